"""The Llama family: a layered model. A segment is a run of consecutive layers with weights and K/V of its own.

Without exit heads (`heads.py`) R is 1 unless `segments` splits the layers; an inner exit then reads through the model's
own final norm and LM head. Shape suffixes: see `base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from anydepth.models.base import KV, Cost, Part, Shape
from anydepth.models.config import need, positive, refuse_variants, rope_settings
from anydepth.models.decoder import Decoder, LayerShape
from anydepth.models.heads import ExitHeads, Head, Probe, exit_segments
from anydepth.ops.linear import pack, unpack


class Llama(Decoder):
    """Layered model from the keys of a released config. `segments`: layers a segment, or the list of exit layers."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        segments: int | Sequence[int] | None = None,
    ) -> None:
        refuse_variants(config)
        layers = need(config, "num_hidden_layers")
        layer = LayerShape.from_config(config, sandwich=False)
        split = split_layers(layers, segments)
        shape = Shape(
            segments=len(split),
            segment_layers=split,
            shared_weights=False,
            hidden=layer.hidden,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            vocab=need(config, "vocab_size"),
            max_positions=need(config, "max_position_embeddings"),
            has_gate=False,
        )
        self.heads: dict[int, Head] = {}  # by segment
        self.probes: dict[int, Probe] = {}
        theta, factors = rope(config, layer.head_dim)
        super().__init__(
            shape,
            layer,
            theta=theta,
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=dtype,
            device=device,
            rope_factors=factors,
        )

    def segment(self, k: int, h_Nd: Tensor, kv: KV) -> Tensor:
        """The layers of segment k, for rows that all stand at k."""
        return self.run_layers(self.shape.segment_layers[k - 1], h_Nd, kv)

    def attach(self, heads: ExitHeads) -> None:
        """Read inner exits through these heads, packed for products without gradients; exits without one go on being
        read through the model's own."""
        segment = exit_segments(heads, [layers.stop for layers in self.shape.segment_layers])
        self.heads = {segment[layer]: head for layer, head in heads.heads.items()}
        self.probes = {segment[layer]: probe for layer, probe in heads.probes.items()}
        self.shape = replace(self.shape, headed=frozenset(self.heads), probed=frozenset(self.probes))
        self.each_table(pack)

    def signal(self, k: int, h_Nd: Tensor) -> Tensor:
        """The probe's logits at depth k, [N]."""
        if k not in self.probes:
            raise ValueError(f"this model has no exit probe at depth {k}")
        return self.probes[k].logit(h_Nd)

    def listed(self, k: int, h_Nd: Tensor) -> Tensor:
        """Logits [N, C] through the exit's head, or the model's own final norm and LM head."""
        return self.heads[k].logits(h_Nd, self.head, self.eps) if k in self.heads else super().listed(k, h_Nd)

    def over_vocabulary(self, k: int, logits_NC: Tensor) -> Tensor:
        return self.heads[k].over_vocabulary(logits_NC, self.shape.vocab) if k in self.heads else logits_NC

    def each_table(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the tables of shortlists one after the other."""
        with torch.no_grad():
            for k, head in self.heads.items():
                self.heads[k] = head.with_table(change)

    def pack(self) -> None:
        """As in `Decoder`; tables of shortlists too."""
        super().pack()
        self.each_table(pack)

    def slots(self) -> dict[str, Tensor]:
        self.each_table(unpack)
        return super().slots()

    def declines(self, k: int) -> bool:
        """Where there is a shortlist."""
        return k in self.heads and self.heads[k].kind == "shortlist"

    def answers(self, k: int, h_Nd: Tensor, logits_NC: Tensor) -> Tensor:
        """Which rows the head at depth k may answer, [N] bool."""
        if not self.declines(k):
            return super().answers(k, h_Nd, logits_NC)
        return self.heads[k].answers(h_Nd, logits_NC, self.eps)

    def cost(self, part: Part, k: int, context: float) -> Cost:
        """As `Decoder.cost`, with the exit head at depth k. A shortlist multiplies by its own columns and, to tell
        whether it answers, by "any other"; that its logits are then spread over the vocabulary, to be sampled from, is
        left out."""
        head, item = self.heads.get(k), self.norm.element_size()
        if head is None or part not in ("readout", "answers"):
            return super().cost(part, k, context)
        if head.kind == "shortlist":
            numbers = head.tensors["table"].numel() if part == "readout" else self.shape.hidden
            return Cost(2.0 * numbers, len(head.tensors["ids"]) * item * (part == "readout"), numbers * item)
        plain = super().cost(part, k, context)
        extra = sum(head.tensors[name].numel() for name in ("a", "b") if name in head.tensors and part == "readout")
        return plain._replace(
            flops_per_row=plain.flops_per_row + 2.0 * extra,
            weight_bytes_per_turn=plain.weight_bytes_per_turn + extra * item,
        )


def split_layers(layers: int, segments: int | Sequence[int] | None) -> tuple[range, ...]:
    """Layer ranges of the segments. split_layers(30, 10) == split_layers(30, [10, 20, 30])."""
    whole = isinstance(segments, int) and not isinstance(segments, bool)
    listed = isinstance(segments, Sequence) and not isinstance(segments, str) and all(type(s) is int for s in segments)
    if segments is not None and not whole and not (listed and segments):
        raise ValueError(
            f"segments is {segments!r}; allowed: a whole number (layers a segment) or a list of exit layers"
        )
    if segments is None:
        exits = [layers]
    elif isinstance(segments, int):
        if segments < 1 or layers % segments:
            raise ValueError(
                f"segments={segments} does not divide the model's {layers} layers; "
                f"give a divisor (layers a segment) or the list of exit layers"
            )
        exits = list(range(segments, layers + 1, segments))
    else:
        exits = list(segments)
        if exits[-1:] != [layers]:
            exits.append(layers)
        if exits[0] < 1 or any(b <= a for a, b in pairwise(exits)):
            raise ValueError(f"segments={list(segments)}: exit layers must rise from 1 to the model's {layers} layers")
    return tuple(range(a, b) for a, b in pairwise([0, *exits]))


def rope(config: Mapping[str, Any], head_dim: int) -> tuple[float, Tensor | None]:
    """(theta, per-frequency divisors or None) from `rope_theta` and `rope_scaling` (llama3 and none)."""
    parameters = rope_settings(config, kinds=("default", "llama3", "factors"))
    theta, kind = parameters["rope_theta"], parameters["rope_type"]
    if kind == "default":
        return theta, None
    if kind == "factors":  # GGUF stores the divisors themselves
        if not isinstance(parameters.get("factors"), Tensor):
            raise ValueError("RoPE of type 'factors' comes with GGUF files only; allowed: 'default', 'llama3'")
        return theta, parameters["factors"]
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, old = (positive(parameters, key, 0.0) for key in keys)
    if not min(factor, low, high, old):
        raise ValueError(f"RoPE of type 'llama3' needs {', '.join(keys)}; the config has {sorted(parameters)}")
    # Llama 3.1: wavelengths longer than old/low are slowed by `factor`, shorter than old/high kept, between blended.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = ((old / wavelengths - low) / (high - low)).clamp(0, 1)
    return theta, 1.0 / ((1 - smooth) / factor + smooth)


Model = Llama
