"""Batch-invariant mode: every comparison here is of bits."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from anydepth import LLM
from anydepth.engine import invariant
from anydepth.engine.engine import Engine
from anydepth.engine.invariant import Invariant, in_blocks
from anydepth.engine.sampling import Settings, processed, processed_logprobs, raw_logprobs
from anydepth.exits.gate_cdf import Policy, ReleasedArithmetic
from anydepth.models.load import load_checkpoint
from anydepth.models.nano.questions import questions
from anydepth.ops.invariant import Block, RowBlocks
from anydepth.ops.linear import LARGE
from anydepth.types import Sampling
from tests.eval.made_heads import write_heads
from tests.helpers import assert_lone_runs, drain, poison, twins
from tests.random_nano import write_random_nano

BATCHES = (1, 2, 3, 4, 8, 16, 17, 33)
BUDGETS = (3, 13, 64, 100, 512)  # of prompt tokens a turn
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 62, 63, 64, 65, 66, 90)  # around every block's edge
WIDE = {  # all of its layers' matrices go to oneDNN
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


@functools.cache
def model_of(name: str):
    if name.startswith("nano"):
        return load_checkpoint("nano", dtype=name.removeprefix("nano-")).model
    kind, dtype, *wide = name.split("-")
    segments = None if kind == "looped" else [1, 2] if wide else [1, 2, 4]
    model = twins(kind, dtype=getattr(torch, dtype), segments=segments, **(WIDE if wide else {}))[0]
    assert not wide or model.layers[0].o.numel() >= LARGE
    model.pack()
    return model


def asks_of(model, count: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of all lengths; greedy and sampled, through to R, of a fixed depth, and where they can, adaptive."""
    draw = random.Random(0)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    draw.shuffle(lengths)
    kinds = [{}, {"depth": 2}, {"temperature": 0.8, "logprobs": "raw"}]
    if model.shape.has_gate:
        kinds += [{"exit_threshold": t} for t in (0.1, 0.3, 0.5, 0.7)]
        kinds += [{"exit_threshold": 0.5, "min_depth": 2, "temperature": 1.0, "top_p": 0.9, "logprobs": "processed"}]
    return [
        (
            [draw.randrange(model.shape.vocab) for _ in range(length)],
            Sampling(max_tokens=draw.randint(2, 4), seed=seed, **draw.choice(kinds)),
        )
        for seed, length in enumerate(lengths)
    ]


def keep(engine) -> dict[str, list[torch.Tensor]]:
    """What each request's outputs were made of, as they come: logits, and the state its policy decided by."""
    kept, choose = defaultdict(list), engine.slots.sampler.choose

    def chosen(draws, logits_LV):
        for (sequence, slot, _), row in zip(draws, logits_LV, strict=True):
            request = sequence.request
            kept[request.id].append(row.clone())
            if (states := engine.slots.states.get(request.policy)) is not None:
                kept[request.id].append(states[slot].clone())
        return choose(draws, logits_LV)

    engine.slots.sampler.choose = chosen
    return kept


def run(model, asks, *, alone=False, batch_invariant=True, **options):
    """(what `keep` kept, what was reported) of each ask: all together, or `alone`, one after the other."""
    engine = poison(Engine(model, batch_invariant=batch_invariant, page_size=8, **options))
    kept, outputs, ids = keep(engine), {}, []
    for prompt, sampling in asks:
        ids.append(engine.submit(prompt, sampling).id)
        if alone:
            outputs |= drain(engine)
    outputs |= drain(engine)
    return [(kept[id], (outputs[id].token_ids, outputs[id].depths, outputs[id].logprobs)) for id in ids]


