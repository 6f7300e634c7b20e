"""Fills: what the planes deeper than its readout hold for a token that was read early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from anydepth.ops.kv import KVPool
from anydepth.types import Shape, unknown


class Early(NamedTuple):
    """Rows that were read early: where the plane of their depth holds them, that depth (`depths`: as the host knows it,
    None where only the device does), and, of whoever left beside them too, positions and the states they were read
    from, in which `at_N` says where they are."""

    storage_N: Tensor
    depth_N: Tensor
    depths: Sequence[int] | None
    at_N: Tensor
    positions_L: Tensor
    h_Ld: Tensor


class Projects(Protocol):
    """The part of a model that `project` needs."""

    shape: Shape

    def keys_values(self, layers: range, h_Nd: Tensor, positions_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K (after RoPE) and V [N, G, D] that each of the layers makes of a state."""


class Fill:
    """Base of all fills; a new one is one subclass here.

    `runs_on`: a row goes on to segment R after its readout. `copies`: `leave` has something to do. `defers`: the state
    of a row that was read early is kept, and the deeper segments run when a later token goes there. `prefill_rows`:
    positions of a prompt that may run together (None: as many as the turn allows).
    """

    name: ClassVar[str]
    runs_on: ClassVar[bool] = False
    prefill_rows: ClassVar[int | None] = None
    copies: ClassVar[bool] = False
    defers: ClassVar[bool] = False

    def check(self, shape: Shape) -> None:
        """ValueError for a model this fill is not defined on."""

    def planes(self, shape: Shape) -> int:
        """Planes a layer keeps."""
        return shape.segments if shape.shared_weights else 1

    def leave(self, model: Projects, pool: KVPool, early: Early) -> None:
        """Fill the deeper planes of rows that were read early."""


class _Looped(Fill):
    def check(self, shape: Shape) -> None:
        if not shape.shared_weights:
            raise ValueError(
                f"fill {self.name!r} is for looped models; this one is layered, allowed: 'full', 'deferred', 'project'"
            )


class Full(Fill):
    """Everything is computed; only the readout is chosen. The reference."""

    name = "full"
    runs_on = True


class LastExited(_Looped):
    """A copy of the position's own K/V of its readout depth, layer by layer, in every deeper plane."""

    name = "last_exited"
    copies = True

    def leave(self, model: Projects, pool: KVPool, early: Early) -> None:
        pool.copy_deeper(early.storage_N, early.depth_N)


class Project(Fill):
    """In every layer that was skipped, what that layer's own input norm, K/V projection and RoPE make of the state the
    row was read from (CALM, arXiv 2207.07061)."""

    name = "project"
    copies = True

    def check(self, shape: Shape) -> None:
        if shape.shared_weights:
            raise ValueError(
                "fill 'project' is for layered models; this one is looped, allowed: 'full', 'last_exited', 'deferred', "
                "'shared'"
            )

    def leave(self, model: Projects, pool: KVPool, early: Early) -> None:
        assert early.depths is not None, "layered models have depths that the host knows"
        for depth in sorted(set(early.depths)):
            same = early.at_N.new_tensor([n for n, other in enumerate(early.depths) if other == depth])
            storage_N, at_N = early.storage_N.index_select(0, same), early.at_N.index_select(0, same)
            h_Nd, positions_N = early.h_Ld.index_select(0, at_N), early.positions_L.index_select(0, at_N)
            skipped = range(model.shape.segment_layers[depth - 1].stop, model.shape.layers)
            for layer, (k, v) in zip(skipped, model.keys_values(skipped, h_Nd, positions_N), strict=True):
                pool.write(layer, storage_N, k, v)


class Deferred(Fill):
    """What `full` writes, but not before it is needed: a position waits with its state until a later token goes deeper
    than it went, and is then run as one block with the others that wait. What nobody needs is never run.

    Exact, because plane d of a position depends on planes d of the positions up to it and on its own state at d - 1
    only; so a policy may look at its own position's states, and at nothing else.
    """

    name = "deferred"
    defers = True


class Shared(_Looped):
    """One plane, overwritten at every loop. Prefill finishes all loops of a position before the next one."""

    name = "shared"
    prefill_rows = 1

    def planes(self, shape: Shape) -> int:
        return 1


FILLS: dict[str, Fill] = {fill.name: fill for fill in (Full(), LastExited(), Deferred(), Project(), Shared())}


def load_fill(name: str | None, shape: Shape) -> Fill:
    """The fill of that name, checked against the model. Default: last_exited (looped), full (layered)."""
    if name is None:
        name = LastExited.name if shape.shared_weights else Full.name
    if name not in FILLS:
        raise unknown("fill", str(name), FILLS)
    FILLS[name].check(shape)
    return FILLS[name]
