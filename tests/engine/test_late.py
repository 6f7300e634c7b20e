"""Signals that come late: which modes there are, what each of them equals, and that timing cannot be seen."""

from __future__ import annotations

import functools
from random import Random

import pytest
import torch

from anydepth.engine.completions import AdversarialCompletions, Buffers, Completions, Submitted
from anydepth.engine.engine import Engine
from anydepth.engine.llm import LLM
from anydepth.engine.plan import Sequence
from anydepth.models.nano.questions import questions
from anydepth.reference.generate import score
from anydepth.types import Sampling
from tests.engine.schedules import VOCABULARY, Asked, Schedule, play
from tests.helpers import drain, twins

LATE = ("delayed", "exact", "resident")
FILLS = ("full", "last_exited", "shared")
PAIRS = [(mode, fill) for mode in LATE for fill in FILLS if (mode, fill) != ("exact", "shared")]
SAMPLED = {"temperature": 0.9, "top_k": 7, "top_p": 0.95, "seed": 2**63 + 5, "logprobs": "processed"}


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(Random(seed * 1000 + length).choices(range(VOCABULARY), k=length))


def policies(segments: int, gate: bool) -> list[dict]:
    depths = [Random(3).randint(1, segments) for _ in range(7)]
    asks = [{}, {"depth": 1}, {"depth": segments}, {"trace": (segments, *depths[1:])}]
    asks += [{"first_token": "policy"}, {"trace": tuple(depths), "first_token": "policy"}]
    if gate:
        gates = [{"exit_threshold": tau} for tau in (0, 0.3, 0.5, 0.7, 0.95, 1.0)]
        gates += [
            {"exit_threshold": 0.3, "min_depth": low, "max_depth": high} for low, high in ((1, 3), (2, 3), (3, 3))
        ]
        gates += [{"exit_threshold": 0.5, "first_token": "policy"}]
        asks += [{"exit_policy": "gate_cdf", **gate} for gate in gates]
    return asks


@pytest.mark.parametrize("late", [None, 1, 2])
@pytest.mark.parametrize("mode, fill", PAIRS)
def test_every_policy_together_in_one_batch(mode, fill, late):
    """Greedy and sampled, beside each other, in a pool that is too small for all. `late` None: all come one turn late;
    else the seed of an adversary."""
    asked = [
        Asked(n, prompt(1 + (5 * n) % 11, n), {"max_tokens": 7, **settings, **more})
        for n, settings in enumerate(policies(4, True))
        for more in ({}, SAMPLED)
    ]
    options = {"max_batch": 5, "page_size": 4, "kv_pages": 12, "max_batched_tokens": 6, "signals": mode}
    played = play(Schedule("looped", 2, {"vocab_size": VOCABULARY}, None, "float64", fill, (3, 16), options,
                           tuple(asked), late, ((20, 1), (21, 0), (22, 1))))  # fmt: skip
    assert all(one.output.token_ids for one in played.ran)


@pytest.mark.parametrize("mode", ["delayed", "exact"])
def test_layered_models(mode):
    asked = [Asked(n, prompt(3 + n), {"max_tokens": 7, **ask}) for n, ask in enumerate(policies(3, False))]
    options = {"max_batch": 3, "page_size": 4, "kv_pages": 12, "max_batched_tokens": 6, "signals": mode}
    changes = {"vocab_size": VOCABULARY, "num_hidden_layers": 4}
    play(Schedule("layered", 2, changes, (1, 2, 4), "float64", "full", (3,), options, tuple(asked), 5, ((20, 1),)))


REFUSED = [
    ("looped", {"signals": "exact", "fill": "shared"}, "'exact' does not go with fill 'shared': round k . 1 has over"),
    ("layered", {"signals": "resident"}, "'resident' is for looped models, whose rows of all depths share a turn"),
    ("layered", {"signals": "exact", "fill": "last_exited"}, "fill 'last_exited' is for looped models"),
    ("looped", {"signals": "late"}, "signals is 'late'; allowed: 'sync', 'delayed', 'exact'"),
    ("looped", {"signals": None}, "signals is None; allowed: 'sync'"),
    ("looped", {"signals": "exact", "lateness": -1}, "lateness is -1; allowed: whole turns, 0 .. 3"),
    ("looped", {"signals": "exact", "lateness": True}, "lateness is True"),
    ("looped", {"lateness": 2}, "signals 'sync' are never late; leave it out or choose 'exact'"),
]


