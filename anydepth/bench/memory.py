"""Peak memory of a run, in the process that runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

RESET_PEAK = "5"  # of the resident set; proc(5), clear_refs


class Peak(NamedTuple):
    """`bytes` at the worst moment, weights included, and what they are bytes `of`; None where that cannot be said,
    and then `of` is the reason."""

    bytes: int | None
    of: str


UNMEASURED = Peak(None, "not measured")


def watch_peak(device: torch.device) -> Callable[[], Peak]:
    """Start measuring; call the result for the peak since then.

    On CUDA it is what torch has allocated on the device. On Linux's CPUs it is the resident set of the whole process,
    whose high-water mark the kernel lets a process set back: memory that an earlier run freed, but the allocator kept,
    still counts. An engine is in no reference cycle: the pool of the run before is gone. Elsewhere there is no honest
    number for one run of several in a process.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: Peak(torch.cuda.max_memory_allocated(device), "allocated on the device")
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    except OSError as error:
        reason = f"not measured: this system does not let a process set its peak back ({error.strerror})"
        return lambda: Peak(None, reason)
    return lambda: Peak(_resident_peak_bytes(), "resident set of the process")


def _resident_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
