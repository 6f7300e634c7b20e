"""MMLU (Hendrycks et al., arXiv 2009.03300): four choices in 57 subjects, the likeliest letter is the answer.

Prompts are those of lm-eval's `mmlu` with five examples, made from its own files: the subject's heading, the first five
questions of the subject's dev split with their letters, the question. Scored are " A", " B", " C" and " D".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anydepth.eval import task
from anydepth.record import Sample
from anydepth.types import unknown

SHOTS = 5
FILES = {"test": "mmlu_test.jsonl", "validation": "mmlu_val.jsonl", "dev": "mmlu_dev.jsonl"}


class MMLU(task.Task):
    """`gold` is the right choice's index, `group` the subject, `data` the texts of the choices.

    Accuracy is over questions; `metrics` has the mean over subjects beside it. A question of dev is never its own
    example: it has the subject's other four.
    """

    splits = tuple(FILES)

    def __init__(self, name: str, file: Path, **options: Any) -> None:
        super().__init__(name, file, **options)
        self.sources = (folder() / "default" / "_default_template_yaml", *_subject_files())
        self.few_shot = tuple(id for subject in _descriptions() for id in _shot_ids(subject))

    def questions(self, split: str) -> Iterable[task.Question]:
        dev = {row["id"]: row for row in self._rows("dev")}
        if missing := set(self.few_shot) - dev.keys():
            raise ValueError(
                f"{FILES['dev']} has no {min(missing)!r}; it needs {SHOTS} examples a subject, from 0000 on"
            )
        for row in self._rows(split):
            before = [dev[id] for id in _shot_ids(row["subject"]) if id != row["id"]]
            yield task.Question(
                id=row["id"],
                prompt=_descriptions()[row["subject"]] + "".join(map(_worked, before)) + _asked(row),
                choices=tuple(f" {letter}" for letter in letters()),
                gold=row["answer"],
                group=row["subject"],
                data=tuple(row["choices"]),
            )

    def grade(self, question: task.Question, text: str) -> task.Grade:
        return task.Grade(prediction={"choice": text.strip()}, score=float(text == question.choices[question.gold]))

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float | None]:
        by_subject: dict[str, list[float]] = {}
        for sample in samples:
            if sample["score"] is not None:
                by_subject.setdefault(sample["group"], []).append(sample["score"])
        means = [sum(scores) / len(scores) for scores in by_subject.values()]
        return {"mean_over_subjects": sum(means) / len(means) if means else None}

    def _rows(self, split: str) -> list[dict[str, Any]]:
        rows = self.rows(FILES[split], ("id", "subject", "question", "choices", "answer"))
        for row in rows:
            if row["subject"] not in _descriptions():
                raise unknown(f"subject of {self.name} question {row['id']!r}:", row["subject"], _descriptions())
            if len(row["choices"]) != len(letters()) or row["answer"] not in range(len(letters())):
                raise ValueError(
                    f"{FILES[split]}: question {row['id']!r} has {len(row['choices'])} choices and answer "
                    f"{row['answer']!r}; each needs {len(letters())} choices, and the right one's index from 0"
                )
        return rows


def letters() -> list[str]:
    """The names of the choices."""
    found: list[str] = _template()["doc_to_choice"]
    return found


def folder() -> Path:
    """Where lm-eval keeps its variants of MMLU, each in a folder."""
    spec = find_spec("lm_eval")  # found, not imported: its package is slow to load
    if spec is None or spec.origin is None:
        raise ValueError("mmlu takes its prompts from lm-eval, which is missing; pip install 'anydepth[eval]'")
    return Path(spec.origin).parent / "tasks" / "mmlu"


def read_yaml(file: Path) -> dict[str, Any]:
    """One of lm-eval's files."""
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return loaded


def _subject_files() -> list[Path]:
    return sorted((folder() / "default").glob("mmlu_*.yaml"))


@cache
def _descriptions() -> Mapping[str, str]:
    """The heading of each subject's prompts."""
    return {content["dataset_name"]: content["description"] for content in map(read_yaml, _subject_files())}


@cache
def _template() -> Mapping[str, Any]:
    return read_yaml(folder() / "default" / "_default_template_yaml")


@cache
def _question_template() -> Any:
    from jinja2 import Environment, StrictUndefined

    return Environment(undefined=StrictUndefined).from_string(_template()["doc_to_text"])


def _asked(row: Mapping[str, Any]) -> str:
    text: str = _question_template().render(row)
    return text


def _worked(row: Mapping[str, Any]) -> str:
    return f"{_asked(row)} {letters()[row['answer']]}\n\n"


def _shot_ids(subject: str) -> list[str]:
    return [f"mmlu-dev-{subject}-{index:04d}" for index in range(SHOTS)]
