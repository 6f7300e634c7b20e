"""Exit heads: the losses are their formulas, only heads learn, killed runs resume to the same bits, and what was saved
reads as what was trained."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Barrier, Event, current_thread, main_thread
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from anydepth.cli import app
from anydepth.models.heads import load_heads
from anydepth.models.load import load_checkpoint
from anydepth.train.distil import Goal, auc, distil
from anydepth.train.head_data import Source, prepare
from anydepth.train.head_fit import Fit, expected
from anydepth.train.head_log import Log
from anydepth.train.head_recipe import HeadRecipe, exits_of
from anydepth.train.head_trainer import HeadTrainer
from anydepth.train.heads import train_heads
from anydepth.train.packed import Order, Pack, exit_states
from anydepth.train.parallel import Peers
from anydepth.train.prepared import held_out, load_prepared
from anydepth.train.trained_head import TrainedHead
from tests.models.checkpoints import WORDS, write_folder, write_tokenizer

LETTERS = "abcdefghi"
RECIPE = HeadRecipe(
    exits=(1, 3), fit=2, rank=4, shortlist=8, tokens=60, accumulate=2, steps=8, warmup=2, save_every=2, evaluate_every=4
)
KINDS = ("norm", "low_rank", "shortlist")


def quiet(line: str) -> None:
    """Report nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer and rows to train on."""
    path = tmp_path_factory.mktemp("llama")
    write_folder(path, vocab_size=len(WORDS), max_position_embeddings=512)
    write_tokenizer(path)
    rows = [(i * 7 % 9, i * 5 % 8) for i in range(90)]
    lines = [
        json.dumps(
            {"prompt": " ".join(LETTERS[(a + j) % 9] for j in range(3 + b)), "response": f"a {LETTERS[b]} c " * 4}
        )
        for a, b in rows
    ]
    (path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def checkpoint(folder):
    return load_checkpoint(folder)


@pytest.fixture(scope="module")
def data(folder, checkpoint):
    return prepare(folder / "data", [Source(path=folder / "rows.jsonl")], checkpoint, report=quiet)


def plain_states(model, ids: list[int]) -> list[torch.Tensor]:
    """h after every layer, one document alone, through an independent causal attention."""

    class Naive:
        positions = torch.arange(len(ids))

        def attend(self, layer, q, k, v):
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = torch.einsum("nhd,mhd->hnm", q, k) / math.sqrt(q.shape[-1])
            seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
            return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    h, states = model.embed(torch.tensor(ids)), []
    for layer in range(model.shape.layers):
        h = model.run_layers(range(layer, layer + 1), h, Naive())
        states.append(h)
    return states


@torch.no_grad()
def test_packed_states_are_those_of_each_document_alone_at_its_answers(checkpoint, data) -> None:
    model = checkpoint.model
    pack = Pack.of(data, [0, 5, 9], mask_prompts=True, device=model.device)
    wanted, targets = [], []
    for index in (0, 5, 9):
        ids, prompt = data.document(index)
        states = plain_states(model, ids.tolist()[:-1])
        wanted.append([states[layer - 1][prompt - 1 :] for layer in (1, 3, 4)])
        targets += ids.tolist()[prompt:]
    for mine, theirs in zip(exit_states(model, pack, (1, 3)), zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.cat(theirs), atol=1e-4, rtol=1e-4)
    assert pack.targets_A.tolist() == targets


def test_documents_are_chat_answers_with_their_ending(checkpoint, data) -> None:
    ids, prompt = data.document(0)
    text = json.loads((checkpoint.path / "rows.jsonl").read_text().splitlines()[0])
    words = checkpoint.tokenizer
    assert ids[:prompt].tolist() == words.chat([{"role": "user", "content": text["prompt"]}])
    assert ids[prompt:].tolist() == [*words.encode(text["response"]), words.id_of("</s>")]
    whole = Pack.of(data, [0], mask_prompts=False, device=torch.device("cpu"))
    assert whole.targets_A.tolist() == ids[1:].tolist()


def wide(folder: Path):
    return load_checkpoint(folder, dtype="float64").model


@pytest.mark.parametrize(("temperature", "ce_weight"), [(1.0, 0.0), (2.0, 0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_the_plain_formula(folder, data, kind, temperature, ce_weight) -> None:
    model, generator = wide(folder), torch.Generator().manual_seed(1)
    ids = data.frequent(5, vocab=len(WORDS))
    heads = [TrainedHead.new(kind, model, rank=3, ids=ids) for _ in range(2)]
    with torch.no_grad():
        for tensor in (t for head in heads for t in head.parameters()):
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    for head in heads:
        head.begin(*(0.5 + torch.rand(2, 32, generator=generator, dtype=torch.float64)))
    pack = Pack.of(data, data.documents(held_out=False)[:9], mask_prompts=True, device=model.device)
    states = exit_states(model, pack, (1, 3))
    goal, weights, share = Goal(temperature=temperature, ce_weight=ce_weight), (1.0, 0.25), 1 / 7
    sums = distil(heads, model, states, pack.targets_A, goal=goal, weights=weights, share=share)
    mine = [[t.grad.clone() for t in head.parameters()] for head in heads]
    top = (model.final_norm(states[-1]) @ model.head).argmax(-1)
    for e, head in enumerate(heads):
        x = head.features(states[e], model.eps)
        columns = model.head
        if kind == "shortlist":
            columns = torch.cat((model.head[:, ids], head.own("other")[:, None]), 1)
        z = x @ columns
        teacher = ((model.final_norm(states[-1]) @ model.head) / temperature).softmax(-1)
        target, says = pack.targets_A, z.argmax(-1)
        if kind == "shortlist":
            outside = [v for v in range(len(WORDS)) if v not in ids.tolist()]
            teacher = torch.cat((teacher[:, ids], teacher[:, outside].sum(1, keepdim=True)), 1)
            places = {int(v): i for i, v in enumerate(ids)}
            target = torch.tensor([places.get(int(v), len(ids)) for v in target])
            says = torch.tensor([int(ids[i]) if i < len(ids) else -1 for i in says])
        kl = torch.nn.functional.kl_div((z / temperature).log_softmax(-1), teacher, reduction="sum")
        ce = torch.nn.functional.cross_entropy(z, target, reduction="sum")
        agrees = says == top
        bce = torch.nn.functional.binary_cross_entropy_with_logits(
            head.probe_logits(states[e]), agrees.double(), reduction="sum"
        )
        loss = share * (weights[e] * (temperature**2 * kl + ce_weight * ce) + bce)
        wanted = torch.autograd.grad(loss, head.parameters())
        for got, want in zip(mine[e], wanted, strict=True):
            torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
        told = [kl.item(), ce.item(), bce.item(), int(agrees.sum()), int((says >= 0).sum())]
        assert sums.total_6E[:5, e].tolist() == pytest.approx(told, rel=1e-9)
    assert 0 < sums.total_6E[3, 0] < len(pack.targets_A)


def test_many_positions_are_measured_in_parts(folder, data, monkeypatch) -> None:
    model = wide(folder)
    heads = [TrainedHead.new("shortlist", model, rank=1, ids=torch.tensor([3, 6, 8]))]
    pack = Pack.of(data, data.documents(held_out=False)[:12], mask_prompts=True, device=model.device)
    states = exit_states(model, pack, (2,))
    found = []
    for size in (1 << 30, 0):
        monkeypatch.setattr("anydepth.train.distil._CHUNK_BYTES", {"cpu": size})
        for tensor in heads[0].parameters():
            tensor.grad = None
        sums = distil(heads, model, states, pack.targets_A, goal=Goal(), weights=(1.0,), share=1.0)
        found.append([sums.total_6E, *(t.grad for t in heads[0].parameters())])
    assert len(pack.targets_A) > 2 * 16
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-9, rtol=1e-9)


def test_only_heads_and_probes_learn_and_agreement_rises(checkpoint, data) -> None:
    model = checkpoint.model
    recipe = replace(RECIPE, exits=(1, 2, 3), kinds=KINDS, shortlist=13, steps=60, lr=0.03, clip=0.0)
    data = replace(data, held_out=torch.arange(len(data)) % 4 == 0)
    trainer = HeadTrainer(checkpoint, data, recipe, Peers(rank=0, count=1))
    frozen = {name: view.clone() for name, view in model.slots().items()}
    model.pack()
    before, learning = trainer.evaluate(), [tensor.detach().clone() for tensor in trainer.parameters]
    while trainer.progress.step < 60:
        trainer.step()
    after = trainer.evaluate()
    assert all(not torch.equal(a, b) for a, b in zip(learning, trainer.parameters, strict=True))
    assert all(torch.equal(view, frozen[name]) for name, view in model.slots().items())
    model.pack()
    for early, late in zip(before, after, strict=True):
        assert late["kl"] < 0.7 * early["kl"]
        # A shortlist learns to decline, too.
        assert late["agreement"] > early["agreement"] + 0.1 or late["answers"] < early["answers"] - 0.1
        assert late["probe_auc"] > 0.54


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_evaluation_is_of_the_numbers_in_the_file(tmp_path, checkpoint, data, kind) -> None:
    """bfloat16 has so few digits that it shows."""
    recipe = replace(RECIPE, kinds=(kind,), lr=0.03, save_dtype="bfloat16")
    out = train_heads(tmp_path, checkpoint, data, recipe, report=quiet)
    told = {row["exit"]: row for row in json.loads((out / "heads.json").read_text())["training"]["evaluation"]}
    model, kept = checkpoint.model, heads_of(out, checkpoint)
    exact = HeadTrainer(checkpoint, data, recipe, Peers(rank=0, count=1))
    exact.load(out / "state.pt")
    exact.recipe = replace(exact.recipe, save_dtype="float32")
    pack = Pack.of(data, data.documents(held_out=True), mask_prompts=True, device=model.device)
    states = exit_states(model, pack, recipe.exits)
    top = model.readout(model.shape.segments, states[-1]).argmax(-1)
    for layer, h, free in zip(recipe.exits, states[:-1], exact.evaluate(), strict=True):
        logits = kept.heads[layer].logits(h, model.head, model.eps)
        agrees = kept.heads[layer].over_vocabulary(logits, model.shape.vocab).argmax(-1) == top
        if kind == "shortlist":
            agrees &= kept.heads[layer].answers(h, logits, model.eps)
        else:
            teacher = model.readout(model.shape.segments, states[-1]).softmax(-1)
            kl = torch.nn.functional.kl_div(logits.log_softmax(-1), teacher, reduction="sum") / len(h)
            assert told[layer]["kl"] == pytest.approx(float(kl), rel=1e-4)
        assert told[layer]["agreement"] == pytest.approx(float(agrees.double().mean()))
        scores = kept.probes[layer].logit(h)
        bce = torch.nn.functional.binary_cross_entropy_with_logits(scores, agrees.to(scores))
        assert told[layer]["bce"] == pytest.approx(float(bce), rel=1e-6) and told[layer]["bce"] != free["bce"]
        assert told[layer]["kl"] != free["kl"]


def heads_of(path: Path, checkpoint):
    model = checkpoint.model
    options = {"shape": model.shape, "unembedding_dV": model.head, "dtype": model.dtype}
    return load_heads(path, model_hash=checkpoint.model_hash, **options)


def test_saved_heads_read_as_the_trained_ones(tmp_path, folder, checkpoint, data) -> None:
    recipe = replace(RECIPE, exits=(1, 2, 3), kinds=KINDS, steps=4)
    trainer = HeadTrainer(checkpoint, data, recipe, Peers(rank=0, count=1))
    while trainer.progress.step < 4:
        trainer.step()
    train_heads(tmp_path, checkpoint, data, recipe, report=quiet, command="anydepth train heads OUT", licence="MIT.")
    split = load_checkpoint(folder, segments=[1, 2, 3, 4]).model
    split.attach(heads_of(tmp_path, checkpoint))
    pack = Pack.of(data, [1, 2], mask_prompts=True, device=split.device)
    with torch.no_grad():
        for k, (head, h) in enumerate(
            zip(trainer.heads, exit_states(checkpoint.model, pack, (1, 2, 3)), strict=False), start=1
        ):
            mine, ids = split.readout(k, h), head.tensors.get("ids", torch.arange(len(WORDS)))
            z = head.features(h, split.eps) @ split.head[:, ids]
            torch.testing.assert_close(mine[:, ids], z, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(split.signal(k, h), head.probe_logits(h), atol=1e-5, rtol=1e-5)
    card, about = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "heads.json").read_text())
    assert "| 3 | shortlist |" in card and "`rows.jsonl`" in card and "anydepth train heads OUT" in card
    assert about["training"]["recipe"]["seed"] == 0 and about["exits"] == {
        "1": "norm",
        "2": "low_rank",
        "3": "shortlist",
    }


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from anydepth.models.load import load_checkpoint
from anydepth.train.prepared import load_prepared
from anydepth.train.head_fit import Fit, expected
from anydepth.train.head_log import Log
from anydepth.train.head_recipe import HeadRecipe
from anydepth.train.heads import train_heads
checkpoint = load_checkpoint(sys.argv[1])
data = load_prepared(Path(sys.argv[1]) / "data", checkpoint)
recipe = HeadRecipe(**eval(sys.argv[3]))
train_heads(Path(sys.argv[2]), checkpoint, data, recipe)
"""


