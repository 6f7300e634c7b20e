"""What router and workers say to each other. Tensors travel as bytes where they leave the process, see `packed`.

A micro-batch goes from the router to the first worker, and from each worker straight to the next. Between two workers
nothing is overtaken; so what one batch says about seats holds for every later one, and a token may enter the first
segment while the row of the token before it, read early, still runs through the deeper ones.

`epoch` counts the starts of a pipeline: what is of an earlier one than the receiver's is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anydepth.dtypes import dtype_name
from anydepth.types import Sampling


class Seat(NamedTuple):
    """A request takes a slot and pages in every worker; `key` is its number, used once. An adaptive `policy` begins
    with `numbers`, is asked at the depths `asked` and leaves at `deepest` at the latest."""

    key: int
    positions: int  # K/V positions it may need
    sampling: Sampling
    seed: int
    max_tokens: int
    deepest: int
    policy: str | None = None
    numbers: tuple[float, ...] = ()
    asked: frozenset[int] = frozenset()


class Row(NamedTuple):
    """`length` positions of a request from `start`. The last one's state at depth `read` (None: where the policy says;
    0: nowhere) gives its `output`-th token; `left` is the depth at which it was read already, 0 before. `ran` counts
    positions times segments that were run for it."""

    key: int
    start: int
    length: int
    output: int
    read: int | None
    left: int = 0
    ran: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch. Rows of one position come first; ids (before the first segment) and h [N, d] are of all positions.
    `states` are those of rows whose policy has not decided, [n, S] by policy, in the order of rows."""

    epoch: int
    number: int
    released: tuple[int, ...]  # requests that have ended: they give back slot and pages before anybody is seated
    seats: tuple[Seat, ...]
    rows: tuple[Row, ...]
    ids: tuple[int, ...] = ()
    h: Any = None
    states: Mapping[str, Any] | None = None


class Join(NamedTuple):
    """Let go of everything, and send batches of this epoch to the worker at `following` (None: you are the last)."""

    epoch: int
    following: Any


class Ask(NamedTuple):
    """Say what you hold."""


class Stop(NamedTuple):
    """End."""


class Kill(NamedTuple):
    """Die, as if by a fault of your own: for a thread, which nobody else can end."""


class Hello(NamedTuple):
    """The worker is there; who comes before it may send to `address`."""

    address: Any


class Joined(NamedTuple):
    epoch: int


class Broken(NamedTuple):
    """The connection of that epoch to the worker that follows could not be made or has ended, and why."""

    epoch: int
    reason: str


class Token(NamedTuple):
    """What came of a row that was read, and the segments executed for it."""

    key: int
    output: int
    token_id: int
    depth: int
    logprob: float | None
    executed: int


class Reads(NamedTuple):
    """Tokens that one worker read in a batch; `done`: the batch has left the last worker."""

    epoch: int
    batch: int
    tokens: tuple[Token, ...]
    done: bool


class Held(NamedTuple):
    """An answer to Ask: pages and slots in use, positions that wait (`deferred`), bytes by tensor; batches, positions
    times segments and the policies' tallies since the worker started."""

    pages: int
    slots: int
    waiting: int
    tensors: Mapping[str, int]
    batches: int
    rows: int
    tallies: Mapping[str, int]


class Gone(NamedTuple):
    """The worker has ended, and why."""

    reason: str


class Packed(NamedTuple):
    """A tensor outside torch: numbers of 16 bits that numpy does not know go as whole numbers."""

    array: Any
    dtype: str


def packed(batch: Batch) -> Batch:
    """The same batch without torch tensors."""
    states = {name: _pack(tensor) for name, tensor in (batch.states or {}).items()}
    return replace(batch, h=None if batch.h is None else _pack(batch.h), states=states)


def unpacked(batch: Batch) -> Batch:
    """What `packed` packed; as it is where nothing was."""
    if not isinstance(batch.h, Packed):
        return batch
    states = {name: _unpack(tensor) for name, tensor in (batch.states or {}).items()}
    return replace(batch, h=_unpack(batch.h), states=states)


def _pack(tensor: Tensor) -> Packed:
    name, there = dtype_name(tensor.dtype), tensor.detach().cpu().contiguous()
    return Packed(there.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else there.numpy(), name)


def _unpack(value: Packed) -> Tensor:
    tensor = torch.from_numpy(np.require(value.array, requirements="W"))  # torch takes writable memory only
    return tensor.view(torch.bfloat16) if value.dtype == "bfloat16" else tensor
