"""`anydepth bench`: which arms become which cells."""

from __future__ import annotations

import pytest

from anydepth.bench_arms import with_baseline
from anydepth.eval.arms import Arm

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
