"""`probe`: leave where a linear probe of the hidden state is sure that this exit says what full depth would (CALM,
arXiv 2207.07061).

A row leaves at the first exit k in [min, max] where sigmoid(w_k . h + b_k) >= lambda_k, a profile's number
(`anydepth.profile`). No logits are computed until it does. Exits that the profile has not are not asked.
"""

from __future__ import annotations

from torch import Tensor

from anydepth.exits import base
from anydepth.models.base import Shape
from anydepth.types import Sampling


class Policy(base.Policy):
    """State columns: d = 0..R-1 the threshold at depth d + 1."""

    name = "probe"
    needs = "signal"
    everywhere = False

    def check(self, sampling: Sampling, shape: Shape) -> None:
        base.bounds_of(sampling, shape)
        asked = {
            d for d, exit in enumerate(self.profile_of(sampling).by_depth, start=1) if exit and exit.probe is not None
        }
        if not asked:
            raise ValueError(
                f"profile {self.profile_name(sampling)!r} has no exit with a probe's threshold; give another "
                f"profile, or exit_policy='confidence'"
            )
        if missing := sorted(asked - shape.probed):
            raise ValueError(
                f"profile {self.profile_name(sampling)!r} asks probes at depths {missing}, where this model has none; "
                f"give heads= that have them, or another profile"
            )

    def asks(self, sampling: Sampling, bounds: tuple[int, int], depth: int) -> bool:
        exit = self.profile_of(sampling).by_depth[depth - 1]
        return depth >= bounds[0] and exit is not None and exit.probe is not None

    def parameters(self, sampling: Sampling, bounds: tuple[int, int], segments: int) -> tuple[float, ...]:
        given = [exit.probe if exit else None for exit in self.profile_of(sampling).by_depth]
        bounded = base.thresholds(0.0, bounds, segments)
        return tuple(
            limit if limit != 0.0 else float("inf") if value is None else value
            for limit, value in zip(bounded, given, strict=True)
        )

    def start(self, parameters_NP: Tensor) -> Tensor:
        return parameters_NP

    def decide(self, state_NS: Tensor, depth_N: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        return base.wide(seen).sigmoid().double() >= base.at_depth(state_NS, depth_N - 1), state_NS
