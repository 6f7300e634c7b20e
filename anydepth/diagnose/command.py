"""`anydepth diagnose`: from two runs to a diagnosis, and from two settings to the rung that parts them. No torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anydepth.diagnose.bisect import Bisection, bisect, ladder
from anydepth.diagnose.divergence import Diagnosis, asks_differ, diagnose
from anydepth.diagnose.sides import Settings, Side, Workplace, questions_of
from anydepth.eval.arms import Study
from anydepth.eval.compare.compare import paired
from anydepth.eval.compare.factors import kv_kind
from anydepth.eval.compare.words import factor_words
from anydepth.eval.task import load_task
from anydepth.record import HEADER, Record, write_atomically
from anydepth.types import Output, unknown

FILE = "diagnosis.json"
Source = Record | Mapping[str, Any]  # a run as it stands, or settings to run


@contextmanager
def results_in(out: Path | None) -> Iterator[Path]:
    """The folder of the Records that are made: `out`, or one that is gone afterwards."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="anydepth-diagnose-") as folder:
        yield Path(folder)


def arms_of(study: Study, names: Sequence[str]) -> list[dict[str, Any]]:
    """The settings of arms by name."""
    known = {arm.name: arm.passed() for arm in study.arms}
    for name in names:
        if name not in known:
            raise unknown("arm", name, known)
    return [known[name] for name in names]


def source(text: str, read: Callable[[str], dict[str, Any]]) -> Source:
    """The Record in the folder of that name, or the settings that the text says."""
    if (Path(text) / HEADER).is_file():
        return Record.read(text)
    if "=" not in text:
        raise ValueError(
            f"{text!r} is neither the folder of a Record nor settings; give a folder with {HEADER}, or name=value "
            f"separated by commas, such as signals=sync"
        )
    return read(text)


def workplace_of(
    sources: Sequence[Source], *, model: str | None, task: str | None, data: Path | None, **options: Any
) -> Workplace:
    """Where two sources are diagnosed: the model and questions of the first Record among them, else the options'.

    A model or task that is given replaces what the Record names, whose hashes must fit all the same."""
    record = next((source for source in sources if isinstance(source, Record)), None)
    if record is None:
        return Workplace(model=model or "nano", task=task or "nano", data=data, **options)
    settings = record.settings_used
    task = task or settings["task"]
    options |= {
        "ids": questions_of(record, load_task(task, data=data)),
        "limit": None,
        "split": settings["split"],
        "seed": settings["seed"],
    }
    return Workplace(model=model or settings["model"], task=task, data=data, **options)


def sides_of(place: Workplace, sources: Sequence[Source]) -> list[Side]:
    """Records as they stand, settings after they have been run; a slip in either shows before anything is."""
    for source in sources:
        if not isinstance(source, Record):
            place.check(source)
    return [
        Side.of(source) if isinstance(source, Record) else place.run(source, folder)
        for source, folder in zip(sources, "AB", strict=True)
    ]


def diagnose_sides(place: Workplace, a: Side, b: Side, *, concurrency: int | None = None) -> Diagnosis:
    """Every answer that differs between two runs, with its class. concurrency: of the baseline, if not the runs' own.

    Raises ValueError as `compare` does: for Records of other protocols or questions, and unfinished ones.
    """
    paired(a.record, b.record, clustered=True)
    with place.replaying(a):
        return _held(place, a, place.outputs(a), b, place.outputs(b), concurrency=concurrency)


def bisect_sides(place: Workplace, a: Settings, b: Settings) -> Bisection:
    """Walk the ladder from A's settings towards B's; both must ask for the same work."""
    first, rungs = ladder(a, b, concurrency=place.concurrency)
    sides: dict[str, Side] = {}

    def run(settings: Settings, name: str) -> list[Output]:
        sides[_key(settings)] = side = place.run(settings, f"{len(sides)}-{name.replace(' ', '-').replace(',', '')}")
        return place.outputs(side)

    def hold(one: Settings, x: Sequence[Output], other: Settings, y: Sequence[Output]) -> Diagnosis:
        a, b = sides[_key(one)], sides[_key(other)]
        with place.replaying(a):
            return _held(place, a, x, b, y)

    return bisect(run, first, rungs, hold=hold)


def refuse_other_work(a: Side, b: Side) -> None:
    """ValueError where no single setting can be blamed, as the two ask for different outputs."""
    if work := asks_differ(a.used, b.used):
        raise ValueError(
            f"A and B ask for different work ({factor_words(work)}); --bisect looks for what changes the outputs of "
            f"the same work: give two runs that differ only in how it is done"
        )


def write(out: Path, result: Mapping[str, Any]) -> None:
    """diagnosis.json beside the Records, as a whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / FILE, json.dumps({"version": 1, **result}, indent=1, default=str).encode() + b"\n")


def _held(
    place: Workplace, a: Side, x: Sequence[Output], b: Side, y: Sequence[Output], *, concurrency: int | None = None
) -> Diagnosis:
    return diagnose(
        x,
        y,
        judge=place.judge(a, b, concurrency=concurrency),
        work=asks_differ(a.used, b.used),
        kv=(kv_kind(a.used), kv_kind(b.used)),
        segments=a.used["segments"],
    )


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True, default=str)
