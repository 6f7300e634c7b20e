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
    rows, heads, size = q_BHD.shape
    groups = k_BTGD.shape[2]
    # The queries of a group stand as its query positions: no key or value is repeated.
    out = scaled_dot_product_attention(
        q_BHD.reshape(rows, groups, heads // groups, size),
        k_BTGD.transpose(1, 2),
        v_BTGD.transpose(1, 2),
        attn_mask=mask_B11T,
    )
    return out.reshape(rows, heads, size)


def attend_chunk(q_nHD: Tensor, k_TGD: Tensor, v_TGD: Tensor, mask_nT: Tensor) -> Tensor:
    """The n query positions of one request's chunk over its context; [n, H, D]."""
    rows, heads, size = q_nHD.shape
    groups = k_TGD.shape[1]
    q = q_nHD.view(rows, groups, heads // groups, size).permute(1, 2, 0, 3).reshape(1, groups, -1, size)
    out = scaled_dot_product_attention(
        q,
        k_TGD.transpose(0, 1).unsqueeze(0),
        v_TGD.transpose(0, 1).unsqueeze(0),
        attn_mask=mask_nT.repeat(heads // groups, 1),
    )
    return out.view(groups, heads // groups, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)


def causal_mask(rows: int, context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, context]: the rows are the last `rows` of `context` positions, each sees itself and what is before it."""
    return torch.full((rows, context), float("-inf"), dtype=dtype, device=device).triu(context - rows + 1)
