"""A looped model of about 100M random parameters, for what nano is too small to show: it does not fit in cache."""

from __future__ import annotations

from typing import Any

import torch

from anydepth.models.ouro import Ouro

LARGE = {
    "model_type": "ouro",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "total_ut_steps": 4,
}
GATE_BIAS = 0.3  # depths of 1 to 4 at a threshold of 0.7


def random_ouro(config: dict[str, Any], *, seed: int) -> Ouro:
    """A packed model whose numbers are small and random, and a gate that lets tokens go at all depths."""
    model = Ouro(config, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for slot in model.slots().values():
        slot.copy_(torch.randn(slot.shape, generator=generator) * slot.shape[-1] ** -0.5)
    model.slots()["model.early_exit_gate.bias"].fill_(GATE_BIAS)
    model.pack()
    return model