def kill(command: list[str], state: Path, *, after_s: float) -> int:
    """Run a command, kill it some time after it has written its state, and return the step that it came to."""

    def written_ns() -> int:
        return state.stat().st_mtime_ns if state.exists() else 0

    before_ns, until = written_ns(), time.monotonic() + 60
    run = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    while written_ns() == before_ns and time.monotonic() < until and run.poll() is None:
        time.sleep(0.002)
    time.sleep(after_s)
    run.send_signal(signal.SIGKILL)
    run.wait()
    return torch.load(state)["progress"]["step"]


@pytest.mark.parametrize(("kills", "steps"), [(2, 100), pytest.param(10, 400, marks=pytest.mark.slow)])
def test_killed_runs_resume_to_the_same_bits(tmp_path, folder, checkpoint, data, kills, steps) -> None:
    options = {**vars(RECIPE), "kinds": ("low_rank", "shortlist"), "steps": steps}
    train_heads(tmp_path / "whole", checkpoint, data, HeadRecipe(**options), report=quiet)
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "run.py"), str(folder), str(tmp_path / "killed"), repr(options)]
    state = tmp_path / "killed" / "state.pt"
    came_to = [kill(command, state, after_s=Random(number).random() * 0.1) for number in range(kills)]
    assert came_to == sorted(set(came_to)) and came_to[-1] < steps, "every run is killed while it trains"
    train_heads(tmp_path / "killed", checkpoint, data, HeadRecipe(**options), report=quiet)
    files = [(tmp_path / name / "heads.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
    rows = [row["step"] for row in csv.DictReader((tmp_path / "killed" / "steps.csv").open())]
    assert rows == [str(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("point", ["distil", "save_state", "fit", "evaluate", "export"])
def test_a_run_that_fails_anywhere_goes_on_to_the_same_bits(tmp_path, checkpoint, data, monkeypatch, point) -> None:
    whole = train_heads(tmp_path / "whole", checkpoint, data, RECIPE, report=quiet)
    where = {
        "distil": "anydepth.train.head_trainer.distil",
        "save_state": "anydepth.train.checkpoint.save_state",
        "fit": "anydepth.train.head_fit.Fit.apply",
        "evaluate": "anydepth.train.head_trainer.HeadTrainer.evaluate",
        "export": "anydepth.models.heads.ExitHeads.save",
    }[point]
    left = {"distil": 9, "save_state": 2}.get(point, 1)

    def planted(original):
        def fail(*args, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return original(*args, **options)

        return fail

    owner, _, name = where.rpartition(".")
    target = __import__("pkgutil").resolve_name(owner)
    with monkeypatch.context() as patch:
        patch.setattr(target, name, planted(getattr(target, name)))
        with pytest.raises(KeyboardInterrupt):
            train_heads(tmp_path / "broken", checkpoint, data, RECIPE, report=quiet)
    broken = train_heads(tmp_path / "broken", checkpoint, data, RECIPE, report=quiet)
    assert (broken / "heads.safetensors").read_bytes() == (whole / "heads.safetensors").read_bytes()
    for log, column in (("steps.csv", "loss"), ("evaluations.csv", "kl")):
        rows = [[(row["step"], row[column]) for row in csv.DictReader((f / log).open())] for f in (whole, broken)]
        assert rows[0] == rows[1]


def test_two_processes_learn_what_one_does(checkpoint, data, monkeypatch) -> None:
    """Each computes its micro-batches; their sum is the step's."""
    one = HeadTrainer(checkpoint, data, RECIPE, Peers(rank=0, count=1))
    both = [HeadTrainer(checkpoint, data, RECIPE, Peers(rank=rank, count=2)) for rank in (0, 1)]
    flat: list[torch.Tensor] = []
    one.step()
    monkeypatch.setattr(Peers, "sum", lambda self, tensor: flat.append(tensor.clone()))
    both[1].step()
    monkeypatch.setattr(Peers, "sum", lambda self, tensor: tensor.add_(flat[0]))
    both[0].step()
    for a, b in zip(one.parameters, both[0].parameters, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="give a multiple of the 3 processes"):
        HeadTrainer(checkpoint, data, RECIPE, Peers(rank=0, count=3))


def test_a_loss_that_is_no_number_is_refused_and_the_state_stays(tmp_path, checkpoint, data, monkeypatch) -> None:
    from anydepth.train import head_trainer

    kept = head_trainer.distil

    def poisoned(heads, model, states, *args, **options):
        if trained["steps"] >= 5:
            states[0][0, 0] = float("nan")
        trained["steps"] += options["share"] is not None
        return kept(heads, model, states, *args, **options)

    trained = {"steps": 0}
    monkeypatch.setattr(head_trainer, "distil", poisoned)
    with pytest.raises(ValueError, match=r"the loss of step 2 is nan.*smaller lr"):
        train_heads(tmp_path, checkpoint, data, RECIPE, report=quiet)
    state = torch.load(tmp_path / "state.pt")
    assert state["progress"]["step"] == 2 and all(tensor.isfinite().all() for tensor in state["heads"])
    monkeypatch.setattr(head_trainer, "distil", kept)
    again = train_heads(tmp_path, checkpoint, data, RECIPE, report=quiet)
    whole = train_heads(tmp_path / "whole", checkpoint, data, RECIPE, report=quiet)
    assert (again / "heads.safetensors").read_bytes() == (whole / "heads.safetensors").read_bytes()


def test_preparing_goes_on_where_it_stopped(tmp_path, folder, checkpoint, data, monkeypatch) -> None:
    monkeypatch.setattr("anydepth.train.head_data.OWN_SHARD_ROWS", 20)
    calls: list[int] = []

    def answer(prompts):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [[6, 7, 1][: 1 + len(prompt) % 3] for prompt in prompts]

    sources = [Source(path=folder / "rows.jsonl", own_answers=True), Source(path=folder / "rows.jsonl", rows=30)]
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "a", sources, checkpoint, answer=answer, report=quiet)
    with pytest.raises(ValueError, match="nothing is prepared there"):
        load_prepared(tmp_path / "a", checkpoint)
    first = prepare(tmp_path / "a", sources, checkpoint, answer=answer, report=quiet)
    assert calls == [20, 20, 20, 20, 20, 10] and len(first) == 120
    second = prepare(tmp_path / "b", sources, checkpoint, answer=answer, report=quiet)
    assert first.hash == second.hash and torch.equal(first.ids, second.ids)
    again = prepare(tmp_path / "a", sources, checkpoint, answer=None, report=quiet)
    assert again.hash == first.hash and first.document(0)[0][int(first.prompts[0]) :].tolist() in (
        [6],
        [6, 7],
        [6, 7, 1],
    )
    with pytest.raises(ValueError, match="holds data of another max_tokens"):
        prepare(tmp_path / "a", sources, checkpoint, answer=answer, max_tokens=64, report=quiet)
    (tmp_path / "a" / "01-00000.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="was changed"):
        load_prepared(tmp_path / "a", checkpoint)


def test_prompts_are_held_out_with_all_their_documents(folder, data) -> None:
    out, learnt = data.documents(held_out=True), data.documents(held_out=False)
    prompts = [tuple(data.document(i)[0][: int(data.prompts[i])].tolist()) for i in range(len(data))]
    assert out and not {prompts[i] for i in out} & {prompts[i] for i in learnt}
    share = sum(held_out(f"prompt {i}") for i in range(4000)) / 4000
    assert 0.09 < share < 0.11


def test_what_is_held_out_of_a_source_is_told_and_a_small_part_is_no_exception(tmp_path, folder, checkpoint) -> None:
    """The rows of FILE:N are not those with the lowest hash, which are held out."""
    rows = [f"prompt {i}" for i in range(600)]
    path, alone = tmp_path / "many.jsonl", next(row for row in rows if held_out(row))
    path.write_text("".join(json.dumps({"prompt": row, "response": "a"}) + "\n" for row in rows))
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": alone, "response": "a"}) + "\n")
    told: list[str] = []
    sources = [Source(path=path), Source(path=path, rows=60), Source(path=tmp_path / "one.jsonl")]
    prepare(tmp_path / "data", sources, checkpoint, report=told.append)
    whole, part = (int(line.split()[1]) for line in told[:2])
    assert whole == sum(map(held_out, rows)) and 30 < whole < 90 and 1 <= part < 20
    assert told[0] == f"many.jsonl: {whole} of 600 rows are held out"
    assert told[2] == "one.jsonl: 1 of 1 rows are held out: none is trained on, give more rows"


def test_every_epoch_has_every_document_once_in_an_order_of_its_own(data) -> None:
    order, again = Order(data, tokens=60, seed=3), Order(data, tokens=60, seed=3)
    epochs, index = [], 0
    for _ in range(2):
        seen: list[int] = []
        while len(seen) < len(data.documents(held_out=False)):
            seen += order(index)
            index += 1
        epochs.append(seen)
    assert sorted(epochs[0]) == sorted(epochs[1]) == data.documents(held_out=False) and epochs[0] != epochs[1]
    assert [again(i) for i in (index - 1, 0)] == [order(index - 1), order(0)]
    lengths = data.lengths()
    assert all(sum(lengths[i] for i in order(n)) <= 60 for n in range(index))


def test_long_rows_are_cut_or_left_out_and_said(tmp_path, folder, checkpoint) -> None:
    said: list[str] = []
    short = prepare(tmp_path, [Source(path=folder / "rows.jsonl")], checkpoint, max_tokens=9, report=said.append)
    assert max(short.lengths()) == 9 and short.manifest["cut"] > 0 and short.manifest["left_out"] > 0
    assert f"{short.manifest['cut']} rows were longer than 9 tokens and cut" in said[-2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows to train on"),
        ('{"prompt": "a", "response": "b"}\n{"prompt": "a"}', "line 2 has no response"),
        ('{"response": "b"}', "line 1 has no prompt"),
        ("[1", "line 1 is no JSON object"),
        ('{"prompt": "a", "response": "b"}', "one prompt only"),
    ],
)
def test_bad_data_is_refused_by_line(tmp_path, checkpoint, content, message) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "data", [Source(path=tmp_path / "bad.jsonl")], checkpoint, report=quiet)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "name",
    ["gsm8k_test.jsonl", "ifeval.jsonl", "mmlu-test.jsonl", "test.jsonl", "mmlu_val.jsonl", "MMLU-validation.jsonl"],
)
def test_test_questions_are_refused_by_the_name_of_their_file(name, own) -> None:
    """Heads must not learn what they are judged by; thresholds neither, which take their prompts from a Source, too."""
    with pytest.raises(ValueError, match=f"{name} has test questions by its name"):
        Source.parse(f"data/{name}:9", own_answers=own)


def test_files_of_other_questions_are_taken() -> None:
    for name in ("gsm8k_train", "mmlu_dev", "arc_easy_validation", "latest", "attested_answers"):
        assert Source.parse(f"test/{name}.jsonl").path.stem == name


def test_data_of_another_vocabulary_is_refused(tmp_path, folder, checkpoint, data) -> None:
    write_folder(tmp_path, vocab_size=len(WORDS), max_position_embeddings=512)
    write_tokenizer(tmp_path, words=[*WORDS[:6], *"ihgfedcbaj"])
    with pytest.raises(ValueError, match="tokenised with another vocabulary"):
        load_prepared(folder / "data", load_checkpoint(tmp_path))
    write_folder(tmp_path, vocab_size=8)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="the model a vocabulary of 8"):
        HeadTrainer(load_checkpoint(tmp_path), data, RECIPE, Peers(rank=0, count=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exits": (4,)}, "allowed: different ones from 1 to 3"),
        ({"exits": (1, 1)}, "allowed: different ones"),
        ({"kinds": ("norm",) * 3}, "3 kinds for 2 exits"),
        ({"kinds": ("big",)}, "allowed: norm, low_rank, shortlist"),
        ({"kinds": ("shortlist",), "shortlist": 99}, "the vocabulary has 16"),
        ({"kinds": ("shortlist",), "shortlist": 16}, "the vocabulary has 16: give fewer"),
        ({"save_dtype": "float8"}, "unknown save_dtype .float8."),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"lr": math.nan}, "lr is nan"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RECIPE, **changes).checked(4, len(WORDS))


def test_exits_and_other_runs(tmp_path, folder, checkpoint, data) -> None:
    assert exits_of("5", 30) == (5, 10, 15, 20, 25) and exits_of("3, 7", 30) == (3, 7) and exits_of("5,", 30) == (5,)
    with pytest.raises(ValueError, match="allowed: a number"):
        exits_of("x", 30)
    train_heads(tmp_path, checkpoint, data, RECIPE, report=quiet)
    with pytest.raises(ValueError, match="was made with seed = 0, this run has 1"):
        train_heads(tmp_path, checkpoint, data, replace(RECIPE, seed=1), report=quiet)
    with pytest.raises(ValueError, match="was made with dtype = 'float32', this run has 'float64'"):
        train_heads(tmp_path, load_checkpoint(folder, dtype="float64"), data, RECIPE, report=quiet)
    assert json.loads((tmp_path / "heads.json").read_text())["training"]["dtype"] == "float32"
    with pytest.raises(ValueError, match="is no layered model"):
        HeadTrainer(load_checkpoint("nano"), data, RECIPE, Peers(rank=0, count=1))


def test_finished_heads_that_are_not_whole_or_of_another_dtype_are_stored_anew(tmp_path, checkpoint, data) -> None:
    train_heads(tmp_path, checkpoint, data, RECIPE, report=quiet)
    made = [(tmp_path / name).read_bytes() for name in ("heads.safetensors", "heads.json", "README.md")]
    for name in ("heads.json", "README.md"):  # killed between two files
        (tmp_path / name).unlink()
        train_heads(tmp_path, checkpoint, data, RECIPE, report=quiet)
        assert [(tmp_path / name).read_bytes() for name in ("heads.safetensors", "heads.json", "README.md")] == made
    train_heads(tmp_path, checkpoint, data, replace(RECIPE, save_dtype="bfloat16"), report=quiet)
    assert (tmp_path / "heads.safetensors").stat().st_size < len(made[0])
    assert "bfloat16" in (tmp_path / "heads.json").read_text() and len(heads_of(tmp_path, checkpoint).heads) == 2
    told = []
    train_heads(tmp_path, checkpoint, data, replace(RECIPE, save_dtype="bfloat16"), report=told.append)
    assert told[-1].endswith("holds the finished heads already")


def test_every_process_of_a_finished_run_sees_the_same_files(tmp_path, checkpoint, data, monkeypatch) -> None:
    """The second looks late: the first must not have stored the lost file anew by then, or it waits for ever."""
    from anydepth.train import heads

    one = replace(RECIPE, steps=2)
    train_heads(tmp_path, checkpoint, data, one, report=quiet)
    (tmp_path / "heads.json").unlink()
    meeting, stored, looked = Barrier(2, timeout=20), Event(), heads._finished

    def look(out, recipe):
        if current_thread() is not main_thread():
            stored.wait(timeout=0.5)
        return looked(out, recipe)

    def report(line):
        if line.startswith("heads of"):
            stored.set()

    def train(rank):
        train_heads(tmp_path, checkpoint, data, one, peers=Peers(rank=rank, count=2), report=report)

    monkeypatch.setattr(heads, "_finished", look)
    monkeypatch.setattr(Peers, "wait", lambda self: meeting.wait())
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(train, 1)
        train(0)
        second.result()
    assert stored.is_set() and (tmp_path / "heads.json").exists()


def test_auc_counts_ties_half() -> None:
    score, right = torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, False, True, True])
    assert auc(score, right) == (1 + 0.5 + 1 + 1) / 4
    assert math.isnan(auc(score, torch.ones(4, dtype=torch.bool)))


