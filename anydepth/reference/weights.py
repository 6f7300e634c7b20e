"""Tiny random models under the released tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def tiny_config(kind: str = "looped", **changes: Any) -> dict[str, Any]:
    """A `config.json` as a dict, "looped" (Ouro) or "layered" (Llama); `changes` override or add keys."""
    config: dict[str, Any] = {
        "model_type": {"looped": "ouro", "layered": "llama"}[kind],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2 if kind == "looped" else 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    if kind == "looped":
        config["total_ut_steps"] = 4
    return config | changes


def random_weights(config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Embedding N(0, 1), matrices N(0, 1/fan_in), norms around 1, an LM head that spreads the logits, and (looped) a
    gate whose hazards vary from token to token. The same seed gives the same numbers, rounded to dtype. A tied
    embedding is smaller: at 1 a layered model would answer every token with itself."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    looped = "total_ut_steps" in config

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return normal(rows, columns, scale=scale / columns**0.5)

    tied = config.get("tie_word_embeddings", False)
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.4 if tied else 1.0)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["input_layernorm_2", "post_attention_layernorm_2"] if looped else []
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in norms:
            weights[f"{name}.{norm}.weight"] = (0.5 if norm.endswith("_2") else 1.0) + normal(hidden, scale=0.1)
        weights[f"{name}.self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden, scale=1.5)
        weights[f"{name}.self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden, scale=1.5)
        weights[f"{name}.self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        weights[f"{name}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{name}.mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{name}.mlp.down_proj.weight"] = matrix(hidden, inner)
    weights["model.norm.weight"] = 1.0 + normal(hidden, scale=0.2)
    if not tied:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden, scale=1.5)
    if looped:
        weights["model.early_exit_gate.weight"] = matrix(1, hidden, scale=1.5)
        weights["model.early_exit_gate.bias"] = normal(1, scale=0.1) - 0.8
    return {name: value.to(dtype) for name, value in weights.items()}
