"""The contract of a task, how one is found, and which of its questions are asked. Imports no torch.

A task is one small file with one subclass of `Task`; built-in ones live in `anydepth.eval.tasks`, others anywhere:

    class Sums(Task):
        max_tokens = 8

        def questions(self, split):
            return [Question(id=f"{a}+{b}", prompt=f"{a} + {b} =", gold=str(a + b)) for a in range(9) for b in range(9)]

        def grade(self, question, text):
            words = text.split()
            return Grade(prediction={"first": words[0] if words else None}, score=float(words[:1] == [question.gold]))
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import anydepth.eval.tasks
from anydepth.types import unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question. `gold` is the right answer as the task wants to see it, None where there is none; `group` is what
    results are broken down by (a difficulty, a subject); `data` is the task's own."""

    id: str
    prompt: str
    gold: Any = None
    group: str | int | None = None
    data: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What an answer is worth: `score` in 0..1, or None with the reason in `unscored` (which is not wrong).

    `prediction` has what each extractor found, None where it found nothing. The first extractor is the one that is
    scored, the answer counts as unparseable where it found nothing.
    """

    prediction: Mapping[str, str | None]
    score: float | None
    unscored: str | None = None

    def __post_init__(self) -> None:
        if (self.score is None) == (self.unscored is None) or not 0 <= (self.score or 0.0) <= 1:
            raise ValueError(
                f"score is {self.score!r} and unscored is {self.unscored!r}; allowed: a score in 0..1, or "
                f"no score and the reason in unscored"
            )


class Task(ABC):
    """Base of all tasks. `max_tokens` and `stop` are the same for every arm; `splits` has the default one first."""

    max_tokens: ClassVar[int]
    stop: ClassVar[Sequence[str]] = ()
    splits: ClassVar[Sequence[str]] = ("test",)
    sources: ClassVar[Sequence[Path]] = ()  # files beside the task's own that decide questions or grades

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file

    @abstractmethod
    def questions(self, split: str) -> Iterable[Question]:
        """All questions of a split, always the same ones."""

    @abstractmethod
    def grade(self, question: Question, text: str) -> Grade:
        """What the answer `text` is worth."""

    def gold_text(self, question: Question) -> str | None:
        """An answer that must score 1, for the check when the task is loaded. None where there is none."""
        return None if question.gold is None else str(question.gold)

    def levels(self, question: Question, pieces: Sequence[str]) -> Sequence[int] | None:
        """For each output token (`pieces` are their texts) how many steps of work it takes, 0 for none.

        None where the task does not know, also because the answer is not built like the right one.
        """
        return None

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) over the task's file and its `sources`."""
        digest = hashlib.sha256()
        for path in (self.file, *self.sources):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def select(self, *, split: str | None = None, limit: int | None = None) -> list[Question]:
        """The first `limit` questions of a split (None: all) in hash order: ascending sha256 of `task:id`.

        Every right answer of the split is graded first. Raises ValueError where one does not score 1, for an unknown
        split, fewer than `limit` questions, an id that comes twice.
        """
        split = self.splits[0] if split is None else split
        if split not in self.splits:
            raise unknown(f"split of task {self.name}", split, self.splits)
        every = list(self.questions(split))
        questions = {question.id: question for question in every}
        if len(questions) < len(every):
            raise ValueError(f"task {self.name}, split {split}: {len(every) - len(questions)} ids come more than once")
        if not 1 <= (len(every) if limit is None else limit) <= len(every):
            raise ValueError(f"{limit} questions were asked for; split {split} of task {self.name} has {len(every)}")
        for question in every:
            check_gold(self, question)
        return [questions[id] for id in ranked(questions, task=self.name)][:limit]


def ranked(ids: Iterable[str], *, task: str) -> list[str]:
    """Ids in ascending order of sha256(`task:id`): the first n are a fixed random sample, whatever n is."""
    return sorted(ids, key=lambda id: hashlib.sha256(f"{task}:{id}".encode()).digest())


def check_gold(task: Task, question: Question) -> None:
    """ValueError unless the right answer scores 1: the grader or the answer is wrong."""
    text = task.gold_text(question)
    if text is None:
        return
    grade = task.grade(question, text)
    if grade.score != 1:
        raise ValueError(
            f"task {task.name}: the right answer of question {question.id!r}, {text!r}, scores "
            f"{grade.score} (prediction {dict(grade.prediction)}); mend grade or gold_text in {task.file}"
        )


def load_task(name: str | Path) -> Task:
    """A task by built-in name, or by the path of a .py file. ValueError for one nobody knows or that is no task."""
    text = str(name)
    if isinstance(name, Path) or text.endswith(".py"):
        return _from_file(Path(text))
    if text not in known_tasks():
        raise ValueError(f"{unknown('task', text, known_tasks())}; a task of your own is the path of a .py file")
    return _from_file(Path(anydepth.eval.tasks.__path__[0]) / f"{text}.py", module=f"anydepth.eval.tasks.{text}")


def known_tasks() -> list[str]:
    """Names of the built-in tasks."""
    return sorted(module.name for module in pkgutil.iter_modules(anydepth.eval.tasks.__path__))


def _from_file(path: Path, *, module: str | None = None) -> Task:
    """The one Task of a file. The file's code runs, as with any import."""
    if not path.is_file():
        raise ValueError(f"there is no task file {path}; give the path of a .py file with a subclass of Task")
    if module is not None:
        loaded = importlib.import_module(module)
    else:
        spec = importlib.util.spec_from_file_location(f"anydepth_task_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    found = [
        item
        for item in vars(loaded).values()
        if isinstance(item, type) and issubclass(item, Task) and item.__module__ == loaded.__name__
    ]
    if len(found) != 1:
        raise ValueError(f"{path} has {len(found)} subclasses of anydepth.eval.task.Task; it needs exactly one")
    return found[0](path.stem, path)
