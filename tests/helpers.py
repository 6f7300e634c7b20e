"""Small random models in both houses, the engine's and the reference's, and a way to run requests to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from anydepth.engine.engine import Engine
from anydepth.models.llama import Llama
from anydepth.models.ouro import Ouro
from anydepth.types import Output, Request
from tests.reference.model import Model as Reference
from tests.reference.weights import random_weights, tiny_config


def twins(
    kind: str = "looped",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    segments: Sequence[int] | None = None,
    **changes: Any,
) -> tuple[Any, Reference]:
    """The same random model twice: anydepth's, and the independent reference's."""
    config = tiny_config(kind, **changes)
    weights = random_weights(config, seed=seed, dtype=dtype)
    build = Ouro if kind == "looped" else Llama
    model = build(config, dtype=dtype, device=torch.device("cpu"), segments=segments)
    slots = model.slots()
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        slot.copy_(weights[name])
    return model, Reference(config, weights, segments=segments)


def poison(engine: Engine) -> Engine:
    """Fill every page with NaN whenever it is handed out, so that nothing may be read that was not written."""
    run = engine.runner.run

    def poisoned(plan):
        pool = engine.runner.pool
        for sequence in plan.admitted:
            for page in sequence.pages:
                for plane in range(pool.planes):
                    start = plane * pool.positions + page * pool.page_size
                    pool.data[:, :, start : start + pool.page_size] = float("nan")
        return run(plan)

    engine.runner.run = poisoned
    return engine


def drain(engine: Engine, requests: Iterable[Request] = ()) -> dict[str, Output]:
    """Submit, step until idle, and check that nothing is held at the end."""
    for request in requests:
        engine.submit(request)
    outputs = {}
    while not engine.idle:
        for chunk in engine.step():
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
    assert engine.pages.in_use == 0, "pages held at the end"
    assert not engine.scheduler.running and not engine.runner.chunks, "a request or a chunk held at the end"
    return outputs
