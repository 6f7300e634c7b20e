"""A timeline says what really ran: its numbers come from a run and agree with the answers' own accounts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from anydepth.bench.timeline import record
from anydepth.bench.timeline_picture import draw
from anydepth.engine.engine import Engine
from anydepth.types import Sampling
from tests.helpers import drain, twins

ROOT = Path(__file__).resolve().parents[2]
GATED = {"exit_policy": "gate_cdf", "exit_threshold": 0.3, "max_depth": 3}
ASKED = {"a": ([5, 3, 2, 7, 1], {"max_tokens": 10}), "b": ([9, 4, 4], {"max_tokens": 6})}
MODES = [("sync", None), ("delayed", 1), ("exact", 1), ("exact", 2), ("exact", 0), ("resident", 1), ("resident", 3)]


def engine_of(signals, lateness, **options):
    model, _ = twins(seed=2, vocab_size=19)
    return Engine(model, signals=signals, lateness=lateness, page_size=4, **options)


def asked(engine):
    return [engine.prepare(prompt, Sampling(**GATED, **more), id=id) for id, (prompt, more) in ASKED.items()]


def timeline_of(signals, lateness, **options):
    engine = engine_of(signals, lateness, **options)
    return record(engine, asked(engine))


@pytest.mark.parametrize("eos", [(), (3,)])
@pytest.mark.parametrize("signals, lateness", MODES)
def test_rows_add_up_to_what_the_answers_say_they_cost(signals, lateness, eos):
    for lane in timeline_of(signals, lateness, eos_ids=frozenset(eos)).lanes:
        usage, positions = lane.output.usage, dict.fromkeys(("prompt", "own", "late", "wasted", "idle"), 0)
        for row in lane.rows:
            positions[row.kind] += row.positions
        assert positions["own"] + positions["late"] == usage.segments_executed
        assert positions["prompt"] == usage.segments_prefill
        assert positions["wasted"] == usage.segments_wasted
        assert [left.depth for left in lane.left] == list(lane.output.depths)
        assert [left.output for left in lane.left] == list(range(usage.output_tokens))


@pytest.mark.parametrize("signals, lateness", MODES)
def test_rounds_a_token(signals, lateness):
    """`exact` runs one more than it reads unless that was the last allowed, the others as many as they read."""
    lanes = timeline_of(signals, lateness).lanes
    assert {depth for lane in lanes for depth in lane.output.depths[1:]} == (
        {2, 3} if signals == "delayed" else {1, 2, 3}
    )
    for lane in lanes:
        for output, depth in enumerate(lane.output.depths[1:], start=1):
            assert lane.rounds(output) == (min(depth + 1, 3) if signals == "exact" else depth)
            late = [row.segment for row in lane.rows if row.output == output and row.kind == "late"]
            if signals == "delayed":  # one read at 3 may have wanted 2, or 3
                assert late == [depth] or (not late and depth == 3)
            else:
                assert late == [depth + 1] * (signals == "exact" and depth < 3)


@pytest.mark.parametrize("signals, lateness", MODES)
def test_the_host_hears_as_late_as_it_was_told_to(signals, lateness):
    timeline = timeline_of(signals, lateness)
    late = timeline.lateness
    assert (timeline.signals, late) == (signals, lateness or 0)
    for lane in timeline.lanes:
        assert all(row.heard == row.turn + late for row in lane.rows if row.kind in ("prompt", "own", "late"))
        as_it_begins = signals in ("exact", "delayed")
        assert all(left.heard == left.boundary - (not as_it_begins) + late for left in lane.left)
        for left, after in zip(lane.left, lane.left[1:], strict=False):
            begins = min(row.turn for row in lane.rows if row.output == after.output)
            assert begins >= left.boundary
            if signals == "sync":  # the host knows before it goes on; the others go on at once
                assert begins > left.heard
            else:
                assert begins == left.boundary


def test_an_end_on_the_device_wastes_nothing_and_an_end_on_the_host_does():
    """Of the first answer, which ends with a stop id; the host plans one row of `resident` too many, which is idle."""
    extra = {}
    for signals in ("sync", "exact", "resident"):
        lane = timeline_of(signals, None, eos_ids=frozenset({3})).lanes[0]
        assert lane.output.finish_reason == "stop"
        extra[signals] = [row.kind for row in lane.rows if row.kind in ("wasted", "idle")]
    assert extra == {"sync": [], "exact": ["wasted", "wasted"], "resident": ["idle"]}


@pytest.mark.parametrize("signals", ["sync", "exact", "resident"])
def test_recording_changes_nothing(signals):
    engine, plain = engine_of(signals, None), engine_of(signals, None)
    lanes = record(engine, asked(engine)).lanes
    alone = drain(plain, asked(plain))
    assert [(lane.output.token_ids, lane.output.usage) for lane in lanes] == [
        (alone[id].token_ids, alone[id].usage) for id in ASKED
    ]
    assert "run" not in vars(engine.runner) and "update" not in vars(engine.scheduler)
    assert record(engine, asked(engine)).turns > 0
    engine.submit([1])
    with pytest.raises(ValueError, match="has requests under way; give one that is idle"):
        record(engine, asked(engine))


def test_the_picture_of_the_docs(tmp_path):
    """The script's own runs: sync and resident as deep as each other, exact one round more; the same bytes twice."""
    spec = importlib.util.spec_from_file_location("timeline_script", ROOT / "scripts/timeline.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    runs = {signals: script.run(signals) for signals in script.MODES}
    executed = {name: [lane.output.usage.segments_executed for lane in run.lanes] for name, run in runs.items()}
    assert executed == {"sync": [11, 9], "delayed": [17, 14], "exact": [17, 14], "resident": [11, 9]}
    tokens = {name: [lane.output.token_ids for lane in run.lanes] for name, run in runs.items()}
    assert tokens["sync"] == tokens["exact"] == tokens["resident"]
    for name in ("one.png", "two.png"):
        draw(list(runs.values()), tmp_path / name)
    one, two = (tmp_path / name for name in ("one.png", "two.png"))
    assert one.read_bytes() == two.read_bytes() and one.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no timeline to draw"):
        draw([], one)
