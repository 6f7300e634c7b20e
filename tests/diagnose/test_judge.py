"""Every class from real runs: nano with two ids that are read alike, thresholds and temperatures on an edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anydepth.diagnose.divergence import FAULT, GATE_TIE, NEAR_TIE, diagnose
from anydepth.diagnose.judge import Replayer
from anydepth.diagnose.replay import replay
from anydepth.engine.engine import Engine
from anydepth.eval.task import load_task
from anydepth.models.load import load_checkpoint
from anydepth.types import Sampling
from tests.helpers import drain, twins

GATE = {"exit_threshold": 0.5}
SETTINGS = {
    "policy": "gate_cdf",
    "min_depth": 1,
    "max_depth": 4,
    "first_token": "prefill",
    "temperature": 0.0,
    "fill": "last_exited",
    **GATE,
}
QUESTIONS = 10


@pytest.fixture(scope="module")
def nano():
    return load_checkpoint("nano")


@pytest.fixture(scope="module")
def prompts(nano):
    return [tuple(nano.tokenizer.encode(q.prompt)) for q in load_task("nano").select(limit=QUESTIONS)]


def answers(model, prompts, *, max_batch=QUESTIONS, eos=(), max_tokens=20, seed=1, **ask):
    engine = Engine(model, fill="last_exited", max_batch=max_batch, eos_ids=frozenset(eos))
    requests = [
        engine.prepare(p, Sampling(max_tokens=max_tokens, seed=seed, **ask), id=str(n)) for n, p in enumerate(prompts)
    ]
    outputs = drain(engine, requests)
    return [outputs[request.id] for request in requests]


def judge(model, outputs, concurrency=QUESTIONS, more=(), **settings):
    return Replayer(models=(model, *more), settings=SETTINGS | settings, answers=outputs, concurrency=concurrency)


def held(model, a, b, concurrency=QUESTIONS, more=(), **settings):
    kv = ("last_exited", "last_exited")
    return diagnose(a, b, judge=judge(model, a, concurrency, more, **settings), segments=4, kv=kv)


def test_batch_variance_is_that_of_the_arithmetic(nano, prompts):
    outputs = answers(nano.model, prompts, **GATE)
    found = judge(nano.model, outputs).baseline()
    assert found.answers == QUESTIONS and found.positions == sum(len(o.token_ids) for o in outputs)
    assert 0 < found.logit <= found.most_logit < 1e-4 and 0 < found.cdf <= found.most_cdf < 1e-5
    assert found.probability is None and found.most_probability is None
    alone = judge(nano.model, outputs, concurrency=1).baseline()
    assert alone.logit == alone.most_logit == 0 and alone.cdf == 0
    drawn = judge(nano.model, outputs, temperature=1.0).baseline()
    assert 0 < drawn.probability < 1e-5 and drawn.logit == found.logit
    wide = load_checkpoint("nano", dtype="float64").model
    assert judge(wide, outputs).baseline().logit < 1e-11
    assert judge(wide, outputs, more=[nano.model]).baseline() == found  # the larger of the two counts


def twin_vocabulary(nano, first, second, by):
    """nano where id `second` is read as `first` is, but for a factor of 1 + by."""
    model = load_checkpoint("nano").model
    model.head[:, second] = model.head[:, first] * (1 + by)
    return model


@pytest.mark.parametrize(("by", "kind"), [(1e-7, NEAR_TIE), (1e-2, FAULT)])
def test_two_ids_read_nearly_alike_are_a_near_tie(nano, prompts, by, kind):
    """Two real runs: in one the twin is a little larger, in the other a little smaller."""
    token = answers(nano.model, prompts[:1])[0].token_ids[3]
    spare = nano.model.shape.vocab - 1
    assert token != spare
    a = answers(twin_vocabulary(nano, token, spare, -by), prompts[:3])
    b = answers(model := twin_vocabulary(nano, token, spare, by), prompts[:3])
    found = held(model, a, b, policy="never")
    assert found.divergences and {each.kind for each in found.divergences} == {kind}
    for each in found.divergences:
        assert set(each.tokens) == {token, spare} and each.context == "same"
        assert each.margins.token == pytest.approx(each.margins.top) and each.margins.gate is None


def narrowed(low, high, differ, width):
    """Two settings, at most `width` apart, between which the outcome changes as it does between `low` and `high`."""
    assert differ(low, high)
    while high - low > width:
        middle = (low + high) / 2
        low, high = (low, middle) if differ(low, middle) else (middle, high)
    return low, high


@pytest.mark.parametrize(("width", "kind"), [(1e-9, GATE_TIE), (2e-4, FAULT)])
def test_a_threshold_on_an_exit_probability_is_a_gate_tie(nano, prompts, width, kind):
    """Two real runs, their thresholds on both sides of one exit probability; judged as if both had asked for A's."""
    outputs = answers(nano.model, prompts[:3], **GATE)
    seen = next(s for s in replay(nano.model, outputs, fill="last_exited") if s.output and 0.1 < s.cdf[0] < 0.9)
    prompt, cdf = prompts[seen.answer], seen.cdf[0]

    def run(tau):
        return answers(nano.model, [prompt], exit_threshold=tau)

    def differ(*taus):
        return len({run(tau)[0].depths[seen.output] for tau in taus}) > 1

    a, b = narrowed(cdf - 1e-4, cdf + 1e-4, differ, width)
    asked = judge(nano.model, outputs, exit_threshold=a)
    (each,) = diagnose(run(a), run(b), judge=asked, segments=4, kv=("last_exited", "last_exited")).divergences
    assert (each.kind, each.position) == (kind, seen.output)
    assert each.depths[0] == 1 < each.depths[1] and each.margins.gate == pytest.approx(width / 2, abs=2e-6)


