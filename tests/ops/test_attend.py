"""Attention against its formula, head by head, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from anydepth.ops.attend import attend_chunk, attend_rows, causal_mask


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_head(q_D, k_TD, v_TD):
    weights = (k_TD @ q_D / math.sqrt(len(q_D))).softmax(0)
    return weights @ v_TD


HEADS = pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (6, 2), (3, 1)])


@HEADS
def test_rows_see_their_own_context_only(heads, groups):
    """Rows of unlike length; what stands beyond a row's length is zero and masked."""
    lengths, context, size = (1, 5, 3), 5, 8
    q, k, v = (random(3, *shape, seed=n) for n, shape in enumerate([(heads, size)] + [(context, groups, size)] * 2))
    mask = torch.full((3, 1, 1, context), -math.inf, dtype=torch.float64)
    for row, length in enumerate(lengths):
        mask[row, :, :, :length] = 0
        k[row, length:] = v[row, length:] = 0
    got = attend_rows(q, k, v, mask)
    assert got.shape == (3, heads, size)
    for row, length in enumerate(lengths):
        for head in range(heads):
            group = head // (heads // groups)
            wanted = one_head(q[row, head], k[row, :length, group], v[row, :length, group])
            torch.testing.assert_close(got[row, head], wanted, rtol=1e-12, atol=1e-12)


@HEADS
@pytest.mark.parametrize("rows, context", [(1, 1), (3, 3), (2, 7), (1, 6)])
def test_a_chunk_is_causal(heads, groups, rows, context):
    """The rows are the last ones of the context; each sees itself and all before it."""
    size = 8
    q, k, v = random(rows, heads, size), random(context, groups, size, seed=1), random(context, groups, size, seed=2)
    got = attend_chunk(q, k, v, causal_mask(rows, context, torch.float64, torch.device("cpu")))
    for row in range(rows):
        seen = context - rows + row + 1
        for head in range(heads):
            group = head // (heads // groups)
            wanted = one_head(q[row, head], k[:seen, group], v[:seen, group])
            torch.testing.assert_close(got[row, head], wanted, rtol=1e-12, atol=1e-12)


def test_causal_mask():
    mask = causal_mask(2, 4, torch.float32, torch.device("cpu"))
    assert (mask == 0).tolist() == [[True, True, True, False], [True] * 4]
    assert mask.isinf().sum() == 1
