"""The contract of a model: a shape, its tensor functions, and what each of them costs.

Shape suffixes used in this package: N rows (token positions of any requests), d hidden size, V vocabulary, C columns of
a readout (all V, or the tokens that it lists), H query heads, G key/value heads, D head size, T positions of context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from anydepth.types import Shape as Shape

Part = Literal["embed", "segment", "signal", "readout", "answers", "copy", "project"]


class Cost(NamedTuple):
    """Work of one row through one part, and the weight bytes a turn reads once however many rows it has."""

    flops_per_row: float
    bytes_per_row: float
    weight_bytes_per_turn: float


class KV(Protocol):
    """The keys and values that a call of `segment` sees: `ops.kv` in the engine, a dense mask in training."""

    @property
    def positions(self) -> Tensor:
        """[N] int64, the position of every row."""

    def attend(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Store k and v (after RoPE) as the rows' own, attend over what each row may see; [N, H, D]."""


class Model(Protocol):
    """What the engine, the trainer and the bench use of a model. Depth k counts segments from 1."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def embed(self, ids_N: Tensor) -> Tensor:
        """[N] int64 -> h_0 [N, d]."""

    def segment(self, k: int, h_Nd: Tensor, kv: KV) -> Tensor:
        """h_{k-1} -> h_k [N, d]. With shared weights k is not read (kv knows each row's plane)."""

    def signal(self, k: int, h_Nd: Tensor) -> Tensor:
        """The exit gate's logits at depth k, [N]. ValueError where the model has no gate."""

    def readout(self, k: int, h_Nd: Tensor) -> Tensor:
        """Logits [N, V] read from h_k: `over_vocabulary` of `listed`. A model of its own changes those, never this."""

    def listed(self, k: int, h_Nd: Tensor) -> Tensor:
        """Logits [N, C] read from h_k, of the tokens that a readout at depth k can give."""

    def over_vocabulary(self, k: int, logits_NC: Tensor) -> Tensor:
        """What `listed` gave at depth k as [N, V]: -inf for any other token."""

    def keys_values(self, layers: range, h_Nd: Tensor, positions_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K (after RoPE) and V [N, G, D] that each of the layers makes of a state."""

    def declines(self, k: int) -> bool:
        """Whether there are rows that the readout at depth k must not answer: `answers` says which."""

    def answers(self, k: int, h_Nd: Tensor, logits_NC: Tensor) -> Tensor:
        """Which rows the readout at depth k, with these (listed) logits, may answer, [N] bool."""

    def cost(self, part: Part, k: int, context: float) -> Cost:
        """Work of `part` at depth k for a row that attends over `context` positions. Affine in `context`."""

    def pack(self) -> None:
        """Make the weights ready for many products without gradients; free to do nothing. `slots` undoes it."""

    def slots(self) -> Mapping[str, Tensor]:
        """Released tensor name -> writable view of this model's weights in the released shape."""
