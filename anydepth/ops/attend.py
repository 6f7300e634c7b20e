"""Attention in torch: the definition that any kernel is tested against.

Grouped queries: H query heads share G key/value heads, H / G each. Shape suffixes: B rows, n query positions of a row,
T positions of context, N, H, G, D as in `models.base`. Masks are added to the scores: 0 or -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_rows(q_NHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask_B1nT: Tensor | None) -> Tensor:
    """Query positions of B rows, n = N / B of each, every row over its own context; [N, H, D]."""
    k, v = k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2)
    if len(q_NHD) == len(k):
        return _attend(q_NHD.unsqueeze(2), k, v, mask_B1nT).squeeze(2)
    q = q_NHD.unflatten(0, (len(k), -1)).transpose(1, 2)
    return _attend(q, k, v, mask_B1nT).transpose(1, 2).flatten(0, 1)


def attend_chunk(q_nHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, mask_nT: Tensor | None) -> Tensor:
    """The n query positions of one request's chunk over its context; [n, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_nHD, k_TGD, v_TGD))
    return _attend(q, k, v, mask_nT).squeeze(0).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def causal_mask(rows: int, context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, context]: the rows are the last `rows` of `context` positions, each sees itself and what is before it."""
    return torch.full((rows, context), float("-inf"), dtype=dtype, device=device).triu(context - rows + 1)
