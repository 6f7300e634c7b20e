"""How turns of late signals reach the device. None of it may change an output; each can be switched off to see that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Submission:
    """streams: 1, or 2 for a boundary stream that carries outcomes to the host while the core stream goes on (with
    graphs they are copied on the core stream, since the next replay writes over them).
    static_buffers: host buffers of outcomes are used again, once they were read. padding: decode rows are padded to a
    power of two. graphs: decode turns are captured as CUDA graphs and replayed, as far as `graph_bytes` of device
    memory go; beyond that, and where a capture fails, they run eagerly. Streams and graphs need CUDA; padding and
    graphs are for `resident`, whose turn is one function of tensors. Not run on a GPU yet."""

    streams: int = 1
    static_buffers: bool = True
    padding: bool = False
    graphs: bool = False
    graph_bytes: int = 1 << 30

    def check(self, signals: str, device: torch.device) -> None:
        """ValueError for what this mode or device cannot do."""
        if signals == "sync" and self != Submission():
            raise ValueError(f"{self} is for late signals; signals 'sync' submits nothing ahead: leave it out")
        for name in ("static_buffers", "padding", "graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: True, False")
        if isinstance(self.streams, bool) or self.streams not in (1, 2):
            raise ValueError(f"streams is {self.streams!r}; allowed: 1, 2")
        if device.type != "cuda" and (self.streams > 1 or self.graphs):
            raise ValueError(
                f"streams={self.streams}, graphs={self.graphs} need a CUDA device; this model is on {device.type!r}: "
                f"leave them out"
            )
        if signals != "resident" and (self.padding or self.graphs):
            raise ValueError(
                f"padding={self.padding}, graphs={self.graphs} go with signals='resident', whose turn has one shape; "
                f"these are {signals!r}"
            )
        if self.graphs and not self.padding:
            raise ValueError("graphs need padding=True: without it every number of rows would be a graph of its own")


def default_submission(signals: str, device: torch.device) -> Submission:
    """Everything that the mode and the device can do."""
    cuda, resident = device.type == "cuda", signals == "resident"
    return Submission(
        streams=2 if cuda and signals != "sync" else 1, padding=cuda and resident, graphs=cuda and resident
    )


Numbers = Sequence[tuple[int | slice, Tensor | None]]
Write = Callable[..., None]


class Streams:
    """The stream that turns run on, and the one that carries what came of them to the host. On a CPU, and with one
    stream, both are the stream there is."""

    def __init__(self, submission: Submission, device: torch.device) -> None:
        self._device = device
        self._boundary: Any = torch.cuda.Stream(device) if submission.streams > 1 else None

    def beside(self, write: Write, numbers: Numbers, **tensors: Tensor | None) -> None:
        """Call write(numbers, **tensors) after all that was submitted so far, and beside all that comes."""
        if self._boundary is None:
            write(numbers, **tensors)
            return
        self._boundary.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._boundary):
            write(numbers, **tensors)
        for tensor in (*(values for _, values in numbers), *tensors.values()):
            if tensor is not None:  # its memory is not used again before it has been read
                tensor.record_stream(self._boundary)
