"""What it brings to run deep segments later: fill `deferred` beside `full` at the same readout depths.

First the time of a segment's products for M rows, t(M) / t(1), on the model's own matrices. From these, with embedding,
head and the K/V that is read, follows what every engine should need for the turns it runs; that prediction stands
beside what it took. Decode only. The fills take turns on the same requests, round by round, and a pair is a ratio of
their sums. Time is that of the processor, since other programs share the machine (tokens/s are by the wall clock); all
runs on one thread.

    python benchmarks/deferred.py --out runs/deferred
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decode_only import decode, engine_for, nano_asked, random_asked, rounded, with_setting
from large_model import LARGE, random_ouro

from anydepth.bench.roofline import spread
from anydepth.bench.rows import write_rows
from anydepth.engine.engine import Engine
from anydepth.engine.plan import TurnWork
from anydepth.models.base import Model
from anydepth.models.load import load_checkpoint
from anydepth.types import Sampling

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FILLS = ("full", "deferred", "last_exited")
SHALLOW = 2
GATE_SPREAD, GATE_BIAS = 60.0, -1.0  # depths of 1 to 4 at both thresholds
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "interval": tuple({"interval": n, "shallow_depth": SHALLOW} for n in (1, 2, 4, 8)),
    "gate_cdf": ({"exit_threshold": 0.5}, {"exit_threshold": 0.7}),
}


class Run(NamedTuple):
    """Tokens decoded, seconds of the processor and of the clock on the wall, and the turns' work."""

    tokens: int
    cpu_s: float
    wall_s: float
    work: list[TurnWork]

    def __add__(self, other: Run) -> Run:  # type: ignore[override]
        return Run(*(a + b for a, b in zip(self, other, strict=True)))


class Times:
    """Seconds of a model's parts, each measured alone: a segment's products for M rows, in between on a straight line,
    the head for M rows, and reading a byte of K/V."""

    def __init__(self, model: Model) -> None:
        self.model = model
        hidden = model.shape.hidden
        self.segment = {rows: best(products(model, rows)) for rows in ROWS}
        self.head = {rows: best(lambda h: model.readout(1, h), torch.randn(rows, hidden)) for rows in ROWS[:6]}
        kv = torch.randn(1 << 22)
        self.kv_s_per_byte = best(kv.sum) / kv.nbytes

    def of(self, turn: TurnWork) -> float:
        """Seconds of one turn's products, head and K/V; the row of the table that embeds a token counts as K/V."""
        rows = turn.decode_rows + turn.prefill_rows
        item = self.model.cost("embed", 1, 0.0).bytes_per_row
        one = self.model.cost("segment", 1, 0.0).bytes_per_row  # K/V of one position that is written
        copies = sum(self.model.cost("copy", depth, 0.0).bytes_per_row for depth in turn.copies)
        moved = one * (turn.kv_read + rows) + item * turn.readout_rows + copies
        head = between(self.head, turn.readout_rows) if turn.readout_rows else 0.0
        return between(self.segment, rows) + head + moved * self.kv_s_per_byte


def products(model: Any, rows: int) -> Callable[[], object]:
    """All matrix products of a segment, without anything between them."""
    from anydepth.ops.linear import linear

    layers = [model.layers[n] for n in model.shape.segment_layers[0]]
    shape = layers[0].shape
    inputs = [
        torch.randn(rows, size) for size in (shape.hidden, shape.heads * shape.head_dim, shape.hidden, shape.inner)
    ]

    def run() -> None:
        for layer in layers:
            for x, matrix in zip(inputs, (layer.qkv, layer.o, layer.gate_up, layer.down), strict=True):
                linear(x, matrix)

    return run


@torch.inference_mode()
def best(call: Callable[..., object], *arguments: Any, repetitions: int = 7) -> float:
    """Seconds of the processor of the fastest of several timings, each of 20 ms or more."""
    call(*arguments)
    timings = []
    for _ in range(repetitions):
        calls, start, spent = 0, time.process_time(), 0.0
        while spent < 0.02:
            call(*arguments)
            calls, spent = calls + 1, time.process_time() - start
        timings.append(spent / calls)
    return min(timings)


