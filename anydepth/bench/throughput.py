"""Throughput on matched work: every cell decodes the same number of tokens for the same prompts.

Each run has a fresh engine; the order of runs is shuffled; a cell's figure is the median over repetitions with its
range; ratios are of runs of one call only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from anydepth.bench.drive import Quantiles, closed_loop, quantiles, settle_on
from anydepth.bench.memory import UNMEASURED, Peak, watch_peak
from anydepth.bench.roofline import Machine, Work, bound, measure_machine, spread
from anydepth.engine.engine import Engine
from anydepth.engine.philox import derive
from anydepth.exits.load import policy_name
from anydepth.models.base import Model
from anydepth.profile import Profile
from anydepth.types import Output, Request, Sampling

WORTHWHILE = 1.1  # below this S_max the shares of a gain say nothing
PAGE_SIZE = 16


@dataclass(frozen=True)
class Cell:
    """One setting to time: a policy with its parameters, a fill (None: the model's default), a mode of signals and how
    late they come (None: the mode's default), and the profile that the policy reads."""

    name: str
    sampling: Sampling
    fill: str | None = None
    signals: str = "sync"
    lateness: int | None = None
    profile: Profile | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of its engine."""
        profiles = {} if self.profile is None else {"profiles": (self.profile,)}
        return {"fill": self.fill, "signals": self.signals, "lateness": self.lateness, **profiles}


@dataclass(frozen=True)
class Timing:
    """One run: seconds spent, tokens that came out, and the least work that the same turns could have been.

    The rest is of the whole run, prompts included: `outputs` in the order of the prompts, seconds from a request's
    submission to its first token and between two tokens of one request, peak memory, and peak pages of K/V.
    """

    seconds: float
    tokens: int
    work: Work
    outputs: tuple[Output, ...] = ()
    first_token_s: Quantiles | None = None
    inter_token_s: Quantiles | None = None
    memory: Peak = UNMEASURED
    pages_peak: int = 0
    kv_peak_bytes: int = 0


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
    is called after every run.
    """
    timings: dict[str, list[Timing]] = {cell.name: [] for cell in cells}
    runs = timed_runs(
        model,
        cells,
        prompts,
        lengths,
        measure_machine(model),
        concurrency=concurrency,
        repetitions=repetitions,
        decode_only=decode_only,
        shuffle=random.Random(seed),
        seed=seed,
    )
    for done, (cell, _, timing) in enumerate(runs, 1):
        timings[cell.name].append(timing)
        if progress:
            progress(done, len(cells) * repetitions)
    base = timings[cells[0].name]
    return [summarise(cell.name, timings[cell.name], base) for cell in cells]


def timed_runs(
    model: Model,
    cells: Sequence[Cell],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    machine: Machine,
    *,
    concurrency: int,
    repetitions: int,
    shuffle: random.Random,
    seed: int = 0,
    decode_only: bool = False,
) -> Iterator[tuple[Cell, int, Timing]]:
    """Every (cell, repetition) once, in shuffled order, as it is done, after a warm-up."""
    warm_up(model, cells, prompts[:concurrency], lengths[:concurrency], concurrency=concurrency)
    order = [(cell, repetition) for cell in cells for repetition in range(repetitions)]
    shuffle.shuffle(order)
    for cell, repetition in order:
        yield (
            cell,
            repetition,
            run_cell(
                model,
                cell,
                prompts,
                lengths,
                machine,
                concurrency=concurrency,
                decode_only=decode_only,
                seed=seed,
            ),
        )


def warm_up(
    model: Model,
    cells: Sequence[Cell],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    concurrency: int,
) -> None:
    """Run each policy in each kind of engine once, uncounted."""
    for cell in {(*cell.options.values(), policy_name(cell.sampling)): cell for cell in reversed(cells)}.values():
        run_cell(model, cell, prompts, lengths, Machine(1.0, 1.0), concurrency=concurrency)


def run_cell(
    model: Model,
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    machine: Machine,
    *,
    concurrency: int,
    decode_only: bool = False,
    seed: int = 0,
) -> Timing:
    """One run of one cell in a fresh engine, `concurrency` requests in flight."""
    peak = watch_peak(model.device)
    positions = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
    pages = concurrency * (positions // PAGE_SIZE + 1)
    engine = Engine(
        model, **cell.options, max_batch=concurrency, page_size=PAGE_SIZE, kv_pages=pages, prefix_sharing=False
    )
    engine.work = []
    requests = matched_requests(engine, cell, prompts, lengths, seed=seed)
    seen = closed_loop(engine, requests, concurrency=concurrency, settle=settle_on(model.device))
    memory, stats, pool = peak(), engine.stats(), engine.slots.pool
    turns_s = seen.turns_s()
    counted = [i for i, work in enumerate(engine.work) if not (decode_only and work.prefill_rows)]
    return Timing(
        seconds=sum(turns_s[i] for i in counted),
        tokens=sum(seen.turn_tokens[i] for i in counted),
        work=bound(model, [engine.work[i] for i in counted], machine),
        outputs=tuple(seen.outputs[request.id] for request in requests),
        first_token_s=quantiles(seen.first_token_s()),
        inter_token_s=quantiles(seen.inter_token_s()),
        memory=memory,
        pages_peak=stats["pages_peak"],
        kv_peak_bytes=stats["pages_peak"] * stats["kv_bytes"] // pool.pages,
    )


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


def matched_requests(
    engine: Engine, cell: Cell, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, seed: int
) -> list[Request]:
    """Requests that decode exactly `lengths` tokens: no end-of-text, no stop strings. What is drawn at a temperature
    depends on the prompt and the seed (the cell's own, where it has one), so equal prompts are answered alike."""
    own = cell.sampling.seed
    first: dict[tuple[int, ...], int] = {}
    asks = []
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        drawn = derive(seed if own is None else own, first.setdefault(tuple(prompt), index), 0)
        ask = replace(cell.sampling, max_tokens=length, ignore_eos=True, stop=(), stop_token_ids=(), n=1)
        asks.append(engine.prepare(prompt, ask, seed=drawn, streaming=False))
    return asks
