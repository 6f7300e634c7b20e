"""What Ouro and Llama share: the decoder layer, and the embedding, LM head, rotary table and costs around a stack.

Matrices are stored [in, out], so that a row times a matrix reads memory in order: on CPUs a single row is a quarter
faster than with the released [out, in]. `slots` show them in the released layout. Shape suffixes: see `base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anydepth.models.base import KV, Cost, Part, Shape
from anydepth.models.config import need, optional, positive
from anydepth.ops.linear import linear, pack, unpack


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of one layer. `sandwich` adds a norm after each branch (Ouro)."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    sandwich: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, sandwich: bool) -> LayerShape:
        """From the keys of a released config; ValueError for one that is missing or no such number."""
        hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
        return cls(
            hidden=hidden,
            inner=need(config, "intermediate_size"),
            heads=heads,
            kv_heads=optional(config, "num_key_value_heads", heads),
            head_dim=optional(config, "head_dim", hidden // heads),
            eps=positive(config, "rms_norm_eps", 1e-6),
            sandwich=sandwich,
        )

    @property
    def matrix_weights(self) -> int:
        """Weights in the four matrices of a layer."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.inner)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32 or wider; the quotient is cast back before the product."""
    if x.dtype in (torch.float32, torch.float64):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return torch.nn.functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


class Rotary:
    """Cosines and sines of RoPE for every position, made once. `turn(positions)` gives the rows' own.

    With `factors` ([D/2], from Llama-3's scaling) each frequency is divided by its factor. Angles are computed in
    float32, in float64 for a float64 model.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        max_positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        factors: Tensor | None = None,
    ) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=wide) / head_dim))
        if factors is not None:
            frequencies = frequencies / factors.to(wide)
        angles = torch.outer(torch.arange(max_positions, dtype=wide), frequencies)
        cos, sin = angles.cos(), angles.sin()
        # Folding the sign of rotate_half into the sine turns it into a plain roll by half the head.
        self.cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device=device, dtype=dtype)

    def turn(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each [N, 1, D]."""
        return self.cos.index_select(0, positions_N), self.sin.index_select(0, positions_N)


def rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """RoPE with the halves convention (pairs are i and i + D/2)."""
    return torch.addcmul(x_NHD * cos_N1D, x_NHD.roll(x_NHD.shape[-1] // 2, -1), sin_N1D)


class Layer:
    """One decoder layer: attention and SwiGLU, each behind a norm, and behind a second one after it when `sandwich`."""

    def __init__(self, shape: LayerShape, *, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        self.shape = shape
        d, f, attended = shape.hidden, shape.inner, shape.heads * shape.head_dim
        sizes = ((d, attended + 2 * shape.kv_heads * shape.head_dim), (attended, d), (d, 2 * f), (f, d))
        # One piece of memory for all four: what one layer lets go of when it is packed is where the next one's fit in.
        parts = empty(shape.matrix_weights).split([rows * columns for rows, columns in sizes])
        self.qkv, self.o, self.gate_up, self.down = (part.view(size) for part, size in zip(parts, sizes, strict=True))
        self.norms = [empty(d) for _ in range(4 if shape.sandwich else 2)]

    def forward(self, index: int, h_Nd: Tensor, rotary: tuple[Tensor, Tensor], kv: KV) -> Tensor:
        s = self.shape
        if s.sandwich:
            before_attention, after_attention, before_mlp, after_mlp = self.norms
        else:
            before_attention, before_mlp = self.norms
        x = rms_norm(h_Nd, before_attention, s.eps)
        qkv = linear(x, self.qkv).view(len(x), -1, s.head_dim)
        qk = rotate(qkv[:, : s.heads + s.kv_heads], *rotary)
        mixed = kv.attend(index, qk[:, : s.heads], qk[:, s.heads :], qkv[:, s.heads + s.kv_heads :])
        branch = linear(mixed.reshape(len(x), -1), self.o)
        h_Nd = h_Nd + (rms_norm(branch, after_attention, s.eps) if s.sandwich else branch)
        gate, up = linear(rms_norm(h_Nd, before_mlp, s.eps), self.gate_up).chunk(2, -1)
        gated = torch.nn.functional.silu(gate, inplace=not torch.is_grad_enabled()) * up
        branch = linear(gated, self.down)
        return h_Nd + (rms_norm(branch, after_mlp, s.eps) if s.sandwich else branch)

    def keys_values(self, h_Nd: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K (after RoPE) and V [N, G, D] of a state. One matrix holds queries too, so these are made as well."""
        s = self.shape
        qkv = linear(rms_norm(h_Nd, self.norms[0], s.eps), self.qkv).view(len(h_Nd), -1, s.head_dim)
        return rotate(qkv[:, s.heads : s.heads + s.kv_heads], *rotary), qkv[:, s.heads + s.kv_heads :]

    def each_matrix(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the four matrices one after the other."""
        for name in ("qkv", "o", "gate_up", "down"):
            setattr(self, name, change(getattr(self, name)))

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Released names of this layer's tensors with [out, in] views of them; packed ones are unpacked first."""
        self.each_matrix(unpack)
        s = self.shape
        ends = [0, s.heads * s.head_dim, (s.heads + s.kv_heads) * s.head_dim, self.qkv.shape[1]]
        for name, start, end in zip("qkv", ends, ends[1:], strict=False):
            yield f"{prefix}self_attn.{name}_proj.weight", self.qkv[:, start:end].t()
        yield f"{prefix}self_attn.o_proj.weight", self.o.t()
        yield f"{prefix}mlp.gate_proj.weight", self.gate_up[:, : s.inner].t()
        yield f"{prefix}mlp.up_proj.weight", self.gate_up[:, s.inner :].t()
        yield f"{prefix}mlp.down_proj.weight", self.down.t()
        names = ["input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"]
        for name, norm in zip(names if s.sandwich else names[::2], self.norms, strict=True):
            yield f"{prefix}{name}.weight", norm

    def parameters(self) -> list[Tensor]:
        """The stored tensors themselves, for an optimiser."""
        return [self.qkv, self.o, self.gate_up, self.down, *self.norms]


class Decoder:
    """Embedding, layers, final norm and LM head; a subclass says what a segment is.

    With `tied` one [d, V] matrix is both the LM head and, read by columns, the embedding.
    """

    def __init__(
        self,
        shape: Shape,
        layer: LayerShape,
        *,
        theta: float,
        tied: bool,
        dtype: torch.dtype,
        device: torch.device,
        rope_factors: Tensor | None = None,
    ) -> None:
        self.shape, self.dtype, self.device, self.eps, self.tied = shape, dtype, device, layer.eps, tied
        self.layers = [Layer(layer, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.norm = torch.empty(shape.hidden, dtype=dtype, device=device)
        self.head = torch.empty(shape.hidden, shape.vocab, dtype=dtype, device=device)
        self.embedding = self.head.t() if tied else torch.empty(shape.vocab, shape.hidden, dtype=dtype, device=device)
        self.rotary = Rotary(
            shape.head_dim, theta, shape.max_positions, dtype=dtype, device=device, factors=rope_factors
        )

    def embed(self, ids_N: Tensor) -> Tensor:
        """[N] int64 -> h_0 [N, d]."""
        return self.embedding.index_select(0, ids_N)

    def run_layers(self, layers: range, h_Nd: Tensor, kv: KV) -> Tensor:
        rotary = self.rotary.turn(kv.positions)
        for index in layers:
            h_Nd = self.layers[index].forward(index, h_Nd, rotary, kv)
        return h_Nd

    def keys_values(self, layers: range, h_Nd: Tensor, positions_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K (after RoPE) and V [N, G, D] that each of the layers makes of a state."""
        rotary = self.rotary.turn(positions_N)
        return [self.layers[index].keys_values(h_Nd, rotary) for index in layers]

    def final_norm(self, h_Nd: Tensor) -> Tensor:
        return rms_norm(h_Nd, self.norm, self.eps)

    def readout(self, k: int, h_Nd: Tensor) -> Tensor:
        """Logits [N, V] read from h_k; what they are, `listed` and `over_vocabulary` say."""
        return self.over_vocabulary(k, self.listed(k, h_Nd))

    def listed(self, k: int, h_Nd: Tensor) -> Tensor:
        """The logits of all V tokens, through the final norm and the LM head."""
        return linear(self.final_norm(h_Nd), self.head)

    def over_vocabulary(self, k: int, logits_NC: Tensor) -> Tensor:
        return logits_NC

    def declines(self, k: int) -> bool:
        """Never, unless an exit head does."""
        return False

    def answers(self, k: int, h_Nd: Tensor, logits_NC: Tensor) -> Tensor:
        return logits_NC.new_ones(len(logits_NC), dtype=torch.bool)

    def pack(self) -> None:
        """Bring the layers' matrices into the order in which products are fastest; `slots` brings them back."""
        with torch.no_grad():
            for layer in self.layers:
                layer.each_matrix(pack)

    def slots(self) -> dict[str, Tensor]:
        """Released tensor name -> writable view of this model's weights in the released shape. Undoes `pack`."""
        named = {"model.embed_tokens.weight": self.embedding}
        for index, layer in enumerate(self.layers):
            named.update(layer.slots(f"model.layers.{index}."))
        named["model.norm.weight"] = self.norm
        if not self.tied:
            named["lm_head.weight"] = self.head.t()
        return named

    def cost(self, part: Part, k: int, context: float) -> Cost:
        """Work of one row in FLOPs (a multiply and an add are two) and bytes.

        A segment multiplies a row by every matrix of its layers and, per layer, by `context` keys and as many values
        (4 H D context); it reads those keys and values and writes its own. `copy` reads the K/V of plane k and writes
        it to the R - k deeper planes; `project` multiplies by the matrix of queries, keys and values in every layer
        after segment k, and writes the keys and values. Activations are left out: they stay in cache.
        """
        s, item = self.shape, self.norm.element_size()
        layers = len(s.segment_layers[k - 1])
        kv_bytes = 2 * s.kv_heads * s.head_dim * item * layers
        if part == "answers":
            return Cost(0.0, 0.0, 0.0)
        if part == "embed":
            return Cost(0.0, s.hidden * item, 0.0)
        if part == "segment":
            weights = layers * self.layers[0].shape.matrix_weights
            attention = 4.0 * s.heads * s.head_dim * context * layers
            return Cost(2.0 * weights + attention, kv_bytes * (context + 1.0), weights * item)
        if part == "signal":
            return Cost(2.0 * s.hidden, 0.0, s.hidden * item)
        if part == "readout":
            return Cost(2.0 * s.hidden * s.vocab, s.vocab * item, s.hidden * s.vocab * item)
        if part == "project":
            one = self.layers[0].shape
            skipped = s.layers - s.segment_layers[k - 1].stop
            weights = skipped * one.hidden * (one.heads + 2 * one.kv_heads) * one.head_dim
            return Cost(2.0 * weights, kv_bytes / layers * skipped, weights * item)
        assert part == "copy", part
        return Cost(0.0, kv_bytes * (1.0 + s.segments - k) if k < s.segments else 0.0, 0.0)
