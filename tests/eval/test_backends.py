"""Every backend answers the same questions with the same tokens; choices are scored; what is too long is unscored."""

from __future__ import annotations

import pytest

from anydepth import LLM
from anydepth.eval.arms import Study
from anydepth.eval.study import Options, run_study
from anydepth.models.export import export_hf
from tests.random_nano import write_random_nano

CHOICES = """
from anydepth.eval.task import Grade, Question, Task


class Choices(Task):
    max_tokens = 4
    stop = ("####",)

    def questions(self, split):
        yield Question(id="short", prompt="Ann has 5 . Bob has", choices=(" 5 .", " 8", " 3 more than Ann"), gold=1)
        yield Question(id="long", prompt="Ann has 5 . " * 60, choices=(" 5", " 8"), gold=0)

    def grade(self, question, text):
        return Grade(prediction={"choice": text.strip()}, score=float(text == question.choices[question.gold]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_nano(tmp_path_factory.mktemp("model"))


def samples(study, out, **options):
    same = ("output_ids", "depths", "segments_read", "segments_executed", "text", "finish_reason", "score", "seed")
    return {
        record.settings_used["name"]: {(s["id"], s["answer_index"]): [s[key] for key in same] for s in record.samples}
        for record in run_study(study, out=out, options=Options(**options), progress=False)
    }


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"exit_threshold": 0.5, "fill": "full"},
        {"exit_threshold": 0.5, "fill": "last_exited", "min_depth": 2},
        {"exit_threshold": 0.4, "fill": "shared"},
        {"depth": 2, "temperature": 0.8, "top_k": 20, "first_token": "policy"},
        {"stop": [" has"], "exit_threshold": 0.5},
    ],
)
def test_the_reference_answers_as_the_engine_does(model, tmp_path, setting):
    setting = {"fill": "full", "max_tokens": 10, **setting}
    study = Study.parse(
        {
            "study": {"task": "nano", "model": str(model), "limit": 5},
            "arm": [{"name": "B", **setting}, {"name": "A", "backend": "reference", **setting}],
        }
    )
    found = samples(study, tmp_path)
    assert found["A"] == found["B"]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"exit_threshold": 0.5},
        {"exit_threshold": 0.5, "first_token": "policy", "stop": [" has"]},
        {"depth": 2, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "n": 2},
    ],
)
def test_transformers_answers_as_the_engine_and_the_reference_do(model, tmp_path, setting):
    setting = {"max_tokens": 10, **setting}
    arms = [{"name": name, "backend": name, **setting} for name in ("transformers", "reference", "engine")]
    arms[2]["fill"] = "full"
    exported = export_hf(model, tmp_path / "exported")
    study = {"study": {"task": "nano", "model": str(exported), "limit": 5}, "arm": arms}
    with pytest.raises(ValueError, match=r"brings code of its own.*--trust-remote-code"):
        samples(Study.parse(study), tmp_path / "untrusted")
    found = samples(Study.parse(study), tmp_path / "out", trust_remote_code=str(exported))
    assert found["transformers"] == found["reference"] == found["engine"]


def test_transformers_refuses_what_it_has_not(model, tmp_path):
    for setting, message in (
        ({"exit_threshold": 0.5, "min_depth": 2}, "arm 'A': min_depth is 2.*transformers has no bounds"),
        ({"fill": "last_exited"}, "unknown fill 'last_exited'"),
        ({"trace": [4] * 64}, "exit_policy is 'trace'"),
        ({"depth": 9}, "depth is 9; this model has 4 segments"),
    ):
        arm = {"name": "A", "backend": "transformers", **setting}
        study = Study.parse({"study": {"task": "nano", "model": "nano", "limit": 1}, "arm": [arm]})
        with pytest.raises(ValueError, match=message):
            run_study(study, out=tmp_path / "out", progress=False)


@pytest.mark.parametrize(("signals", "lateness"), [("exact", 1), ("resident", 2), ("delayed", 1)])
def test_choices_are_scored_without_lateness(model, tmp_path, signals, lateness):
    (tmp_path / "choices.py").write_text(CHOICES)
    arms = [
        {"name": "late", "exit_threshold": 0.5, "signals": signals, "lateness": lateness},
        {"name": "sync", "exit_threshold": 0.5, "signals": "delayed" if signals == "delayed" else "sync"},
    ]
    arms[1]["lateness"] = 0
    study = {"study": {"task": str(tmp_path / "choices.py"), "model": str(model)}, "arm": arms}
    late, sync = run_study(Study.parse(study), out=tmp_path / "out", progress=False)
    same = ("score", "unscored", "segments_read", "segments_executed")
    one, other = ({s["id"]: s for s in record.samples} for record in (late, sync))
    for id, sample in one.items():
        assert [sample[key] for key in same] == [other[id][key] for key in same]
    for mine, theirs in zip(one["short"]["choices"], other["short"]["choices"], strict=True):
        assert mine == {"logprobs": pytest.approx(theirs["logprobs"], abs=1e-5), "depths": theirs["depths"]}
    assert (late.settings_used["signals"], late.settings_used["lateness"]) == (signals, 0)


def test_choices_are_scored_and_what_does_not_fit_is_unscored(model, tmp_path):
    (tmp_path / "choices.py").write_text(CHOICES)
    exported = export_hf(model, tmp_path / "exported")
    study = Study.parse(
        {
            "study": {"task": str(tmp_path / "choices.py"), "model": str(exported)},
            "arm": [
                {"name": "B", "exit_threshold": 0.5, "fill": "full"},
                {"name": "A", "backend": "reference", "exit_threshold": 0.5},
                {"name": "T", "backend": "transformers", "exit_threshold": 0.5},
            ],
        }
    )
    engine, *others = run_study(
        study, out=tmp_path / "out", options=Options(trust_remote_code=str(exported)), progress=False
    )
    short, long = (next(s for s in engine.samples if s["id"] == id) for id in ("short", "long"))
    direct = LLM(model, fill="full").score(
        ["Ann has 5 . Bob has"] * 3, [" 5 .", " 8", " 3 more than Ann"], study.arms[0].sampling()
    )
    assert [choice["logprobs"] for choice in short["choices"]] == [pytest.approx(s.logprobs, abs=1e-5) for s in direct]
    assert [choice["depths"] for choice in short["choices"]] == [list(score.depths) for score in direct]
    best = max(direct, key=lambda score: sum(score.logprobs))
    assert short["prediction"] == {"choice": ("5 .", "8", "3 more than Ann")[direct.index(best)]}
    assert short["segments_read"] == sum(sum(score.depths) for score in direct)
    assert engine.aggregates["mean_depth"] == short["segments_read"] / 7
    assert long["score"] is None and "240 tokens, which leaves no room in the model's 160" in long["unscored"]
    assert engine.aggregates["unscored"] == 1 and engine.aggregates["accuracy"] == short["score"]
    for record in others:
        other = next(s for s in record.samples if s["id"] == "short")
        assert [c["depths"] for c in other["choices"]] == [c["depths"] for c in short["choices"]]
        for mine, theirs in zip(short["choices"], other["choices"], strict=True):
            assert theirs["logprobs"] == pytest.approx(mine["logprobs"], abs=1e-4)
