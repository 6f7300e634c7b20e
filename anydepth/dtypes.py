"""The dtypes that weights may have, and their names in options, Records and hashes."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """dtype_name(torch.float32) == "float32"."""
    return str(dtype).removeprefix("torch.")
