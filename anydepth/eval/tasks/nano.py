"""nano's own questions: who has how many, said by comparison over up to six steps. Exact match after `####`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import cast

from anydepth.eval import task
from anydepth.models.nano import questions as nano


class Nano(task.Task):
    """`group` is the difficulty 1..6, `data` the generator's own Question."""

    max_tokens = 64  # the longest right answer has 61 words and an end token
    splits = ("test", "validation", "calibration")
    sources = (Path(nano.__file__),)

    def questions(self, split: str) -> Iterable[task.Question]:
        return _questions(cast(nano.Split, split))

    def gold_text(self, question: task.Question) -> str:
        answer: str = question.data.answer
        return answer

    def grade(self, question: task.Question, text: str) -> task.Grade:
        return task.Grade(prediction={"strict": nano.final_answer(text)}, score=float(nano.grade(text, question.data)))

    def levels(self, question: task.Question, pieces: Sequence[str]) -> list[int] | None:
        """Hop depth of each number that must be worked out: a person's own, not its copies.

        Of an explanation only the first number counts: the later ones follow from what the answer has said by then.
        """
        words = [piece.strip() for piece in pieces]
        right: list[str] = question.data.answer.split()
        if [_shape(word) for word in words[: len(right)]] != [_shape(word) for word in right]:
            return None
        hops = list(question.data.hops)
        if question.data.kind == "why":
            first = next(index for index, hop in enumerate(hops) if hop)
            hops[first + 1 :] = [0] * (len(hops) - first - 1)
        return hops + [0] * (len(words) - len(right))


@cache  # drawing 2,160 of them takes a second or two
def _questions(split: nano.Split) -> list[task.Question]:
    return [
        task.Question(id=q.id, prompt=q.prompt, gold=nano.final_answer(q.answer), group=q.difficulty, data=q)
        for q in nano.questions(split)
    ]


def _shape(word: str) -> str:
    return "number" if word.isdigit() else word
