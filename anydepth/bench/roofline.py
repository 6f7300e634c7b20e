"""What the machine allows: measured peak and bandwidth, and the least time that a list of turns could have taken.

A turn's bound is max(FLOPs / peak, bytes / bandwidth) with every weight it touches read once; a run's is the sum over
its turns. Peak and bandwidth are measured on operands of the model's size, because a model that fits in cache is not
bounded by memory.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from anydepth.engine.plan import TurnWork
from anydepth.models.base import Cost, Model, Part
from anydepth.ops.linear import linear


class Machine(NamedTuple):
    """Measured limits of one device for one model."""

    flops_per_s: float
    bytes_per_s: float


class Work(NamedTuple):
    """FLOPs and bytes of some work, and the least time it needs on a Machine."""

    flops: float
    bytes: float
    bound_s: float


@torch.inference_mode()
def measure_machine(model: Model, *, rows: int = 512, repetitions: int = 7) -> Machine:
    """Peak from a product of `rows` rows with a matrix of the model's widest layer; bandwidth from reading as many
    bytes as a segment has weights, the faster of a sum and a matrix-vector product. Takes the best of `repetitions`."""
    shape = model.shape
    weights = model.cost("segment", 1, 0.0).weight_bytes_per_turn
    per_layer = int(weights / len(shape.segment_layers[0]) / torch.empty((), dtype=model.dtype).element_size())
    columns = max(1, per_layer // shape.hidden)
    matrices = [
        torch.randn(shape.hidden, columns, dtype=model.dtype, device=model.device) for _ in shape.segment_layers[0]
    ]
    many = torch.randn(rows, shape.hidden, dtype=model.dtype, device=model.device)

    def product() -> None:
        for matrix in matrices:
            linear(many, matrix)

    def vector() -> None:
        for matrix in matrices:
            linear(many[:1], matrix)

    def total() -> None:
        for matrix in matrices:
            matrix.sum()

    numbers = len(matrices) * shape.hidden * columns
    seconds = {f: _best(f, repetitions, model.device) for f in (product, vector, total)}
    read_bytes = numbers * matrices[0].element_size()
    return Machine(2.0 * rows * numbers / seconds[product], read_bytes / min(seconds[vector], seconds[total]))


def bound(model: Model, turns: Iterable[TurnWork], machine: Machine) -> Work:
    """Summed FLOPs, bytes and least time of turns."""
    flops = read = seconds = 0.0
    for turn in turns:
        turn_flops, turn_bytes = _turn(model, turn)
        flops, read = flops + turn_flops, read + turn_bytes
        seconds += max(turn_flops / machine.flops_per_s, turn_bytes / machine.bytes_per_s)
    return Work(flops, read, seconds)


def _turn(model: Model, turn: TurnWork) -> tuple[float, float]:
    """(FLOPs, bytes) of one turn. A part's cost is affine in context, so rows times the mean context is exact. With
    late signals a turn may run no segment at all."""
    rows = turn.decode_rows + turn.prefill_rows
    segment = model.cost("segment", turn.segment, turn.attended / max(rows, 1))
    reads = model.cost("segment", turn.segment, turn.kv_read / max(rows, 1))
    filled: Part = "copy" if model.shape.shared_weights else "project"
    parts: list[tuple[int, Cost]] = [
        *_made(model, turn),
        (turn.readout_rows, model.cost("embed", 1, 0.0)),
        *((count, model.cost(filled, depth, 0.0)) for depth, count in Counter(turn.copies).items()),
    ]
    flops = rows * segment.flops_per_row + sum(n * cost.flops_per_row for n, cost in parts)
    read = rows * reads.bytes_per_row + (rows > 0) * reads.weight_bytes_per_turn
    return flops, read + sum(n * cost.bytes_per_row + (n > 0) * cost.weight_bytes_per_turn for n, cost in parts)


def _made(model: Model, turn: TurnWork) -> list[tuple[int, Cost]]:
    """(rows, cost) of signals, logits, and of asking heads whether they answer. The unembedding, by which several of
    them may multiply, is read once."""
    rows = Counter[tuple[Part, int]]()
    for part, depth, count in (
        (("signal", turn.segment, turn.signal_rows), ("readout", turn.segment, turn.readout_rows))
        if turn.made is None
        else turn.made
    ):
        rows[part, 1 if model.shape.shared_weights else depth] += count  # type: ignore[index]
    found, whole = [], model.cost("readout", model.shape.segments, 0.0).weight_bytes_per_turn
    read = False
    for (part, depth), count in rows.items():
        cost = model.cost(part, depth, 0.0)
        weights = cost.weight_bytes_per_turn
        if part == "readout" and count and weights >= whole:
            weights, read = weights - whole * read, True
        found.append((count, cost._replace(weight_bytes_per_turn=weights)))
    return found


def _best(run: Callable[[], None], repetitions: int, device: torch.device) -> float:
    """Seconds of the fastest of several timings, each long enough (2 ms) for the clock."""
    run()
    timings = []
    for _ in range(repetitions):
        calls, start, spent = 0, time.perf_counter(), 0.0
        while spent < 2e-3:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            calls, spent = calls + 1, time.perf_counter() - start
        timings.append(spent / calls)
    return min(timings)


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """(median, least, most)."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[0], ordered[-1]
