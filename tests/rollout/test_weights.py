"""Weights that are exchanged under a loaded model: afterwards it is the model of the new ones, in every respect."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file

from anydepth import LLM, Sampling
from anydepth.engine.engine import Engine
from anydepth.eval.backends.engine import EngineBackend
from anydepth.models.load import load_checkpoint
from tests.helpers import assert_empty, drain, twins
from tests.models.checkpoints import write_folder
from tests.random_nano import write_random_nano

QUESTION = "Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve ?"  # 23 tokens
OTHERS = ["Ann has 5 . Bob has 3 more than Ann . How many has Bob ?", "Ann has 5 ."]
SAMPLED = Sampling(max_tokens=12, temperature=1.0, seed=5, n=2, logprobs="raw", ignore_eos=True)
SEVERAL = pytest.mark.parametrize(
    ("kind", "signals"),
    [("nano", "sync"), ("nano", "resident"), ("nano", "exact"), ("layered", "sync"), ("layered", "exact")],
)


def folders(kind, tmp_path):
    """Two checkpoints of one shape."""
    if kind == "nano":
        return [load_checkpoint(name).path for name in ("nano", "nano-plain")]
    return [write_random_nano(tmp_path / f"{kind}-{seed}", kind=kind, seed=seed) for seed in (0, 1)]


def load(folder, kind, **options):
    return LLM(folder, **({"segments": [1, 2]} if kind == "layered" else {}) | options)


def said(llm, kind="nano"):
    """Tokens, depths and logprobs of questions at several depths."""
    sampling = [SAMPLED, Sampling(max_tokens=9, depth=2, logprobs="raw", ignore_eos=True), SAMPLED]
    if kind == "nano":
        sampling[2] = Sampling(max_tokens=9, exit_threshold=0.7, logprobs="raw")
    outputs = llm.generate([QUESTION, *OTHERS], sampling)
    return [(o.token_ids, o.depths, o.logprobs) for o in outputs]


def same(some, others):
    return all(
        a[:2] == b[:2] and a[2] == pytest.approx(b[2], abs=1e-5, rel=1e-5) for a, b in zip(some, others, strict=True)
    )


def equals_a_fresh_one(tmp_path, kind="nano", signals="sync", **options):
    """The same questions were asked before, so that their beginnings are known with the old weights."""
    old, new = folders(kind, tmp_path)
    llm = load(old, kind, signals=signals, **options)
    before = said(llm, kind)
    assert same(said(llm, kind), before) and llm.stats()["prefix_pages"]
    assert llm.update_weights(new) == 1 == llm.stats()["weight_version"]
    after, wanted = said(llm, kind), said(load(new, kind, signals=signals, **options), kind)
    assert same(after, wanted)
    assert not same(before, after), "nothing was shown"
    assert {output.weight_version for output in llm.generate(OTHERS)} == {1}
    assert llm.update_weights(load_file(old / "model.safetensors")) == 2
    assert same(said(llm, kind), before)
    assert_empty(llm.engine)


def scores_equal_those_of_a_fresh_one(tmp_path, signals="exact"):
    """Where signals come late, by an engine that shares the model."""
    old, new = folders("nano", tmp_path)
    ask = ([QUESTION, QUESTION], [" Eve has 8", " Bob"], Sampling(exit_threshold=0.5))
    llm, fresh = LLM(old, signals=signals), LLM(new, signals=signals)
    before = llm.score(*ask)
    llm.update_weights(new)
    after, wanted = llm.score(*ask), fresh.score(*ask)
    for one, other in zip(after, wanted, strict=True):
        assert one.depths == other.depths and one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    assert before[0].logprobs != pytest.approx(after[0].logprobs, abs=1e-6), "nothing was shown"


@SEVERAL
def test_an_llm_with_new_weights_is_that_of_the_new_weights(kind, signals, tmp_path):
    equals_a_fresh_one(tmp_path, kind, signals)


@pytest.mark.parametrize("options", [{"fill": "full"}, {"fill": "shared"}, {"batch_invariant": True}])
def test_whatever_the_fill_and_in_blocks(options, tmp_path):
    equals_a_fresh_one(tmp_path, **options)


def test_in_blocks_their_sizes_are_measured_again(monkeypatch):
    llm = LLM("nano", batch_invariant=True)
    measured = []
    monkeypatch.setattr(llm.engine._invariant, "measure", lambda: measured.append(llm.stats()["weight_version"]))
    llm.update_weights(llm.checkpoint.path)
    assert len(measured) == 1


@pytest.mark.parametrize("signals", ["sync", "exact", "resident"])
def test_scores_are_of_the_new_weights_too(signals, tmp_path):
    scores_equal_those_of_a_fresh_one(tmp_path, signals)


@pytest.mark.parametrize("tied", [True, False])
def test_packed_and_tied_weights(tied, tmp_path):
    """Large enough for the order that products like best; a tied head may be given too."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "tie_word_embeddings": tied, "num_hidden_layers": 2}
    weights = {name: 0.9 * weight for name, weight in write_folder(tmp_path / "old", **sizes).items()}
    llm = LLM(tmp_path / "old")
    write_folder(tmp_path / "new", **sizes)
    if tied:
        weights["model.embed_tokens.weight"] *= 0.02  # else every token repeats itself for certain
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].double()
    save_file({name: w.float() for name, w in weights.items()}, tmp_path / "new/model.safetensors")
    asked = [[1, 2, 3], Sampling(max_tokens=6, logprobs="raw")]
    before = llm.generate(*asked)[0]
    llm.update_weights(weights)
    after, wanted = llm.generate(*asked)[0], LLM(tmp_path / "new").generate(*asked)[0]
    assert llm.engine.model.layers[1].down.is_mkldnn == torch.backends.mkldnn.is_available()
    assert (after.token_ids, after.logprobs) == (
        wanted.token_ids,
        wanted.logprobs,
    ) and after.logprobs != before.logprobs