@pytest.mark.parametrize(("kind", "rank"), [("low_rank", 32), ("low_rank", 5), ("shortlist", 1)])
def test_heads_begin_at_the_best_linear_map(folder, data, kind, rank) -> None:
    model, ids = wide(folder), torch.tensor([2, 6, 9, 11])
    head = TrainedHead.new(kind, model, rank=rank, ids=ids)
    fit, parts = Fit(head, model), []
    for document in range(12):
        h, last = exit_states(model, Pack.of(data, [document], mask_prompts=True, device=model.device), (2,))
        fit.add(h, *expected(model, last, ids if kind == "shortlist" else None))
        parts.append((h, last))
    h, last = (torch.cat(part) for part in zip(*parts, strict=True))
    x, y = head.features(h, model.eps).detach(), model.final_norm(last)
    fit.apply(head=True)
    ridge = (1e-3 * x.square().sum(0)).sqrt().diag()
    solved = torch.linalg.lstsq(torch.cat((x, ridge)), torch.cat((y - x, 0 * ridge))).solution
    corrected = head.features(h, model.eps).detach()
    best = torch.linalg.svdvals(x @ solved)[rank:].norm()
    torch.testing.assert_close((x @ solved - (corrected - x)).norm(), best, atol=1e-9, rtol=1e-6)
    if kind == "shortlist":
        rest = (y @ model.head).exp().sum(1) - (y @ model.head)[:, ids].exp().sum(1)
        rows = torch.cat((corrected, (1e-3 * corrected.square().sum(0)).sqrt().diag()))
        other = torch.linalg.lstsq(rows, torch.cat((rest.log(), 0 * ridge[0]))[:, None]).solution
        torch.testing.assert_close(corrected @ head.own("other").detach(), (corrected @ other)[:, 0])
    torch.testing.assert_close((h - head.mean) / head.scale, (h - h.mean(0)) / h.std(0, correction=0))


