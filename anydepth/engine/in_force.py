"""Which settings an engine and a Sampling come to, by the names that Records use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anydepth.certificate import PROFILED, describe
from anydepth.dtypes import dtype_name
from anydepth.engine.engine import Engine
from anydepth.types import Sampling


def settings_in_force(engine: Engine, sampling: Sampling) -> dict[str, Any]:
    """What decides the tokens and depths of a request, resolved: bounds, stop ids, the certified exit and the like.
    ValueError where the sampling is not for this engine's model."""
    request = engine.prepare([0], replace(sampling, n=1), streaming=False)
    low, high = request.bounds
    asked, certificate = request.sampling, engine.requests.certificate
    shape = engine.model.shape
    layered = {} if shape.shared_weights else {"exit_layers": [layers.stop for layers in shape.segment_layers]}
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
        "dtype": dtype_name(engine.model.dtype),
        "gate_dtype": engine.gate_dtype,
        "batch_invariant": engine.stats()["batch_invariant"] is not None,
        "device": engine.model.device.type,
        "segments": shape.segments,
        **layered,
        **_profile(engine, asked, request.policy.name),
        "policy": request.policy.name,
        "min_depth": low,
        "max_depth": high,
        "stop_token_ids": sorted(request.stop_ids),
    }


def _profile(engine: Engine, sampling: Sampling, policy: str) -> dict[str, Any]:
    """The profile that decides, with its numbers and their hash; nothing where none does."""
    name = sampling.profile
    if name is None and policy in PROFILED and len(engine.profiles) == 1:
        name = next(iter(engine.profiles))
    if name is None or name not in engine.profiles:
        return {}
    profile = engine.profiles[name]
    return {"profile": name, "profile_hash": profile.hash, "profile_thresholds": profile.thresholds()}
