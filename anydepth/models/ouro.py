"""Ouro (ByteDance, arXiv 2510.25741): the same layers run up to R times, and a gate says after which of them to stop.

h_0 = embed(ids); h_r = final_norm(stack(h_{r-1})). The normalised state is what the next loop, the gate and the LM
head read. Shape suffixes: see `base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anydepth.models.base import KV, Shape
from anydepth.models.config import need, refuse_variants, rope_settings
from anydepth.models.decoder import Decoder, LayerShape
from anydepth.ops.linear import linear


class Ouro(Decoder):
    """Looped model with a learned exit gate, from the keys of a released config."""

    def __init__(
        self, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device, segments: object = None
    ) -> None:
        if segments is not None:
            raise ValueError(f"segments is {segments!r}, but an Ouro model's segments are its loops; leave it out")
        refuse_variants(config)
        layers = need(config, "num_hidden_layers")
        layer = LayerShape.from_config(config, sandwich=True)
        loops = need(config, "total_ut_steps")
        shape = Shape(
            segments=loops,
            segment_layers=(range(layers),) * loops,
            shared_weights=True,
            hidden=layer.hidden,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            vocab=need(config, "vocab_size"),
            max_positions=need(config, "max_position_embeddings"),
            has_gate=True,
        )
        super().__init__(
            shape,
            layer,
            theta=rope_settings(config, kinds=("default",))["rope_theta"],
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=dtype,
            device=device,
        )
        self.gate_weight = torch.empty(1, layer.hidden, dtype=dtype, device=device)
        self.gate_bias = torch.empty(1, dtype=dtype, device=device)

    def segment(self, k: int, h_Nd: Tensor, kv: KV) -> Tensor:
        """One loop over the whole stack; k is not read, rows of different loops share the call."""
        return self.final_norm(self.run_layers(self.shape.segment_layers[0], h_Nd, kv))

    def signal(self, k: int, h_Nd: Tensor) -> Tensor:
        """Gate logits w . h + b, [N]; the hazard is their sigmoid."""
        return torch.nn.functional.linear(h_Nd, self.gate_weight, self.gate_bias).squeeze(-1)

    def listed(self, k: int, h_Nd: Tensor) -> Tensor:
        """All V logits; h is already normalised."""
        return linear(h_Nd, self.head)

    def slots(self) -> dict[str, Tensor]:
        """Released tensor name -> writable view of this model's weights in the released shape."""
        gate = {"model.early_exit_gate.weight": self.gate_weight, "model.early_exit_gate.bias": self.gate_bias}
        return super().slots() | gate


Model = Ouro
