"""The keys and values of a training batch: dense masks, and in deeper loops the copies that positions left behind.

Shape suffixes: B rows of T positions (N = B T model rows), H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anydepth.models.base import Model
from anydepth.train.data import Batch


class DenseKV:
    """The model's `KV` for whole sequences. Call `begin(k)` before segment k = 1, 2, ...

    With `exit_depths_BT` (1 to R) position p keeps, in every loop k beyond its depth, the K/V of its last loop, for
    everybody including itself: what fill `last_exited` does while generating. Without it every loop has its own K/V.
    """

    def __init__(self, batch: Batch, *, exit_depths_BT: Tensor | None = None) -> None:
        self.positions = batch.positions_BT.reshape(-1)
        self._mask = batch.mask.unsqueeze(1)
        self._size = batch.ids_BT.shape
        self._depths = exit_depths_BT
        self._running: Tensor | None = None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, k: int) -> None:
        """Segment k comes next; positions whose depth is below k have left."""
        if self._depths is not None and k > 1:
            self._running = (self._depths >= k).view(-1, 1, 1)

    def attend(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """Attention over each row's visible positions, [N, H, D]."""
        if self._running is not None:
            old_k, old_v = self._kept[layer]
            k_NGD, v_NGD = torch.where(self._running, k_NGD, old_k), torch.where(self._running, v_NGD, old_v)
        if self._depths is not None:
            self._kept[layer] = k_NGD, v_NGD
        q, k, v = (x.view(*self._size, *x.shape[1:]).transpose(1, 2) for x in (q_NHD, k_NGD, v_NGD))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed.transpose(1, 2).reshape(q_NHD.shape)


def all_depths(model: Model, batch: Batch, *, exit_depths_BT: Tensor | None = None) -> list[Tensor]:
    """h_1 .. h_R of the answer positions, each [A, d]."""
    kv = DenseKV(batch, exit_depths_BT=exit_depths_BT)
    h = model.embed(batch.ids_BT.reshape(-1))
    states = []
    for k in range(1, model.shape.segments + 1):
        kv.begin(k)
        h = model.segment(k, h, kv)
        states.append(h.index_select(0, batch.answer_A))
    return states
