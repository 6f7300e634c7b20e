"""A policy that the package does not know takes part like any other: it reads hidden states or logits, of looped and
of layered models, beside requests with other policies."""

from __future__ import annotations

from random import Random

import pytest

from anydepth.engine.engine import Engine
from anydepth.types import Sampling
from tests.exits.own import GAP, SIZE
from tests.helpers import drain, expected, poison, twins

RULES = {
    "Confident": lambda reference, h: (lambda top: float(top[0] - top[1]) >= GAP)(reference.readout(h).topk(2).values),
    "Positive": lambda reference, h: abs(float(h.mean())) >= SIZE,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind, segments", [("looped", None), ("layered", (1, 2, 4))])
def test_rows_leave_where_the_rule_says_of_the_dense_states(kind, segments, name):
    """Under `full`, so that the dense pass over prompt and outputs gives the states at every depth."""
    model, reference = twins(kind, seed=1, segments=segments)
    engine = poison(Engine(model, fill="full", page_size=4, max_batch=3))
    ask = Sampling(max_tokens=9, temperature=1.0, seed=1, exit_policy=f"tests.exits.own:{name}", max_depth=3)
    prompts = [Random(n).choices(range(61), k=3 + 4 * n) for n in range(3)]
    requests = [engine.prepare(prompt, ask) for prompt in prompts]
    requests.append(engine.prepare(prompts[0], Sampling(max_tokens=9), id="plain"))
    outputs = drain(engine, requests)
    depths = set()
    for request in requests[:3]:
        output = outputs[request.id]
        for n in range(1, len(output.token_ids)):
            states, _ = reference.dense([*output.prompt_ids, *output.token_ids[:n]])
            wanted = next(r for r in (1, 2, 3) if r == 3 or RULES[name](reference, states[r - 1][-1]))
            assert output.depths[n] == wanted
            depths.add(wanted)
    assert len(depths) > 1, "this model says nothing about the policy"
    assert (
        list(outputs["plain"].token_ids) == expected(reference, (prompts[0], {"max_tokens": 9}), fill="full").token_ids
    )


def test_tallies_are_in_the_stats_and_outlive_their_requests():
    model, _ = twins(seed=1)
    engine = Engine(model, fill="last_exited", max_batch=1)
    ask = Sampling(max_tokens=5, exit_policy="tests.exits.own:Positive", max_depth=3)
    for times in (1, 2, 3):
        engine.work = []
        drain(engine, [engine.prepare([1, 2, 3], ask)])
        assert engine.stats()["rounds_asked"] == times * sum(turn.signal_rows for turn in engine.work) > 0


@pytest.mark.parametrize(("name", "said"), [("TooDeep", "plans depth 9"), ("Undecided", "plans no depth")])
def test_a_plan_that_cannot_be_followed_is_refused_at_admission(name, said):
    engine = Engine(twins(seed=3)[0])
    with pytest.raises(ValueError, match=said):
        engine.prepare([1, 2, 3], Sampling(exit_policy=f"tests.exits.own:{name}"))


MODES = [("sync", 0), ("delayed", 3), ("exact", 0), ("exact", 3), ("resident", 0), ("resident", 3)]


@pytest.mark.parametrize("fill", ["full", "last_exited"])
@pytest.mark.parametrize(("signals", "lateness"), MODES)
def test_a_policy_is_asked_below_its_last_depth_only_in_every_mode(signals, lateness, fill):
    engine = Engine(twins(seed=1)[0], fill=fill, signals=signals, lateness=lateness)
    ask = {"max_tokens": 6, "exit_policy": "tests.exits.own:Shy"}
    requests = [engine.prepare([1, 2, 3], Sampling(**ask, max_depth=last), id=str(last)) for last in (4, 2)]
    outputs = drain(engine, requests)
    assert outputs["4"].depths == (4,) * 6 and outputs["2"].depths == (4, *[2] * 5)
    assert engine.stats()["rounds_asked"] == 5 * 3 + 5 * 1


@pytest.mark.parametrize("fill", ["full", "last_exited"])
@pytest.mark.parametrize(("signals", "lateness"), [mode for mode in MODES if mode[0] != "delayed"])
def test_tallies_are_those_of_the_synchronous_engine(signals, lateness, fill):
    """Late rounds, and rounds after a stop id that the host has not heard of, are asked in vain."""
    counted = []
    for mode in ({}, {"signals": signals, "lateness": lateness}):
        engine = Engine(twins(seed=1)[0], fill=fill, max_batch=3, **mode)
        stops = {"temperature": 1.0, "stop_token_ids": range(0, 61, 2)}
        asks = [Sampling(exit_policy=f"tests.exits.own:{name}", max_depth=3, **stops) for name in ("Positive", "Shy")]
        prepared = [engine.prepare([1, 2, 3 + n], asks[n % 2], seed=n) for n in range(12)]
        assert {output.finish_reason for output in drain(engine, prepared).values()} == {"stop"}
        counted.append(engine.stats()["rounds_asked"])
    assert counted[0] == counted[1] > 12


@pytest.mark.parametrize(("signals", "lateness"), [mode for mode in MODES if mode[0] != "delayed"])
def test_what_is_tallied_ends_where_the_token_leaves(signals, lateness):
    counted = []
    for fill in ("full", "deferred" if signals != "resident" else "last_exited"):
        engine = Engine(twins(seed=1)[0], fill=fill, signals=signals, lateness=lateness)
        ask = Sampling(max_tokens=2, exit_policy="tests.exits.own:Positive", max_depth=3, temperature=1.0)
        outputs = drain(engine, [engine.prepare([1, 2, 3 + n], ask, seed=n) for n in range(12)])
        counted.append(engine.stats()["rounds_asked"])
        assert 1 in {depth for output in outputs.values() for depth in output.depths}
    assert counted[0] == counted[1] > 0  # of one decode token each, the same under every fill
