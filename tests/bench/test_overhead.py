"""Timing must cost less than 1 % of what it times, on the smallest model there is."""

from __future__ import annotations

import pytest

from anydepth.bench import drive
from anydepth.bench.overhead import timing_overhead
from anydepth.bench.throughput import Cell
from anydepth.models.load import load_checkpoint
from anydepth.models.nano.questions import questions
from anydepth.types import Sampling


@pytest.fixture(scope="module")
def overhead():
    checkpoint = load_checkpoint("nano")
    asked = questions("test", n=12)
    prompts = [checkpoint.tokenizer.encode(question.prompt) for question in asked]
    lengths = [len(checkpoint.tokenizer.encode(question.answer)) for question in asked]

    def measure(concurrency):
        cell = Cell("never", Sampling())
        return timing_overhead(checkpoint.model, cell, prompts, lengths, concurrency=concurrency, runs=1)

    return measure


@pytest.mark.parametrize("concurrency", [1, 8])
def test_timing_costs_less_than_one_percent(overhead, concurrency):
    found = overhead(concurrency)
    assert found.low < 0.01 and found.low <= found.share <= found.high and found.turns > 100, found


def test_a_loop_that_idles_is_seen(overhead, monkeypatch):
    """Fifty microseconds a turn, of 140 or more."""
    turn = drive._turn

    def slow(engine, seen, now, settle):
        ended, until = turn(engine, seen, now, settle), now() + 50e-6
        while now() < until:
            pass
        return ended

    monkeypatch.setattr(drive, "_turn", slow)
    assert overhead(1).low > 0.01
