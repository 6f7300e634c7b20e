"""A pipeline of two processes on this machine: its throughput beside what the machine allows.

Decode rows go through in micro-batches; each reads the weights of every stage once (not the embedding, but the last
stage's LM head) and the K/V of its rows. The slower stage sets the pace, and memory is shared. Three predictions:

- bound: a stage needs max(FLOPs / peak, bytes / bandwidth), both of one process while the other works too; and the two
  together read no more than both were seen to read at once.
- products: a stage needs the time of its matrix products for a micro-batch, measured while the other's are; that has
  weights read once and bandwidth shared, at the speed that these products reach for so few rows.
- workers: a stage needs the time of its worker for a micro-batch, with K/V, attention, norms and sampling, measured
  while the other's is; what is lost to this is lost between workers.

All are measured before, between and after the runs: of seconds the median is taken, of peaks the largest. Throughput is
of the time in which all requests decode.

    python benchmarks/pipeline.py --out runs/pipeline            # SmolLM2-135M, C = 32, micro-batches of 8: 2 minutes
    python benchmarks/pipeline.py --out runs/tiny --tokens 8 --requests 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from threading import Barrier
from typing import Any, NamedTuple

import torch

from anydepth.bench.roofline import Machine, measure_machine
from anydepth.bench.rows import write_rows
from anydepth.models.load import load_checkpoint
from anydepth.ops.linear import linear
from anydepth.pipeline.export import export_segments, outline, read_artifacts
from anydepth.pipeline.manifest import Manifest, Stage
from anydepth.pipeline.messages import Batch, Row, Seat
from anydepth.pipeline.part import Part
from anydepth.pipeline.router import Router
from anydepth.pipeline.worker import Worker
from anydepth.types import Sampling

PROMPT_TOKENS = 16


class Measured(NamedTuple):
    """What a stage's process reaches while the others work too: its peak and bandwidth, and seconds that a micro-batch
    takes for its products, and in its worker."""

    machine: Machine
    products_s: float
    worker_s: float


class Predicted(NamedTuple):
    """Seconds of a micro-batch in each stage by FLOPs and bytes, of reading all their bytes together, and the tokens/s
    that follow from these, from the products and from the workers."""

    stage_s: tuple[float, ...]
    memory_s: float
    bound_tokens_per_s: float
    products_tokens_per_s: float
    workers_tokens_per_s: float


def manifest_of(model: str, exits: tuple[int, ...], *, requests: int, micro_batch: int) -> Manifest:
    """Two stages, one process each, read at the end only."""
    stages = tuple(Stage(segments=(n,), place="process", device=("cpu",)) for n in range(1, len(exits) + 1))
    return Manifest(
        model=model,
        segments=exits,
        readouts=exits[-1:],
        stages=stages,
        dtype="float32",
        max_batch=requests,
        micro_batch=micro_batch,
        kv_pages=requests * 16,
    )


def measured_in(artifacts: str, manifest: Manifest, stage: int, rows: int, context: int, together: Barrier) -> Measured:
    """Of one stage, a process for each; they begin every measurement together."""
    torch.set_num_threads(manifest.threads)
    own = [read_artifacts(artifacts, manifest)[segment - 1] for segment in manifest.stages[stage].segments]
    part = Part(own, dtype=manifest.dtype, device="cpu")
    decode = decoding(part, manifest, rows, context)
    together.wait()
    products_s = median_s(lambda: products(part, rows))
    together.wait()
    worker_s = median_s(decode)
    part.shape = replace(part.shape, segment_layers=(part.shape.segment_layers[part.own[0] - 1],))
    together.wait()
    return Measured(measure_machine(part), products_s, worker_s)


@torch.inference_mode()
def products(part: Part, rows: int) -> None:
    """The products of a micro-batch with all matrices of a part."""
    wide = part.layers[part.first_layer].shape
    x, inner, attended = (torch.ones(rows, size) for size in (wide.hidden, wide.inner, wide.heads * wide.head_dim))
    for k in part.own:
        for layer in (part.layers[index] for index in part.shape.segment_layers[k - 1]):
            linear(x, layer.qkv)
            linear(attended, layer.o)
            linear(x, layer.gate_up)
            linear(inner, layer.down)
        if k == part.shape.segments:
            part.readout(k, x)


def decoding(part: Part, manifest: Manifest, rows: int, context: int) -> Callable[[], None]:
    """A worker's micro-batch, of rows that each see `context` positions."""
    sizes = {"slots": manifest.max_batch, "pages": manifest.pages, "page_size": manifest.page_size}
    worker = Worker(part, **sizes, fill=manifest.fill)
    last, greedy = part.shape.segments, Sampling(max_tokens=context)
    ids, h = (tuple(range(rows)), None) if part.is_first else ((), torch.ones(rows, part.shape.hidden))

    def decode(position: int, seats: tuple[Seat, ...] = ()) -> None:
        decoded = tuple(Row(key, position, 1, 1, last) for key in range(rows))
        worker.run(Batch(epoch=0, number=0, released=(), seats=seats, rows=decoded, ids=ids, h=h))

    decode(0, tuple(Seat(key, context, greedy, 0, context, last) for key in range(rows)))
    for position in range(1, context):
        decode(position)
    return partial(decode, context - 1)


