"""The contract of an exit policy: when a row stops. Pure and batched: tensors in, tensors out.

A policy is one of two kinds. A *planned* one (`never`, `fixed`, `interval`, `trace`) knows every token's depth
beforehand: the host asks `planned` and no tensor is looked at. An *adaptive* one (`gate_cdf`, `confidence`, `probe`)
returns None there; the runner then calls `decide` once a segment with what `needs` names, for every row that has not
reached its max_depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor

from anydepth.models.base import Model, Shape
from anydepth.profile import Exit, Profile
from anydepth.types import Sampling

Needs = Literal["nothing", "signal", "hidden", "logits"]


@dataclass(frozen=True)
class Thresholds:
    """A profile on a model: the exit at each depth 1..R, None where the profile has none."""

    gate_temperature: float
    by_depth: tuple[Exit | None, ...]


class Policy:
    """Base of all policies; a new one is one file with one subclass named `Policy`. `profiles` are those that the
    engine was given, by name. `everywhere`: it is asked at every depth below max_depth, not only where `asks` says.
    `needs`: what `decide` sees, and no more is computed; "logits" [N, C] are `Model.listed`, of the tokens that an exit
    can give, which may be few: a column is no token id."""

    profiles: Mapping[str, Thresholds] = MappingProxyType({})
    everywhere: ClassVar[bool] = True
    name: ClassVar[str]
    needs: ClassVar[Needs] = "nothing"
    tallies: ClassVar[Mapping[str, int]] = {}  # state columns that outlive a request, by the name `stats` gives them

    def check(self, sampling: Sampling, shape: Shape) -> None:
        """ValueError for a setting this policy cannot honour on a model of this shape."""

    def planned(self, sampling: Sampling, index: int, segments: int) -> int | None:
        """Readout depth of output `index` (0-based), or None when only `decide` can tell. Torch-free."""
        return None

    def asks(self, sampling: Sampling, bounds: tuple[int, int], depth: int) -> bool:
        """Whether a row at this depth is to be asked. Torch-free; not called where it is asked `everywhere`."""
        return True

    def profile_of(self, sampling: Sampling) -> Thresholds:
        """The profile that a request names, or the only one there is."""
        name = sampling.profile
        if name is None and len(self.profiles) == 1:
            return next(iter(self.profiles.values()))
        if name is None or name not in self.profiles:
            raise ValueError(
                f"policy {self.name!r} takes its thresholds from a profile; given: {name!r}, loaded: "
                f"{sorted(self.profiles) or 'none'}: give profile= to LLM, and its name here"
            )
        return self.profiles[name]

    def profile_name(self, sampling: Sampling) -> str:
        """The name of `profile_of`."""
        return sampling.profile or next(iter(self.profiles))

    def parameters(self, sampling: Sampling, bounds: tuple[int, int], segments: int) -> tuple[float, ...]:
        """The request's own numbers, as many for every request of this policy."""
        return ()

    def start(self, parameters_NP: Tensor) -> Tensor:
        """State [N, S] float64 of N fresh rows. It lasts for the whole request; `decide` starts afresh at depth 1."""
        raise NotImplementedError

    def decide(self, state_NS: Tensor, depth_N: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(leave [N] bool, new state [N, S]) after segment `depth_N`, given the signal, hidden state or logits seen."""
        raise NotImplementedError

    def seen(self, model: Model, k: int, h_Nd: Tensor) -> Tensor:
        """What `decide` is shown of rows whose state after segment `k` is `h`."""
        if self.needs == "signal":
            return model.signal(k, h_Nd)
        return model.listed(k, h_Nd) if self.needs == "logits" else h_Nd


def known_profiles(profiles: Sequence[Profile], shape: Shape) -> dict[str, Thresholds]:
    """Profiles on a model, by name. ValueError for two of one name, and for exits where no segment ends."""
    ends = [layers.stop for layers in shape.segment_layers]
    found = dict[str, Thresholds]()
    for profile in profiles:
        profile.check_exits(ends)
        if profile.name in found:
            raise ValueError(f"two profiles are named {profile.name!r}; give each a name of its own")
        by_layer = {exit.layer: exit for exit in profile.exits}
        found[profile.name] = Thresholds(profile.gate_temperature, tuple(by_layer.get(layer) for layer in ends))
    return found


def bounds_of(sampling: Sampling, shape: Shape) -> tuple[int, int]:
    """(min_depth, max_depth) of a request, checked against the model's R segments."""
    segments = shape.segments
    low, high = sampling.min_depth, segments if sampling.max_depth is None else sampling.max_depth
    for name, value in (("min_depth", low), ("max_depth", high), ("depth", sampling.depth or 1)):
        if not 1 <= value <= segments:
            raise ValueError(f"{name} is {value}; this model has {segments} segments, allowed: 1 .. {segments}")
    if low > high:
        raise ValueError(f"min_depth {low} is above max_depth {high}; allowed: min_depth <= max_depth")
    return low, high


def exclude_bounds(name: str, depth: int, bounds: tuple[int, int]) -> None:
    """ValueError where min_depth and max_depth shut out the one depth a policy has."""
    if not bounds[0] <= depth <= bounds[1]:
        raise ValueError(
            f"policy {name!r} reads at depth {depth}, which min_depth={bounds[0]}, max_depth={bounds[1]} "
            f"exclude; leave the bounds out or choose a policy that adapts"
        )


def thresholds(value: float, bounds: tuple[int, int], segments: int) -> tuple[float, ...]:
    """One threshold a depth: unreachable below min_depth, always reached from max_depth on.

    thresholds(0.5, (2, 3), 4) == (inf, 0.5, -inf, -inf)
    """
    low, high = bounds
    return tuple(float("-inf") if d >= high else float("inf") if d < low else value for d in range(1, segments + 1))


def at_depth(table_NC: Tensor, depth_N: Tensor) -> Tensor:
    """Each row's entry in the column of its own depth, [N]; columns count from 0."""
    return table_NC.gather(1, depth_N.unsqueeze(1)).squeeze(1)


def wide(x: Tensor) -> Tensor:
    """float32, or float64 for a float64 model: the precision in which signals are read."""
    return x if x.dtype == torch.float64 else x.float()
