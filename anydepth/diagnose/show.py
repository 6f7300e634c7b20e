"""A diagnosis in words and as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from anydepth.diagnose.bisect import Bisection
from anydepth.diagnose.divergence import CLASSES, Diagnosis, Divergence
from anydepth.eval.compare.words import factor_words

MOST_LINES = 40


def print_diagnosis(found: Diagnosis) -> None:
    """Counts of each class, then a line for every answer that differs."""
    console = _console()
    if found.work:
        console.print(f"A and B ask for different work: {factor_words(found.work)}", soft_wrap=True)
    if not found.divergences:
        console.print(f"Token ids and depths of all {found.answers} answers are the same.")
        return
    counts = _table("class", "answers")
    for kind in CLASSES:
        counts.add_row(kind, str(found.classes[kind]))
    counts.add_row("the same", str(found.answers - len(found.divergences)))
    console.print(counts)
    console.print(_baseline(found), soft_wrap=True)
    lines = _table()
    for heading in ("question", "at", "context", "tokens", "depths", "margin", "gate\nmargin", "class"):
        words = heading in ("context", "class")
        lines.add_column(heading, no_wrap=not words, min_width=9 if words else None)
    for each in found.divergences[:MOST_LINES]:
        answer = f" ({each.answer_index})" if each.answer_index else ""
        margins = each.margins
        lines.add_row(
            f"{each.id}{answer}",
            str(each.position),
            each.context,
            _both(each.tokens),
            _both(each.depths),
            _number(_margin(each)),
            _number(margins.gate),
            each.kind,
        )
    console.print(lines)
    if (more := len(found.divergences) - MOST_LINES) > 0:
        console.print(f"and {more:,} more: --out has them all, in diagnosis.json")


def print_bisection(found: Bisection) -> None:
    """A line a rung, then the one that is named."""
    console = _console()
    table = _table("rung", "outputs", "differ", "why not")
    for step in found.steps:
        differ = "–" if step.diagnosis is None else str(len(step.diagnosis.divergences))
        table.add_row(step.name, step.status, differ, step.because or "")
    console.print(table)
    if found.named is None:
        console.print("No rung that runs here changes outputs beyond batch variance.")
        return
    named = next(step for step in found.steps if step.name == found.named)
    assert named.diagnosis is not None
    console.print(f"The first setting that changes outputs: {found.named}", soft_wrap=True)
    print_diagnosis(named.diagnosis)


def _baseline(found: Diagnosis) -> str:
    base = found.baseline
    assert base is not None
    figures = (
        ("logits", base.logit, base.most_logit),
        ("probabilities", base.probability, base.most_probability),
        ("exit probabilities", base.cdf, base.most_cdf),
    )
    parts = [f"{name} {_number(p99)} ({_number(most)})" for name, p99, most in figures if p99 is not None]
    return (
        f"Batch variance, {base.concurrency} at a time against one, over {base.positions} outputs of {base.answers} "
        f"answers, 99th percentile (largest): {', '.join(parts)}"
    )


def _margin(each: Divergence) -> float | None:
    """What made the class: of other tokens at one depth, how far they are from being chosen; else how near others."""
    margins = each.margins
    return margins.token if margins.token and each.depths[0] == each.depths[1] else margins.top


def _both(values: Sequence[int | None]) -> str:
    one, other = ("ended" if value is None else str(value) for value in values)
    return one if one == other else f"{one} / {other}"


def _number(value: float | None) -> str:
    return "–" if value is None else "∞" if value == inf else f"{value:.1e}" if value else "0"


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def _table(*headings: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
