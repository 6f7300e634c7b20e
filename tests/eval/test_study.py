"""Studies: arms.toml read with its mistakes located, run and resumed, plans kept, frozen protocols held to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anydepth.eval.arms import Arm, Rule, Study
from anydepth.eval.compare.compare import compare
from anydepth.eval.compare.rules import judge
from anydepth.eval.protocol import read_frozen, study_of, write_frozen
from anydepth.eval.study import freeze_study, read_plan, run_study
from anydepth.record import Record
from tests.random_nano import write_random_nano

TOML = """\
[study]
task = "nano"
model = "{model}"
limit = 6
seed = 3

[[arm]]
name = "B0"
policy = "never"
max_tokens = 8

[[arm]]
name = "B1-0.5"
policy = "gate_cdf"
exit_threshold = 0.5
fill = "full"
max_tokens = 8

[[rule]]
name = "B1 differs"
compare = ["B1-0.5", "B0"]
p_below = 0.05
min_abs_difference_pp = 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_nano(tmp_path_factory.mktemp("model"))


@pytest.fixture
def toml(model, tmp_path):
    path = tmp_path / "arms.toml"
    path.write_text(TOML.format(model=model))
    return path


def test_a_study_is_read(toml, model):
    study = Study.read(toml)
    assert study.head() == {"task": "nano", "model": str(model), "limit": 6, "seed": 3}
    assert [arm.name for arm in study.arms] == ["B0", "B1-0.5"] and study.arms[1].fill == "full"
    assert study.rules[0].compare == ("B1-0.5", "B0") and study.rules[0].p_below == 0.05


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("limit = 6", "limitt = 6", r"line 4: \[study\]: unknown field 'limitt'; did you mean 'limit'"),
        ("limit = 6", "limit = = 6", r"at line 4, column"),
        ("exit_threshold = 0.5", "exit_treshold = 0.5", r"line 15: arm 'B1-0.5': unknown field 'exit_treshold'"),
        ("exit_threshold = 0.5", "exit_threshold = 5", r"line 15: arm 'B1-0.5': exit_threshold is 5; allowed"),
        ('"full"\nmax_tokens = 8', '"full"\nmax_tokens = -8', r"line 17: arm 'B1-0.5': max_tokens is -8"),
        ('name = "B1-0.5"', 'name = "B0"', "two arms have the name 'B0'"),
        ('"B1-0.5", "B0"', '"B1-0.5", "B9"', r"line 21: rule 'B1 differs': unknown arm 'B9'"),
        ("p_below = 0.05", "p_below = nan", r"line 22: rule 'B1 differs': p_below is nan"),
        ("p_below = 0.05", "p_below = 5", r"line 22: rule 'B1 differs': p_below is 5; allowed: a number from 0 to 1"),
        ('"B1-0.5", "B0"', '"B0", "B0"', r"rule 'B1 differs': compare names 'B0' twice"),
        ("p_below = 0.05", "p_below = -1", r"line 22: rule 'B1 differs': p_below is -1"),
        ("p_below = 0.05", "identical = false", r"line 22: rule 'B1 differs': identical is False; allowed: true"),
        ("p_below = 0.05", "identical = 1", r"line 22: rule 'B1 differs': identical is 1; allowed: true"),
        ("p_below = 0.05", "identical = true", r"rule 'B1 differs': identical stands beside min_abs_difference_pp"),
        ("p_below", "p_under", r"line 22: rule 'B1 differs': unknown field 'p_under'"),
        ("[[rule]]", "[[rules]]", r"line 19: unknown table 'rules'"),
        ('task = "nano"', "", r"\[study\] has no task"),
        ("limit = 6", 'limit = "6"', r"line 4: \[study\]: limit is '6'; allowed: a whole number from 1"),
        ("seed = 3", "seed = -3", r"line 5: \[study\]: seed is -3"),
        ("seed = 3", "split = 3", r"line 5: \[study\]: split is 3; allowed"),
        ("limit = 6", "ids = [1]", r"line 4: \[study\]: ids is \[1\]"),
        ('fill = "full"', "fill = 3", r"line 16: arm 'B1-0.5': fill is 3; allowed: a string"),
    ],
)
def test_a_mistake_is_named_with_its_line(toml, old, new, message):
    assert old in toml.read_text()
    toml.write_text(toml.read_text().replace(old, new))
    with pytest.raises(ValueError, match=rf"arms\.toml.*{message}"):
        Study.read(toml)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("study = 3", r"study is 3; write it as a table, \[study\]"),
        ('[study]\ntask = "nano"\nmodel = "nano"\n[arm]\nname = "a"', r"arm is .*; write each as .*\[\[arm\]\]"),
        ('arm = [1]\n[study]\ntask = "nano"\nmodel = "nano"', r"arm is \[1\]; write each"),
        ("", r"\[study\] has no task"),
        (b"\xff", "no UTF-8 text"),
    ],
)
def test_what_is_no_study_is_said(tmp_path, text, message):
    path = tmp_path / "arms.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        Study.read(path)


