"""Drive an engine and write down when each token came out.

Two ways to offer work. A closed loop keeps so many requests in flight and submits the next one when one has ended. An
open loop submits each request when its time has come, whatever the engine is doing: a slow engine gets a queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from anydepth.engine.scheduler import Scheduler
from anydepth.types import Chunk, Output, Request


class Driven(Protocol):
    """What a loop needs of an engine."""

    @property
    def idle(self) -> bool: ...

    @property
    def scheduler(self) -> Scheduler: ...

    def submit(self, prompt: Request, /) -> Request: ...

    def step(self) -> list[Chunk]: ...


class Clock(NamedTuple):
    """Seconds from any beginning, and a way to let them pass."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep


class Quantiles(NamedTuple):
    """50th, 95th and 99th percentile, linear between the two nearest values (numpy's default)."""

    p50: float
    p95: float
    p99: float


@dataclass(kw_only=True)
class Seen:
    """What came out of an engine. Times are the clock's; a token's is that of the end of its turn.

    A turn lasts from the end of the one before, so that turns add up to the whole time. A request is due when it is
    submitted in a closed loop, and at its arrival in an open one. `most_waiting`: the most requests that a turn left
    without a slot.
    """

    begin_s: float
    turn_ends_s: list[float] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    due_s: dict[str, float] = field(default_factory=dict)
    tokens_s: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)
    most_waiting: int = 0

    def turns_s(self) -> list[float]:
        """Seconds of each turn."""
        return [end - start for start, end in pairwise([self.begin_s, *self.turn_ends_s])]

    def first_token_s(self) -> list[float]:
        """Seconds from due to the first token, a request."""
        return [times[0] - self.due_s[id] for id, times in self.tokens_s.items()]

    def inter_token_s(self) -> list[float]:
        """Seconds between consecutive tokens of one request, for all requests."""
        return [after - before for times in self.tokens_s.values() for before, after in pairwise(times)]

    def end_to_end_s(self) -> list[float]:
        """Seconds from due to the last token, a request."""
        return [times[-1] - self.due_s[id] for id, times in self.tokens_s.items()]

    @property
    def duration_s(self) -> float:
        """From the beginning to the last token."""
        return self.turn_ends_s[-1] - self.begin_s


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """None where there are no values. quantiles([1, 2, 3, 4]) is (2.5, 3.85, 3.97)."""
    found = list(values)
    return Quantiles(*map(float, np.percentile(found, (50, 95, 99)))) if found else None


def closed_loop(
    engine: Driven,
    requests: Sequence[Request],
    *,
    concurrency: int,
    settle: Callable[[], object] | None,
    clock: Clock = Clock(),  # noqa: B008 - immutable
) -> Seen:
    """Answer all requests, `concurrency` in flight. settle: waits until the device has done what it was given."""
    seen = Seen(begin_s=clock.now())
    waiting, flying = deque(requests), 0
    while waiting or flying:
        while waiting and flying < concurrency:
            request = engine.submit(waiting.popleft())
            seen.due_s[request.id], seen.tokens_s[request.id] = clock.now(), []
            flying += 1
        flying -= _turn(engine, seen, clock.now, settle)
    return seen


def open_loop(
    engine: Driven,
    requests: Sequence[Request],
    due_s: Sequence[float],
    *,
    settle: Callable[[], object] | None,
    clock: Clock = Clock(),  # noqa: B008 - immutable
) -> Seen:
    """Submit each request as soon as a turn ends after its time (`due_s`, ascending, from the beginning), and sleep
    while there is nothing to do. Latencies count from the time a request was due, not from its submission."""
    seen = Seen(begin_s=clock.now())
    coming = deque(zip(requests, due_s, strict=True))
    while coming or not engine.idle:
        now = clock.now() - seen.begin_s
        while coming and coming[0][1] <= now:
            request, due = coming.popleft()
            engine.submit(request)
            seen.due_s[request.id], seen.tokens_s[request.id] = seen.begin_s + due, []
        if engine.idle:
            clock.sleep(coming[0][1] - now)
            continue
        _turn(engine, seen, clock.now, settle)
        seen.most_waiting = max(seen.most_waiting, len(engine.scheduler.waiting))
    return seen


def _turn(engine: Driven, seen: Seen, now: Callable[[], float], settle: Callable[[], object] | None) -> int:
    """One step; how many requests ended in it. What is done here is timed along with the engine: keep it short."""
    ended = 0
    chunks = engine.step()
    if settle is not None:
        settle()
    end_s = now()
    seen.turn_ends_s.append(end_s)
    seen.turn_tokens.append(len(chunks))
    for chunk in chunks:
        seen.tokens_s[chunk.request_id].append(end_s)
        if chunk.output is not None:
            seen.outputs[chunk.request_id] = chunk.output
            ended += 1
    return ended


def settle_on(device: torch.device) -> Callable[[], object] | None:
    """Waits until the device is done: on CUDA work is only queued. None on a CPU, where it is done already."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
