"""Signal modes by name: when the host learns what a turn's rows decided, and which pairs of mode, fill and model go
together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from anydepth.engine.completions import Completions
from anydepth.engine.late import LateScheduler
from anydepth.engine.late_runner import LateRunner, LateSlots
from anydepth.engine.plan import Plan
from anydepth.engine.resident import ResidentScheduler
from anydepth.engine.resident_runner import ResidentRunner, ResidentSlots
from anydepth.engine.runner import Runner
from anydepth.engine.scheduler import Scheduler
from anydepth.engine.slots import Slots
from anydepth.engine.submission import Submission
from anydepth.models.base import Model
from anydepth.ops.fill import Fill
from anydepth.types import Shape

MOST_LATE = 3  # turns


class AnyRunner(Protocol):
    """A plan in, what the host learns by then out: of this plan (`sync`), or of earlier ones."""

    def run(self, plan: Plan) -> Any:
        """Run or submit one turn."""

    def drain(self) -> None:
        """Wait for all that is on its way to the host, and let go of it."""


class Mode(NamedTuple):
    """A signal mode: what makes its scheduler and runner, how late its signals come unless told otherwise, and the
    fills it cannot go with, each with the reason."""

    name: str
    lateness: int
    refuses: Mapping[str, str] = {}

    def check(self, fill: Fill, shape: Shape) -> None:
        """ValueError, with the reason, where the mode cannot keep its promise."""
        if self.name == "resident" and not shape.shared_weights:
            raise ValueError(
                "signals 'resident' is for looped models, whose rows of all depths share a turn; this one is layered, "
                "allowed: 'sync', 'delayed', 'exact'"
            )
        if fill.name in self.refuses:
            raise ValueError(f"signals {self.name!r} does not go with fill {fill.name!r}: {self.refuses[fill.name]}")

    def scheduler(self, fill: Fill, **options: Any) -> Scheduler:
        if self.name == "sync":
            return Scheduler(**options)
        if self.name == "resident":
            return ResidentScheduler(**options)
        return LateScheduler(reads_late=self.name == "delayed", runs_on=fill.runs_on, **options)

    def slots(self, model: Model, fill: Fill, **options: int) -> Slots:
        if self.name == "sync":
            return Slots(model, fill, **options)
        return (ResidentSlots if self.name == "resident" else LateSlots)(model, fill, **options)

    def runner(self, model: Model, fill: Fill, slots: Slots, *, lateness: int, submission: Submission) -> AnyRunner:
        if self.name == "sync":
            return Runner(model, fill, slots)
        completions = Completions(lateness)
        if isinstance(slots, ResidentSlots):
            return ResidentRunner(model, fill, slots, completions=completions, submission=submission)
        assert isinstance(slots, LateSlots)
        delayed = self.name == "delayed"
        return LateRunner(model, fill, slots, completions=completions, submission=submission, reads_late=delayed)


MODES = {
    mode.name: mode
    for mode in (
        Mode("sync", 0),
        Mode("delayed", 1),
        Mode("exact", 1, {"shared": "round k + 1 has overwritten the only K/V by the time round k's answer is known"}),
        Mode("resident", 1, {"deferred": "only the host knows which positions wait for which segment"}),
    )
}


def load_mode(name: str, lateness: int | None, fill: Fill, shape: Shape) -> tuple[Mode, int]:
    """The mode of that name and the lateness it runs with, checked. `lateness` None: the mode's own."""
    mode, lateness = named_mode(name, lateness)
    mode.check(fill, shape)
    return mode, lateness


def named_mode(name: str, lateness: int | None) -> tuple[Mode, int]:
    """As `load_mode`, as far as it can be told without a model."""
    if not isinstance(name, str) or name not in MODES:
        raise ValueError(f"signals is {name!r}; allowed: {', '.join(map(repr, MODES))}")
    mode = MODES[name]
    if lateness is None:
        return mode, mode.lateness
    if isinstance(lateness, bool) or not isinstance(lateness, int) or not 0 <= lateness <= MOST_LATE:
        raise ValueError(f"lateness is {lateness!r}; allowed: whole turns, 0 .. {MOST_LATE}")
    if lateness and name == "sync":
        raise ValueError(f"lateness is {lateness}, but signals 'sync' are never late; leave it out or choose 'exact'")
    return mode, lateness