@pytest.mark.parametrize("kind, options, message", REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(kind, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(twins(kind)[0], **options)


@functools.cache
def answers(signals: str, lateness: int | None, fill: str = "last_exited") -> list:
    engine = Engine(twins(seed=2)[0], signals=signals, lateness=lateness, fill=fill, max_batch=3, page_size=4)
    asks = [Sampling(max_tokens=9, exit_threshold=0.6, logprobs="raw", seed=n, temperature=n % 2) for n in range(6)]
    outputs = drain(engine, [engine.prepare(prompt(3 + n, n), ask, id=str(n)) for n, ask in enumerate(asks)])
    return [outputs[str(n)] for n in range(6)]


@pytest.mark.parametrize("lateness", [0, 1, 2, 3])
@pytest.mark.parametrize("mode, fill", PAIRS)
def test_how_late_signals_come_cannot_be_seen(mode, fill, lateness):
    """`delayed` equals its synchronous form, the others the synchronous engine; what is executed is the same too."""
    first = answers(mode, 0, fill)
    for got, wanted in zip(answers(mode, lateness, fill), first, strict=True):
        assert (got.token_ids, got.depths) == (wanted.token_ids, wanted.depths)
        assert got.usage.segments_executed == wanted.usage.segments_executed
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-9)
    if mode != "delayed":
        for got, wanted in zip(first, answers("sync", None, fill), strict=True):
            assert (got.token_ids, got.depths) == (wanted.token_ids, wanted.depths)


def test_what_is_executed():
    """A round more than was read where the policy decides below its max, and none more on the device."""
    for mode, extra in (("sync", 0), ("resident", 0), ("exact", 1), ("delayed", 0)):
        for output in answers(mode, None):
            depths = output.depths[1:]
            late_rounds = sum(extra for depth in depths if depth < 4)
            assert output.usage.segments_executed == sum(depths) + late_rounds
    sync, delayed = answers("sync", None), answers("delayed", None)
    assert any(a.depths != b.depths for a, b in zip(sync, delayed, strict=True))


def test_a_policy_that_is_known_beforehand_runs_no_round_more():
    for mode in LATE:
        engine = Engine(twins(seed=2)[0], signals=mode)
        (output,) = drain(engine, [engine.prepare(prompt(5), Sampling(depth=2, max_tokens=6))]).values()
        assert output.usage.segments_executed == 2 * 5 and output.depths == (4, 2, 2, 2, 2, 2)


def test_what_began_before_a_stop_was_seen_is_wasted_and_not_executed():
    """Three turns late, a token of depth 1 is followed by three more before the host sees that it was a stop id."""
    model, _ = twins(seed=2)
    asks = {"depth": 1, "max_tokens": 30}
    first = drain(sync := Engine(model), [sync.prepare(prompt(5), Sampling(**asks))]).popitem()[1].token_ids
    stop = next(n for n in range(1, 30) if first[n] not in first[:n])
    ask = Sampling(**asks, stop_token_ids=(first[stop],))
    for mode, wasted in (("delayed", 4), ("exact", 4), ("resident", 0)):
        engine = Engine(model, signals=mode, lateness=3)
        (output,) = drain(engine, [engine.prepare(prompt(5), ask)]).values()
        assert output.token_ids == first[: stop + 1] and output.usage.segments_executed == stop
        assert output.usage.segments_wasted == wasted, mode


# -- nano -------------------------------------------------------------------------------------------------------------


@functools.cache
def nano(signals: str, fill: str, lateness: int | None = None) -> LLM:
    return LLM("nano", signals=signals, fill=fill, lateness=lateness, max_batch=8)


@functools.cache
def nano_answers(signals: str, fill: str, lateness: int | None = None) -> list:
    asks = [
        Sampling(max_tokens=40, exit_threshold=tau, min_depth=low, max_depth=high, temperature=warm, seed=3)
        for tau, low, high, warm in ((0.9, 1, 4, 0), (0.7, 2, 4, 0), (0.5, 1, 4, 1.0), (0.5, 1, 3, 0), (0.2, 2, 3, 0.7))
    ]
    asked = [(question.prompt, ask) for question, ask in zip(questions("validation", n=20), asks * 4, strict=True)]
    llm = nano(signals, fill, lateness)
    return llm.generate([text for text, _ in asked], [ask for _, ask in asked])


@pytest.mark.parametrize("lateness", [1, 3])
@pytest.mark.parametrize("mode, fill", [pair for pair in PAIRS if pair[0] != "delayed"])
def test_nano_in_float32(mode, fill, lateness):
    """Thresholds, bounds and temperatures on a trained model: tokens, depths and text are the synchronous engine's."""
    for got, wanted in zip(nano_answers(mode, fill, lateness), nano_answers("sync", fill), strict=True):
        assert (got.token_ids, got.depths, got.text) == (wanted.token_ids, wanted.depths, wanted.text)
        assert got.finish_reason == wanted.finish_reason


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LATE)
def test_scores_are_made_without_lateness(mode):
    """`delayed` scores as its synchronous form does, the others as the synchronous engine."""
    contexts, continuations = ["Ann has 5 .", "Ann has 5 .", "Bob has"], [" Bob has 3", " How", " 7 more than Ann ."]
    ask = Sampling(exit_threshold=0.5)
    got = nano(mode, "last_exited").score(contexts, continuations, ask)
    alone = [nano("sync", "last_exited").score([c], [t], ask)[0] for c, t in zip(contexts, continuations, strict=True)]
    if mode != "delayed":
        assert [s.depths for s in got] == [s.depths for s in alone]
        assert [s.greedy for s in got] == [s.greedy for s in alone]
        for one, other in zip(got, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    else:
        assert all(a >= b for one, other in zip(got, alone, strict=True) for a, b in zip(one.depths, other.depths))
        assert [s.depths for s in got] != [s.depths for s in alone]


def test_delayed_scores_are_the_references():
    model, reference = twins(seed=2)
    engine = Engine(model, signals="delayed", lateness=0)
    targets = [[5, 6, 7], [9], [11, 2, 3, 4, 8]]
    requests = [
        engine.prepare([1, 2, 3], Sampling(exit_threshold=0.6), forced=[t], id=str(n)) for n, t in enumerate(targets)
    ]
    scores = {chunk.request_id: chunk.score for chunk in engine.run(requests) if chunk.score}
    for n, target in enumerate(targets):
        lone = score(reference, [1, 2, 3], target, fill="last_exited", exit_threshold=0.6, delayed=True)
        assert list(scores[str(n)].depths) == lone.depths and list(scores[str(n)].argmax) == lone.argmax
        assert scores[str(n)].logprobs == pytest.approx(lone.logprobs, abs=1e-9)
        assert scores[str(n)].usage.segments_executed == lone.usage.segments_executed


@pytest.mark.parametrize("options", [{"signals": "exact"}, {"signals": "resident", "lateness": 0}])
def test_an_engine_whose_signals_are_late_makes_no_scores(options):
    engine = Engine(twins()[0], **options)
    with pytest.raises(ValueError, match="continuations are scored without lateness"):
        engine.prepare([1, 2], forced=[[3]])


# -- completions ------------------------------------------------------------------------------------------------------


def submitted(buffers: Buffers, *names: str, row: int = 0) -> Submitted:
    return Submitted([(known(name), row, None, None, None) for name in names], buffers.take(), buffers)  # type: ignore[list-item]


@functools.cache
def known(name: str) -> Sequence:
    return Sequence(name, 0)  # type: ignore[arg-type]


def test_each_turns_outcomes_come_so_many_turns_later():
    buffers, completions = Buffers(4, torch.device("cpu")), Completions(2)
    arrived = []
    for turn in range(5):
        if turn < 2:
            completions.put(submitted(buffers, f"a{turn}", f"b{turn}"))
        arrived.append([sequence.request for sequence, *_ in completions.take()])
        assert buffers.in_flight == sum(turn - 2 < put <= turn for put in (0, 1))
    assert arrived == [[], [], ["a0", "b0"], ["a1", "b1"], []] and len(completions) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_adversary_keeps_each_sequences_order_and_no_other(seed):
    buffers, completions = Buffers(4, torch.device("cpu")), AdversarialCompletions(seed)
    arrived, put = [], []
    for turn in range(40):
        completions.put(submitted(buffers, "a", "b", row=turn))
        put += [("a", turn), ("b", turn)]
        for sequence, _, row, _ in completions.take():
            assert 0 <= turn - row <= 3
            arrived.append((sequence.request, row))
    completions.drain()
    for name in "ab":
        mine = [turn for other, turn in arrived if other == name]
        assert mine == sorted(mine) and len(mine) > 30
    assert arrived != put[: len(arrived)] and buffers.in_flight == 0


def test_a_buffer_comes_back_when_the_last_of_it_was_read():
    buffers = Buffers(4, torch.device("cpu"))
    turn = submitted(buffers, "a", "b")
    turn.open(turn.parts[:1])
    assert buffers.in_flight == 1
    turn.open(turn.parts[1:])
    assert buffers.in_flight == 0
