"""What must hold of Records before a threshold may be certified from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from anydepth.certificate import EXIT_SETTINGS, GRID_SETTINGS, NEVER
from anydepth.record import Record

LEAST_QUESTIONS = 500
# May differ along the grid.
_FREE = ("name", "concurrency", *GRID_SETTINGS, "profile", "profile_hash", "profile_thresholds")
_IDLE = ("policy", "fill", "gate_dtype", "signals", "lateness")  # mean nothing where no token leaves early


def check_finished(records: Sequence[Record]) -> None:
    """ValueError unless all are complete evaluations by the engine, read with their samples."""
    for record in records:
        if record.kind != "eval" or record.status != "complete" or not record.samples:
            raise ValueError(
                f"{record.path} is a Record of kind {record.kind}, {record.status}, with {len(record.samples)} samples "
                f"read; certifying needs complete evaluations with their samples: finish the run"
            )
        if record.settings_used["backend"] != "engine":
            raise ValueError(f"{record.path} is of backend {record.settings_used['backend']!r}; allowed: 'engine'")


def check_paired(full: Record, points: Sequence[Record]) -> list[str]:
    """Ids of the questions, once it is certain that the Records differ in nothing but thresholds."""
    for record in points:
        if record.protocol_hash != full.protocol_hash:
            raise ValueError(f"{record.path} and {full.path} have different protocols; run both under the same")
        if _keys(record) != _keys(full):
            one = next(iter(_keys(record) ^ _keys(full)))
            raise ValueError(f"{record.path} and {full.path} have different questions (such as {one}); run the same")
    if full.settings_used["policy"] != NEVER:
        raise ValueError(
            f"{full.path} is of policy {full.settings_used['policy']!r}; the paired Record must be 'never'"
        )
    if points[0].settings_used["policy"] in (NEVER, "trace"):
        raise ValueError(f"{points[0].path} is of policy {points[0].settings_used['policy']!r}, which has no threshold")
    for record in points:
        _check_same(points[0], record, free=_FREE)
    _check_same(full, points[0], free=(*_FREE, *EXIT_SETTINGS, *_IDLE))
    return sorted({sample["id"] for sample in full.samples})


def _keys(record: Record) -> set[tuple[str, int]]:
    return {(sample["id"], sample["answer_index"]) for sample in record.samples}


def _check_same(one: Record, other: Record, *, free: Collection[str]) -> None:
    for name in sorted({*one.settings_used, *other.settings_used} - {*free}):
        old, new = one.settings_used.get(name), other.settings_used.get(name)
        if old != new:
            raise ValueError(
                f"{name} is {old!r} in {one.path} and {new!r} in {other.path}; only thresholds may vary along a grid"
            )


def check_questions(
    ids: Sequence[str], *, split: str | None, test_ids: Collection[str] | None, fitted_on: Collection[str]
) -> None:
    """ValueError unless enough questions were asked, none of them a test question or one that was fitted on."""
    if split is None and test_ids is None:
        raise ValueError("the Records do not say of which split the questions are; give the ids of the test questions")
    if split == "test" or (tests := {*ids} & {*(test_ids or ())}):
        which = "split 'test'" if split == "test" else f"{len(tests)} of them, such as {min(tests)!r}"
        raise ValueError(f"these are test questions ({which}); a threshold is certified on questions of another split")
    if both := {*ids} & {*fitted_on}:
        raise ValueError(
            f"{len(both)} questions were also fitted on, such as {min(both)!r}; certify on others, or nothing is shown"
        )
    if len(ids) < LEAST_QUESTIONS:
        raise ValueError(f"there are {len(ids)} questions; a certificate needs {LEAST_QUESTIONS} or more")
