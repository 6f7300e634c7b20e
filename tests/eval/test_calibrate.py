"""Choosing a threshold: what is certified from known losses, all that is refused, and nano from questions to an LLM."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from anydepth import LLM, Sampling
from anydepth.certificate import Certificate, question_set_hash
from anydepth.eval.arms import Arm, Study
from anydepth.eval.calibrate import Goal, calibrate, certify
from anydepth.eval.data import read_ids
from anydepth.eval.study import Options, run_study
from anydepth.models.nano import questions as nano
from anydepth.record import Record, RecordWriter

N = 500
USED = {
    "task": "sums",
    "model": "m",
    "backend": "engine",
    "split": "calibration",
    "policy": "gate_cdf",
    "exit_threshold": 0.9,
    "min_depth": 1,
    "max_depth": 4,
    "depth": None,
    "trace": None,
    "segments": 4,
    "fill": "last_exited",
    "dtype": "float32",
    "gate_dtype": "float32",
    "temperature": 0.0,
    "top_k": None,
    "top_p": 1.0,
    "first_token": "prefill",
    "seed": 3,
    "concurrency": 32,
}


def record(*, scores=(), answers=(), n=N, **changes):
    """A finished Record of n questions, all right but those that `scores` (by number) says otherwise of."""
    samples = [
        {"id": f"q{i}", "answer_index": 0, "score": 1.0, "prediction": {"strict": "7"}, "text": f"it is 7 {i}"}
        for i in range(n)
    ]
    for i, score in dict(scores).items():
        samples[i] |= {"score": score}
    for i, (text, prediction) in dict(answers).items():
        samples[i] |= {"text": text, "prediction": {"strict": prediction, "other": "7"}}
    used = {**USED, "name": f"{changes.get('exit_threshold', 'full')}", **changes}
    return Record(
        path=Path(used["name"]),
        kind="eval",
        status="complete",
        settings_used=used,
        settings_passed={},
        provenance={"model": {"hash": "m"}},
        protocol_hash="p",
        samples=tuple(samples),
    )


def wrong(count, *, value=0.0, start=0):
    return dict.fromkeys(range(start, start + count), value)


full = partial(record, policy="never", exit_policy=None, exit_threshold=1.0, name="full")


def point(threshold, lost=0, **changes):
    return record(exit_threshold=threshold, scores=wrong(lost), **changes)


def made(goal, *points, tmp_path, deep=None, **options):
    return calibrate(goal, full=deep or full(), grid=points, out=tmp_path, **options)


FIVE = Goal(epsilon=0.05)


# -- what is certified -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "chosen"),
    [
        ((0, 10, 15), 0.5),  # p .054 at 15 of 500 is above .05
        ((0, 10, 14), 0.2),
        ((0, 15, 0), 0.9),  # what comes after the first failure is not looked at
        ((15, 0, 0), None),
        ((0, 0, 500), 0.5),
    ],
)
def test_stops_at_the_first_setting_that_fails(tmp_path, lost, chosen):
    points = [point(threshold, count) for threshold, count in zip((0.9, 0.5, 0.2), lost, strict=True)]
    certificate = made(FIVE, points[1], points[2], points[0], tmp_path=tmp_path)
    assert certificate.chosen == ({"exit_threshold": chosen, "min_depth": 1} if chosen else "never")
    assert [p["losses"] for p in certificate.points] == list(lost) and certificate.method == "ltt"
    assert Certificate.read(tmp_path / "certificate.json") == certificate


def test_known_p_values(tmp_path):
    """Semantics, section 8: n = 500 and a risk of .02 against .05 give .0013."""
    certificate = made(FIVE, point(0.9, 10), tmp_path=tmp_path)
    assert certificate.points[0]["p"] == pytest.approx(0.0013, abs=5e-5)
    assert made(Goal(epsilon=0.05, delta=0.0012), point(0.9, 10), tmp_path=tmp_path / "b").chosen == "never"


def test_the_certificate_says_what_it_is_for(tmp_path):
    shared = {"fill": "full", "dtype": "float64", "gate_dtype": "bfloat16", "temperature": 0.7, "top_p": 0.9}
    deep = full(dtype="float64", temperature=0.7, top_p=0.9)  # no token leaves early there: fill and gate mean nothing
    points = [point(0.9, 0, min_depth=2, max_depth=3, **shared), point(0.9, 0, max_depth=3, **shared)]
    certificate = made(Goal(epsilon=0.1), *points, tmp_path=tmp_path, deep=deep, fitted_on=["a", "b"])
    assert certificate.policy == {
        "exit_policy": "gate_cdf",
        "max_depth": 3,
        "depth": None,
        "trace": None,
        "segments": 4,
    }
    assert certificate.grid == tuple({"exit_threshold": 0.9, "min_depth": low} for low in (2, 1))
    assert (certificate.fill, certificate.dtype, certificate.gate_dtype) == ("full", "float64", "bfloat16")
    assert certificate.sampling == {"temperature": 0.7, "top_k": None, "top_p": 0.9, "first_token": "prefill"}
    assert (certificate.n, certificate.eps, certificate.delta, certificate.seed) == (N, 0.1, 0.05, 3)
    assert certificate.fitted_on == question_set_hash(["b", "a"]) != certificate.certified_on
    assert certificate.certified_on == question_set_hash(f"q{i}" for i in range(N))
    assert certificate.protocol_hash == "p" and certificate.made_by["version"]


@pytest.mark.parametrize(
    ("loss", "losses"),
    [
        ("lost", 3.0),  # 2 and 3 wrong, half of 4; not 0, which both have wrong, nor 1, which early exit gained
        ("wrong", 3.5),  # 0, 2, 3, half of 4
        ("disagree", 2.0),  # 2 says something else, 3 nothing
    ],
)
def test_losses(tmp_path, loss, losses):
    deep = full(
        scores={0: 0.0, 1: 0.0, 4: 1.0, 5: 1.0}, answers={0: ("x", "7"), 3: ("a", None), 4: ("b", None), 5: ("c", "7")}
    )
    early = record(
        exit_threshold=0.5,
        scores={0: 0.0, 2: 0.0, 3: 0.0, 4: 0.5, 5: 1.0},
        answers={0: ("y", "7"), 2: ("it is 8", "8"), 3: ("d", None), 4: ("b", None), 5: ("c", "7")},
    )
    extra = 0.5 if loss == "lost" else 0.0
    certificate = made(Goal(epsilon=0.05, loss=loss), early, tmp_path=tmp_path, deep=deep)
    assert certificate.points[0]["losses"] == losses - extra and certificate.points[0]["unscored"] == 0


def test_what_was_not_scored_counts_as_lost(tmp_path):
    deep, early = full(scores={0: None, 1: None}), record(exit_threshold=0.9, scores={1: None, 2: None})
    for loss, unscored in (("lost", 3), ("disagree", 3), ("wrong", 2)):
        certificate = made(Goal(epsilon=0.05, loss=loss), early, tmp_path=tmp_path / loss, deep=deep)
        assert certificate.points[0] | {"p": 0} == {"n": N, "losses": unscored, "unscored": unscored, "p": 0}


def test_several_answers_to_a_question_are_one_loss(tmp_path):
    def twice(found):
        again = [{**sample, "answer_index": 1, "score": 1.0} for sample in found.samples]
        return replace(found, samples=(*again, *found.samples))

    certificate = made(FIVE, twice(point(0.9, 10)), tmp_path=tmp_path, deep=twice(full()))
    assert certificate.points[0] | {"p": 0} == {"n": N, "losses": 5.0, "unscored": 0, "p": 0}


def test_conformal_risk_control(tmp_path):
    goal = Goal(epsilon=0.05, method="conformal_risk_control")
    certificate = made(goal, point(0.9, 2), point(0.5, 24), point(0.2, 25), tmp_path=tmp_path)  # 25 of 501 is .0499
    assert certificate.chosen == {"exit_threshold": 0.5, "min_depth": 1}
    assert certificate.method == "conformal_risk_control" and certificate.delta is None
    assert [p["p"] for p in certificate.points] == [None] * 3


def test_conformal_risk_control_needs_losses_that_never_fall(tmp_path):
    goal = Goal(epsilon=0.05, method="conformal_risk_control")
    points = [point(0.9, 2), record(exit_threshold=0.5, scores=wrong(5, start=1)), point(0.2, 20)]
    with pytest.raises(ValueError, match=r"'q0' has loss 1 in 0\.9 and 0 in 0\.5, which leaves earlier"):
        made(goal, *points, tmp_path=tmp_path)
    certificate = made(replace(goal, monotonise=True), *points, tmp_path=tmp_path / "raised")
    assert certificate.method == "conformal_risk_control, losses of 1 questions monotonised"
    assert certificate.chosen == {"exit_threshold": 0.2, "min_depth": 1}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0}, "epsilon is 0; allowed: numbers above 0 and below 1"),
        ({"epsilon": 5}, "epsilon is 5"),
        ({"epsilon": 0.1, "delta": 1}, "delta is 1"),
        ({"epsilon": 0.1, "loss": "lots"}, "unknown loss 'lots'; did you mean 'lost'"),
        ({"epsilon": 0.1, "method": "lt"}, "unknown method 'lt'; did you mean 'ltt'"),
        ({"epsilon": 0.1, "monotonise": True}, "monotonise is for conformal_risk_control"),
        ({"epsilon": 0.1, "loss": "wrong", "method": "conformal_risk_control"}, "'wrong' it may not"),
    ],
)
def test_refuses_goals(options, message):
    with pytest.raises(ValueError, match=message):
        Goal(**options)


@pytest.mark.parametrize(
    ("points", "deep", "message"),
    [
        ([], None, "the grid is empty"),
        ([point(0.9), point(0.5), point(0.9)], None, r"the grid has .*0\.9.* twice"),
        (
            [point(0.9), point(0.5, fill="full")],
            None,
            "fill is 'last_exited' in 0.9 and 'full' in 0.5; only thresholds",
        ),
        ([point(0.9), point(0.5, max_depth=3)], None, "max_depth is 4 in 0.9 and 3 in 0.5"),
        ([point(0.9), point(0.5, new=1)], None, "new is None in 0.9 and 1 in 0.5"),
        ([point(0.9, temperature=1.0)], None, "temperature is 0.0 in full and 1.0 in 0.9"),
        ([point(0.9, backend="transformers")], None, "0.9 is of backend 'transformers'; allowed: 'engine'"),
        ([point(0.9, policy="never")], None, "0.9 is of policy 'never', which has no threshold"),
        ([point(0.9)], point(0.5), "0.5 is of policy 'gate_cdf'; the paired Record must be 'never'"),
        ([point(0.9, n=N + 1)], None, r"0\.9 and full have different questions \(such as \('q500', 0\)\)"),
        ([point(0.9), replace(point(0.5), protocol_hash="q")], None, "0.5 and full have different protocols"),
        ([replace(point(0.9), status="running")], None, "0.9 is a Record of kind eval, running"),
        ([replace(point(0.9), kind="bench", settings_used={})], None, "0.9 is a Record of kind bench"),
        ([replace(point(0.9), samples=())], None, "with 0 samples read"),
        ([point(0.9, n=N - 1)], full(n=N - 1), "there are 499 questions; a certificate needs 500 or more"),
        ([point(0.9, split="test")], full(split="test"), r"test questions \(split 'test'\)"),
        ([point(0.9, split=None)], full(split=None), "do not say of which split"),
    ],
)
def test_refuses_records(tmp_path, points, deep, message):
    with pytest.raises(ValueError, match=message):
        made(FIVE, *points, tmp_path=tmp_path, deep=deep)
    assert not list(tmp_path.iterdir())


def test_refuses_questions_by_id(tmp_path):
    with pytest.raises(ValueError, match=r"test questions \(2 of them, such as 'q10'\)"):
        made(FIVE, point(0.9), tmp_path=tmp_path, test_ids=["q10", "q7", "x"])
    with pytest.raises(ValueError, match="1 questions were also fitted on, such as 'q7'"):
        made(FIVE, point(0.9), tmp_path=tmp_path, fitted_on=["q7", "x"])
    unsaid = [found(split=None) for found in (full, partial(point, 0.9))]
    assert made(FIVE, unsaid[1], tmp_path=tmp_path, deep=unsaid[0], test_ids=["x"]).n == N


@pytest.mark.parametrize(
    ("goal", "thresholds", "message"),
    [
        (FIVE, (0.9, 0.5, 0.2), r"grid was .*0\.9.* and is .*0\.2"),
        (FIVE, (0.5,), "grid was"),
        (replace(FIVE, epsilon=0.1), (0.9, 0.5), "eps was 0.05 and is 0.1"),
        (replace(FIVE, delta=0.1), (0.9, 0.5), "delta was 0.05 and is 0.1"),
        (replace(FIVE, loss="wrong"), (0.9, 0.5), "loss was 'lost' and is 'wrong'"),
        (replace(FIVE, method="conformal_risk_control"), (0.9, 0.5), "method was 'ltt' and is 'conformal_risk"),
    ],
)
def test_refuses_what_is_altered_after_looking(tmp_path, goal, thresholds, message):
    first = made(FIVE, point(0.9, 10), point(0.5, 12), tmp_path=tmp_path)
    with pytest.raises(ValueError, match=r"grid\.json was fixed before the answers were looked at.*" + message):
        made(goal, *(point(threshold, 10) for threshold in thresholds), tmp_path=tmp_path)
    assert Certificate.read(tmp_path / "certificate.json") == first
    assert made(FIVE, point(0.5, 12), point(0.9, 10), tmp_path=tmp_path) == first


def test_refuses_other_questions_in_the_same_folder(tmp_path):
    made(FIVE, point(0.9), tmp_path=tmp_path)
    with pytest.raises(ValueError, match="n was 500 and is 501; question_ids_sha256 was"):
        made(FIVE, point(0.9, n=N + 1), tmp_path=tmp_path, deep=full(n=N + 1))
    (tmp_path / "grid.json").write_text("{")
    with pytest.raises(ValueError, match=r"grid\.json is no plan of a calibration"):
        made(FIVE, point(0.9), tmp_path=tmp_path)


def test_read_ids(tmp_path):
    (tmp_path / "ids").write_text("a\n\n b \n")
    assert read_ids(tmp_path / "ids") == ["a", "b"]
    with RecordWriter(tmp_path / "r", kind="eval", settings_used={}, settings_passed={}, provenance={}) as writer:
        writer.append({"id": "c", "answer_index": 0})
    assert read_ids(tmp_path / "r") == ["c"]
    with pytest.raises(ValueError, match="neither a Record's folder nor a file"):
        read_ids(tmp_path / "x")


# -- from a model ----------------------------------------------------------------------------------------------------

TASK = """
import json
from pathlib import Path

