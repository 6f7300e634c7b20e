"""AlpacaEval (Li et al. 2023, github.com/tatsu-lab/alpaca_eval): 805 open instructions, whose answers a judge compares.

There is no judge here: answers are unscored, and `anydepth.eval.alpaca_outputs` writes them in the format it reads.
"""

from __future__ import annotations

from collections.abc import Iterable

from anydepth.eval import task


class AlpacaEval(task.Task):
    """`group` is the collection that an instruction comes from, `data` the instruction."""

    max_tokens = 512  # room for a long answer; the judge likes those, so the cap must be the same in every arm

    def questions(self, split: str) -> Iterable[task.Question]:
        for row in self.rows("alpacaeval.jsonl", ("id", "dataset", "instruction")):
            messages = ({"role": "user", "content": row["instruction"]},)
            yield task.Question(id=row["id"], prompt=messages, group=row["dataset"], data=row["instruction"])

    def grade(self, question: task.Question, text: str) -> task.Grade:
        return task.Grade(prediction={}, score=None, unscored="needs a judge")
