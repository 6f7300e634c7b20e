"""When the device ran what, and when the host heard of it: a record of one engine's turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from anydepth.engine.engine import Engine
from anydepth.engine.plan import LateResult, Leave, Plan, Read, Result, Row
from anydepth.engine.plan import Sequence as Running
from anydepth.types import Output, Request

Kind = Literal["prompt", "own", "late", "wasted", "idle"]


class Ran(NamedTuple):
    """A request's row in one turn: the output it works on (-1: the prompt), the segment, its positions.

    kind: "prompt"; "own", a round that its token asked for; "late", the round after the policy said that it leaves;
    "wasted", run although the answer had ended; "idle", planned by a host that did not know of the end, and not run.
    `heard` is the turn after which the host knew of it, None where it never asked.
    """

    turn: int
    output: int
    segment: int
    positions: int
    kind: Kind
    heard: int | None


class Left(NamedTuple):
    """A token that left the model after `boundary` turns, read at `depth`; the host knew it after turn `heard`."""

    output: int
    boundary: int
    depth: int
    heard: int


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What happened to one request."""

    output: Output
    rows: tuple[Ran, ...]
    left: tuple[Left, ...]

    def rounds(self, output: int) -> int:
        """Segments that ran for one output."""
        return sum(row.output == output and row.kind in ("own", "late") for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One engine's run: its mode, and a lane a request. Turns count from 0."""

    signals: str
    lateness: int
    segments: int
    turns: int
    lanes: tuple[Lane, ...]


@dataclass
class _Turn:
    """A sequence's part of one turn."""

    row: Row | None = None
    leave: Leave | None = None  # as the turn began
    read: Read | None = None  # as it ended
    heard: int | None = None
    leaves: bool | None = None


@dataclass
class _Watch:
    turn: int = -1
    of: dict[Running, dict[int, _Turn]] = field(default_factory=dict)
    begun: dict[int, _Turn] = field(default_factory=dict)  # by the identity of its row: two turns' may be equal
    tokens: dict[Running, list[int]] = field(default_factory=dict)  # of each, the turn after which it was heard
    outputs: dict[str, Output] = field(default_factory=dict)

    def began(self, plan: Plan) -> None:
        self.turn += 1
        for leave in plan.leaving:
            self._at(leave.sequence).leave = leave
        for row in plan.rows:
            self._at(row.sequence).row = row
            self.begun[id(row)] = self._at(row.sequence)

    def heard(self, sequence: Running, read: Read | None, row: Row | None, leaves: bool | None) -> None:
        if read is not None:
            self.tokens.setdefault(sequence, []).append(self.turn)
        if row is not None:
            part = self.begun[id(row)]
            part.heard, part.leaves, part.read = self.turn, leaves, read

    def _at(self, sequence: Running) -> _Turn:
        return self.of.setdefault(sequence, {}).setdefault(self.turn, _Turn())


def record(engine: Engine, requests: Sequence[Request]) -> Timeline:
    """Submit the requests to an idle engine, run it until all have ended, and say what happened when.

    Nothing of the engine's own work is changed; turns are counted from the first one of this call.
    """
    if not engine.idle:
        raise ValueError("the engine has requests under way; give one that is idle")
    with _watching(engine) as watch:
        for request in requests:
            engine.submit(request)
        while not engine.idle:
            watch.outputs |= {chunk.request_id: chunk.output for chunk in engine.step() if chunk.output is not None}
    of = {sequence.request.id: sequence for sequence in watch.of}
    return Timeline(
        signals=engine.mode.name,
        lateness=engine.lateness,
        segments=engine.model.shape.segments,
        turns=watch.turn + 1,
        lanes=tuple(_lane(watch, of[request.id]) for request in requests),
    )


@contextmanager
def _watching(engine: Engine) -> Iterator[_Watch]:
    """Look at what goes into the runner and what comes to the scheduler."""
    watch, runner, scheduler = _Watch(), engine.runner, engine.scheduler
    run: Callable[[Plan], Any] = runner.run
    update: Callable[[Plan, Any], Any] = scheduler.update

    def watched_run(plan: Plan) -> Any:
        watch.began(plan)
        return run(plan)

    def watched_update(plan: Plan, result: Result | LateResult) -> Any:
        if isinstance(result, Result):
            for n, row in enumerate(plan.rows):
                watch.heard(row.sequence, result.reads.get(n), row, None)
        else:
            result = replace(result, outcomes=list(result.outcomes))
            for outcome in result.outcomes:
                watch.heard(*outcome)
        return update(plan, result)

    vars(runner)["run"], vars(scheduler)["update"] = watched_run, watched_update
    try:
        yield watch
    finally:
        del vars(runner)["run"], vars(scheduler)["update"]


def _lane(watch: _Watch, sequence: Running) -> Lane:
    """One request's rows and tokens, in order of turns. A token leaves as a turn begins, or as one ends."""
    output = watch.outputs[sequence.request.id]
    depths, heard = output.depths, iter(watch.tokens[sequence])
    rows: list[Ran] = []
    left: list[Left] = []
    segment, said = 0, None  # the depth at which the policy said that the token leaves

    def leaves(boundary: int) -> None:
        left.append(Left(len(left), boundary, depths[len(left)], next(heard)))

    for turn, part in sorted(watch.of[sequence].items()):
        if part.leave is not None and len(left) < len(depths):
            leaves(turn)
            segment, said = 0, None
        row = part.row
        if row is None:
            continue
        if row.prefill:
            rows.append(Ran(turn, -1, row.depth, row.length, "prompt", part.heard))
        else:
            segment += 1
            kind: Kind = "own" if said is None else "late"
            if len(left) == len(depths):
                kind = "wasted" if output.usage.segments_wasted else "idle"
            rows.append(Ran(turn, len(left), segment, 1, kind, part.heard))
        if part.leave is None and part.read is not None and len(left) < len(depths):
            leaves(turn + 1)
            segment, said = 0, None
        elif part.leaves:
            said = segment
    return Lane(output=output, rows=tuple(rows), left=tuple(left))
