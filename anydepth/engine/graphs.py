"""Turns captured as CUDA graphs: one launch instead of some hundred. Not run on a GPU yet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anydepth.engine.resident_turn import Given


class Captured(NamedTuple):
    """A graph, the tensor it reads the rows' slots from, and the tensors it writes what came of them to."""

    graph: Any
    slots_B: Tensor
    given: Given


class Graphs:
    """Graphs by key. The first turn of a key runs eagerly, which warms it up; from the second on its graph is replayed.

    What a replay gives is overwritten by the next one of the same key: it must be copied away on the same stream. Once
    the graphs take `budget_bytes`, or a capture has failed, no more are captured, and other turns run eagerly.
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        self.budget_bytes, self.used_bytes, self.replayed, self.device = budget_bytes, 0, 0, device
        self._captured: dict[Hashable, Captured | None] = {}
        self._pool: Any = None
        self._stream: Any = None

    def run(self, key: Hashable, slots_B: Tensor, turn: Callable[[Tensor], Given]) -> Given:
        """turn(slots_B), replayed where it can be."""
        if key not in self._captured:
            self._captured[key] = None
            return turn(slots_B)
        captured = self._captured[key]
        if captured is None and self.used_bytes < self.budget_bytes:
            captured = self._capture(key, slots_B, turn)
        if captured is None:
            return turn(slots_B)
        captured.slots_B.copy_(slots_B, non_blocking=True)
        captured.graph.replay()
        self.replayed += 1
        return captured.given

    def _capture(self, key: Hashable, slots_B: Tensor, turn: Callable[[Tensor], Given]) -> Captured | None:
        before, graph, static_B = self._reserved_bytes(), self._new_graph(), slots_B.clone()
        try:
            with self._capturing(graph):
                given = turn(static_B)
        except RuntimeError as error:
            warnings.warn(f"a turn could not be captured as a CUDA graph and runs eagerly: {error}", stacklevel=2)
            self.budget_bytes = 0
            return None
        self._pool = graph.pool()
        self.used_bytes += max(0, self._reserved_bytes() - before)
        self._captured[key] = Captured(graph, static_B, given)
        return self._captured[key]

    def _new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def _capturing(self, graph: Any) -> Any:
        if self._stream is None:  # of the model's device, which need not be the current one
            self._stream = torch.cuda.Stream(self.device)
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream)

    def _reserved_bytes(self) -> int:
        torch.cuda.empty_cache()  # as a capture does when it begins: what it frees would hide what the graph takes
        return torch.cuda.memory_reserved(self.device)
