"""A study that was run becomes a folder of results/: samples, headers alone, plan, protocol, report."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from anydepth.eval.arms import Study
from anydepth.eval.protocol import write_frozen
from anydepth.eval.study import freeze_study, run_study
from anydepth.record import Record
from tests.random_nano import write_random_nano

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/publish_study.py"


def script():
    spec = importlib.util.spec_from_file_location("publish_study", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.publish_study


def test_a_study_is_published_in_place_of_an_earlier_one(tmp_path):
    model = write_random_nano(tmp_path / "model")
    arms = [{"name": "B0", "max_tokens": 4}, {"name": "R0", "max_tokens": 4, "backend": "reference"}]
    study = Study.parse({"study": {"task": "nano", "model": str(model), "limit": 3}, "arm": arms})
    frozen = freeze_study(study)
    write_frozen(tmp_path / "frozen.json", frozen)
    run_study(study, out=tmp_path / "out", frozen=frozen, progress=False)
    target = tmp_path / "results" / "study"
    (target / "gone").mkdir(parents=True)
    (target / "gone/record.json").touch()
    publish_study = script()
    publish_study(tmp_path / "out", target, protocol=tmp_path / "frozen.json", headers_only="R*")
    names = {"B0", "R0", "report", "protocol.json", "study.jsonl"}
    assert {path.name for path in target.iterdir()} == names
    assert Record.read(target / "B0").samples == Record.read(tmp_path / "out/B0").samples
    assert [path.name for path in (target / "R0").iterdir()] == ["record.json"]
    assert "R0 − B0" in (target / "report/report.md").read_text()  # made from all samples
    assert (target / "protocol.json").read_bytes() == (tmp_path / "frozen.json").read_bytes()

    write_frozen(tmp_path / "other.json", freeze_study(replace(study, arms=study.arms[:1])))
    with pytest.raises(ValueError, match=r"was not run from .*other\.json"):
        publish_study(tmp_path / "out", target, protocol=tmp_path / "other.json")
    assert {path.name for path in target.iterdir()} == names
