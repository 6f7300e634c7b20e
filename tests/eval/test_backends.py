"""Every backend answers the same questions with the same tokens; choices are scored; what is too long is unscored."""

from __future__ import annotations

import pytest

from anydepth import LLM
from anydepth.eval.arms import Study
from anydepth.eval.study import run_study
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


def samples(study, out):
    same = ("output_ids", "depths", "segments_read", "segments_executed", "text", "finish_reason", "score", "seed")
    return {
        record.settings_used["name"]: {s["id"]: [s[key] for key in same] for s in record.samples}
        for record in run_study(study, out=out, progress=False)
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


def test_choices_are_scored_and_what_does_not_fit_is_unscored(model, tmp_path):
    (tmp_path / "choices.py").write_text(CHOICES)
    study = Study.parse(
        {
            "study": {"task": str(tmp_path / "choices.py"), "model": str(model)},
            "arm": [
                {"name": "B", "exit_threshold": 0.5, "fill": "full"},
                {"name": "A", "backend": "reference", "exit_threshold": 0.5},
            ],
        }
    )
    engine, reference = run_study(study, out=tmp_path / "out", progress=False)
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
    other = next(s for s in reference.samples if s["id"] == "short")
    assert [c["depths"] for c in other["choices"]] == [c["depths"] for c in short["choices"]]
