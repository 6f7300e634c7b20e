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
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from large_model import LARGE, random_ouro

from anydepth.bench.roofline import spread
from anydepth.bench.rows import write_rows
from anydepth.engine.engine import Engine
from anydepth.engine.plan import TurnWork
from anydepth.models.base import Model
from anydepth.models.load import load_checkpoint
from anydepth.models.nano.questions import questions
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
            asked = nano_asked(checkpoint, concurrency) if name == "nano" else random_asked(concurrency)
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


Asked = list[tuple[list[int], int]]  # a prompt, and how long its answer is


def nano_asked(checkpoint: Any, concurrency: int) -> Asked:
    """The longest explanations, each as long as the right answer."""
    chosen = [q for q in questions("validation") if q.kind == "why" and q.difficulty == 6][:concurrency]
    encode = checkpoint.tokenizer.encode
    return [(encode(question.prompt), len(encode(question.answer))) for question in chosen]


def random_asked(concurrency: int) -> Asked:
    """Answers of 33 tokens: the first comes from the prompt, the others are whole intervals."""
    draw = random.Random(0)
    return [([draw.randrange(LARGE["vocab_size"]) for _ in range(24)], 33) for _ in range(concurrency)]


def with_setting(asked: Asked, setting: dict[str, Any]) -> list[tuple[list[int], Sampling]]:
    return [(prompt, Sampling(max_tokens=length, ignore_eos=True, **setting)) for prompt, length in asked]


def compare(
    model: Model, times: Times, asked: list[tuple[list[int], Sampling]], *, pairs: int, rounds: int
) -> dict[str, Any]:
    """Medians (least, most) over the pairs, each of so many rounds."""
    engines = {fill: new_engine(model, fill, asked) for fill in FILLS}
    depths = {fill: decode(engine, asked)[1] for fill, engine in engines.items()}
    assert depths["deferred"] == depths["full"], "`deferred` reads other tokens or depths than `full`"
    runs: dict[str, list[Run]] = {fill: [] for fill in FILLS}
    for _ in range(pairs):
        sums = dict.fromkeys(FILLS, Run(0, 0.0, 0.0, []))
        for n in range(rounds):
            for fill in FILLS if n % 2 else FILLS[::-1]:
                sums[fill] += decode(engines[fill], asked)[0]
        for fill in FILLS:
            runs[fill].append(sums[fill])
    predicted = {fill: sum(map(times.of, runs[fill][0].work)) for fill in FILLS}
    row: dict[str, Any] = {}
    for fill in FILLS:
        row[fill] = {
            "tokens_per_s": rounded(spread(run.tokens / run.wall_s for run in runs[fill])),
            "segments_per_token": round(sum(turn.decode_rows for turn in runs[fill][0].work) / runs[fill][0].tokens, 3),
            "turns": len(runs[fill][0].work),
            "predicted_share": round(predicted[fill] / min(run.cpu_s for run in runs[fill]), 3),
        }
    ratios = [one.cpu_s / full.cpu_s for one, full in zip(runs["deferred"], runs["full"], strict=True)]
    row["deferred_over_full"] = rounded(spread(ratios))
    row["predicted"] = round(predicted["deferred"] / predicted["full"], 4)
    if row["predicted"] < 0.97:
        row["saved_of_predicted"] = rounded(spread((1 - ratio) / (1 - row["predicted"]) for ratio in ratios))
    stats = engines["deferred"].stats()
    row["pending_peak"] = {name: stats[name] for name in ("pending_peak", "pending_peak_bytes", "pending_pool_bytes")}
    return row


def new_engine(model: Model, fill: str, asked: list[tuple[list[int], Sampling]]) -> Engine:
    pages = sum((len(prompt) + ask.max_tokens) // 16 + 1 for prompt, ask in asked)
    return Engine(model, fill=fill, max_batch=len(asked), kv_pages=pages, max_batched_tokens=4096, prefix_sharing=False)


def decode(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> tuple[Run, dict[str, Any]]:
    """Prefill all prompts together, then time the turns from the first without a prompt row to the end."""
    numbers = {engine.submit(prompt, ask).id: n for n, (prompt, ask) in enumerate(asked)}
    while engine.scheduler.waiting or any(sequence.prefilling for sequence in engine.scheduler.running.values()):
        engine.step()
    outputs = []
    engine.work = work = []
    cpu, wall = time.process_time(), time.perf_counter()
    while not engine.idle:
        outputs += [chunk.output for chunk in engine.step() if chunk.output]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    engine.work = None
    tokens = sum(output.usage.decode_tokens for output in outputs)
    said = {numbers[output.request_id]: (output.token_ids, output.depths) for output in outputs}
    return Run(tokens, cpu, wall, work), said


def describe(row: dict[str, Any]) -> str:
    speeds = "  ".join(f"{fill} {row[fill]['tokens_per_s'][0]:.0f}/s" for fill in FILLS)
    saved = f"  saved of predicted {row['saved_of_predicted']}" if "saved_of_predicted" in row else ""
    return (
        f"{row['model']} C={row['concurrency']} {row['setting']}: {speeds}  deferred/full {row['deferred_over_full']}, "
        f"predicted {row['predicted']}{saved}  predicted share {[row[fill]['predicted_share'] for fill in FILLS]}"
    )


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 4) for value in values]


if __name__ == "__main__":
    main()
