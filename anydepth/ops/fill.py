"""Fills: what the planes deeper than its readout hold for a token that was read early."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from anydepth.ops.kv import KVPool
from anydepth.types import Shape, unknown


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

    def leave(self, pool: KVPool, storage_N: Tensor, depth_N: Tensor) -> None:
        """Fill the deeper planes of rows that were read at `depth`; `storage` is where that plane holds them."""


class _Looped(Fill):
    def check(self, shape: Shape) -> None:
        if not shape.shared_weights:
            raise ValueError(
                f"fill {self.name!r} is for looped models; this one is layered, allowed: 'full', 'deferred'"
            )


class Full(Fill):
    """Everything is computed; only the readout is chosen. The reference."""

    name = "full"
    runs_on = True


class LastExited(_Looped):
    """A copy of the position's own K/V of its readout depth, layer by layer, in every deeper plane."""

    name = "last_exited"
    copies = True

    def leave(self, pool: KVPool, storage_N: Tensor, depth_N: Tensor) -> None:
        pool.copy_deeper(storage_N, depth_N)


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


FILLS: dict[str, Fill] = {fill.name: fill for fill in (Full(), LastExited(), Deferred(), Shared())}


def load_fill(name: str | None, shape: Shape) -> Fill:
    """The fill of that name, checked against the model. Default: last_exited (looped), full (layered)."""
    if name is None:
        name = LastExited.name if shape.shared_weights else Full.name
    if name not in FILLS:
        raise unknown("fill", str(name), FILLS)
    FILLS[name].check(shape)
    return FILLS[name]