def test_weights_may_be_the_models_own_in_another_place():
    """Two layers change places: what is written must not be read after that."""
    model, _ = twins(seed=3)
    own = dict(model.slots())
    swapped = {name: own[name.replace(".0.", ".9.").replace(".1.", ".0.").replace(".9.", ".1.")] for name in own}
    wanted = {name: tensor.clone() for name, tensor in swapped.items()}
    assert any(not torch.equal(wanted[name], own[name]) for name in own), "nothing was shown"
    Engine(model).update_weights(swapped)
    for name, slot in model.slots().items():
        assert torch.equal(slot, wanted[name]), name


@functools.cache
def nano_weights():
    return load_file(load_checkpoint("nano").path / "model.safetensors")


def changed(**tensors):
    weights = dict(nano_weights())
    for name, tensor in tensors.items():
        full = name.replace("__", ".")
        if tensor is None:
            del weights[full]
        else:
            weights[full] = tensor
    return weights


NORM = "model__norm__weight"
SIZE = 128
WRONG = {
    "missing": (
        lambda: changed(**{NORM: None}),
        r"lacks 1 tensor \(model.norm.weight\) that the model asks for; give all",
    ),
    "unknown": (
        lambda: changed(model__extra=torch.ones(3)),
        r"has 1 tensor \(model.extra\) that the model does not ask for; give the released names",
    ),
    "shape": (lambda: changed(**{NORM: torch.ones(7)}), r"model.norm.weight has the shape \[7\], the model asks for"),
    "nan": (lambda: spoilt(float("nan")), "numbers that are not finite in float32"),
    "infinite": (lambda: spoilt(float("inf")), "numbers that are not finite in float32"),
    "infinite in float32": (lambda: spoilt(1e200), "numbers that are not finite in float32"),
    "whole numbers": (lambda: changed(**{NORM: torch.ones(SIZE).long()}), "model.norm.weight as int64 on cpu; allowed"),
    "no data": (lambda: changed(**{NORM: torch.ones(SIZE, device="meta")}), "float32 on meta; allowed: plain float"),
    "no tensor": (lambda: changed(**{NORM: [1.0]}), "model.norm.weight as <class 'list'>; allowed"),
    "no place": (lambda: "no/such/place", "there are no weights no/such/place"),
    "no source": (lambda: 7, "the weights are 7; allowed: a state dict, a .safetensors file or a folder of them"),
}


def spoilt(value):
    """The last of all tensors, in its last number."""
    name = list(nano_weights())[-1]
    tensor = nano_weights()[name].double()
    tensor.view(-1)[-1] = value
    return nano_weights() | {name: tensor}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_wrong_weights_change_nothing(wrong, in_flight):
    """Not the weights, the version, an answer under way, nor what is known of prompts."""
    source, message = WRONG[wrong]
    llm = LLM("nano")
    stream = llm.stream(QUESTION, SAMPLED)
    first = [next(stream) for _ in range(3)]
    turn, known = llm.stats()["turns"], llm.stats()["prefix_pages"]
    with pytest.raises(ValueError, match=message):
        llm.update_weights(source(), in_flight=in_flight)
    assert (llm.stats()["turns"], llm.stats()["prefix_pages"], llm.stats()["weight_version"]) == (turn, known, 0)
    for name, slot in llm.engine.model.slots().items():
        assert torch.equal(slot, nano_weights()[name]), name
    outputs = [chunk.output for chunk in (*first, *stream) if chunk.output]
    wanted = LLM("nano").generate(QUESTION, SAMPLED)
    assert sorted(o.token_ids for o in outputs) == sorted(o.token_ids for o in wanted)


