"""GSM8K (Cobbe et al., arXiv 2110.14168): grade-school arithmetic, answered step by step after three worked examples.

Prompt, stop strings and strict extraction are those of `gsm8k_cot` in the lm-evaluation-harness, read from its own
file. Its strict match needs one character after the number, so a text that ends in "The answer is 18" is read as 1;
the tolerant extraction beside it takes the number after the last "answer is" or "####", else the last number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anydepth.eval import task

SHOTS = 3
NUMBER = r"(?:(?<![\w)])-)?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
ANNOUNCED = re.compile(rf"(?:answer is|answer:|####)[\s*:$]*({NUMBER})", re.IGNORECASE)
ANY = re.compile(NUMBER)


class GSM8K(task.Task):
    """`gold` is the final number, commas removed. The score is lm-eval's strict match; `scores` has both."""

    max_tokens = 256
    splits = ("test", "train")
    few_shot = tuple(f"gsm8k_cot:{index}" for index in range(SHOTS))

    def __init__(self, name: str, file: Path, **options: Any) -> None:
        super().__init__(name, file, **options)
        self.sources = (_yaml_path(),)
        self.stop = tuple(text for text in _cot()["generation_kwargs"]["until"])

    def questions(self, split: str) -> Iterable[task.Question]:
        shots = "".join(f"Q: {shot['question']}\nA: {shot['target']}\n\n" for shot in _shots())
        for row in self.rows(f"gsm8k_{split}.jsonl", ("id", "question", "answer", "final")):
            prompt = f"{shots}Q: {row['question']}\nA:"
            yield task.Question(id=row["id"], prompt=prompt, gold=row["final"])

    def gold_text(self, question: task.Question) -> str:
        return f"The answer is {question.gold}."

    def grade(self, question: task.Question, text: str) -> task.Grade:
        found = {"strict": strict(text), "tolerant": tolerant(text)}
        scores = {
            "strict": float(found["strict"] is not None and _same_text(found["strict"], question.gold)),
            "tolerant": float(found["tolerant"] is not None and _same_number(found["tolerant"], question.gold)),
        }
        return task.Grade(prediction=found, score=scores["strict"], scores=scores)


def strict(text: str) -> str | None:
    """What lm-eval's strict-match filter extracts: the first match of its pattern."""
    found = re.search(_strict_pattern(), text)
    return found.group(1).strip() if found else None


def tolerant(text: str) -> str | None:
    """The answer as a reader would take it, as a plain number: "$1,800." is "1800", ".5" is "0.5", "18.0" is "18"."""
    text = text.split("Q:")[0]
    announced = [match for match in ANNOUNCED.findall(text) if re.search(r"\d", match)]
    numbers = announced or [match for match in ANY.findall(text) if re.search(r"\d", match)]
    return _plain(numbers[-1]) if numbers else None


def _plain(number: str) -> str:
    whole, _, fraction = number.replace(",", "").replace("$", "").partition(".")
    sign, whole = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    fraction = fraction.rstrip("0")
    plain = (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return plain if plain == "0" else sign + plain


def _same_text(prediction: str, gold: str) -> bool:
    """lm-eval's exact_match: equal once what its config ignores is taken out."""
    return _cleaned(prediction) == _cleaned(gold)


def _cleaned(text: str) -> str:
    for pattern in _cot()["metric_list"][0]["regexes_to_ignore"]:
        text = re.sub(pattern, "", text)
    return text.lower()


def _same_number(prediction: str, gold: str) -> bool:
    return prediction == _plain(gold)


def _yaml_path() -> Path:
    spec = find_spec("lm_eval")  # found, not imported: its package is slow to load
    if spec is None or spec.origin is None:
        raise ValueError(
            "gsm8k takes its prompt and extraction from lm-eval, which is missing; pip install anydepth[eval]"
        )
    return Path(spec.origin).parent / "tasks" / "gsm8k" / "gsm8k-cot.yaml"


@cache
def _cot() -> Mapping[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(_yaml_path().read_text(encoding="utf-8"))
    return loaded


def _shots() -> list[Mapping[str, str]]:
    shots: list[Mapping[str, str]] = _cot()["fewshot_config"]["samples"][:SHOTS]
    return shots


def _strict_pattern() -> str:
    filters = {chain["name"]: chain["filter"][0] for chain in _cot()["filter_list"]}
    pattern: str = filters["strict-match"]["regex_pattern"]
    return pattern