def median_s(function: Callable[[], None], repetitions: int = 60) -> float:
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def measure(artifacts: str, manifest: Manifest, rows: int, context: int) -> list[Measured]:
    """Every stage, measured while the others are."""
    count = len(manifest.stages)
    with get_context("spawn").Manager() as manager, ProcessPoolExecutor(count, get_context("spawn")) as pool:
        together = manager.Barrier(count)
        each = partial(measured_in, artifacts, manifest, rows=rows, context=context, together=together)
        return list(pool.map(each, range(count)))


def of_several(several: Sequence[Measured]) -> Measured:
    """One stage, measured several times."""
    machines, products_s, worker_s = zip(*several, strict=True)
    return Measured(Machine(*map(max, zip(*machines, strict=True))), median(products_s), median(worker_s))


def predict(artifacts: str, manifest: Manifest, stages: list[Measured], *, rows: int, context: int) -> Predicted:
    """What the machine allows a micro-batch of `rows` whose contexts have `context` positions on average."""
    found = read_artifacts(artifacts, manifest)
    model = outline(found[0].config, manifest.segments)
    stage_s, total_bytes = [], 0.0
    for stage, (machine, *_) in zip(manifest.stages, stages, strict=True):
        costs = [model.cost("segment", k, context) for k in stage.segments]
        costs += [model.cost("readout", k, context) for k in stage.segments if model.shape.segments == k]
        flops = rows * sum(cost.flops_per_row for cost in costs)
        moved = sum(cost.weight_bytes_per_turn + rows * cost.bytes_per_row for cost in costs)
        stage_s.append(max(flops / machine.flops_per_s, moved / machine.bytes_per_s))
        total_bytes += moved
    memory_s = total_bytes / sum(stage.machine.bytes_per_s for stage in stages)
    return Predicted(
        tuple(stage_s),
        memory_s,
        bound_tokens_per_s=rows / max(*stage_s, memory_s),
        products_tokens_per_s=rows / max(stage.products_s for stage in stages),
        workers_tokens_per_s=rows / max(stage.worker_s for stage in stages),
    )


def run(artifacts: str, manifest: Manifest, *, tokens: int, requests: int) -> float:
    """tokens/s while all requests decode."""
    arrived, first = dict.fromkeys(map(str, range(requests)), 0), 0.0
    with Router(manifest, artifacts) as router:
        vocabulary = router.shape.vocab
        for n in range(requests):
            prompt = [(7 * n + 13 * m) % vocabulary for m in range(PROMPT_TOKENS)]
            router.submit(prompt, Sampling(max_tokens=tokens, ignore_eos=True), id=str(n))
        counted = last = 0.0
        while not router.idle:
            for chunk in router.step():
                arrived[chunk.request_id] += chunk.token_id is not None
                if not first and min(arrived.values()) >= 1:
                    first, counted = time.perf_counter(), float(sum(arrived.values()))
                if not last and chunk.finish_reason:
                    last, counted = time.perf_counter(), sum(arrived.values()) - counted
    return counted / (last - first)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--exits", default="19,30", help="last layer of each stage; 30 layers and a head of eight")
    options.add_argument("--requests", type=int, default=32)
    options.add_argument("--micro-batch", type=int, default=8)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--repetitions", type=int, default=3)
    asked = options.parse_args()
    exits = tuple(map(int, asked.exits.split(",")))
    manifest = manifest_of(asked.model, exits, requests=asked.requests, micro_batch=asked.micro_batch)
    artifacts = str(export_segments(manifest, asked.out / "artifacts"))
    rows, context = min(asked.micro_batch, -(-asked.requests // len(exits))), PROMPT_TOKENS + asked.tokens // 2
    speeds, found = list[float](), [measure(artifacts, manifest, rows, context)]
    for _ in range(asked.repetitions):
        speeds.append(run(artifacts, manifest, tokens=asked.tokens, requests=asked.requests))
        found.append(measure(artifacts, manifest, rows, context))
    stages = [of_several(each) for each in zip(*found, strict=True)]
    predicted = predict(artifacts, manifest, stages, rows=rows, context=context)
    for n, (stage, stage_s) in enumerate(zip(stages, predicted.stage_s, strict=True), 1):
        print(
            f"stage {n}: {stage.machine.flops_per_s / 1e9:.1f} GFLOP/s, {stage.machine.bytes_per_s / 1e9:.1f} GB/s; a "
            f"micro-batch of {rows} needs {1e3 * stage_s:.1f} ms by these, {1e3 * stage.products_s:.1f} ms for its "
            f"products, {1e3 * stage.worker_s:.1f} ms in its worker"
        )
    print(f"all stages' bytes together: {1e3 * predicted.memory_s:.1f} ms")
    spread = f"{min(speeds):.1f}-{max(speeds):.1f}"
    print(f"measured {median(speeds):.1f} tokens/s ({spread}; target 85 % of what is predicted)")
    for name, value in zip(("bound", "products", "workers"), predicted[2:], strict=True):
        print(f"predicted by {name}: {value:.1f} tokens/s, reached {100 * median(speeds) / value:.0f} %")
    record_rows: list[dict[str, Any]] = [
        {**stage._asdict(), "machine": stage.machine._asdict(), "measured": "stage", "stage": n}
        for n, stage in enumerate(stages, 1)
    ]
    record_rows.append({**predicted._asdict(), "measured": "pipeline", "tokens_per_s": speeds})
    torch.set_num_threads(manifest.threads)
    settings = vars(asked) | {"benchmark": "pipeline", "out": None}
    write_rows(asked.out, settings=settings, rows=record_rows, checkpoint=load_checkpoint(asked.model))


if __name__ == "__main__":
    main()
