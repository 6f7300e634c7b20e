"""Reading a checkpoint's config: the few questions every model file asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def need(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number that the config must have."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config has {key} = {value!r}; a positive whole number is needed")
    return value


def refuse_variants(config: Mapping[str, Any]) -> None:
    """ValueError where a config asks for what the decoders of this package do not compute."""
    for key, allowed in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1.0),
    ):
        value = config.get(key)
        if value is not None and value != allowed:
            raise ValueError(f"config has {key} = {value!r}; allowed: {allowed!r}")


def plain_rope(config: Mapping[str, Any]) -> float:
    """RoPE's theta, where no scaling is allowed."""
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_scaling of type {kind!r} is not supported here; allowed: none")
    return float((config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 10000.0)))


def read_json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    """A JSON object, {} where the file is absent and not needed."""
    if not path.is_file():
        if needed:
            raise ValueError(f"{path.parent} has no {path.name}, which says what the model is; it needs one")
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; allowed: a JSON object")
    return value