from anydepth.eval import task
from anydepth.models.nano.questions import final_answer

class Single(task.Task):
    max_tokens = 16
    splits = ("test", "calibration")

    def questions(self, split):
        for id, prompt, answer in json.loads(Path(self.file).with_suffix(".json").read_text())[split]:
            yield task.Question(id=id, prompt=prompt, gold=answer)

    def grade(self, question, text):
        found = final_answer(text)
        return task.Grade(prediction={"strict": found}, score=float(found == final_answer(question.gold)))
"""


@pytest.fixture(scope="module")
def drawn():
    """Short questions of nano's, by split."""
    splits = {"test": 9, "calibration": N}
    return {split: nano.questions(split, n=n, kinds=("single",)) for split, n in splits.items()}


@pytest.fixture(scope="module")
def on_nano(drawn, tmp_path_factory):
    """Certifies on nano's short questions of its calibration split."""
    file = tmp_path_factory.mktemp("task") / "single.py"
    file.write_text(TASK)
    content = {split: [(q.id, q.prompt, q.answer) for q in questions] for split, questions in drawn.items()}
    file.with_suffix(".json").write_text(json.dumps(content))
    options = Options(threads=1, concurrency=64)
    return partial(certify, FIVE, model="nano", task=str(file), progress=False, options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, r"test questions \(split 'test'\)"),
        ({"split": "train"}, "unknown split of task single 'train'"),
        ({"limit": N - 1}, "there are 499 questions"),
        ({"thresholds": (0.5, 0.5)}, "twice"),
        ({"thresholds": (2,)}, "exit_threshold is 2; allowed"),
        ({"settings": {"min_depth": 2}}, "min_depth was given for all settings"),
        ({"settings": {"fil": "full"}}, "unknown field 'fil'; did you mean 'fill'"),
    ],
)
def test_certify_refuses_before_any_work(on_nano, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        on_nano(out=tmp_path / "c", **options)
    assert not (tmp_path / "c").exists()


def test_nano_from_questions_to_an_llm_that_keeps_to_it(on_nano, drawn, tmp_path):
    certificate = on_nano(out=tmp_path, thresholds=(0.02, 0.5))
    assert [point["n"] for point in certificate.points] == [N, N] and certificate.chosen["exit_threshold"] == 0.5
    plan = json.loads((tmp_path / "grid.json").read_bytes())
    assert plan["grid"] == list(certificate.grid) and plan["question_ids_sha256"] == certificate.certified_on
    assert read_ids(tmp_path / "full-depth") == sorted(q.id for q in drawn["calibration"])

    records = {path.parent.name: Record.read(path.parent) for path in tmp_path.glob("*/record.json")}
    right = {s["id"] for s in records["full-depth"].samples if s["score"] == 1}
    for threshold, point in zip((0.5, 0.02), certificate.points, strict=True):
        early = records[f"threshold-{threshold}-min-1"]
        assert point["losses"] == sum(s["id"] in right and s["score"] == 0 for s in early.samples)

    assert on_nano(out=tmp_path, thresholds=(0.5, 0.02)) == certificate  # the Records are there
    with pytest.raises(ValueError, match="something is altered: grid was"):
        on_nano(out=tmp_path, thresholds=(0.5, 0.02, 0.01))
    assert not (tmp_path / "threshold-0.01-min-1").exists()  # refused before it was run

    path = str(tmp_path / "certificate.json")
    held, plain = LLM("nano", certificate=path), LLM("nano")
    prompts = [q.prompt for q in drawn["test"]]
    wanted = plain.generate(prompts, Sampling(exit_threshold=0.5))
    assert [o.depths for o in held.generate(prompts)] == [o.depths for o in wanted]
    with pytest.raises(ValueError, match=r"exit_threshold is 0\.2, certified is 0\.5"):
        held.generate(prompts, Sampling(exit_threshold=0.2))
    with pytest.raises(ValueError, match="model_hash is"):
        LLM("nano-plain", certificate=path)

    arms = Arm.parse({"name": "certified", "certificate": path}), Arm.parse({"name": "half", "exit_threshold": 0.5})
    study = Study(task=on_nano.keywords["task"], model="nano", arms=arms)
    certified, half = run_study(study, out=tmp_path / "eval", progress=False)
    assert certified.settings_used["policy"] == "gate_cdf" and certified.settings_passed["certificate"] == path
    a, b = ({**found.aggregates, "latency_s": None} for found in (certified, half))
    assert a == b and half.aggregates["mean_depth"] < 4


@pytest.mark.parametrize("signals", ["delayed", "exact", "resident"])
def test_the_certificate_says_which_signals_the_arms_had(tmp_path, signals):
    """And counts exact and resident as sync when a model is loaded."""
    late = {"signals": signals, "lateness": 1}
    points = [point(threshold, **late) for threshold in (0.9, 0.5)]
    certificate = made(FIVE, *points, deep=full(**late), tmp_path=tmp_path)
    assert certificate.signals == signals
    here = {name: getattr(certificate, name) for name in ("model_hash", "head_hash", "fill", "dtype", "gate_dtype")}
    kept = {mode for mode in ("sync", "delayed", "exact", "resident") if keeps(certificate, signals=mode, **here)}
    assert kept == ({"delayed"} if signals == "delayed" else {"sync", "exact", "resident"})


def keeps(certificate, **here):
    try:
        certificate.match(segments=4, **here)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("settings", "low", "message"),
    [({}, 9, "min_depth is 9"), ({"fill": "zz"}, 1, "unknown fill 'zz'"), ({"backend": "reference"}, 1, "backend was")],
)
def test_a_plan_that_does_not_fit_is_not_fixed(tmp_path, settings, low, message):
    with pytest.raises(ValueError, match=message):
        certify(
            Goal(epsilon=0.05),
            model="nano",
            task="nano",
            out=tmp_path / "out",
            thresholds=(0.5,),
            min_depths=(low,),
            settings=settings,
            limit=500,
            progress=False,
        )
    assert not (tmp_path / "out").exists()


