"""MMLU answered by generation: the prompts of `mmlu`, and the letter is read from what the model writes.

The first token counts as an answer's token here, not as the prompt's last: it is decoded at the policy's depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anydepth.eval import task
from anydepth.eval.tasks import mmlu

STRICT = re.compile(r"(?<!\w)[A-D](?!\w)")
ANNOUNCED = re.compile(r"answer(?: is|:)\W*([A-D])(?!\w)", re.IGNORECASE)
FIRST = re.compile(r"\W*([A-D])(?=\W*$|[).:,*])", re.IGNORECASE)


class MMLUGenerate(mmlu.MMLU):
    """`gold` is the right letter. The strict reading, which is scored, takes the first of A to D that stands alone; the
    tolerant one also a small letter or a choice's text, and looks behind "answer is" first.

    Four tokens hold " A" and its line's end, "(A)" and "**A**" in every usual vocabulary; the stop at a line's end,
    lm-eval's, keeps most answers at two.
    """

    max_tokens = 4
    first_token = "policy"

    def __init__(self, name: str, file: Path, **options: Any) -> None:
        super().__init__(name, file, **options)
        generative = mmlu.folder() / "generative" / "_default_template_yaml"
        self.sources = (*self.sources, generative, Path(mmlu.__file__))
        self.stop = tuple(mmlu.read_yaml(generative)["generation_kwargs"]["until"])

    def questions(self, split: str) -> Iterable[task.Question]:
        for question in super().questions(split):
            yield replace(question, choices=(), gold=mmlu.letters()[question.gold])

    def grade(self, question: task.Question, text: str) -> task.Grade:
        found = {"strict": strict(text), "tolerant": tolerant(text, question.data)}
        scores = {name: float(letter == question.gold) for name, letter in found.items()}
        return task.Grade(prediction=found, score=scores["strict"], scores=scores)


def strict(text: str) -> str | None:
    """The first of the letters A to D that stands alone."""
    found = STRICT.search(text)
    return found.group() if found else None


def tolerant(text: str, choices: Sequence[str]) -> str | None:
    """The letter as a reader would take it: " b)" is "B", "the answer is (c)" is "C", "Paris" is that choice's."""
    if found := ANNOUNCED.search(text) or FIRST.match(text):
        return found.group(1).upper()
    said = text.strip(" \n.*").lower()
    texts = [choice.strip().lower() for choice in choices]
    meant = [index for index, choice in enumerate(texts) if choice == said]
    if not meant:  # cut short, or gone on
        meant = [index for index, choice in enumerate(texts) if choice.startswith(said) or said.startswith(choice)]
    return mmlu.letters()[meant[0]] if len(meant) == 1 else strict(text)