def test_a_damaged_or_foreign_file_changes_nothing(tmp_path):
    llm = LLM("nano")
    (tmp_path / "model.safetensors").write_bytes((llm.checkpoint.path / "model.safetensors").read_bytes()[:-1])
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ValueError, match="is truncated or no safetensors file"):
            llm.update_weights(source)
    torch.save({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="pickle"):
        llm.update_weights(tmp_path)
    tied = write_folder(tmp_path / "tied", tie_word_embeddings=True)
    model = LLM(tmp_path / "tied")
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight \(rows from 0 on\)"):
        model.update_weights(tied | {"lm_head.weight": tied["model.embed_tokens.weight"] + 1})
    with pytest.raises(ValueError, match="in_flight is 'wait'; allowed: 'finish', 'abort'"):
        llm.update_weights(llm.checkpoint.path, in_flight="wait")
    assert llm.stats()["weight_version"] == model.stats()["weight_version"] == 0


def test_a_certificate_is_for_its_weights(monkeypatch):
    engine = Engine(load_checkpoint("nano").model)
    monkeypatch.setattr(engine.requests, "certificate", object())
    with pytest.raises(ValueError, match="keeps to a certificate, which is for the weights it was made with"):
        engine.update_weights(load_checkpoint("nano").path)


def test_no_evaluation_under_the_name_of_other_weights():
    llm = LLM("nano")
    EngineBackend(llm)
    llm.update_weights(llm.checkpoint.path)
    with pytest.raises(ValueError, match="the weights of nano were exchanged after it was loaded"):
        EngineBackend(llm)


@pytest.mark.parametrize("signals", ["sync", "exact", "resident"])
@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_answers_under_way_are_of_the_old_weights_to_their_end(in_flight, signals, tmp_path):
    """Of two iterators under way each gets its own chunks; one that has not begun is of the new weights."""
    old, new = folders("nano", tmp_path)
    llm, was, fresh = (LLM(folder, signals=signals, max_batch=3) for folder in (old, old, new))
    streams = [llm.stream(QUESTION, SAMPLED), llm.stream(OTHERS[0], SAMPLED)]
    later = llm.stream(QUESTION, SAMPLED)
    chunks = [[next(stream) for _ in range(3)] for stream in streams]
    llm.update_weights(new, in_flight=in_flight)
    assert llm.generate(OTHERS[1], SAMPLED)[0].token_ids == fresh.generate(OTHERS[1], SAMPLED)[0].token_ids
    for stream, came, question in zip(streams, chunks, [QUESTION, OTHERS[0]], strict=True):
        came += stream
        outputs = sorted((chunk.output for chunk in came if chunk.output), key=lambda o: o.answer_index)
        assert [o.weight_version for o in outputs] == [0, 0]
        for output, wanted in zip(outputs, was.generate(question, SAMPLED), strict=True):
            tokens = tuple(c.token_id for c in came if c.request_id == output.request_id and c.token_id is not None)
            assert tokens == output.token_ids
            if in_flight == "finish":
                assert output.token_ids == wanted.token_ids and output.finish_reason == "length"
            else:
                assert output.finish_reason == "abort" and output.token_ids == wanted.token_ids[: len(tokens)]
    outputs = [chunk.output for chunk in later if chunk.output]
    wanted = {o.token_ids for o in fresh.generate(QUESTION, SAMPLED)}
    assert {(o.weight_version, o.token_ids in wanted) for o in outputs} == {(1, True)}
    assert not llm._inbox and not llm._mail
    assert_empty(llm.engine)


def test_an_engine_gives_what_came_meanwhile_with_its_next_step():
    """Each chunk once, each request counted once."""
    model, _ = twins(seed=3, dtype=torch.float32)
    weights = {name: 1.1 * slot for name, slot in model.slots().items()}
    engine = Engine(model, max_batch=1)
    for id in ("a", "b"):
        engine.submit([1, 2, 3], Sampling(max_tokens=4), id=id)
    assert engine.update_weights(weights) == 1 and not engine.idle
    assert engine.update_weights(weights) == 2 and not engine.idle
    chunks = engine.step()
    assert [chunk.request_id for chunk in chunks] == ["a"] * 4 + ["b"] * 4 and engine.idle and engine.step() == []
    assert engine.stats()["finished"] == {"length": 2} and engine.stats()["usage"]["output_tokens"] == 8
    engine.submit([1, 2, 3], Sampling(max_tokens=4), id="a")
    assert drain(engine)["a"].weight_version == 2