# -- profiles of exit heads ------------------------------------------------------------------------------------------


def profiled(name, lost=0, **changes):
    """Under a profile of `probe`, as an arm with heads records it."""
    used = {"policy": "probe", "exit_threshold": 1.0, "heads": "heads", "profile": name, "profile_hash": f"of {name}"}
    found = record(name=name, scores=wrong(lost), **used | changes)
    return replace(found, provenance={"model": {"hash": "m", "head_hash": "h"}})


HEADED = {"heads": "heads", "profile": None, "profile_hash": None}


def test_a_grid_of_profiles_is_tried_in_the_order_given(tmp_path):
    grid = [profiled(name, lost) for name, lost in (("strict", 2), ("middle", 10), ("lax", 100))]
    certificate = made(FIVE, *grid, tmp_path=tmp_path, deep=full(**HEADED))
    assert certificate.grid == tuple({"profile": name} for name in ("strict", "middle", "lax"))
    assert certificate.chosen == {"profile": "middle"} and certificate.head_hash == "h"
    assert [point["losses"] for point in certificate.points] == [2, 10, 100]
    assert certificate.points[1]["profile_hash"] == "of middle" and "profile" not in certificate.policy
    assert (certificate.policy["exit_policy"], certificate.policy["exit_threshold"]) == ("probe", 1.0)
    assert certificate.settings["profile"] == "middle"
    turned = made(FIVE, *grid[::-1], tmp_path=tmp_path / "turned", deep=full(**HEADED))
    assert turned.chosen == "never"  # the first one fails


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([profiled("a"), profiled("a")], "'a'.* twice"),
        ([profiled("a"), profiled("b", heads="other")], "heads is 'heads' in a and 'other' in b"),
        ([profiled("a"), profiled("b", policy="confidence")], "policy is 'probe' in a and 'confidence' in b"),
    ],
)
def test_refuses_grids_of_profiles(tmp_path, grid, message):
    with pytest.raises(ValueError, match=message):
        made(FIVE, *grid, tmp_path=tmp_path, deep=full(**HEADED))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "profiles are of heads and of a policy, confidence or probe; give both"),
        ({"heads": "h", "policy": "gate_cdf"}, "profiles are of heads and of a policy"),
        ({"heads": "h", "policy": "probe", "profile": "a"}, "profile was given for all settings"),
    ],
)
def test_profiles_need_heads_and_a_policy(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        certify(FIVE, model="nano", task="nano", out=tmp_path / "out", profiles=["a"], settings=settings)
