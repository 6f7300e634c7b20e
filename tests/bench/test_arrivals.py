"""Traces of arrivals: read, fitted to a model, replayed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anydepth.bench.arrivals import fit, load_prompts, read_trace, replay
from anydepth.bench.drive import Clock
from anydepth.bench.throughput import Cell
from anydepth.types import Sampling
from tests.helpers import twins

ROWS = [
    {"id": "a", "arrival_s": 2.0, "prompt_tokens": 374, "output_tokens": 44},
    {"id": "b", "arrival_s": 4.0, "prompt_tokens": 10, "output_tokens": 300},
    {"id": "c", "arrival_s": 10.0, "prompt_tokens": 20, "output_tokens": 5},
]
NEVER = Cell("never", Sampling())


def trace_file(folder, rows):
    path = folder / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def trace(folder, rows=ROWS, **options):
    return read_trace(trace_file(folder, rows), **options)


def evenly(folder, *, n, every_s, prompt=5, output=4):
    return trace(
        folder,
        [{"id": str(i), "arrival_s": i * every_s, "prompt_tokens": prompt, "output_tokens": output} for i in range(n)],
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"trace\.jsonl, line 2 is no request .*an object with id, arrival_s"),
        ("", "line 2 is no request"),
        ("[1]", "line 2 is no request"),
        ({k: v for k, v in ROWS[1].items() if k != "arrival_s"}, "line 2 is no request .*arrival_s"),
        (ROWS[1] | {"id": 7}, "line 2: id is 7"),
        (ROWS[1] | {"arrival_s": -1}, "line 2: arrival_s is -1; allowed: seconds from 0"),
        (ROWS[1] | {"arrival_s": float("nan")}, "line 2: arrival_s is nan"),
        (ROWS[1] | {"prompt_tokens": 0}, "line 2: prompt_tokens is 0; allowed: whole numbers from 1"),
        (ROWS[1] | {"output_tokens": 2.5}, "line 2: output_tokens is 2.5"),
    ],
)
def test_a_malformed_line_is_named(line, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trace(tmp_path, [ROWS[0], line, ROWS[2]])


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("options", "ids"),
    [({}, "abc"), ({"limit": 2}, "ab"), ({"window_s": (4, 10)}, "b"), ({"window_s": (3, 99), "limit": 1}, "b")],
)
def test_a_part_of_a_trace_in_order_of_arrival(options, ids, tmp_path):
    assert [a.id for a in trace(tmp_path, ROWS[::-1], **options).arrivals] == list(ids)


@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": -1}, {"window_s": (11, 12)}])
def test_a_choice_of_nothing_is_refused(options, tmp_path):
    with pytest.raises(ValueError, match="choose none of its 3 requests"):
        trace(tmp_path, **options)


def test_lengths_are_cut_to_the_model_and_both_are_recorded(tmp_path):
    load = fit(trace(tmp_path), max_positions=256, rate_scale=2)
    assert [(a.arrival_s, a.prompt_tokens, a.output_tokens) for a in load.arrivals] == [
        (0.0, 213, 44),  # 213 + 44 - 1 positions: the last token takes none
        (1.0, 10, 128),
        (4.0, 20, 5),
    ]
    facts = load.facts()
    assert facts["prompt_tokens_recorded"] == 404 and facts["prompt_tokens"] == 243
    assert facts["output_tokens_recorded"] == 349 and facts["output_tokens"] == 177
    assert facts["requests_clipped"] == 2 and facts["span_s_recorded"] == 8.0 and facts["span_s"] == 4.0
    assert facts["offered_requests_per_s"] == 0.5 and facts["rate_scale"] == 2.0 and len(facts["trace_sha256"]) == 64


def test_a_rate_that_is_asked_for_is_offered(tmp_path):
    load = fit(trace(tmp_path), max_positions=256, requests_per_s=10, max_prompt_tokens=8, max_output_tokens=6)
    assert load.offered_requests_per_s == pytest.approx(10) and load.rate_scale == pytest.approx(40)
    assert [(a.prompt_tokens, a.output_tokens) for a in load.arrivals] == [(8, 6), (8, 6), (8, 5)]
    assert load.clipped == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate_scale": 0}, "rate_scale is 0; allowed: numbers above 0"),
        ({"max_output_tokens": 0.5}, "max_output_tokens is 0.5; allowed: whole numbers from 1"),
        ({"rate_scale": 1, "requests_per_s": 1}, "both given"),
    ],
)
def test_rates_and_caps_that_mean_nothing(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(trace(tmp_path), max_positions=256, **options)


def test_prompts_have_the_lengths_of_the_load(tmp_path):
    load = fit(trace(tmp_path), max_positions=256)
    drawn = load_prompts(load, vocab=61, seed=3)
    assert [len(p) for p in drawn] == [213, 10, 20] and drawn == load_prompts(load, vocab=61, seed=3)
    assert {id for p in drawn for id in p} <= set(range(61)) and len(set(drawn[0])) > 40
    assert drawn != load_prompts(load, vocab=61, seed=4)
    given = load_prompts(load, vocab=61, prompts=[[1, 2, 3], [4, 5]])
    assert given[0][:7] == (1, 2, 3, 4, 5, 1, 2) and given[1] == (4, 5, 1, 2, 3, 4, 5, 1, 2, 3) and len(given[0]) == 213


def ticking(tick_s):
    """A clock that moves on whenever it is read."""
    at = [0.0]

    def now():
        at[0] += tick_s
        return at[0]

    def sleep(seconds):
        at[0] += seconds

    return Clock(now, sleep)


@pytest.mark.parametrize(("every_s", "kept_up"), [(1e4, True), (0.01, False), (0.0, None)])
def test_a_replay_says_whether_it_kept_up(every_s, kept_up, tmp_path):
    model, _ = twins()
    load = fit(evenly(tmp_path, n=8, every_s=every_s), max_positions=model.shape.max_positions)
    prompts = load_prompts(load, vocab=61)
    timing = replay(model, NEVER, load, prompts, max_batch=1, clock=ticking(1.0))
    assert timing.kept_up is kept_up and timing.tokens == 32 and [len(o.token_ids) for o in timing.outputs] == [4] * 8
    assert (timing.most_waiting > 4) == (kept_up is not True)
    assert timing.end_to_end_s.p50 > timing.first_token_s.p50 > 0 and timing.drain_s > 0
    assert timing.duration_s == pytest.approx(load.span_s + timing.drain_s)


def test_a_replay_answers_as_lone_runs_do(tmp_path):
    model, _ = twins()
    load = fit(evenly(tmp_path, n=5, every_s=0.001, prompt=9, output=6), max_positions=128)
    prompts = load_prompts(load, vocab=61)
    gate = Cell("gate", Sampling(exit_threshold=0.6, temperature=1.0))
    together = replay(model, gate, load, prompts, max_batch=4, seed=5)
    apart = replay(model, gate, load, prompts, max_batch=1, seed=5)
    assert [(o.token_ids, o.depths) for o in together.outputs] == [(o.token_ids, o.depths) for o in apart.outputs]


@pytest.mark.skipif("ANYDEPTH_DATA" not in os.environ, reason="ANYDEPTH_DATA names no folder of data")
def test_the_azure_trace_is_read_whole():
    whole = read_trace(Path(os.environ["ANYDEPTH_DATA"]) / "azure_llm_2023_conv.jsonl")
    assert len(whole.arrivals) == 19366 and whole.arrivals[0].prompt_tokens == 374
    facts = fit(whole, max_positions=256, requests_per_s=20).facts()
    assert facts["offered_requests_per_s"] == pytest.approx(20) and facts["prompt_tokens"] < 256 * 19366