def test_the_command_prepares_answers_trains_and_says_its_bound(tmp_path, folder, monkeypatch, capsys) -> None:
    rows = folder / "rows.jsonl"
    with pytest.raises(ValueError, match="nano is no layered model"):
        app(["train", "heads", str(tmp_path / "out"), "-m", "nano"], standalone_mode=False)
    words = [
        "train",
        "heads",
        str(tmp_path / "out"),
        "-m",
        str(folder),
        "--data",
        f"{rows}:40",
        "--own-answers",
        f"{rows}:9",
    ]
    words += [
        "--answer-tokens",
        "5",
        "--exits",
        "2",
        "--kind",
        "shortlist",
        "--shortlist",
        "8",
        "--save-dtype",
        "float16",
        "--steps",
        "10",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["anydepth", *words])
    app(words, standalone_mode=False)
    said = capsys.readouterr().out
    assert "GFLOP in" in said and "of it)" in said
    result = json.loads(said.splitlines()[-1])["result"]
    manifest = json.loads((Path(result["data"]) / "manifest.json").read_text())
    assert [source["rows"] for source in manifest["sources"]] == [40, 9] and manifest["own_answers"]["tokens"] == 5
    about = json.loads((tmp_path / "out" / "heads.json").read_text())
    assert (
        about["exits"] == {"2": "shortlist"} and str(folder.parent) not in (tmp_path / "out" / "README.md").read_text()
    )
    kept = load_file(tmp_path / "out" / "heads.safetensors")
    assert {t.dtype for name, t in kept.items() if not name.endswith("ids")} == {torch.float16}
    row = next(csv.DictReader((tmp_path / "out" / "steps.csv").open()))
    assert float(row["bound_s"]) > 0 and float(row["share_of_bound"]) < 1.5


def test_the_board_gets_the_numbers_of_the_files(tmp_path, monkeypatch) -> None:
    seen: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder, purge_step):
            seen.append((folder, 0.0, purge_step))

        def add_scalar(self, *scalar):
            seen.append(scalar)

        def close(self):
            seen.append(("closed", 0.0, 0))

    board = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    log = Log(tmp_path, step=4, evaluated=4, report=quiet)
    log.step({"step": 5, "loss": 0.5})
    log.evaluation({"step": 5, "exit": 2, "kl": 0.25})
    log.close()
    assert seen == [
        (str(tmp_path / "tensorboard"), 0.0, 5),
        ("train/loss", 0.5, 5),
        ("exit 2/kl", 0.25, 5),
        ("closed", 0.0, 0),
    ]
    assert (tmp_path / "evaluations.csv").read_text() == "step,exit,kl\n5,2,0.25\n"
    (tmp_path / "steps.csv").open("a").write("6,0.4\n7,")
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    Log(tmp_path, step=6, evaluated=4, report=said.append)
    assert (tmp_path / "steps.csv").read_text() == "step,loss\n5,0.5\n6,0.4\n"
    assert not (tmp_path / "evaluations.csv").exists() and "TensorBoard is not installed" in said[0]