def test_a_byte_order_mark_is_no_mistake(toml):
    study = Study.read(toml)
    toml.write_bytes(b"\xef\xbb\xbf" + toml.read_bytes())
    assert Study.read(toml) == study


def test_each_arm_becomes_a_record_and_a_second_run_changes_nothing(toml, tmp_path):
    study = Study.read(toml)
    records = run_study(study, out=tmp_path / "out", progress=False)
    assert [record.settings_used["name"] for record in records] == ["B0", "B1-0.5"]
    assert len({record.protocol_hash for record in records}) == 1 and records[0].protocol_hash
    assert [record.settings_used["fill"] for record in records] == ["last_exited", "full"]
    assert records == [Record.read(tmp_path / "out" / arm.name) for arm in study.arms]
    assert run_study(study, out=tmp_path / "out", progress=False) == records
    assert len(read_plan(tmp_path / "out")) == 1


def test_some_arms_are_run_now_and_the_others_later(toml, tmp_path):
    study, out = Study.read(toml), tmp_path / "out"
    finished: list[Record] = []
    first = run_study(study, out=out, progress=False, only=["B1-0.5"], finished=finished.append)
    assert [record.settings_used["name"] for record in first] == ["B1-0.5"] and finished == first
    assert not (out / "B0").exists()
    assert run_study(study, out=out, progress=False)[1] == first[0] and (out / "B0").exists()
    assert len(read_plan(out)) == 1
    with pytest.raises(ValueError, match="unknown arm 'B2'"):
        run_study(study, out=out, only=["B2"])


def test_rules_that_come_later_are_told_from_those_set_beforehand(toml, tmp_path):
    study = Study.read(toml)
    run_study(study, out=tmp_path / "out", progress=False)
    later = replace(study, rules=(replace(study.rules[0], p_below=0.5),))
    run_study(later, out=tmp_path / "out", progress=False)
    first, second = read_plan(tmp_path / "out")
    assert (first["answers"], second["answers"]) == (0, 12)
    assert [plan["rules"][0]["p_below"] for plan in (first, second)] == [0.05, 0.5]


def test_nothing_is_computed_where_an_arm_does_not_fit(toml, tmp_path):
    study = Study.read(toml)
    with pytest.raises(ValueError, match="arm 'deep': depth is 7"):
        run_study(
            replace(study, arms=(*study.arms, Arm.parse({"name": "deep", "depth": 7}))),
            out=tmp_path / "out",
            progress=False,
        )
    assert not (tmp_path / "out").exists()


REFUSED = [
    ({"signals": "exact", "fill": "shared"}, "signals 'exact' does not go with fill 'shared': round k"),
    ({"signals": "exakt"}, "signals is 'exakt'; allowed: 'sync', 'delayed', 'exact', 'resident'"),
    ({"signals": "exact", "lateness": 9}, "lateness is 9; allowed: whole turns"),
    ({"signals": "sync", "lateness": 1}, "lateness is 1, but signals 'sync' are never late"),
    ({"signals": "exact", "backend": "reference"}, "the reference backend: unknown signals 'exact'"),
    ({"signals": "delayed", "backend": "transformers"}, "the transformers backend: unknown signals 'delayed'"),
    ({"lateness": 0, "backend": "reference"}, "lateness is of the engine alone; leave it out of reference arms"),
    ({"batch_invariant": True, "backend": "reference"}, "batch_invariant is of the engine alone"),
]


