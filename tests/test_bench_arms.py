"""`anydepth bench`: which arms become which cells."""

from __future__ import annotations

import pytest

from anydepth.bench_arms import bench_arms, with_baseline
from anydepth.eval.arms import Arm
from tests.eval.made_heads import CAREFUL, write_heads, write_profile
from tests.random_nano import write_random_nano

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


def test_arms_with_heads_do_the_same_work(tmp_path):
    model = write_random_nano(tmp_path / "model", kind="layered")
    heads = str(write_heads(tmp_path / "heads", model))
    own = str(write_profile(tmp_path / "own.toml", CAREFUL))
    arms = [
        {"name": "never"},
        {"name": "sure", "heads": heads, "policy": "confidence", "profile": "eager", "fill": "project"},
        {"name": "probe", "heads": heads, "policy": "probe", "profile": own, "fill": "deferred"},
    ]
    options = {"model": str(model), "task": "nano", "limit": 3, "concurrency": [2], "requests": 4}
    record = bench_arms([Arm.parse(arm) for arm in arms], out=tmp_path / "out", **options)
    used = record.settings_used
    assert used["heads"] == "heads" and used["head_hash"] == record.provenance["model"]["head_hash"]
    assert [(cell.get("profile"), cell["fill"]) for cell in used["cells"]] == [
        (None, "full"),
        ("eager", "project"),
        ("own", "deferred"),
    ]
    assert len({cell.get("profile_hash") for cell in used["cells"]}) == 3
    rows = {row["name"]: row for row in record.aggregates["rows"]}
    assert len({row["tokens"] for row in rows.values()}) == 1 and rows["never"]["tokens"] > 4
    assert rows["sure"]["mean_depth"] == 1 < rows["probe"]["mean_depth"] < rows["never"]["mean_depth"] == 3
    assert rows["sure"]["s_max_flops"] > 1 == rows["never"]["s_max_flops"]
    mixed = [Arm.parse(arm) for arm in (*arms, {"name": "other", "depth": 1})]
    with pytest.raises(
        ValueError, match=r"same exit heads in all arms; here sure has .*, other has none: time them apart"
    ):
        bench_arms(mixed, out=tmp_path / "none", **options)
