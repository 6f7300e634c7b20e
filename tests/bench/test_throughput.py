"""Matched work: what is run, in which order, in how many engines, and what the figures mean."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from anydepth.bench.roofline import Machine, Work
from anydepth.bench.throughput import Cell, Timing, matched_work, run_cell, summarise, timed_runs
from anydepth.engine.engine import Engine
from anydepth.types import Sampling
from tests.bench.stub import wobbly
from tests.helpers import twins

CELLS = [Cell("never", Sampling()), Cell("one", Sampling(depth=1)), Cell("gate", Sampling(exit_threshold=0.6), "full")]
PROMPTS, LENGTHS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]], [5, 3, 6]
MACHINE = Machine(1e9, 1e9)


@pytest.fixture(scope="module")
def model():
    return twins()[0]


def test_every_run_has_a_fresh_engine_and_the_order_is_shuffled(model, monkeypatch):
    made = wobbly(monkeypatch)
    runs = list(
        timed_runs(model, CELLS, PROMPTS, LENGTHS, MACHINE, concurrency=2, repetitions=4, shuffle=random.Random(1))
    )
    order = [(cell.name, repetition) for cell, repetition, _ in runs]
    everything = [(cell.name, repetition) for cell in CELLS for repetition in range(4)]
    assert sorted(order) == sorted(everything) and order != everything
    warm = 3  # never, fixed, and gate_cdf under full
    assert len(made) == len({id(engine) for engine in made}) == warm + len(everything)
    assert all(len(engine.order) == len(PROMPTS) and engine.max_batch == 2 for engine in made[warm:])
    assert [engine.cell.depth for engine in made[warm:]] == [cell.sampling.depth for cell, *_ in runs]


def test_every_cell_decodes_the_same_tokens_whatever_would_end_it(model):
    stop = Cell("stop", Sampling(stop_token_ids=tuple(range(61)), max_tokens=1, n=3))
    for cell in (*CELLS, stop):
        timing = run_cell(model, cell, PROMPTS, LENGTHS, MACHINE, concurrency=2)
        assert [len(output.token_ids) for output in timing.outputs] == LENGTHS and timing.tokens == sum(LENGTHS)
        assert [output.prompt_ids for output in timing.outputs] == [tuple(prompt) for prompt in PROMPTS]


def test_seconds_and_latencies_add_up(model):
    timing = run_cell(model, CELLS[0], PROMPTS, LENGTHS, MACHINE, concurrency=1)
    first, between = timing.first_token_s, timing.inter_token_s
    assert 0 < first.p50 <= first.p95 <= first.p99 < timing.seconds and 0 < between.p50 <= between.p99
    assert 3 * first.p99 + 11 * between.p99 > timing.seconds * 0.5  # 3 first tokens and 11 others, one at a time
    assert run_cell(model, CELLS[0], PROMPTS, [1, 1, 1], MACHINE, concurrency=1).inter_token_s is None
    decode = run_cell(model, CELLS[0], PROMPTS, LENGTHS, MACHINE, concurrency=1, decode_only=True)
    assert decode.tokens == 11 and decode.work.flops < timing.work.flops


def test_pages_and_their_bytes(model):
    timing = run_cell(model, CELLS[0], [[1] * 20, [2] * 20], [13, 13], MACHINE, concurrency=2)
    shape = model.shape
    assert timing.pages_peak == 4  # two requests of 32 positions, 16 a page
    position = 2 * shape.layers * shape.segments * shape.kv_heads * shape.head_dim * 8
    assert timing.kv_peak_bytes == 4 * 16 * position


def test_an_engine_is_gone_when_its_run_is_over(model, monkeypatch):
    """Without the collector's help: else the next run's peak memory would have two pools in it."""
    made = []

    class Watched(Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(weakref.ref(self.slots.pool.data))

    monkeypatch.setattr("anydepth.bench.throughput.Engine", Watched)
    gc.disable()
    try:
        for cell in CELLS:
            run_cell(model, cell, PROMPTS, LENGTHS, MACHINE, concurrency=2)
        assert len(made) == 3 and not any(pool() is not None for pool in made)
    finally:
        gc.enable()


def test_equal_prompts_are_drawn_alike_and_others_are_not(model):
    drawn = Cell("drawn", Sampling(temperature=1.0))
    prompts, lengths = [[1, 2], [3, 4], [1, 2]], [8, 8, 8]

    def answers(cell, seed):
        return [o.token_ids for o in run_cell(model, cell, prompts, lengths, MACHINE, concurrency=3, seed=seed).outputs]

    one = answers(drawn, 1)
    assert one[0] == one[2] != one[1] and one == answers(drawn, 1) != answers(drawn, 2)
    own = Cell("own", Sampling(temperature=1.0, seed=7))
    assert answers(own, 1) == answers(own, 2)


def test_shares_by_hand():
    """Three runs each: never takes 4 s for 8 tokens, the other 2 s, and could have taken a quarter."""
    base = [Timing(seconds, 8, Work(100.0, 10.0, 1.0)) for seconds in (4.0, 5.0, 3.0)]
    fast = [Timing(seconds, 8, Work(50.0, 10.0, 0.25)) for seconds in (2.0, 1.0, 8.0)]
    found = summarise("fast", fast, base)
    assert (found.tokens_per_s, found.tokens_per_s_low, found.tokens_per_s_high) == (4.0, 1.0, 8.0)
    assert (found.s, found.s_max, found.s_max_flops, found.share_of_bound) == (2.0, 4.0, 2.0, 0.5)
    assert found.share_of_gain == pytest.approx(1 / 3) and found.time_saved_share == pytest.approx(0.5 / 0.75)
    assert found.roofline_share == 0.125
    same = summarise("never", base, base)
    assert same.s == same.s_max == same.share_of_bound == 1 and same.time_saved_share is same.share_of_gain is None


def test_matched_work_reports_every_cell(model):
    calls = []
    found = matched_work(
        model, CELLS, PROMPTS, LENGTHS, concurrency=2, progress=lambda done, total: calls.append((done, total))
    )
    assert [cell.name for cell in found] == ["never", "one", "gate"] and calls == [(i, 9) for i in range(1, 10)]
    assert all(cell.tokens == sum(LENGTHS) and cell.tokens_per_s > 0 for cell in found)
    assert found[1].s_max_flops > 1.5 and found[2].s_max <= 1.0  # full runs everything, and reads the gate besides
