"""Timing turns that carry no prompt rows: what the benchmarks of deferred K/V and of late signals have in common."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from large_model import LARGE

from anydepth.engine.engine import Engine
from anydepth.engine.plan import TurnWork
from anydepth.models.base import Model
from anydepth.models.nano.questions import questions
from anydepth.types import Output, Sampling

Asked = list[tuple[list[int], int]]  # a prompt, and how long its answer is


class Decoded(NamedTuple):
    """What one run of an engine gave, in the order of the requests, and took: turns, seconds of the processor and of
    the clock on the wall."""

    outputs: list[Output]
    work: list[TurnWork]
    turns: int
    cpu_s: float
    wall_s: float


def nano_asked(checkpoint: Any, concurrency: int) -> Asked:
    """The longest explanations, each as long as the right answer."""
    chosen = [q for q in questions("validation") if q.kind == "why" and q.difficulty == 6][:concurrency]
    encode = checkpoint.tokenizer.encode
    return [(encode(question.prompt), len(encode(question.answer))) for question in chosen]


def random_asked(concurrency: int, *, tokens: int) -> Asked:
    draw = random.Random(0)
    return [([draw.randrange(LARGE["vocab_size"]) for _ in range(24)], tokens) for _ in range(concurrency)]


def with_setting(asked: Asked, setting: dict[str, Any]) -> list[tuple[list[int], Sampling]]:
    return [(prompt, Sampling(max_tokens=length, ignore_eos=True, **setting)) for prompt, length in asked]


def engine_for(model: Model, asked: list[tuple[list[int], Sampling]], **options: Any) -> Engine:
    """An engine that just holds them all."""
    pages = sum((len(prompt) + ask.max_tokens) // 16 + 1 for prompt, ask in asked)
    options |= {"max_batch": len(asked), "kv_pages": pages, "max_batched_tokens": 4096, "prefix_sharing": False}
    return Engine(model, **options)


def decode(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> Decoded:
    """Prefill all prompts together, then time the turns from the first without a prompt row to the end."""
    requests = [engine.submit(prompt, ask) for prompt, ask in asked]
    while engine.scheduler.waiting or any(sequence.prefilling for sequence in engine.scheduler.running.values()):
        engine.step()
    outputs, turns = dict[str, Output](), engine.scheduler.turn
    engine.work = work = []
    cpu, wall = time.process_time(), time.perf_counter()
    while not engine.idle:
        outputs |= {chunk.request_id: chunk.output for chunk in engine.step() if chunk.output}
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    engine.work = None
    return Decoded([outputs[request.id] for request in requests], work, engine.scheduler.turn - turns, cpu, wall)


def rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 4) for value in values]
