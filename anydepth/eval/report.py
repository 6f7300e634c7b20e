"""One self-contained HTML page out of Records: what each arm costs and yields, and answers coloured by depth.

Every number comes from Records. Only the answers' texts need more: the questions, and a tokenizer's pieces.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anydepth.record import Record, Sample

TEMPLATES = Path(__file__).parent / "templates"
# Light tints of viridis, light for shallow and darker for deep: their lightness alone tells them apart.
_TINTS = ((254, 244, 178), (186, 230, 184), (150, 204, 214), (178, 176, 226))


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
    """The page about a study and its arms.

    The study's aggregates have the `row` of each arm, joined with its throughput, as `arms`; its settings name the arm
    that the page speaks of as `highlight` (fixed beforehand), and the one at full depth as `baseline`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    settings, rows = study.settings_used, study.aggregates["arms"]
    segments = arms[0].settings_used["segments"]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.filters["digits"] = digits
    environment.globals["tint"] = lambda depth: tint(depth, segments)
    by_name = {row["name"]: row for row in rows}
    return environment.get_template("report.html").render(
        settings=settings,
        rows=rows,
        shown=shown,
        segments=segments,
        lead=by_name[settings["highlight"]],
        full=by_name[settings["baseline"]],
        levels=_levels(arms),
        groups=_groups(arms),
        facts=_facts(study),
        picture=base64.b64encode(picture).decode(),
    )


def percent(share: float | None, places: int = 1) -> str:
    """0.9933 -> "99.3"; a dash where there is nothing."""
    return "–" if share is None else f"{100 * share:.{places}f}"


def digits(value: float | None, places: int = 2) -> str:
    return "–" if value is None else f"{value:,.{places}f}"


def tint(depth: float, segments: int) -> str:
    """CSS colour of a depth between 1 and R."""
    place = (depth - 1) / max(1, segments - 1) * (len(_TINTS) - 1)
    below = min(int(place), len(_TINTS) - 2)
    mixed = (round(a + (b - a) * (place - below)) for a, b in zip(_TINTS[below], _TINTS[below + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


class Table(NamedTuple):
    """A breakdown: its columns with how many there are of each, and a line of cells an arm."""

    columns: tuple[tuple[str, int], ...]
    lines: tuple[tuple[str, tuple[float | None, ...]], ...]


def _levels(arms: Sequence[Record]) -> Table:
    """Mean depth of the tokens that take so many steps of work, for the arms whose depth is not fixed."""
    adaptive = [arm for arm in arms if arm.settings_used["policy"] != "fixed"]
    found = {arm.settings_used["name"]: arm.aggregates["depth_by_level"] for arm in adaptive}
    columns = sorted({level for levels in found.values() for level in levels}, key=int)
    counts = [max(levels.get(column, {"tokens": 0})["tokens"] for levels in found.values()) for column in columns]
    return Table(
        tuple(zip(columns, counts, strict=True)),
        tuple(
            (name, tuple(levels[c]["mean_depth"] if c in levels else None for c in columns))
            for name, levels in found.items()
        ),
    )


def _groups(arms: Sequence[Record]) -> Table:
    """Accuracy by group, for all arms."""
    first = arms[0].aggregates["by_group"]
    return Table(
        tuple((group, first[group]["n"]) for group in first),
        tuple(
            (arm.settings_used["name"], tuple(arm.aggregates["by_group"][g]["accuracy"] for g in first)) for arm in arms
        ),
    )


def _facts(study: Record) -> list[tuple[str, str]]:
    """The provenance block in words."""
    p, n = study.provenance, study.settings_used["questions"]
    source, model, task = p["anydepth"], p["model"], p["task"]
    commit = f", commit {source['commit'][:12]}{' with changes' if source['dirty'] else ''}" if source["commit"] else ""
    packages = [f"{name} {version}" for name, version in p["packages"].items() if version]
    threads = f"{p['threads']} thread{'s' if p['threads'] != 1 else ''}"
    return [
        ("anydepth", source["version"] + commit),
        ("model", f"{model['name']}, sha256 {model['hash'][:16]}"),
        ("task", f"{task['name']}, sha256 {task['hash'][:16]}, {n} questions an arm, seed {p['seed']}"),
        ("machine", ", ".join([p["cpu"], threads, *p["gpu"]])),
        ("software", ", ".join([p["os"], f"Python {p['python']}", *packages])),
        ("run", " to ".join(time for time in (p["started"], p["finished"]) if time)),
    ]
