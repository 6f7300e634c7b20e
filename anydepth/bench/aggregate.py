"""What a bench's samples say: pure functions of the samples, in the order in which they were written.

A sample is one run: (loop, cell, repetition). Those of one block (one concurrency, or the open loop) were measured in
one process in shuffled order, and ratios are formed within a block only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from anydepth.bench.differences import Answer, compare, unpack
from anydepth.bench.roofline import Work, spread
from anydepth.bench.throughput import Timing, summarise
from anydepth.record import Sample

Runs = list[Sample]  # the repetitions of one cell in one block


def aggregate(samples: Sequence[Sample]) -> dict[str, Any]:
    """`rows`: one a cell and concurrency. `batch_variance`: one a cell and pair of concurrencies. `arrivals`: one a
    cell of the open loop.

    A figure is the median over repetitions, with `_low` and `_high` beside it. The names of speed-ups and shares are
    those of `throughput.Throughput`. `repetitions_differ` counts requests of later repetitions that were answered
    otherwise than in the first; `repeats_differ` those whose prompt stood in the same run before; batch_variance those
    that were answered otherwise at the other concurrency (`differences.compare`).
    """
    blocks: dict[str, dict[str, Runs]] = {}
    for sample in samples:
        blocks.setdefault(sample["block"], {}).setdefault(sample["cell"], []).append(sample)
    for cells in blocks.values():
        for runs in cells.values():
            runs.sort(key=lambda run: run["answer_index"])
    closed = [cells for cells in blocks.values() if _first(cells)["concurrency"] is not None]
    opened = [cells for cells in blocks.values() if _first(cells)["concurrency"] is None]
    return {
        "rows": [_closed_row(runs, next(iter(cells.values()))) for cells in closed for runs in cells.values()],
        "batch_variance": [
            _batch_variance(one[name], other[name]) for one, other in combinations(closed, 2) for name in one
        ],
        "arrivals": [_open_row(runs) for cells in opened for runs in cells.values()],
    }


def _first(cells: Mapping[str, Runs]) -> Sample:
    return next(iter(cells.values()))[0]


def _closed_row(runs: Runs, base: Runs) -> dict[str, Any]:
    first = runs[0]
    found = summarise(first["cell"], [_timing(run) for run in runs], [_timing(run) for run in base])
    return {
        "concurrency": first["concurrency"],
        **found.asdict(),
        "requests": first["requests"],
        "repetitions": len(runs),
        **_range("questions_per_s", [run["requests"] / run["seconds"] for run in runs]),
        **_range("flops_per_s", [run["flops"] / run["seconds"] for run in runs]),
        **_range("bytes_per_s", [run["bytes"] / run["seconds"] for run in runs]),
        "machine_flops_per_s": first["machine_flops_per_s"],
        "machine_bytes_per_s": first["machine_bytes_per_s"],
        **_shared(runs, latencies=("first_token_s", "inter_token_s")),
        "kv_peak_bytes": max(run["kv_peak_bytes"] for run in runs),
    }


def _open_row(runs: Runs) -> dict[str, Any]:
    first = runs[0]
    return {
        "name": first["cell"],
        "requests": first["requests"],
        "repetitions": len(runs),
        "tokens": first["tokens"],
        "offered_requests_per_s": first["offered_requests_per_s"],
        **_range("requests_per_s", [run["requests"] / run["duration_s"] for run in runs]),
        **_range("tokens_per_s", [run["tokens"] / run["duration_s"] for run in runs]),
        **_shared(runs, latencies=("first_token_s", "inter_token_s", "end_to_end_s")),
        **_range("drain_s", [run["drain_s"] for run in runs]),
        "most_waiting": max(run["most_waiting"] for run in runs),
        "kept_up": None if first["kept_up"] is None else all(run["kept_up"] for run in runs),
    }


def _shared(runs: Runs, *, latencies: Sequence[str]) -> dict[str, Any]:
    """Figures that closed and open loops have alike."""
    first = runs[0]
    answers = [unpack(run, first) for run in runs]
    decoded = first["decode_tokens"]
    found: dict[str, Any] = {
        "mean_depth": first["segments_read"] / decoded if decoded else None,
        "segments_executed_per_question": first["segments_executed"] / first["requests"],
    }
    for name in latencies:
        for quantile in ("p50", "p95", "p99"):
            found |= _range(f"{name}_{quantile}", [run[f"{name}_{quantile}"] for run in runs])
    return found | {
        **_range("peak_memory_bytes", [run["peak_memory_bytes"] for run in runs]),
        "peak_memory_of": first["peak_memory_of"],
        "pages_peak": max(run["pages_peak"] for run in runs),
        "repetitions_differ": compare(
            (repetition, request, *pair)
            for repetition, later in enumerate(answers[1:], 1)
            for request, pair in enumerate(zip(answers[0], later, strict=True))
        ),
        "repeats_differ": compare(
            (repetition, request, given[before], given[request])
            for repetition, given in enumerate(answers)
            for before, request in _repeats(first["prompts"])
        ),
    }


def _batch_variance(one: Runs, other: Runs) -> dict[str, Any]:
    """The requests that both concurrencies have, repetition by repetition."""

    def answers(runs: Runs) -> list[list[Answer]]:
        return [unpack(run, runs[0]) for run in runs]

    return {
        "name": one[0]["cell"],
        "concurrency": [one[0]["concurrency"], other[0]["concurrency"]],
        **compare(
            (repetition, request, *pair)
            for repetition, both in enumerate(zip(answers(one), answers(other), strict=True))
            for request, pair in enumerate(zip(*both, strict=False))
        ),
    }


def _repeats(prompts: Sequence[int]) -> list[tuple[int, int]]:
    """(request, later request) of the same prompt; the earlier one is the prompt's first."""
    first: dict[int, int] = {}
    return [(first[p], at) for at, p in enumerate(prompts) if first.setdefault(p, at) != at]


def _timing(run: Sample) -> Timing:
    return Timing(run["seconds"], run["tokens"], Work(run["flops"], run["bytes"], run["bound_s"]))


def _range(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    """Median, least and most; nothing where a value is missing."""
    known = [value for value in values if value is not None]
    figures = spread(known) if len(known) == len(values) else (None, None, None)
    return dict(zip((name, f"{name}_low", f"{name}_high"), figures, strict=True))
