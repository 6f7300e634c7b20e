"""What a report is made from: the Records, plans and certificates that lie in folders, sorted into what belongs
together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from anydepth.certificate import FILE, Certificate
from anydepth.eval.aggregate import aggregate
from anydepth.eval.compare.factors import PROTOCOL
from anydepth.eval.compare.rules import Told, rules_told
from anydepth.eval.study import PLAN, read_plan
from anydepth.record import HEADER, PUBLISHED_SAMPLES, SAMPLES, Record

# What a header says and its samples must bear out; the rest is a breakdown of the same.
CHECKED = (
    "n",
    "accuracy",
    "low",
    "high",
    "mean_depth",
    "tokens_per_question",
    "segments_read_per_question",
    "segments_executed_per_question",
)


class Plan(NamedTuple):
    """A study's folder, and what was planned in it, first to last."""

    folder: Path
    lines: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One arm's Record under the label it has in the report."""

    label: str
    record: Record

    @property
    def paired(self) -> bool:
        """Whether pairs can be formed with it: it is complete, and its samples and protocol hash are there."""
        return self.complete and bool(self.record.samples) and self.record.protocol_hash is not None

    @property
    def complete(self) -> bool:
        return self.record.status == "complete"

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.record.settings_used

    @property
    def found(self) -> Mapping[str, Any]:
        return self.record.aggregates


@dataclass(frozen=True, kw_only=True)
class Section:
    """Arms of one protocol, in the order in which they were planned, with the rules of their studies."""

    entries: tuple[Entry, ...]
    plans: tuple[Plan, ...]

    @property
    def rules(self) -> list[Told]:
        return [told for plan in self.plans for told in rules_told(plan.lines)]

    @property
    def complete(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.complete]

    def entry(self, name: str) -> Entry | None:
        """The arm that a rule speaks of."""
        return next((e for e in self.entries if name in (e.label, e.settings["name"])), None)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    sections: tuple[Section, ...]
    benches: tuple[Record, ...]
    unstarted: tuple[Plan, ...]  # studies of which no arm was begun
    certificates: tuple[Certificate, ...]


def gather(folders: Sequence[str | Path]) -> Gathered:
    """Read every eval and bench Record in these folders and below them; header-only ones too.

    Bench Records that `anydepth bench` did not make are left out. Raises ValueError naming the file for one that is
    missing, malformed or of a newer version, and for folders without an eval or bench Record.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise ValueError(f"there is no folder {folder}; give folders of Records or studies")
    plans = tuple(Plan(path.parent, tuple(read_plan(path.parent))) for path in _found(folders, PLAN))
    records = [_read(path.parent) for path in _found(folders, HEADER)]
    # Scripts write Records of this kind too, with rows of their own; those of `anydepth bench` name their baseline.
    benches = tuple(record for record in records if record.kind == "bench" and "baseline" in record.settings_used)
    evals = [record for record in records if record.kind == "eval"]
    if not evals and not benches:
        others = sorted({record.kind for record in records})
        seen = f"only Records of kind {', '.join(others)}" if others else "no Record"
        raise ValueError(f"{', '.join(map(str, folders))} has {seen}; give folders of eval or bench Records")
    sections = _sections(evals, plans)
    begun = [plan for section in sections for plan in section.plans]
    return Gathered(
        sections=sections,
        benches=benches,
        unstarted=tuple(plan for plan in plans if plan not in begun),
        certificates=tuple(Certificate.read(path) for path in _found(folders, FILE)),
    )


def not_run(plan: Plan) -> list[str]:
    """Arms of the last plan that were never begun."""
    names = [arm["name"] for arm in plan.lines[-1]["arms"]] if plan.lines else []
    return [name for name in names if not (plan.folder / name / HEADER).exists()]


def _found(folders: Sequence[str | Path], pattern: str) -> list[Path]:
    """Files of this name in the folders, those of the first folder first, none twice."""
    found = [path for folder in folders for path in sorted(Path(folder).rglob(pattern))]
    return list({path.resolve(): path for path in found}.values())


def _read(folder: Path) -> Record:
    """With its samples where they are needed and there."""
    header = Record.read(folder, samples=False)
    if header.kind != "eval" or not any((folder / name).exists() for name in (SAMPLES, PUBLISHED_SAMPLES)):
        return header
    record = Record.read(folder)
    if record.status == "complete":
        found = aggregate(record.samples)
        for name in CHECKED:
            said, counted = record.aggregates.get(name), found[name]
            near = said is not None and counted is not None and isclose(said, counted, abs_tol=1e-6)
            if said != counted and not near:
                raise ValueError(
                    f"{folder / HEADER} says {name} is {said!r}, its samples make it {counted!r}; the header was "
                    f"edited, get the Record again"
                )
    return record


def _sections(records: Sequence[Record], plans: Sequence[Plan]) -> tuple[Section, ...]:
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: _place(record, plans)):  # stable: else as they were found
        groups.setdefault(_protocol(record), []).append(record)
    sections, left = [], list(plans)
    for group in groups.values():
        own = tuple(plan for plan in left if any(_planned(record, plan) for record in group))
        left = [plan for plan in left if plan not in own]
        sections.append(Section(entries=_label(group), plans=own))
    return tuple(sections)


def _planned(record: Record, plan: Plan) -> bool:
    return plan.folder in record.path.parents and record.settings_used["name"] in _planned_names(plan)


def _planned_names(plan: Plan) -> list[str]:
    """Arms that were ever planned, those of the last plan first."""
    return [arm["name"] for line in reversed(plan.lines) for arm in line["arms"]]


def _place(record: Record, plans: Sequence[Plan]) -> tuple[int, int]:
    """Which study an arm is of, and where it stands there; what no study planned comes last, as it was found."""
    for number, plan in enumerate(plans):
        if _planned(record, plan):
            return number, _planned_names(plan).index(record.settings_used["name"])
    return len(plans), 0


def _protocol(record: Record) -> str:
    """What records must share to stand in one table; older Records have no hash, and their headers must do."""
    if record.protocol_hash is not None:
        return record.protocol_hash
    hashes = [(record.provenance.get(part) or {}).get("hash") for part in ("task", "model", "tokenizer")]
    return json.dumps([hashes, [record.settings_used.get(name) for name in PROTOCOL]])


def _label(records: Sequence[Record]) -> tuple[Entry, ...]:
    """Arms by name; of equal names, with their folder's and then a number before it."""
    entries = [Entry(label=record.settings_used["name"], record=record) for record in records]
    for naming in (
        lambda entry, i: f"{entry.record.path.parent.name}/{entry.label}",
        lambda entry, i: f"{i}:{entry.label}",
    ):
        labels = [entry.label for entry in entries]
        entries = [
            replace(entry, label=naming(entry, i)) if labels.count(entry.label) > 1 else entry
            for i, entry in enumerate(entries, start=1)
        ]
    return tuple(entries)
