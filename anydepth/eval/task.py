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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anydepth.eval.tasks
from anydepth.eval.data import data_file, read_jsonl
from anydepth.record import Sample
from anydepth.types import unknown

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question. A prompt of messages goes through the model's chat template, where it has one. With `choices` the
    answer is not generated: each of them is scored as a continuation of the prompt. `gold` is the right answer as the
    task wants to see it (of choices: its index), None where there is none; `group` is what results are broken down by
    (a difficulty, a subject); `data` is the task's own."""

    id: str
    prompt: str | Messages
    choices: tuple[str, ...] = ()
    gold: Any = None
    group: str | int | None = None
    data: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What an answer is worth: `score` in 0..1, or None with the reason in `unscored` (which is not wrong).

    `prediction` has what each extractor found, None where it found nothing. The first extractor is the one that is
    scored, the answer counts as unparseable where it found nothing. `scores` says what the answer is worth by each
    extractor, where there are several.
    """

    prediction: Mapping[str, str | None]
    score: float | None
    unscored: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.score is None) == (self.unscored is None) or not 0 <= (self.score or 0.0) <= 1:
            raise ValueError(
                f"score is {self.score!r} and unscored is {self.unscored!r}; allowed: a score in 0..1, or "
                f"no score and the reason in unscored"
            )


class Task(ABC):
    """Base of all tasks. `max_tokens`, `stop` and `first_token` are the same for every arm; `splits` has the default
    one first. `few_shot` has the ids of the worked examples in each prompt."""

    max_tokens: int = 1
    stop: Sequence[str] = ()
    first_token: Literal["prefill", "policy"] = "prefill"
    splits: Sequence[str] = ("test",)
    few_shot: Sequence[str] = ()
    sources: Sequence[Path] = ()  # files beside the task's own that decide grades

    def __init__(self, name: str, file: Path, *, data: str | Path | None = None) -> None:
        self.name, self.file, self.data = name, file, data

    def rows(self, file: str, fields: Sequence[str]) -> list[dict[str, Any]]:
        """The objects of a JSONL file in the data folder, each with these fields."""
        return read_jsonl(data_file(file, folder=self.data), fields)

    @abstractmethod
    def questions(self, split: str) -> Iterable[Question]:
        """All questions of a split, always the same ones."""

    @abstractmethod
    def grade(self, question: Question, text: str) -> Grade:
        """What the answer `text` is worth. For a choice that was scored, it is the most likely one's own text."""

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float | None]:
        """Figures of an arm beside accuracy: a pure function of its samples."""
        return {}

    def gold_text(self, question: Question) -> str | None:
        """An answer that must score 1, for the check when the task is loaded. None where there is none."""
        return None if question.gold is None else str(question.gold)

    def levels(self, question: Question, pieces: Sequence[str]) -> Sequence[int] | None:
        """For each output token (`pieces` are their texts) how many steps of work it takes, 0 for none.

        None where the task does not know, also because the answer is not built like the right one.
        """
        return None

    def hash(self, questions: Iterable[Question]) -> str:
        """sha256 (hex) over what decides a result: the task's file, its `sources`, and these questions with all that
        belongs to them, so also the data file's part in it."""
        digest = hashlib.sha256()
        for path in (self.file, *self.sources):
            digest.update(path.read_bytes())
        for question in questions:
            digest.update(repr(question).encode())
        return digest.hexdigest()

    def select(
        self, *, split: str | None = None, limit: int | None = None, ids: Sequence[str] | None = None
    ) -> list[Question]:
        """The first `limit` questions of a split (None: all) in hash order, ascending sha256 of `task:id`; or those
        with these `ids`, in the order given.

        Every right answer of the split is graded first. Raises ValueError where one does not score 1, for an unknown
        split, fewer than `limit` questions, an id that comes twice or not at all.
        """
        split = self.splits[0] if split is None else split
        if split not in self.splits:
            raise unknown(f"split of task {self.name}", split, self.splits)
        every = list(self.questions(split))
        for question in every:
            if not isinstance(question.id, str):
                raise ValueError(f"task {self.name}, split {split}: the id {question.id!r} is no string; make it one")
        questions = {question.id: question for question in every}
        if len(questions) < len(every):
            raise ValueError(f"task {self.name}, split {split}: {len(every) - len(questions)} ids come more than once")
        if not 1 <= (len(every) if limit is None else limit) <= len(every):
            raise ValueError(f"{limit} questions were asked for; split {split} of task {self.name} has {len(every)}")
        for question in every:
            check_gold(self, question)
        if ids is None:
            return [questions[id] for id in ranked(questions, task=self.name)][:limit]
        if limit is not None:
            raise ValueError("both a limit and ids were given; give one of them")
        for id in ids:
            if id not in questions:
                raise unknown(f"question of task {self.name}, split {split}:", id, questions)
        if len(set(ids)) < len(ids) or not ids:
            raise ValueError(f"{len(ids)} ids were given, {len(set(ids))} different ones; give each question once")
        return [questions[id] for id in ids]


def ranked(ids: Iterable[str], *, task: str) -> list[str]:
    """Ids in ascending order of sha256(`task:id`): the first n are a fixed random sample, whatever n is."""
    return sorted(ids, key=lambda id: hashlib.sha256(f"{task}:{id}".encode()).digest())


def check_gold(task: Task, question: Question) -> None:
    """ValueError unless the right answer scores 1: the grader or the answer is wrong."""
    if question.choices and question.gold is not None:
        if question.gold not in range(len(question.choices)):
            raise ValueError(
                f"task {task.name}: question {question.id!r} has {len(question.choices)} choices and the right one is "
                f"{question.gold!r}; allowed: its index, from 0"
            )
        text: str | None = question.choices[question.gold]
    else:
        text = task.gold_text(question)
    if text is None:
        return
    grade = task.grade(question, text)
    if grade.score != 1:
        raise ValueError(
            f"task {task.name}: the right answer of question {question.id!r}, {text!r}, scores "
            f"{grade.score} (prediction {dict(grade.prediction)}); mend grade or gold_text in {task.file}"
        )


def load_task(name: str | Path, *, data: str | Path | None = None) -> Task:
    """A task by built-in name, or by the path of a .py file; `data` is the folder of its files (None: ANYDEPTH_DATA).

    Raises ValueError for one nobody knows or that is no task.
    """
    text = str(name)
    if isinstance(name, Path) or text.endswith(".py"):
        return _from_file(Path(text), data=data)
    if text not in known_tasks():
        raise ValueError(f"{unknown('task', text, known_tasks())}; a task of your own is the path of a .py file")
    file = Path(anydepth.eval.tasks.__path__[0]) / f"{text}.py"
    return _from_file(file, module=f"anydepth.eval.tasks.{text}", data=data)


def known_tasks() -> list[str]:
    """Names of the built-in tasks."""
    return sorted(module.name for module in pkgutil.iter_modules(anydepth.eval.tasks.__path__))


def _from_file(path: Path, *, module: str | None = None, data: str | Path | None = None) -> Task:
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
    return found[0](path.stem, path, data=data)
