"""Which setting changes outputs: a ladder from the plainest engine upwards, one setting more a rung. Imports no torch.

Every rung is held against the first, since by the semantics their outputs are equal. What batch variance explains is a
tie; the first rung with a difference beyond it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anydepth.diagnose.divergence import Diagnosis
from anydepth.types import Output

Settings = Mapping[str, Any]
Runner = Callable[[Settings, str], Sequence[Output]]  # settings, and the name of the rung that has them
Hold = Callable[[Settings, Sequence[Output], Settings, Sequence[Output]], Diagnosis]
EQUAL, TIES, FAULT, MISSING, REFUSED, LATER = (
    "equal",
    "ties only",
    "changes outputs",
    "not on this machine",
    "refused",
    "not reached",
)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step: what it adds to the settings of the rung before, and why it cannot run here (None: it can)."""

    name: str
    adds: Settings
    missing: Callable[[Settings], str | None] = lambda settings: None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What became of a rung. `because`: why it did not run."""

    name: str
    settings: Settings
    status: str
    because: str | None = None
    diagnosis: Diagnosis | None = None

    def asdict(self) -> dict[str, Any]:
        found = self.diagnosis.asdict() if self.diagnosis else None
        return {**{n: getattr(self, n) for n in ("name", "settings", "status", "because")}, "diagnosis": found}


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The ladder from its first rung on. `named`: the first rung that changes outputs beyond the baseline."""

    steps: tuple[Step, ...]

    @property
    def named(self) -> str | None:
        return next((step.name for step in self.steps if step.status == FAULT), None)

    def asdict(self) -> dict[str, Any]:
        return {"named": self.named, "steps": [step.asdict() for step in self.steps]}


def bisect(run: Runner, first: Settings, rungs: Sequence[Rung], *, hold: Hold) -> Bisection:
    """Walk the ladder up to the first rung that changes outputs.

    run: settings and a rung's name to that run's answers, diagnostics off. first: the settings that all others are held
    against. hold: diagnose two runs. A rung that cannot run here, or whose combination is refused (ValueError), is
    marked and its settings are left out of those above. Errors of the first rung are the caller's.
    Example: with a fault planted in "padding", `named` is "padding", and the rungs above it are "not reached".
    """
    reference = run(first, "sync")
    steps, settings = [Step(name="sync", settings=first, status=EQUAL)], dict(first)
    for rung in rungs:
        if any(step.status == FAULT for step in steps):
            steps.append(Step(name=rung.name, settings={}, status=LATER))
            continue
        tried = {**settings, **rung.adds}
        if (because := rung.missing(tried)) is not None:
            steps.append(Step(name=rung.name, settings=tried, status=MISSING, because=because))
            continue
        try:
            answers = run(tried, rung.name)
        except ValueError as error:
            steps.append(Step(name=rung.name, settings=tried, status=REFUSED, because=str(error)))
            continue
        found = hold(first, reference, tried, answers)
        status = FAULT if found.faults else TIES if found.divergences else EQUAL
        steps.append(Step(name=rung.name, settings=tried, status=status, diagnosis=found))
        settings = tried
    return Bisection(steps=tuple(steps))


def ladder(a: Settings, b: Settings, *, concurrency: int) -> tuple[dict[str, Any], list[Rung]]:
    """The first rung's settings and the rungs above, from A's settings towards B's.

    Where B says nothing of a rung, it gets a value worth trying: signals `exact`, late by one turn; two streams; one
    answer at a time (32, where that is A's); the other of float32 and float64. `concurrency` is A's where A says
    nothing. `delayed` is another policy: where B has it, the first rung is its own synchronous form.
    """
    delayed = b.get("signals") == "delayed"
    plain = {"signals": "delayed", "lateness": 0} if delayed else {"signals": "sync"}
    how = ("signals", "lateness", "streams", "static_buffers", "padding", "graphs", "submission")
    first = {"concurrency": concurrency, **{k: v for k, v in a.items() if k not in how}, **plain}
    mode = b.get("signals", "sync")
    at_a_time, dtype = first["concurrency"], a.get("dtype") or "float32"
    other_batch = b.get("concurrency", at_a_time)
    other_dtype = b.get("dtype") or dtype
    return first, [
        Rung(
            name="late signals, one stream",
            adds={
                "signals": "exact" if mode == "sync" else mode,
                "lateness": b.get("lateness") or 1,
                "static_buffers": False,
            },
        ),
        Rung(name="more streams", adds={"streams": 2}, missing=_needs_cuda),
        Rung(name="static buffers", adds={"static_buffers": True}),
        Rung(name="padding", adds={"padding": True}),
        Rung(name="graphs", adds={"graphs": True}, missing=_needs_cuda),
        Rung(
            name="batch size",
            adds={"concurrency": other_batch if other_batch != at_a_time else 32 if at_a_time == 1 else 1},
        ),
        Rung(
            name="dtype",
            adds={
                "dtype": other_dtype if other_dtype != dtype else "float64" if dtype == "float32" else "float32",
            },
        ),
    ]


def _needs_cuda(settings: Settings) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not str(settings.get("device", "cpu")).startswith("cuda"):
        return "the settings say no device=cuda"
    return None
