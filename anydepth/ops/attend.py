"""Attention in torch: the definition that any kernel is tested against.

Grouped queries: H query heads share G key/value heads, H / G each. Shape suffixes: B decode rows, n rows of a prefill
chunk, T positions of context, H, G, D as in `models.base`. Masks are added to the scores: 0 or -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_rows(q_BHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask_B11T: Tensor | None) -> Tensor:
    """One query position a row, each over its own context; [B, H, D]."""
    return _attend(q_BHD.unsqueeze(2), k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2), mask_B11T).squeeze(2)


def attend_chunk(q_nHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, mask_nT: Tensor | None) -> Tensor:
    """The n query positions of one request's chunk over its context; [n, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_nHD, k_TGD, v_TGD))
    return _attend(q, k, v, mask_nT).squeeze(0).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def causal_mask(rows: int, context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, context]: the rows are the last `rows` of `context` positions, each sees itself and what is before it."""
    return torch.full((rows, context), float("-inf"), dtype=dtype, device=device).triu(context - rows + 1)