def test_a_depth_that_skipped_a_sure_round_is_a_fault(nano, prompts):
    """The exit at 1 is a tie, but the run that went on passed round 2 by far."""
    outputs = answers(nano.model, prompts[:3], max_batch=1, **GATE)
    seen = next(s for s in replay(nano.model, outputs, fill="full") if s.output and 0.1 < s.cdf[0] < 0.5 < s.cdf[1])
    tau = seen.cdf[0]
    one = answers(nano.model, prompts[:3], max_batch=1, exit_threshold=tau)[seen.answer]
    deep = replace(one, depths=(*one.depths[: seen.output], 4, *one.depths[seen.output + 1 :]))
    (each,) = held(nano.model, [one], [deep], exit_threshold=tau).divergences
    assert each.kind == FAULT and each.margins.gate > 0.01


def flipped(output, at, token):
    return replace(output, token_ids=(*output.token_ids[:at], token, *output.token_ids[at + 1 :]))


def test_a_flipped_token_is_a_fault_and_its_margin_is_its_own(nano, prompts):
    """Also where the replay's two likeliest ids are a tie, if the token is neither."""
    (one,) = answers(nano.model, prompts[:1])
    wrong = (one.token_ids[3] + 1) % nano.model.shape.vocab
    (each,) = held(nano.model, [one], [flipped(one, 3, wrong)], policy="never").divergences
    assert each.kind == FAULT and each.margins.token >= each.margins.top > 0.1
    spare = nano.model.shape.vocab - 1
    model = twin_vocabulary(nano, one.token_ids[3], spare, 0.0)
    wrong = next(i for i in range(spare) if i != one.token_ids[3])
    (each,) = held(model, [one], [flipped(one, 3, wrong)], policy="never").divergences
    assert each.margins.top == 0 and each.kind == FAULT


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_a_draw_is_a_near_tie_where_u_is_at_an_edge(cut):
    """Two real runs at temperatures between which an edge moves over u: hardly apart, and far apart."""
    model, _ = twins(seed=3, dtype=torch.float32)
    prompts = [tuple(range(n, n + 9)) for n in range(6)]

    def run(temperature):
        return answers(model, prompts, seed=seed, max_tokens=3, temperature=temperature, **cut)

    def differ(*temperatures):
        return len({run(temperature)[0].token_ids[0] for temperature in temperatures}) > 1

    for seed in range(50):  # noqa: B007 (run draws with it)
        if differ(0.5, 2.0):
            break
    for (low, high), kind in ((0.5, 2.0), FAULT), (narrowed(0.5, 2.0, differ, 1e-10), NEAR_TIE):
        found = held(model, run(low), run(high), policy="never", temperature=low, **cut).divergences[0]
        assert (found.kind, found.position) == (kind, 0)
        assert (found.margins.top < 1e-6) == (kind == NEAR_TIE)