@pytest.mark.parametrize(("late", "message"), REFUSED)
def test_signals_that_cannot_be_kept_are_refused_when_a_study_is_planned(toml, tmp_path, late, message):
    study = Study.read(toml)
    study = replace(study, arms=(*study.arms, Arm.parse({"name": "late", "exit_threshold": 0.5, **late})))
    with pytest.raises(ValueError, match=f"arm 'late': .*{message}"):
        freeze_study(study)
    with pytest.raises(ValueError, match=f"arm 'late': .*{message}"):
        run_study(study, out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_an_arm_may_be_batch_invariant(toml, tmp_path):
    arms = [Arm.parse({"name": str(on), "max_tokens": 8, "batch_invariant": on}) for on in (False, True)]
    plain, invariant = run_study(replace(Study.read(toml), arms=tuple(arms)), out=tmp_path / "out", progress=False)
    assert (plain.settings_used["batch_invariant"], invariant.settings_used["batch_invariant"]) == (False, True)
    assert [factor.name for factor in compare(plain, invariant).factors] == ["batch_invariant"]


def test_layered_models_have_no_resident_signals(toml, tmp_path):
    layered = write_random_nano(tmp_path / "layered", kind="layered")
    arms = (Arm.parse({"name": "late", "signals": "resident"}),)
    with pytest.raises(ValueError, match="arm 'late': signals 'resident' is for looped models"):
        freeze_study(replace(Study.read(toml), model=str(layered), arms=arms))


LATE = {
    "sync": ("sync", None),
    "exact": ("exact", 1),
    "resident": ("resident", 3),
    "delayed": ("delayed", 0),
    "late": ("delayed", 3),
}


def test_late_arms_answer_as_their_synchronous_forms_and_say_how_late_they_were(toml, tmp_path):
    study = Study.read(toml)
    gate = {"policy": "gate_cdf", "exit_threshold": 0.5, "fill": "last_exited", "max_tokens": 8}
    arms = [
        Arm.parse({"name": name, **gate, "signals": mode, **({} if turns is None else {"lateness": turns})})
        for name, (mode, turns) in LATE.items()
    ]
    rules = [Rule.parse({"name": "=", "compare": ["late", "delayed"], "identical": True}, list(LATE))]
    study = replace(study, arms=tuple(arms), rules=tuple(rules))
    assert study_of(freeze_study(study)) == study
    records = run_study(study, out=tmp_path / "out", progress=False)
    found = {record.settings_used["name"]: record for record in records}
    for name, (mode, turns) in LATE.items():
        assert (found[name].settings_used["signals"], found[name].settings_used["lateness"]) == (mode, turns or 0)
    for name, base in (("exact", "sync"), ("resident", "sync"), ("late", "delayed")):
        made = compare(found[name], found[base])
        assert judge({"identical": True, "compare": [name, base]}, made).met is True
    made = compare(found["delayed"], found["sync"])
    assert judge({"identical": True, "compare": ["delayed", "sync"]}, made).met is False
    assert [factor.name for factor in made.factors] == ["signals"]
    assert compare(found["resident"], found["sync"]).sequences.executed_difference == 0
    assert compare(found["exact"], found["sync"]).sequences.executed_difference > 0


def test_a_frozen_study_is_run_as_it_was_frozen(toml, tmp_path):
    study = Study.read(toml)
    frozen = freeze_study(study)
    write_frozen(tmp_path / "protocol.json", frozen)
    write_frozen(tmp_path / "protocol.json", frozen)  # the same again is no conflict
    assert study_of(read_frozen(tmp_path / "protocol.json")) == study
    records = run_study(study_of(frozen), out=tmp_path / "out", frozen=frozen, progress=False)
    assert read_plan(tmp_path / "out")[0]["study_hash"] == frozen["study_hash"]
    assert len(records) == 2
    with pytest.raises(ValueError, match="holds another frozen study"):
        write_frozen(tmp_path / "protocol.json", freeze_study(replace(study, limit=5)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 5}, "questions differ from entry 5 on"),
        ({"seed": 4}, "study.seed was 3 and is 4"),
        ({"rules": ()}, "rules differ from entry 0"),
        ({"arms": (Arm(name="B0"),)}, "arms differ from entry 0"),
        ({"split": "validation"}, "prompt_ids_sha256 differ"),
    ],
)
def test_a_run_from_a_frozen_study_refuses_what_changed(toml, tmp_path, change, message):
    study = Study.read(toml)
    frozen = freeze_study(study)
    with pytest.raises(ValueError, match=f"frozen with something else.*{message}"):
        run_study(replace(study, **change), out=tmp_path / "out", frozen=frozen, progress=False)
    assert not (tmp_path / "out").exists()


def test_another_model_package_or_edited_file_is_found(toml, tmp_path, monkeypatch):
    study = Study.read(toml)
    frozen = freeze_study(study)
    other = write_random_nano(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="model_hash was"):
        run_study(replace(study, model=str(other)), out=tmp_path / "out", frozen=frozen, progress=False)
    monkeypatch.setattr("anydepth.eval.protocol.package_versions", lambda: {**frozen["packages"], "torch": "1.0"})
    with pytest.raises(ValueError, match=r"packages.torch was '2.* and is '1.0'"):
        run_study(study, out=tmp_path / "out", frozen=frozen, progress=False)
    edited = {**frozen, "rules": []}
    (tmp_path / "protocol.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match="edited after it was frozen"):
        read_frozen(tmp_path / "protocol.json")
    (tmp_path / "protocol.json").write_text(json.dumps({**frozen, "version": 9}))
    with pytest.raises(ValueError, match="has version 9"):
        read_frozen(tmp_path / "protocol.json")


def test_caps_of_an_arm_of_its_own_change_its_protocol(toml, tmp_path):
    study = Study.read(toml)
    longer = replace(study, arms=(study.arms[0], Arm.parse({"name": "long", "max_tokens": 9})))
    first, second = run_study(longer, out=tmp_path / "out", progress=False)
    assert first.protocol_hash != second.protocol_hash
