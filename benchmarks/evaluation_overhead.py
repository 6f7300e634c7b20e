"""What evaluation adds to the engine's own time: the same questions through `LLM.generate` and through a study's `run`.

    python benchmarks/evaluation_overhead.py                  # nano, the hardest case: an answer takes 2 ms
    python benchmarks/evaluation_overhead.py --model smollm2-135m --questions 16 --pairs 3

Pairs are interleaved in one process, their order alternates; processor time, because the machine may be shared.
Grading, hashes, aggregates, samples and header on disk are in it; loading the model is in neither.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from anydepth import LLM
from anydepth.bench.roofline import spread
from anydepth.bench.rows import write_rows
from anydepth.eval.arms import Arm
from anydepth.eval.backends.engine import EngineBackend
from anydepth.eval.run import run, sampling_of
from anydepth.eval.task import load_task


def main(
    model: Annotated[str, typer.Option(help="A model that nano's questions can be put to.")] = "nano",
    questions: Annotated[int, typer.Option(help="Questions an arm.")] = 2160,
    pairs: Annotated[int, typer.Option(help="Pairs an arm.")] = 11,
    concurrency: Annotated[int, typer.Option(help="Answers at a time.")] = 32,
    out: Annotated[Path | None, typer.Option(help="Folder of a Record.")] = None,
) -> None:
    torch.set_num_threads(1)
    task = load_task("nano")
    asked = task.select(limit=questions)
    llm = LLM(model, max_batch=concurrency)
    backend = EngineBackend(llm)
    gated = llm.engine.model.shape.has_gate
    rows = []
    for arm in [Arm(name="never"), *([Arm.parse({"name": "gate", "exit_threshold": 0.5})] if gated else [])]:
        sampling = sampling_of(arm, task)

        def alone(sampling=sampling) -> None:
            llm.generate([str(question.prompt) for question in asked], sampling)

        def evaluated(arm=arm) -> None:
            with tempfile.TemporaryDirectory() as folder:
                run(arm, task=task, backend=backend, out=folder, questions=asked, concurrency=concurrency)

        alone(), evaluated()
        added = []
        for pair in range(pairs):
            first, second = (alone, evaluated) if pair % 2 else (evaluated, alone)
            seconds = {first: spent(first), second: spent(second)}
            added.append(seconds[evaluated] / seconds[alone] - 1)
        median, least, most = spread(added)
        rows.append({"arm": arm.name, "added_share": median, "added_share_low": least, "added_share_high": most})
        print(f"{arm.name}: evaluation adds {100 * median:.1f} % ({100 * least:.1f} to {100 * most:.1f})")
    if out is not None:
        settings = {"model": model, "questions": questions, "pairs": pairs, "concurrency": concurrency}
        write_rows(out, settings=settings, rows=rows, checkpoint=llm.checkpoint)


def spent(work: Callable[[], None]) -> float:
    """Processor seconds of one call, from a heap without garbage of the one before."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    typer.run(main)
