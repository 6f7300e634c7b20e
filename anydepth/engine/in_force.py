"""Which settings an engine and a Sampling come to, by the names that Records use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydepth.certificate import describe
from anydepth.engine.engine import Engine
from anydepth.types import Sampling


def settings_in_force(engine: Engine, sampling: Sampling) -> dict[str, Any]:
    """What decides the tokens and depths of a request, resolved: bounds, stop ids, the certified exit and the like.
    ValueError where the sampling is not for this engine's model."""
    request = engine.prepare([0], replace(sampling, n=1), streaming=False)
    low, high = request.bounds
    asked, certificate = request.sampling, engine.requests.certificate
    return {
        "exit_threshold": asked.exit_threshold,
        "depth": asked.depth,
        "interval": asked.interval,
        "shallow_depth": asked.shallow_depth,
        "trace": asked.trace,
        "certificate": certificate and {"sha256": certificate.sha256, "says": describe(certificate)},
        "fill": engine.fill.name,
        "signals": engine.mode.name,
        "lateness": engine.lateness,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "gate_dtype": engine.gate_dtype,
        "batch_invariant": engine.stats()["batch_invariant"] is not None,
        "device": engine.model.device.type,
        "segments": engine.model.shape.segments,
        "policy": request.policy.name,
        "min_depth": low,
        "max_depth": high,
        "stop_token_ids": sorted(request.stop_ids),
    }
