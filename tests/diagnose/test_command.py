"""`anydepth diagnose` on nano: Records, settings and arms of a study, from the command line to the line of JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anydepth.cli import app
from anydepth.diagnose.divergence import CLASSES, DIFFERENT_WORK, FAULT
from anydepth.diagnose.sides import Workplace, parse
from anydepth.record import Record, RecordWriter

LIMIT = 6
STUDY = """[study]
task = "nano"
model = "nano"
limit = 4
[[arm]]
name = "one"
exit_threshold = 0.5
[[arm]]
name = "two"
exit_threshold = 0.5
fill = "full"
"""


def diagnose(capsys, *arguments):
    app(["diagnose", *map(str, arguments), "--json"], standalone_mode=False)
    said = capsys.readouterr().out
    line = json.loads(said.splitlines()[-1])
    assert (line["command"], line["version"]) == ("diagnose", 1)
    return line["result"], said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Records of nano at two thresholds."""
    place = Workplace(model="nano", task="nano", limit=LIMIT, out=tmp_path_factory.mktemp("made"), progress=False)
    return {tau: place.run({"exit_threshold": tau}, str(tau)).record for tau in (0.5, 0.9)}


def edited(record, folder, change=lambda sample: sample, **header):
    """The Record once more, its samples changed."""
    whole = replace(record, **header)
    with RecordWriter(
        folder,
        kind=whole.kind,
        settings_used=whole.settings_used,
        settings_passed=whole.settings_passed,
        provenance=whole.provenance,
        protocol_hash=whole.protocol_hash,
    ) as writer:
        for sample in record.samples:
            writer.append(change(sample))
        return writer.finish(record.aggregates).path


def test_the_same_record_twice_has_no_difference(capsys, made):
    result, said = diagnose(capsys, made[0.5].path, made[0.5].path)
    assert result["differ"] == 0 and result["answers"] == LIMIT and result["baseline"] is None
    assert f"all {LIMIT} answers are the same" in said


def test_other_thresholds_are_different_work(capsys, made):
    result, said = diagnose(capsys, made[0.5].path, made[0.9].path)
    assert result["classes"][DIFFERENT_WORK] == result["differ"] > 0
    assert [factor["name"] for factor in result["different_work"]] == ["exit_threshold"]
    assert "exit_threshold (0.5 against 0.9)" in said


def test_a_token_flipped_in_one_record_is_a_fault_with_its_place_and_margins(capsys, made, tmp_path):
    victim = min(sample["id"] for sample in made[0.5].samples)

    def flip(sample):
        ids = list(sample["output_ids"])
        ids[3] = (ids[3] + 1) % 76 if sample["id"] == victim else ids[3]
        return {**sample, "output_ids": ids}

    result, said = diagnose(capsys, made[0.5].path, edited(made[0.5], tmp_path / "b", flip), "--baseline", 3)
    (found,) = result["divergences"]
    assert (found["id"], found["position"], found["kind"], found["context"]) == (victim, 3, FAULT, "same")
    assert found["first_depth"] is None and found["first_token"] == 3
    assert found["margins"]["token"] > 0.1 and 0 < found["margins"]["gate"] < 1
    assert result["classes"] == {**dict.fromkeys(CLASSES, 0), FAULT: 1}
    assert result["baseline"]["answers"] == 3 and result["baseline"]["concurrency"] == 32
    assert any(line.split() == [*FAULT.split(), "1"] for line in said.splitlines())


def test_a_depth_changed_in_one_record_is_a_fault(capsys, made, tmp_path):
    def deepen(sample):
        return {**sample, "depths": [*sample["depths"][:2], 5 - sample["depths"][2], *sample["depths"][3:]]}

    result, _ = diagnose(capsys, made[0.5].path, edited(made[0.5], tmp_path / "b", deepen), "--concurrency", 4)
    assert result["classes"][FAULT] == LIMIT and result["baseline"]["concurrency"] == 4
    assert all(found["first_token"] is None and found["margins"]["gate"] > 0 for found in result["divergences"])


def test_a_record_against_settings_runs_the_records_questions(capsys, made, tmp_path):
    result, _ = diagnose(capsys, made[0.5].path, "exit_threshold=0.5,dtype=float64", "--out", tmp_path)
    assert (result["answers"], result["differ"]) == (LIMIT, 0)
    assert Record.read(tmp_path / "B").settings_used["dtype"] == "float64"
    assert json.loads((tmp_path / "diagnosis.json").read_text())["classes"] == result["classes"]


