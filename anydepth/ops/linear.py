"""A row times a matrix. Weights are stored [in, out], so that a row reads memory in order."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this many weights a call of oneDNN costs more (some 15 us) than it saves.
LARGE = 1 << 18
_onednn = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None


def linear(x_Nd: Tensor, weight_do: Tensor) -> Tensor:
    """x @ weight, [N, o].

    On CPUs torch hands float32 products to MKL, which on some processors reaches a half to a third of what oneDNN does
    (an EPYC with AVX-512, 8 rows through SmolLM2-135M: 47 ms against 20 ms), so large ones go to oneDNN directly. That
    call has no gradient; where one is recorded the plain product is used.
    """
    if (
        weight_do.numel() < LARGE
        or x_Nd.dtype != torch.float32
        or not x_Nd.is_cpu
        or torch.is_grad_enabled()
        or _onednn is None
    ):
        return x_Nd @ weight_do
    return _onednn(x_Nd, weight_do.t(), None, "none", [], "")
