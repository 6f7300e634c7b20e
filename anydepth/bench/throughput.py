"""Throughput on matched work: every cell decodes the same number of tokens for the same prompts.

Each run has a fresh engine; the order of runs is shuffled; a cell's figure is the median over repetitions with its
range; ratios are of runs of one call only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from anydepth.bench.roofline import Machine, Work, bound, measure_machine, spread
from anydepth.engine.engine import Engine
from anydepth.models.base import Model
from anydepth.types import Request, Sampling

WORTHWHILE = 1.1  # below this S_max the shares of a gain say nothing


@dataclass(frozen=True)
class Cell:
    """One setting to time: a policy with its parameters, and a fill (None: the model's default)."""

    name: str
    sampling: Sampling
    fill: str | None = None


@dataclass(frozen=True)
class Timing:
    """One run: seconds spent, tokens that came out, and the least work that the same turns could have been."""

    seconds: float
    tokens: int
    work: Work


@dataclass(frozen=True)
class Throughput:
    """Median tokens/s of a cell with its range, beside what the machine and the policy allow.

    s = T(first cell) / T(this); s_max the same ratio of bounds (by time; by FLOPs in s_max_flops). share_of_bound =
    s / s_max; time_saved_share = (1 - 1/s) / (1 - 1/s_max) and share_of_gain = (s - 1) / (s_max - 1) are None where
    s_max is below 1.1. roofline_share = bound time / measured time.
    """

    name: str
    tokens_per_s: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    tokens: int
    s: float
    s_max: float
    s_max_flops: float
    share_of_bound: float
    share_of_gain: float | None
    time_saved_share: float | None
    roofline_share: float

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def matched_work(
    model: Model,
    cells: Sequence[Cell],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    concurrency: int = 32,
    repetitions: int = 3,
    decode_only: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> list[Throughput]:
    """Time every cell on the same prompts and answer lengths (tokens, one a prompt); the first cell is the baseline.

    decode_only leaves out turns that carry prompt tokens, in seconds and in the bound alike. `progress(done, total)`
    is called after every run. One warm-up run per fill is not counted.
    """
    machine = measure_machine(model)
    for fill in {cell.fill for cell in cells}:
        warm = next(cell for cell in cells if cell.fill == fill)
        run_cell(model, warm, prompts[:concurrency], lengths[:concurrency], machine, concurrency=concurrency)
    order = [cell for cell in cells for _ in range(repetitions)]
    random.Random(seed).shuffle(order)
    timings: dict[str, list[Timing]] = {cell.name: [] for cell in cells}
    for done, cell in enumerate(order, 1):
        timings[cell.name].append(
            run_cell(model, cell, prompts, lengths, machine, concurrency=concurrency, decode_only=decode_only)
        )
        if progress:
            progress(done, len(order))
    base = timings[cells[0].name]
    return [summarise(cell.name, timings[cell.name], base) for cell in cells]


def run_cell(
    model: Model,
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    machine: Machine,
    *,
    concurrency: int,
    decode_only: bool = False,
) -> Timing:
    """One run of one cell in a fresh engine."""
    positions = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    pages = concurrency * (positions // 16 + 1)
    engine = Engine(model, fill=cell.fill, max_batch=concurrency, page_size=16, kv_pages=pages)
    engine.work = []
    for request in _requests(engine, cell, prompts, lengths):
        engine.submit(request)
    turns: list[tuple[float, int]] = []
    while not engine.idle:
        start = time.perf_counter()
        chunks = engine.step()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        turns.append((time.perf_counter() - start, len(chunks)))
    counted = [i for i, work in enumerate(engine.work) if not (decode_only and work.prefill_rows)]
    work = bound(model, [engine.work[i] for i in counted], machine)
    return Timing(sum(turns[i][0] for i in counted), sum(turns[i][1] for i in counted), work)


def summarise(name: str, timings: Sequence[Timing], base: Sequence[Timing]) -> Throughput:
    """The figures of one cell against the baseline's timings of the same call."""
    speed, low, high = spread(t.tokens / t.seconds for t in timings)
    base_speed = spread(t.tokens / t.seconds for t in base)[0]
    mine, theirs = timings[0].work, base[0].work
    # decode-only cells may count a few tokens more or less (those that leave beside a prompt's chunk): per token
    per_token = [w.bound_s / t[0].tokens for w, t in ((theirs, base), (mine, timings))]
    flops = [w.flops / t[0].tokens for w, t in ((theirs, base), (mine, timings))]
    s, s_max = speed / base_speed, per_token[0] / per_token[1]
    gain = s_max >= WORTHWHILE
    return Throughput(
        name=name,
        tokens_per_s=speed,
        tokens_per_s_low=low,
        tokens_per_s_high=high,
        tokens=timings[0].tokens,
        s=s,
        s_max=s_max,
        s_max_flops=flops[0] / flops[1],
        share_of_bound=s / s_max,
        share_of_gain=(s - 1) / (s_max - 1) if gain else None,
        time_saved_share=(1 - 1 / s) / (1 - 1 / s_max) if gain else None,
        roofline_share=spread(t.work.bound_s / t.seconds for t in timings)[0],
    )


def _requests(engine: Engine, cell: Cell, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Request]:
    """Requests that decode exactly `lengths` tokens: no end-of-text, no stop strings."""
    asks = []
    for prompt, length in zip(prompts, lengths, strict=True):
        ask = replace(cell.sampling, max_tokens=length, ignore_eos=True, stop=(), stop_token_ids=())
        asks.append(engine.prepare(prompt, ask, streaming=False))
    return asks
