"""What the timing itself costs: the same cell with and without it, turn by turn in one process."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from time import perf_counter
from typing import NamedTuple

from anydepth.bench.drive import closed_loop, settle_on
from anydepth.bench.roofline import spread
from anydepth.bench.throughput import PAGE_SIZE, Cell, matched_requests
from anydepth.engine.engine import Engine
from anydepth.engine.scheduler import Scheduler
from anydepth.models.base import Model
from anydepth.types import Chunk, Request


class Overhead(NamedTuple):
    """`share`: median over pairs of turns of (seconds with timing / seconds without) - 1, with its 95 % interval by
    order statistics; `turn_s`: a plain turn's median."""

    share: float
    low: float
    high: float
    turn_s: float
    turns: int


class Pair:
    """Two engines with the same requests: one that the timed loop drives, and one that is only stepped, in the same
    turn. Which goes first alternates, since the second finds the weights in cache."""

    def __init__(self, timed: Engine, plain: Engine) -> None:
        self.timed, self.plain = timed, plain
        self.settle = settle_on(timed.model.device)
        self.seconds: list[tuple[float, float]] = []
        self._left = perf_counter()

    @property
    def idle(self) -> bool:
        return self.timed.idle

    @property
    def scheduler(self) -> Scheduler:
        return self.timed.scheduler

    def submit(self, request: Request, /) -> Request:
        submitted = self.timed.submit(request)
        self._left = perf_counter()  # submitting is no part of a turn: the plain engine was given all at once
        return submitted

    def step(self) -> list[Chunk]:
        around_s = perf_counter() - self._left  # what the loop did since the last turn
        plain_s = 0.0
        if plain_first := bool(len(self.seconds) % 2):
            plain_s = self._step_plain()
        start = perf_counter()
        chunks = self.timed.step()
        if self.settle is not None:
            self.settle()
        timed_s = perf_counter() - start
        if not plain_first:
            plain_s = self._step_plain()
        self.seconds.append((around_s + timed_s, plain_s))
        self._left = perf_counter()
        return chunks

    def _step_plain(self) -> float:
        start = perf_counter()
        self.plain.step()
        if self.settle is not None:
            self.settle()
        return perf_counter() - start


def timing_overhead(
    model: Model,
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    concurrency: int,
    runs: int = 3,
) -> Overhead:
    """Run a cell `runs` times both ways, a turn of each after the other, so that whatever else the machine does
    disturbs both alike."""
    seconds: list[tuple[float, float]] = []
    pages = concurrency * ((max(map(len, prompts)) + max(lengths)) // PAGE_SIZE + 1)
    for _ in range(runs):
        engines = [
            Engine(model, **cell.options, max_batch=concurrency, page_size=PAGE_SIZE, kv_pages=pages) for _ in range(2)
        ]
        asks, plain = (matched_requests(engine, cell, prompts, lengths, seed=0) for engine in engines)
        for request in plain:
            engines[1].submit(request)
        engines[0].work = []
        pair = Pair(*engines)
        closed_loop(pair, asks, concurrency=concurrency, settle=None)  # the pair settles each of the two
        assert engines[1].idle
        seconds += pair.seconds
    ratios = sorted(timed / plain - 1 for timed, plain in seconds)
    reach = max(0, int(len(ratios) / 2 - 0.98 * sqrt(len(ratios))))
    turn_s = spread(plain for _, plain in seconds)[0]
    return Overhead(spread(ratios)[0], ratios[reach], ratios[-1 - reach], turn_s, len(ratios))
