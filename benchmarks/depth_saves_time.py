"""How much of the time that an early exit could save is saved: decode only, against the bound (time_saved_share).

Two models: `nano` with its gate (turns that carry prompt tokens are left out, so with refill the two arms are compared
on the turns they happen to have without any), and a looped model of about 100M random parameters with a replayed trace.
Also the host's share of a turn on `nano`: Engine.step less the model, policy, readout and sampling.

    python benchmarks/depth_saves_time.py --out runs/depth_saves_time
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from large_model import LARGE, random_ouro

from anydepth.bench.roofline import spread
from anydepth.bench.rows import write_rows
from anydepth.bench.throughput import Cell, matched_work
from anydepth.engine.engine import Engine
from anydepth.models.base import Model
from anydepth.models.load import load_checkpoint
from anydepth.models.nano.questions import Question, questions
from anydepth.types import Sampling

WIDE = LARGE | {"num_hidden_layers": 7, "vocab_size": 4096}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exit-threshold", type=float, default=0.5, help="nano's")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="for the large model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/depth_saves_time"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # nano's products are too small for more
    checkpoint = load_checkpoint("nano")
    mixed = questions("test", n=128)
    long = [question for question in questions("test") if question.kind == "why" and question.difficulty >= 5]
    rows = [
        time_nano("nano, 8 mixed questions", checkpoint, mixed[:8], 1, options),
        time_nano("nano, 32 long answers in flight", checkpoint, long[:32], 32, options),
        time_nano("nano, 128 mixed questions with refill", checkpoint, mixed, 32, options),
    ]
    torch.set_num_threads(options.threads)
    rows.append(time_large(options))
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    settings = vars(options) | {"benchmark": "depth_saves_time", "out": None}
    write_rows(options.out, settings=settings, rows=rows, checkpoint=checkpoint)


def time_nano(
    name: str, checkpoint: Any, asked: Sequence[Question], concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """nano's gate against never on test questions, and the host's milliseconds a turn."""
    prompts = [checkpoint.tokenizer.encode(question.prompt) for question in asked]
    lengths = [len(checkpoint.tokenizer.encode(question.answer)) for question in asked]
    gate = Sampling(exit_threshold=options.exit_threshold)
    cells = [Cell("never", Sampling()), Cell("gate_cdf", gate)]
    timed = matched_work(
        checkpoint.model,
        cells,
        prompts,
        lengths,
        concurrency=concurrency,
        repetitions=options.repetitions,
        decode_only=True,
        seed=options.seed,
    )[1]
    host = [host_ms(checkpoint.model, prompts[:concurrency], gate) for _ in range(options.repetitions)]
    return {"model": name, "concurrency": concurrency, **timed.asdict(), "host_ms_per_turn": spread(host)[0]}


def time_large(options: argparse.Namespace) -> dict[str, Any]:
    """A looped model of about 100M random parameters, depths replayed from a seeded trace, one request at a time."""
    model = random_ouro(WIDE, seed=options.seed)
    parameters = sum(slot.numel() for slot in model.slots().values())
    model.pack()  # which asking for the slots undid
    draw = random.Random(options.seed)
    length = 40
    prompt = [draw.randrange(WIDE["vocab_size"]) for _ in range(16)]
    trace = [4, *(draw.choice((1, 1, 2, 2, 3, 4)) for _ in range(length - 1))]
    cells = [Cell("never", Sampling()), Cell("trace", Sampling(trace=trace))]
    timed = matched_work(
        model,
        cells,
        [prompt],
        [length],
        concurrency=1,
        repetitions=options.repetitions,
        decode_only=True,
        seed=options.seed,
    )[1]
    return {"model": f"looped, {parameters / 1e6:.0f}M random", "concurrency": 1, **timed.asdict()}


def host_ms(model: Model, prompts: list[list[int]], sampling: Sampling) -> float:
    """Milliseconds of a decode turn outside the model, policy, readout and sampling."""
    engine = Engine(model, max_batch=len(prompts))
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    while any(sequence.prefilling for sequence in engine.scheduler.running.values()) or engine.scheduler.waiting:
        engine.step()
    kernels = [0.0]

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                kernels[0] += time.perf_counter() - start

        return wrapper

    policy = requests[0].policy
    owners = [
        (model, ("embed", "segment", "signal", "readout")),
        (policy, ("decide",)),
        (engine.slots.sampler, ("choose",)),
        (engine.runner.fill, ("leave",)),
    ]
    for owner, names in owners:
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))
    turns, start = 0, time.perf_counter()
    while not engine.idle:
        engine.step()
        turns += 1
    spent = time.perf_counter() - start
    for owner, names in owners:
        for name in names:
            delattr(owner, name)
    return (spent - kernels[0]) / turns * 1e3


if __name__ == "__main__":
    main()