def between(table: dict[int, float], rows: int) -> float:
    """The value for so many rows, on a straight line between its neighbours, or beyond the last one."""
    known = sorted(table)
    high = next((n for n in known[1:] if n >= rows), known[-1])
    low = known[known.index(high) - 1]
    return table[low] + (table[high] - table[low]) * (rows - low) / (high - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="nano,large")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--policies", default="interval,gate_cdf")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/deferred"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint("nano")
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        model = checkpoint.model if name == "nano" else gated_ouro()
        times = Times(model)
        relative = {n: round(seconds / times.segment[1], 3) for n, seconds in times.segment.items()}
        print(
            f"{name}: t(M) / t(1) of a segment's products, t(1) = {times.segment[1] * 1e3:.3f} ms: {relative}",
            flush=True,
        )
        rows.append({"model": name, "t_1_ms": round(times.segment[1] * 1e3, 4), "t_relative": relative})
        for concurrency in map(int, options.concurrency.split(",")):
            # 33 tokens: the first comes from the prompt, the others are whole intervals.
            asked = nano_asked(checkpoint, concurrency) if name == "nano" else random_asked(concurrency, tokens=33)
            rounds = max(1, (32 if name == "nano" else 2) // concurrency)
            for setting in (each for policy in options.policies.split(",") for each in SETTINGS[policy]):
                row = compare(model, times, with_setting(asked, setting), pairs=options.pairs, rounds=rounds)
                rows.append({"model": name, "concurrency": concurrency, "setting": setting} | row)
                print(describe(rows[-1]), flush=True)
    settings = {**vars(options), "benchmark": "deferred", "out": None}
    write_rows(options.out, settings=settings, rows=rows, checkpoint=checkpoint)


def gated_ouro() -> Model:
    """The large model with a gate whose hazards differ from token to token, so that depths do."""
    model = random_ouro(LARGE, seed=0)
    model.gate_weight.mul_(GATE_SPREAD)
    model.gate_bias.fill_(GATE_BIAS)
    return model


def compare(
    model: Model, times: Times, asked: list[tuple[list[int], Sampling]], *, pairs: int, rounds: int
) -> dict[str, Any]:
    """Medians (least, most) over the pairs, each of so many rounds."""
    engines = {fill: engine_for(model, asked, fill=fill) for fill in FILLS}
    said = {
        fill: [(output.token_ids, output.depths) for output in decode(engine, asked).outputs]
        for fill, engine in engines.items()
    }
    assert said["deferred"] == said["full"], "`deferred` reads other tokens or depths than `full`"
    runs: dict[str, list[Run]] = {fill: [] for fill in FILLS}
    for _ in range(pairs):
        sums = dict.fromkeys(FILLS, Run(0, 0.0, 0.0, []))
        for n in range(rounds):
            for fill in FILLS if n % 2 else FILLS[::-1]:
                sums[fill] += run(engines[fill], asked)
        for fill in FILLS:
            runs[fill].append(sums[fill])
    predicted = {fill: sum(map(times.of, runs[fill][0].work)) for fill in FILLS}
    row: dict[str, Any] = {}
    for fill in FILLS:
        row[fill] = {
            "tokens_per_s": rounded(spread(one.tokens / one.wall_s for one in runs[fill])),
            "segments_per_token": round(sum(turn.decode_rows for turn in runs[fill][0].work) / runs[fill][0].tokens, 3),
            "turns": len(runs[fill][0].work),
            "predicted_share": round(predicted[fill] / min(one.cpu_s for one in runs[fill]), 3),
        }
    ratios = [one.cpu_s / full.cpu_s for one, full in zip(runs["deferred"], runs["full"], strict=True)]
    row["deferred_over_full"] = rounded(spread(ratios))
    row["predicted"] = round(predicted["deferred"] / predicted["full"], 4)
    if row["predicted"] < 0.97:
        row["saved_of_predicted"] = rounded(spread((1 - ratio) / (1 - row["predicted"]) for ratio in ratios))
    stats = engines["deferred"].stats()
    row["pending_peak"] = {name: stats[name] for name in ("pending_peak", "pending_peak_bytes", "pending_pool_bytes")}
    return row


def run(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> Run:
    found = decode(engine, asked)
    return Run(sum(output.usage.decode_tokens for output in found.outputs), found.cpu_s, found.wall_s, found.work)


def describe(row: dict[str, Any]) -> str:
    speeds = "  ".join(f"{fill} {row[fill]['tokens_per_s'][0]:.0f}/s" for fill in FILLS)
    saved = f"  saved of predicted {row['saved_of_predicted']}" if "saved_of_predicted" in row else ""
    return (
        f"{row['model']} C={row['concurrency']} {row['setting']}: {speeds}  deferred/full {row['deferred_over_full']}, "
        f"predicted {row['predicted']}{saved}  predicted share {[row[fill]['predicted_share'] for fill in FILLS]}"
    )


if __name__ == "__main__":
    main()
