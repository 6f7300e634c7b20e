"""A row times a matrix. Weights are stored [in, out], so that a row reads memory in order."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this many weights a call of oneDNN costs more (some 15 us) than it saves.
LARGE = 1 << 18
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def linear(x_Nd: Tensor, weight_do: Tensor) -> Tensor:
    """x @ weight, [N, o], with a weight as it is or packed.

    On CPUs torch hands float32 products to MKL, which on some processors reaches a third of what oneDNN does (an EPYC
    with AVX-512, 8 rows through SmolLM2-135M's layers: 36 ms against 15, packed 12), so large ones go to oneDNN
    directly. That call has no gradient; where one is recorded the plain product is used.
    """
    if weight_do.is_mkldnn:
        assert not (torch.is_grad_enabled() and x_Nd.requires_grad), "a packed weight has no gradient; unpack it first"
        return torch.ops.mkldnn._linear_pointwise(x_Nd, weight_do, None, "none", [], "")
    if x_Nd.dtype == torch.float32 and _suits_onednn(weight_do) and not torch.is_grad_enabled():
        return torch.ops.mkldnn._linear_pointwise(x_Nd, weight_do.t(), None, "none", [], "")
    return x_Nd @ weight_do


def pack(weight_do: Tensor) -> Tensor:
    """The weight in oneDNN's own order, which `linear` takes too; the weight itself where that gains nothing.

    The result is opaque: nothing but `linear` and `unpack` can read it. Both exist until the caller lets one go.
    """
    if weight_do.is_mkldnn or not _suits_onednn(weight_do):
        return weight_do
    return torch.ops.mkldnn._reorder_linear_weight(weight_do.t(), None)


def unpack(weight_do: Tensor) -> Tensor:
    """What was packed, number for number, as an ordinary [in, out] tensor."""
    return weight_do.to_dense().t().contiguous() if weight_do.is_mkldnn else weight_do


def _suits_onednn(weight_do: Tensor) -> bool:
    return weight_do.numel() >= LARGE and weight_do.is_cpu and weight_do.dtype == torch.float32 and _HAS_ONEDNN
