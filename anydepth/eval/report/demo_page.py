"""The demo's page: what each arm costs and yields, and answers coloured by depth.

Every number comes from Records. Only the answers' texts need more: the questions, and a tokenizer's pieces.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from anydepth.eval.report.page import facts, template_environment, tint
from anydepth.eval.report.plot import Point
from anydepth.record import Record, Sample


class Token(NamedTuple):
    """One output token as the page shows it. `kind` is "" or why its depth was not chosen: "prompt" or "end"."""

    text: str
    depth: int
    kind: str


class Answer(NamedTuple):
    """One arm's answer to a question; `right` is None where it could not be scored."""

    label: str
    tokens: tuple[Token, ...]
    right: bool | None
    segments: int


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A question on the page: what was given, what was asked, the right answer, and what arms made of it."""

    title: str
    context: str
    asked: str
    gold: str
    answers: tuple[Answer, ...]


def row(record: Record) -> dict[str, Any]:
    """One arm in numbers, as tables and pictures want it. Shares are in 0..1."""
    settings, found = record.settings_used, record.aggregates
    adaptive = settings["policy"] not in ("fixed", "trace", "interval")
    return {
        "name": settings["name"],
        "policy": settings["policy"],
        "exit_threshold": settings["exit_threshold"] if adaptive else None,
        "depth": settings["depth"],
        **{key: found[key] for key in ("accuracy", "low", "high", "n", "mean_depth")},
        "segments_per_question": found["segments_executed_per_question"],
        "tokens_per_question": found["tokens_per_question"],
        "length_stops": found["length_stops"],
        "unparseable": found["unparseable"],
    }


def pareto_points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The arms as points of the picture: fixed depths as one line, thresholds as another."""
    return [
        Point(
            label=_point_label(row),
            x=row["segments_per_question"],
            accuracy=row["accuracy"],
            low=row["low"],
            high=row["high"],
            series="the same depth for every token" if row["depth"] else "the exit gate decides, by threshold",
        )
        for row in rows
        if row["accuracy"] is not None
    ]


def _point_label(row: Mapping[str, Any]) -> str:
    if row["depth"] is not None:
        return f"depth {row['depth']}"
    return "never early" if row["exit_threshold"] == 1 else f"{row['exit_threshold']:g}"


def answer(
    sample: Sample, *, label: str, pieces: Callable[[Sequence[int]], Sequence[str]], stop_ids: Sequence[int]
) -> Answer:
    """A sample as the page shows it. pieces: token ids to what each of them adds to the text."""
    ids, depths = sample["output_ids"], sample["depths"]
    before = len(ids) - sample["decode_tokens"]
    tokens = [
        Token(text, depth, "end" if id in stop_ids else "prompt" if index < before else "")
        for index, (id, text, depth) in enumerate(zip(ids, pieces(ids), depths, strict=True))
    ]
    right = None if sample["score"] is None else sample["score"] == 1
    return Answer(label, tuple(tokens), right, sample["segments_executed"])


def page(study: Record, arms: Sequence[Record], *, shown: Sequence[Shown], picture: bytes) -> str:
    """The page about a study and its arms; the picture is a PNG.

    The study's aggregates have the `row` of each arm, joined with its throughput, as `arms`; its settings name the arm
    that the page speaks of as `highlight` (fixed beforehand), and the one at full depth as `baseline`.
    """
    settings, rows = study.settings_used, study.aggregates["arms"]
    segments = arms[0].settings_used["segments"]
    environment = template_environment()
    environment.globals["tint"] = lambda depth: tint(depth, segments)
    by_name = {row["name"]: row for row in rows}
    return environment.get_template("demo.html").render(
        settings=settings,
        rows=rows,
        shown=shown,
        segments=segments,
        lead=by_name[settings["highlight"]],
        full=by_name[settings["baseline"]],
        levels=_levels(arms),
        groups=_groups(arms),
        facts=facts(study.provenance, questions=settings["questions"]),
        picture=base64.b64encode(picture).decode(),
    )


class Breakdown(NamedTuple):
    """Its columns with how many there are of each, and a line of cells an arm."""

    columns: tuple[tuple[str, int], ...]
    lines: tuple[tuple[str, tuple[float | None, ...]], ...]


def _levels(arms: Sequence[Record]) -> Breakdown:
    """Mean depth of the tokens that take so many steps of work, for the arms whose depth is not fixed."""
    adaptive = [arm for arm in arms if arm.settings_used["policy"] != "fixed"]
    found = {arm.settings_used["name"]: arm.aggregates["depth_by_level"] for arm in adaptive}
    columns = sorted({level for levels in found.values() for level in levels}, key=int)
    counts = [max(levels.get(column, {"tokens": 0})["tokens"] for levels in found.values()) for column in columns]
    return Breakdown(
        tuple(zip(columns, counts, strict=True)),
        tuple(
            (name, tuple(levels[c]["mean_depth"] if c in levels else None for c in columns))
            for name, levels in found.items()
        ),
    )


def _groups(arms: Sequence[Record]) -> Breakdown:
    """Accuracy by group, for all arms."""
    first = arms[0].aggregates["by_group"]
    return Breakdown(
        tuple((group, first[group]["n"]) for group in first),
        tuple(
            (arm.settings_used["name"], tuple(arm.aggregates["by_group"][g]["accuracy"] for g in first)) for arm in arms
        ),
    )
