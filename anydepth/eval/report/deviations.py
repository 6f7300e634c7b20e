"""What a reader of a report must know of how its arms were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anydepth.eval.compare.factors import surroundings
from anydepth.eval.compare.rules import rule_words
from anydepth.eval.report.files import Entry, Section, not_run


def deviations(section: Section) -> list[str]:
    """What a reader must know of how the arms were made."""
    said = []
    for plan in section.plans:
        said += [f"{name} was planned and not run." for name in not_run(plan)]
        said += _replanned(plan.lines)
    apart = {
        "Not complete": [e for e in section.entries if not e.complete],
        "Without a protocol hash (older Records)": [e for e in section.complete if e.record.protocol_hash is None],
        "Published without samples": [e for e in section.complete if e.record.protocol_hash and not e.record.samples],
    }
    for why, entries in apart.items():
        said += [f"{why}, so in no comparison: {', '.join(e.label for e in entries)}."] if entries else []
    for told in section.rules:
        if not told.beforehand:
            said.append(f"Rule “{told.rule['name']}” ({rule_words(told.rule)}): {told.since}.")
    return [*said, *_conditions(section.entries)]


def _replanned(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arms that came or went after the first answer."""
    before = next((line for line in reversed(lines) if line["answers"] == 0), None)
    if before is None:
        return []
    said, known = [], {arm["name"]: arm for arm in before["arms"]}
    now = {arm["name"]: arm for arm in lines[-1]["arms"]}
    for name in [*known, *(name for name in now if name not in known)]:
        if known.get(name) != now.get(name):
            change = "added" if name not in known else "dropped" if name not in now else "changed"
            since = next(
                line["answers"]
                for line in lines
                if line["answers"] > 0
                and next((arm for arm in line["arms"] if arm["name"] == name), None) != known.get(name)
            )
            said.append(f"{name} was {change} in the plan after {since} answers.")
    return said


def _conditions(entries: Sequence[Entry]) -> list[str]:
    """Where arms were made under different conditions, or from code that is in no commit."""
    found = {entry.label: surroundings(entry.record.provenance) for entry in entries}
    said = []
    if dirty := [label for label, made in found.items() if made.pop("uncommitted changes") == "yes"]:
        said.append(f"Made with changes to anydepth that are in no commit: {', '.join(dirty)}.")
    for name in dict.fromkeys(name for made in found.values() for name in made):
        values: dict[str, list[str]] = {}
        for label, made in found.items():
            values.setdefault(made.get(name, "none"), []).append(label)
        if len(values) > 1:
            shares = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in values.items())
            said.append(f"Arms differ in {name}: {shares}.")
    return said
