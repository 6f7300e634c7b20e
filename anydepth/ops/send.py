"""From the host to the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def send(values: Iterable[int], device: torch.device) -> Tensor:
    """Whole numbers on the device, [n] int64, without waiting for it."""
    return send_tensor(torch.tensor(list(values), dtype=torch.int64, pin_memory=device.type == "cuda"), device)


def send_tensor(here: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device, without waiting for it.

    A plain copy to a GPU would wait until all that was submitted has run. This one goes through pinned memory, which
    torch's allocator hands out again only when the copy from it is done.
    """
    if device.type == "cpu":
        return here
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)