def same_bits(one, other) -> bool:
    (tensors, reported), (others, reported_too) = one, other
    return reported == reported_too and len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def differing(model, asks, lone, batches, **options) -> list[tuple[int, int]]:
    """(batch size, request) for every request that is not what it is alone. Rows, neighbours and cuts are drawn."""
    draw, found = random.Random(1), []
    for size in batches:
        chosen = draw.sample(range(len(asks)), size)
        cuts = {"max_batch": draw.choice((size, size, -(-size // 2))), "max_batched_tokens": draw.choice(BUDGETS)}
        together = run(model, [asks[i] for i in chosen], **cuts, **options)
        found += [(size, i) for i, seen in zip(chosen, together, strict=True) if not same_bits(lone[i], seen)]
    return found


@pytest.mark.parametrize(
    ("name", "fill", "batches"),
    [
        ("nano-float32", "last_exited", BATCHES),
        ("nano-float32", "full", (4, 17, 33)),
        ("looped-float32-wide", "full", (2, 17)),
        ("looped-float32-wide", "shared", (3, 8)),
        ("nano-float32", "shared", (3, 17)),
        ("nano-float64", "last_exited", (3, 17)),
        ("looped-float32-wide", "last_exited", BATCHES),
        ("looped-float32", "last_exited", BATCHES),
        ("layered-float32", None, BATCHES),
        ("layered-float32-wide", None, (3, 8, 33)),
    ],
)
def test_logits_have_the_same_bits_in_every_batch(name, fill, batches):
    model = model_of(name)
    asks = asks_of(model, max(batches))
    lone = run(model, asks, alone=True, fill=fill)
    assert differing(model, asks, lone, batches, fill=fill) == []


@pytest.mark.parametrize("name", ["nano-float32", "looped-float32-wide"])
def test_without_the_mode_a_batch_changes_bits(name):
    model = model_of(name)
    asks = asks_of(model, 17)
    lone = run(model, asks, alone=True, batch_invariant=False)
    if not differing(model, asks, lone, (3, 17), batch_invariant=False):
        pytest.skip("on this machine the plain engine is invariant in these batches")


def test_one_ulp_is_a_difference():
    model = model_of("nano-float32")
    ask = asks_of(model, 1)[0]
    one, other = run(model, [ask])[0], run(model, [ask])[0]
    assert same_bits(one, other)
    row = other[0][-1] = other[0][-1].clone()
    row[3] = torch.nextafter(row[3], torch.tensor(torch.inf))
    assert not same_bits(one, other)


@pytest.mark.parametrize("budget", [1, 2, 5, 31, 32, 33, 64])
def test_any_cut_of_a_prompt_gives_the_same_bits(budget):
    model = model_of("nano-float32")
    asks = [(prompt, Sampling(max_tokens=2)) for prompt, _ in asks_of(model, 21)[::4]]
    whole = run(model, asks)
    for cut, seen in zip(run(model, asks, max_batched_tokens=budget), whole, strict=True):
        assert same_bits(cut, seen)


def test_a_policy_decides_by_the_same_bits_beside_many_others():
    model, draw = model_of("nano-float32"), random.Random(0)
    sampling = Sampling(max_tokens=3, exit_threshold=0.5)
    asks = [([draw.randrange(model.shape.vocab) for _ in range(4)], sampling) for _ in range(40)]
    lone, together = run(model, asks, alone=True), run(model, asks, max_batch=40)
    assert all(map(same_bits, lone, together))


def test_a_neighbour_with_a_long_context_changes_nothing():
    model = twins("looped", dtype=torch.float32, max_position_embeddings=1100)[0]
    draw = random.Random(0)
    asks = [
        ([draw.randrange(model.shape.vocab) for _ in range(length)], Sampling(max_tokens=3))
        for length in (20, 63, 500, 509, 1090)
    ]
    lone = run(model, asks, alone=True)
    assert differing(model, asks, lone, (2, 3, 5, 5)) == []


def test_bfloat16_decode_has_the_same_bits_in_batches_up_to_8():
    model = model_of("nano-bfloat16")
    asks = asks_of(model, 8)
    lone = run(model, asks, alone=True)
    assert differing(model, asks, lone, (1, 2, 3, 4, 8)) == []


def test_a_decode_row_has_the_bits_of_a_prefill_row():
    model = model_of("nano-float32")
    for prompt, _ in asks_of(model, 5):
        prefilled, decoded = (
            run(model, [(prompt, Sampling(max_tokens=1, first_token=first))])[0] for first in ("prefill", "policy")
        )
        assert torch.equal(prefilled[0][0], decoded[0][0])


@pytest.mark.parametrize("fill", ["full", "last_exited", "shared"])
def test_the_mode_gives_what_the_reference_gives(fill):
    asks = [([3, 1, 4, 1, 5], {"max_tokens": 4, "exit_threshold": 0.4}), ([2] * 9, {"max_tokens": 3, "depth": 2})]
    asks += [([7], {"max_tokens": 5}), ([1, 2] * 35, {"max_tokens": 3, "temperature": 0.9, "seed": 5})]
    assert_lone_runs(twins("looped"), asks, fill=fill, batch_invariant=True)


@pytest.mark.parametrize("segments", [None, [2, 4]])
def test_the_mode_gives_what_the_reference_gives_on_layered_models(segments):
    asks = [([3, 1, 4, 1, 5], {"max_tokens": 4}), ([2] * 40, {"max_tokens": 3, "depth": 1}), ([7], {"max_tokens": 5})]
    assert_lone_runs(twins("layered", segments=segments), asks, fill="full", batch_invariant=True)


def test_rows_go_one_at_a_time_where_no_block_holds(monkeypatch):
    monkeypatch.setattr(invariant, "_counts", lambda *_: (1,))
    model = model_of("nano-float32")
    asks = asks_of(model, 6)
    assert Engine(model, batch_invariant=True).stats()["batch_invariant"]["segment"] == (1,)
    assert Engine(model).stats()["batch_invariant"] is None
    lone = run(model, asks, alone=True)
    assert differing(model, asks, lone, (3, 6)) == []


def test_row_counts_are_kept_by_their_bits():
    model = SimpleNamespace(shape=SimpleNamespace(hidden=8), dtype=torch.float32)
    torch.manual_seed(0)

    def by_count(h):  # below 8 rows one ulp more
        return h if len(h) >= 8 else torch.nextafter(h, torch.full_like(h, torch.inf))

    def by_place(h):
        return torch.cat((h[:-1], torch.nextafter(h[-1:], torch.full_like(h[-1:], torch.inf))))

    assert invariant._counts(model, lambda h: h) == invariant.COUNTS
    assert invariant._counts(model, by_count) == (8, 16, 32, 64)
    assert invariant._counts(model, by_place) == (1,)


def test_rows_are_cut_into_the_fewest_blocks_that_are_allowed():
    blocks = RowBlocks((4, 32))
    assert list(blocks.cut(1)) == [Block(0, 1, 4)]
    assert list(blocks.cut(5)) == [Block(0, 5, 32)]
    assert list(blocks.cut(68)) == [Block(0, 32, 32), Block(32, 64, 32), Block(64, 68, 4)]
    x = torch.arange(39.0)
    assert torch.equal(blocks.run(lambda y: y * 2 if len(y) in (4, 32) else None, x), x * 2)


@pytest.mark.parametrize("vocab", [76, 4096])
def test_sampling_has_the_same_bits_in_every_batch(vocab):
    draw = torch.Generator().manual_seed(0)
    for rows in BATCHES:
        logits = torch.randn(rows, vocab, generator=draw) * 4
        temperature, top_p = torch.rand(2, rows, generator=draw, dtype=torch.float64) + 0.3
        top_k = torch.randint(1, vocab + 2, (rows,), generator=draw)

        def chosen(at, *, logits=logits, settings=Settings(temperature, top_k, top_p.clamp(max=1))):  # noqa: B008
            asked = Settings(*(setting[at] for setting in settings))
            chances = processed(logits[at], asked, max_k=vocab, any_top_p=True)
            token = chances.argmax(-1)
            return chances, chances.cumsum(-1), processed_logprobs(chances, token), raw_logprobs(logits[at], token)

        together = chosen(slice(None))
        for i in range(rows):
            at = slice(i, i + 1)
            assert all(torch.equal(own, all_[at]) for own, all_ in zip(chosen(at), together, strict=True))


@pytest.mark.parametrize("policy", [Policy, ReleasedArithmetic])
def test_a_policy_decides_with_the_same_bits_in_every_batch(policy):
    sampling, draw = Sampling(exit_threshold=0.5), torch.Generator().manual_seed(0)
    fixed = in_blocks(policy())
    start = fixed.start(torch.tensor([fixed.parameters(sampling, (1, 4), 4)], dtype=torch.float64))
    for rows in BATCHES:
        seen = torch.randn(rows, generator=draw) * 3
        depth = torch.randint(1, 5, (rows,), generator=draw)
        states = start.repeat(rows, 1)
        states[:, 0] = torch.rand(rows, generator=draw, dtype=torch.float64)
        leave, after = fixed.decide(states, depth, seen)
        for i in range(rows):
            at = slice(i, i + 1)
            left, own = fixed.decide(states[at], depth[at], seen[at])
            assert torch.equal(left, leave[at]) and torch.equal(own, after[at])


def test_what_was_not_measured_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="measured on CPUs only"):
        Invariant(SimpleNamespace(device=torch.device("cuda", 0)))
    with pytest.raises(ValueError, match="dtype 'float16'; allowed: float32, float64, bfloat16"):
        LLM("nano", dtype="float16", batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant is 'yes'; allowed: True, False"):
        LLM("nano", batch_invariant="yes")
    monkeypatch.setattr(invariant, "attend_each", lambda q, k, v, mask: q + k.shape[1] // 192)
    with pytest.raises(ValueError, match="padded to 256 positions"):
        Invariant(model_of("nano-float32"))


@functools.cache
def nano_answers(rounds: int = 1, **options):
    """Tokens, depths and log-probabilities of twelve questions, as floats that are equal or not; in the second round
    the prompts' beginnings are known."""
    llm = LLM("nano", batch_invariant=True, **options)
    asks = [
        Sampling(max_tokens=30, exit_threshold=(0.5, 0.7, 0.9)[n % 3], logprobs="raw", temperature=n % 2, seed=n)
        for n in range(12)
    ]
    prompts = [question.prompt for question in questions("validation", n=12)]
    for _ in range(rounds):
        outputs = llm.generate(prompts, asks)
    return llm, [(output.token_ids, output.depths, output.logprobs) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 1, "prefix_sharing": False, "max_batched_tokens": 7},
        {"rounds": 2},
        {"signals": "exact"},
        {"signals": "exact", "lateness": 3, "max_batch": 5, "max_batched_tokens": 16},
        {"signals": "resident"},
        {"kv_pages": 60, "page_size": 4, "max_batch": 12},
        {"signals": "resident", "kv_pages": 60, "page_size": 4, "max_batch": 12},
    ],
    ids=str,
)
def test_signals_preemption_and_shared_prompts_change_no_bit(options):
    llm, got = nano_answers(**options)
    assert got == nano_answers()[1]
    assert (llm.stats()["preempted"] > 0) == ("kv_pages" in options)
    assert (llm.stats()["prefix_tokens"] > 100) == ("rounds" in options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("policy", ["confidence", "probe"])
def test_exit_heads_and_projected_keys_change_no_bit(tmp_path, monkeypatch, policy, packed):
    """Shortlists that decline, several exits, and K/V that are made of the states that were read."""
    if packed:
        monkeypatch.setattr("anydepth.ops.linear.LARGE", 1)
    model = write_random_nano(tmp_path / "model", kind="layered")
    heads = write_heads(tmp_path / "heads", model, kind="shortlist")
    llm = LLM(model, heads=heads, profile="careful", fill="project", batch_invariant=True)
    sampling = Sampling(exit_policy=policy, max_tokens=16, ignore_eos=True, logprobs="raw")
    prompts = [[3 + i % 7, 5, 9, 11][: 1 + i % 4] + [4] * (i % 5) for i in range(10)]
    assert all(head.tensors["table"].is_mkldnn == packed for head in llm.checkpoint.model.heads.values())
    together = llm.generate(prompts, sampling)
    alone = [llm.generate([prompt], sampling)[0] for prompt in prompts]
    assert len({depth for output in together for depth in output.depths}) == 3
    assert [(o.token_ids, o.depths, o.logprobs) for o in together] == [
        (o.token_ids, o.depths, o.logprobs) for o in alone
    ]


def test_every_depth_has_its_readout_measured(monkeypatch):
    """Rows of the last readout that have other bits in other counts are run one at a time."""
    model = twins("layered", dtype=torch.float32, segments=[1, 2, 4])[0]
    listed = model.listed
    model.shape = replace(model.shape, headed=frozenset({1}))
    monkeypatch.setattr(model, "listed", lambda k, h: listed(k, h) + (k > 1) * 1e-3 * torch.arange(len(h))[:, None])
    assert Invariant(model).counts["readout"] == (1,)