def test_two_settings_and_the_names_of_arms_are_run(capsys, tmp_path):
    result, _ = diagnose(capsys, "concurrency=1", "concurrency=4,page_size=4", "--limit", 3, "--out", tmp_path)
    assert (result["answers"], result["differ"]) == (3, 0)
    used = [Record.read(tmp_path / side).settings_used for side in "AB"]
    assert [each["concurrency"] for each in used] == [1, 4]
    with pytest.raises(ValueError, match="holds a run of something else"):
        diagnose(capsys, "concurrency=1", "concurrency=4,page_size=8", "--limit", 3, "--out", tmp_path)
    (tmp_path / "arms.toml").write_text(STUDY)
    result, _ = diagnose(capsys, "one", "two", "--arms", tmp_path / "arms.toml")
    assert result["answers"] == 4 and [factor["name"] for factor in result["different_work"]] == ["fill"]


def test_the_ladder_is_walked_from_the_command_line(capsys):
    result, said = diagnose(capsys, "exit_threshold=0.5", "exit_threshold=0.5", "--limit", 3, "--bisect")
    steps = {step["name"]: step["status"] for step in result["bisect"]["steps"]}
    assert result["bisect"]["named"] is None and steps["batch size"] == steps["dtype"] == "equal"
    assert "not on this machine" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "signals=sync"), "'nowhere' is neither the folder of a Record nor settings"),
        (("exit_treshold=0.5", "signals=sync"), "unknown setting 'exit_treshold'; did you mean 'exit_threshold'"),
        (("signals=sync", "signals"), "'signals' is neither"),
        (("concurrency=0", "signals=sync"), "concurrency is 0; allowed"),
        (("signals=sync", "signals=sync", "--baseline", 0), "baseline is 0; allowed"),
        (("streams=2", "signals=sync"), "is for late signals; signals 'sync' submits nothing ahead"),
        (("signals=late", "signals=sync"), "signals is 'late'; allowed: 'sync'"),
        (("depth=1", "depth=2", "--limit", 2, "--bisect"), "ask for different work"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys, arguments, message):
    with pytest.raises(ValueError, match=message):
        diagnose(capsys, *arguments)


def test_what_is_wrong_with_b_is_said_before_a_is_run(capsys, tmp_path):
    with pytest.raises(ValueError, match="unknown setting 'exit_treshold'"):
        diagnose(capsys, "exit_threshold=0.5", "exit_treshold=0.5", "--limit", 2, "--out", tmp_path)
    assert not (tmp_path / "A").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "prompt_ids_sha256": "0" * 64}, "had another prompt than task nano gives it now"),
        (lambda s: {**s, "choices": []}, "diagnose is for answers that were generated"),
    ],
)
def test_records_that_cannot_be_replayed_are_refused(capsys, made, tmp_path, change, message):
    folders = [edited(made[0.5], tmp_path / name, change) for name in "ab"]
    with pytest.raises(ValueError, match=message):
        diagnose(capsys, *folders)


def test_records_of_another_model_or_protocol_are_refused(capsys, made, tmp_path):
    other = {**made[0.5].provenance, "model": {"name": "nano", "hash": "0" * 64}}
    folder = edited(made[0.5], tmp_path / "model", provenance=other)
    with pytest.raises(ValueError, match="made with a model of hash 000000000000"):
        diagnose(capsys, folder, folder)
    folder = edited(made[0.5], tmp_path / "protocol", protocol_hash="1" * 64)
    with pytest.raises(ValueError, match="of different protocols"):
        diagnose(capsys, made[0.5].path, folder)


def test_settings_are_sorted_into_arm_engine_and_concurrency():
    given = {"exit_threshold": 0.5, "fill": "full", "page_size": 8, "concurrency": 4}
    arm, options, at_a_time = parse(given, concurrency=32)
    assert arm.sampling().exit_threshold == 0.5 and options == {"fill": "full", "page_size": 8} and at_a_time == 4
    assert arm.name == "exit_threshold-0.5_fill-full_page_size-8_concurrency-4"
    assert parse({}, concurrency=32)[2] == 32
