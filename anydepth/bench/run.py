"""`anydepth bench`: cells on matched work at several concurrencies, and under arrivals, as one Record.

The unit of work is a block: all cells and repetitions of one concurrency (or of the open loop), in shuffled order in
one process, each run in a fresh engine. A block is written when it is complete, so that an interrupted bench goes on
with the next one and every ratio is of runs that stood side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anydepth.bench.aggregate import aggregate
from anydepth.bench.arrivals import Load, OpenTiming, load_prompts, replay
from anydepth.bench.differences import Answer, pack
from anydepth.bench.drive import Quantiles
from anydepth.bench.plan import OPEN, Plan, check_requests, natural_lengths
from anydepth.bench.roofline import Machine, measure_machine
from anydepth.bench.throughput import Cell, Timing, timed_runs, warm_up
from anydepth.models.load import Checkpoint
from anydepth.record import HEADER, Record, RecordWriter, Sample, write_atomically
from anydepth.types import Output

JOURNAL = "block.json"  # a block that was measured, until all of it is in the samples
WARM_UP_TOKENS = 16


def run_bench(
    checkpoint: Checkpoint,
    *,
    cells: Sequence[Cell],
    prompts: Sequence[Sequence[int]],
    out: str | Path,
    lengths: Sequence[int] | None = None,
    concurrency: Sequence[int] = (1, 8, 32),
    requests: int | None = None,
    repetitions: int = 3,
    arrivals: Load | None = None,
    max_batch: int = 32,
    task: Mapping[str, Any] | None = None,
    heads: tuple[str, str] | None = None,
    seed: int = 0,
    settings_passed: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Record:
    """Time the cells and return the Record in `out`; its aggregates are those of `aggregate.aggregate`.

    cells: the first is the baseline, whose policy is `never`. prompts: token ids; a run's requests have them in turn,
    so prompts that come more than once in a run show what the composition of the batch changes. lengths: tokens that
    each prompt's answer has in every cell; by default what the first cell answers, with its max_tokens and stops, the
    seed and the checkpoint's EOS ids. requests: a run's, by default four a slot and at least 16. arrivals: a load for
    the open loop, in an engine of max_batch slots, on prompts cut from the given ones; it takes its own time a run.
    task: name and hash of what the prompts are from, for the provenance; heads: folder and hash of the exit heads that
    the model has. seed: of the order and of what is drawn.
    progress: called with (runs done, runs in all); first with those of blocks found done.

    A Record that is there already is completed block by block; a complete one is returned as it is. Raises ValueError,
    before anything is timed, for cells that do not fit the model and where `out` holds another run.
    """
    plan = Plan(
        checkpoint=checkpoint,
        cells=tuple(cells),
        prompts=tuple(tuple(prompt) for prompt in prompts),
        concurrency=tuple(concurrency),
        requests=requests,
        repetitions=repetitions,
        load=arrivals,
        max_batch=max_batch,
        seed=seed,
        heads=heads,
    )
    plan = replace(plan, lengths=_lengths(plan, lengths, Path(out)))
    check_requests(plan)
    with RecordWriter(
        out,
        kind="bench",
        settings_used=plan.settings(),
        settings_passed=settings_passed or {},
        provenance=plan.provenance(task),
    ) as writer:
        journal = writer.record.path / JOURNAL
        if journal.exists():
            _append(writer, journal)
        runs = len(cells) * repetitions
        done = {sample["block"] for sample in writer.samples}
        count = _counter(progress, len(done) * runs, len(plan.blocks) * runs)
        for block, at_once in plan.blocks:
            if block not in done:
                measured = list(_open(plan, count) if at_once is None else _closed(plan, block, at_once, count))
                write_atomically(journal, json.dumps(measured, allow_nan=False).encode())
                _append(writer, journal)
        return writer.finish(aggregate(writer.samples))


def _lengths(plan: Plan, given: Sequence[int] | None, out: Path) -> tuple[int, ...]:
    """Those given; else those that an earlier start of the same bench has found, which are not measured again, nor
    differently; else the first cell's own."""
    if given is not None:
        if len(given) != len(plan.prompts):
            raise ValueError(f"{len(given)} lengths for {len(plan.prompts)} prompts; give one a prompt, or none")
        return tuple(given[: plan.timed])
    if (out / HEADER).exists():
        before = Record.read(out, samples=False).settings_used
        if before.get("prompt_ids_sha256") == plan.prompts_hash and len(before.get("lengths", ())) == plan.timed:
            return tuple(before["lengths"])
    return natural_lengths(plan) if plan.timed else ()


