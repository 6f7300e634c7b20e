"""The demo from end to end on a tiny random model: files, keys, and what an interruption leaves."""

from __future__ import annotations

import re

import pytest

from anydepth import demo as d
from anydepth.eval.report import demo_page
from anydepth.record import Record
from tests.random_nano import write_random_nano

KEYS = {
    "name",
    "policy",
    "exit_threshold",
    "depth",
    "accuracy",
    "low",
    "high",
    "n",
    "mean_depth",
    "segments_per_question",
    "tokens_per_s",
    "s_max",
    "share_of_bound",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_nano(tmp_path_factory.mktemp("random"), loops=2)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "demo"
    return out, d.demo(out=out, questions=6, model=model, thresholds=(0.1, 1.0), progress=False)


def test_result_and_records(made):
    out, result = made
    assert [arm["name"] for arm in result["arms"]] == ["depth-1", "depth-2", "gate-0.1", "gate-0.5", "never"]
    assert all(arm.keys() >= KEYS and arm["n"] == 6 for arm in result["arms"])
    never, fixed = result["arms"][-1], result["arms"][0]
    assert never["exit_threshold"] == 1.0 and never["depth"] is None and never["s_max"] == 1.0
    assert fixed["depth"] == 1 == fixed["mean_depth"] and fixed["exit_threshold"] is None
    study = Record.read(out)
    assert study.kind == "study" and study.status == "complete" and study.aggregates["arms"] == result["arms"]
    for sample in study.samples:
        arm = Record.read(out / "records" / sample["id"])
        assert arm.status == "complete" and arm.samples_sha256 == sample["samples_sha256"] and len(arm.samples) == 6


def test_full_depth_and_never_give_the_same_tokens(made):
    fixed, never = (
        {s["id"]: s["output_ids"] for s in Record.read(made[0] / "records" / name).samples}
        for name in ("depth-2", "never")
    )
    assert fixed == never


def test_page_needs_nothing_else(made):
    out, _ = made
    html = (out / "report.html").read_text()
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG") and "data:image/png;base64," in html
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|@import|<script", html)
    assert 'class="t d1"' in html and 'data-tip="1 of 2 passes"' in html and "gate-0.5" in html


def test_tokens_know_why_their_depth_was_not_chosen():
    sample = {"output_ids": [7, 8, 1], "depths": [4, 2, 1], "decode_tokens": 2, "segments_executed": 3, "score": 0.0}
    answer = demo_page.answer(sample, label="gate", pieces=lambda ids: [f" {id}" for id in ids], stop_ids=[1])
    assert answer.tokens == ((" 7", 4, "prompt"), (" 8", 2, ""), (" 1", 1, "end"))
    assert answer.right is False and answer.segments == 3


def test_an_interrupted_demo_goes_on_and_a_complete_one_is_made_anew(model, tmp_path, monkeypatch):
    def ask():
        return d.demo(out=tmp_path, questions=2, model=model, thresholds=(), progress=False)

    calls = []

    def counted(arm, **options):
        calls.append((arm.name, (tmp_path / "records" / arm.name / "record.json").exists()))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(arm, **options)

    run = d.run
    monkeypatch.setattr(d, "run", counted)
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert Record.read(tmp_path).status == "running"
    ask()
    assert calls[3:] == [("depth-1", True), ("depth-2", True), ("gate-0.5", False), ("never", False)]
    ask()
    assert not any(there for _, there in calls[7:])


def test_a_folder_with_another_record_is_left_alone(model, tmp_path):
    d.RecordWriter(tmp_path, kind="train", settings_used={}, settings_passed={}, provenance={}).close()
    with pytest.raises(ValueError, match="Record of something else"):
        d.demo(out=tmp_path, questions=2, model=model, progress=False)
    assert Record.read(tmp_path).kind == "train"


def test_a_model_without_a_gate_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(d, "sweep", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match="has no exit gate"):
        d.demo(out=tmp_path / "demo", questions=2, model=write_random_nano(tmp_path / "m", kind="layered"))
    assert not (tmp_path / "demo").exists()
