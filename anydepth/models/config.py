"""Reading a checkpoint's config: the few questions every model file asks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def need(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number that the config must have."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config has {key} = {value!r}; a positive whole number is needed")
    return value


def optional(config: Mapping[str, Any], key: str, default: int) -> int:
    """A positive whole number that the config may leave out."""
    return default if config.get(key) is None else need(config, key)


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number above 0 that the config may leave out."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config has {key} = {value!r}; a number above 0 is needed")
    return float(value)


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


def rope_settings(config: Mapping[str, Any], *, kinds: tuple[str, ...]) -> dict[str, Any]:
    """`rope_parameters` and `rope_scaling` joined, with `rope_type` and `rope_theta`; ValueError for other kinds."""
    joined: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"config has {key} = {value!r}; an object or null is needed")
        joined |= {name: entry for name, entry in value.items() if entry is not None}
    joined["rope_type"] = joined.get("rope_type", joined.get("type", "default"))
    joined["rope_theta"] = positive(joined, "rope_theta", 10000.0)
    if joined["rope_type"] not in kinds:
        raise ValueError(f"config asks for RoPE of type {joined['rope_type']!r}; allowed: {', '.join(kinds)}")
    return joined


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