def _closed(plan: Plan, block: str, concurrency: int, count: Callable[[], None]) -> Iterator[Sample]:
    """The samples of one concurrency, in the order of cells and repetitions."""
    indices, model = plan.indices(concurrency), plan.checkpoint.model
    machine = measure_machine(model)
    prompts, lengths = [plan.prompts[i] for i in indices], [plan.lengths[i] for i in indices]
    runs = timed_runs(
        model,
        plan.cells,
        prompts,
        lengths,
        machine,
        concurrency=concurrency,
        repetitions=plan.repetitions,
        shuffle=plan.shuffle(block),
        seed=plan.seed,
    )
    found = {}
    for place, (cell, repetition, timing) in enumerate(runs):
        found[cell.name, repetition] = _closed_figures(timing, machine) | {"place": place}, timing.outputs
        count()
    yield from _samples(plan, found, {"block": block, "concurrency": concurrency, "prompts": indices})


def _open(plan: Plan, count: Callable[[], None]) -> Iterator[Sample]:
    """The samples of the open loop. Requests are made from the prompts; none is a repeat of another."""
    assert plan.load is not None
    model = plan.checkpoint.model
    prompts = load_prompts(plan.load, vocab=model.shape.vocab, seed=plan.seed, prompts=plan.prompts)
    few = [min(arrival.output_tokens, WARM_UP_TOKENS) for arrival in plan.load.arrivals[: plan.max_batch]]
    warm_up(model, plan.cells, prompts[: len(few)], few, concurrency=len(few))
    order = [(cell, repetition) for cell in plan.cells for repetition in range(plan.repetitions)]
    plan.shuffle(OPEN).shuffle(order)
    found = {}
    for place, (cell, repetition) in enumerate(order):
        timing = replay(model, cell, plan.load, prompts, max_batch=plan.max_batch, seed=plan.seed)
        found[cell.name, repetition] = _open_figures(timing, plan.load) | {"place": place}, timing.outputs
        count()
    yield from _samples(
        plan, found, {"block": OPEN, "concurrency": None, "prompts": list(range(len(plan.load.arrivals)))}
    )


def _samples(
    plan: Plan, found: Mapping[tuple[str, int], tuple[dict[str, Any], tuple[Output, ...]]], shared: dict[str, Any]
) -> Iterator[Sample]:
    """One sample a (cell, repetition). `place` is where it stood in the shuffled order."""
    for cell in plan.cells:
        first: list[Answer] | None = None
        for repetition in range(plan.repetitions):
            figures, outputs = found[cell.name, repetition]
            answers: list[Answer] = [(output.token_ids, output.depths) for output in outputs]
            yield {
                "id": f"{shared['block']}/{cell.name}",
                "answer_index": repetition,
                "cell": cell.name,
                "requests": len(outputs),
                "decode_tokens": sum(output.usage.decode_tokens for output in outputs),
                "segments_read": sum(output.usage.segments_read for output in outputs),
                "segments_executed": sum(output.usage.segments_executed for output in outputs),
                **shared,
                **figures,
                **pack(answers, first),
            }
            first = first or answers


def _closed_figures(timing: Timing, machine: Machine) -> dict[str, Any]:
    return {
        "seconds": timing.seconds,
        "tokens": timing.tokens,
        "flops": timing.work.flops,
        "bytes": timing.work.bytes,
        "bound_s": timing.work.bound_s,
        "machine_flops_per_s": machine.flops_per_s,
        "machine_bytes_per_s": machine.bytes_per_s,
        **_latency("first_token_s", timing.first_token_s),
        **_latency("inter_token_s", timing.inter_token_s),
        "peak_memory_bytes": timing.memory.bytes,
        "peak_memory_of": timing.memory.of,
        "pages_peak": timing.pages_peak,
        "kv_peak_bytes": timing.kv_peak_bytes,
    }


def _open_figures(timing: OpenTiming, load: Load) -> dict[str, Any]:
    return {
        "duration_s": timing.duration_s,
        "tokens": timing.tokens,
        "offered_requests_per_s": load.offered_requests_per_s,
        **_latency("first_token_s", timing.first_token_s),
        **_latency("inter_token_s", timing.inter_token_s),
        **_latency("end_to_end_s", timing.end_to_end_s),
        "most_waiting": timing.most_waiting,
        "drain_s": timing.drain_s,
        "kept_up": timing.kept_up,
        "peak_memory_bytes": timing.memory.bytes,
        "peak_memory_of": timing.memory.of,
        "pages_peak": timing.pages_peak,
    }


def _latency(name: str, found: Quantiles | None) -> dict[str, float | None]:
    return {f"{name}_{q}": getattr(found, q, None) for q in Quantiles._fields}


def _append(writer: RecordWriter, journal: Path) -> None:
    """Put a measured block into the samples, as far as it is not there yet. A kill on the way loses nothing."""
    for sample in json.loads(journal.read_bytes()):
        if (sample["id"], sample["answer_index"]) not in writer.done:
            writer.append(sample)
    journal.unlink()


def _counter(progress: Callable[[int, int], object] | None, done: int, total: int) -> Callable[[], None]:
    counted = done

    def count() -> None:
        nonlocal counted
        counted += 1
        if progress:
            progress(counted, total)

    if progress and done:
        progress(done, total)
    return count
