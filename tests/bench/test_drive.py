"""Latencies by hand: a fake clock, and a server whose every turn takes a second."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from anydepth.bench.drive import closed_loop, open_loop, quantiles
from anydepth.types import Chunk
from tests.bench.stub import Hand, OneSlot, asks


def test_open_loop_counts_the_queue_and_sleeps_only_when_idle():
    """a has the only slot until 3 s, so b, due at 0.5 s, waits until then; c finds an idle server."""
    hand = Hand(at=100.0)
    engine = OneSlot(hand, {"a": 3, "b": 2, "c": 1})
    seen = open_loop(engine, asks("a", "b", "c"), [0.0, 0.5, 10.0], settle=None, clock=hand.clock)
    assert engine.submitted_s == {"a": 100.0, "b": 101.0, "c": 110.0}  # b as soon as a turn ends after its time
    assert seen.first_token_s() == [1.0, 3.5, 1.0]
    assert seen.end_to_end_s() == [3.0, 4.5, 1.0]
    assert seen.inter_token_s() == [1.0, 1.0, 1.0]
    assert seen.most_waiting == 1 and hand.slept == [5.0]
    assert seen.duration_s == 11.0 and list(seen.outputs) == ["a", "b", "c"]


def test_open_loop_never_waits_for_earlier_requests():
    hand = Hand()
    engine = OneSlot(hand, dict.fromkeys("abcd", 5))
    seen = open_loop(engine, asks(*"abcd"), [0.0, 1.0, 2.0, 3.0], settle=None, clock=hand.clock)
    assert list(engine.submitted_s.values()) == [0.0, 1.0, 2.0, 3.0] and seen.most_waiting == 3
    assert seen.first_token_s() == [1.0, 5.0, 9.0, 13.0] and not hand.slept


def test_closed_loop_keeps_so_many_in_flight_and_times_from_submission():
    hand = Hand()
    engine = OneSlot(hand, {"a": 2, "b": 1, "c": 3})
    seen = closed_loop(engine, asks("a", "b", "c"), concurrency=1, settle=None, clock=hand.clock)
    assert engine.submitted_s == {"a": 0.0, "b": 2.0, "c": 3.0}
    assert seen.first_token_s() == [1.0, 1.0, 1.0] and seen.turns_s() == [1.0] * 6 and seen.turn_tokens == [1] * 6
    engine = OneSlot(hand := Hand(), {"a": 2, "b": 1, "c": 3})
    seen = closed_loop(engine, asks("a", "b", "c"), concurrency=2, settle=None, clock=hand.clock)
    assert engine.submitted_s == {"a": 0.0, "b": 0.0, "c": 2.0} and seen.first_token_s() == [1.0, 3.0, 2.0]


def test_settling_is_inside_the_turn():
    """Work that a device still does belongs to the turn that gave it."""
    hand = Hand()

    def settle():
        hand.at += 0.5

    seen = closed_loop(OneSlot(hand, {"a": 2}), asks("a"), concurrency=1, settle=settle, clock=hand.clock)
    assert seen.first_token_s() == [1.5] and seen.turns_s() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 3, 4], (2.5, 3.85, 3.97)), ([7.0], (7.0, 7.0, 7.0)), ([3, 1, 2], (2.0, 2.9, 2.98))],
)
def test_quantiles_are_linear_between_the_nearest(values, expected):
    assert quantiles(values) == pytest.approx(expected)


def test_quantiles_are_numpys_and_none_of_nothing():
    values = np.random.default_rng(0).exponential(size=1001)
    assert quantiles(values) == tuple(np.quantile(values, [0.5, 0.95, 0.99])) and quantiles([]) is None


@pytest.mark.parametrize("rows", [1, 32])
def test_timing_a_turn_costs_microseconds(rows):
    """Under 1 % even of nano's turns, which take 140 us for one row and 1 ms for 32 on this project's machines."""
    limit_s = {1: 1.4e-6, 32: 10e-6}[rows]
    turns = 5000
    chunks = [Chunk(None, 1, 1, request_id=str(i)) for i in range(rows)]
    last = [Chunk(None, 1, 1, request_id=str(i), output=SimpleNamespace()) for i in range(rows)]

    class Free:
        def __init__(self):
            self.left = turns

        @property
        def idle(self):
            return self.left == 0

        def submit(self, request):
            return request

        def step(self):
            self.left -= 1
            return chunks if self.left else last

    def plain_s():
        engine, start = Free(), time.perf_counter()
        while not engine.idle:
            engine.step()
        return time.perf_counter() - start

    def timed_s():
        engine, start = Free(), time.perf_counter()
        closed_loop(engine, asks(*map(str, range(rows))), concurrency=rows, settle=None)
        return time.perf_counter() - start

    assert (min(timed_s() for _ in range(9)) - min(plain_s() for _ in range(9))) / turns < limit_s
