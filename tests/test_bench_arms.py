"""`anydepth bench`: which arms become which cells."""

from __future__ import annotations

import pytest

from anydepth.bench_arms import bench_arms, with_baseline
from anydepth.eval.arms import Arm

SEGMENTS = {"name": "split", "segments": 2}
GATE = {"name": "gate", "exit_threshold": 0.5}
OFF = {"name": "gate-off", "policy": "gate_cdf", "exit_threshold": 1.0}  # neutral, but not the plain model's cell
PLAIN = {"name": "plain"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([GATE, PLAIN], ["plain", "gate"]),
        ([GATE], ["never", "gate"]),
        ([OFF, GATE], ["never", "gate-off", "gate"]),
        ([{"name": "two", "depth": 2}], ["never", "two"]),
    ],
)
def test_the_baseline_stands_first_and_is_never(given, names):
    assert [arm.name for arm in with_baseline([Arm.parse(arm) for arm in given])] == names


def test_cells_may_differ_in_policy_fill_and_signals(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr("anydepth.bench.run.run_bench", lambda checkpoint, **options: seen.update(options))
    late = {"name": "late", "exit_threshold": 0.5, "fill": "last_exited", "signals": "exact", "lateness": 2}
    bench_arms([Arm.parse(late)], model="nano", task="nano", out=tmp_path, limit=2)
    assert [cell.options for cell in seen["cells"]] == [
        {"fill": None, "signals": "sync", "lateness": None},
        {"fill": "last_exited", "signals": "exact", "lateness": 2},
    ]
    with pytest.raises(ValueError, match=r"arm 'split' has .*a bench times policies, fills and signals of one engine"):
        bench_arms([Arm.parse(SEGMENTS)], model="nano", task="nano", out=tmp_path, limit=2)
