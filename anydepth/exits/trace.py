"""`trace`: every token is read at its recorded depth. It replays another run's depths as exact, comparable work."""

from __future__ import annotations

from anydepth.exits import base
from anydepth.models.base import Shape
from anydepth.types import Sampling


class Policy(base.Policy):
    name = "trace"

    def check(self, sampling: Sampling, shape: Shape) -> None:
        if sampling.trace is None:
            raise ValueError("policy 'trace' needs trace=[...], one depth for every output token")
        low, high = base.bounds_of(sampling, shape)
        prefilled = sampling.first_token == "prefill"
        for index, depth in enumerate(sampling.trace):
            if not low <= depth <= high and not (prefilled and index == 0):
                raise ValueError(f"trace[{index}] is {depth}; allowed: {low} .. {high}")
        if prefilled and sampling.trace[:1] not in ((), (shape.segments,)):
            raise ValueError(
                f"trace[0] is {sampling.trace[0]}; the first token comes from the full-depth prefill, so "
                f"it must be {shape.segments} (or set first_token='policy')"
            )

    def planned(self, sampling: Sampling, index: int, segments: int) -> int:
        assert sampling.trace is not None
        return sampling.trace[index]
