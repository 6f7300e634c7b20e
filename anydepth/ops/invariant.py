"""Rows and contexts in blocks of fixed size, so that a row's bits do not depend on what stands beside it.

A library picks how it sums by the shape of the operands, so one row of three can have other bits than the same row of
four. Here every row function is called with one of a few row counts (`RowBlocks`), and every attention has one query
position a row over its own context, padded to a multiple of KV_BLOCK (`BlockKV`). That rows of such a block do not
touch each other is measured, not assumed: `engine.invariant` does it for a model on the machine at hand.

Shape suffixes: n rows of a block, T positions of context, others as in `models.base` and `ops.kv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from anydepth.ops.attend import attend_rows, causal_mask
from anydepth.ops.kv import Chunk, Together, TurnKV, join

KV_BLOCK = 64


class Block(NamedTuple):
    """Rows [start, stop) of a turn, run as `rows` rows: the first one is repeated at the end, and then dropped."""

    start: int
    stop: int
    rows: int

    def of(self, x_N: Tensor) -> Tensor:
        """The block's rows of `x`, and its padding."""
        real = x_N[self.start : self.stop]
        missing = self.rows - len(real)
        return torch.cat((real, real[:1].expand(missing, *real.shape[1:]))) if missing else real

    def drop(self, y_n: Tensor) -> Tensor:
        """Without the padding."""
        return y_n[: self.stop - self.start]


class RowBlocks:
    """The row counts that are allowed, ascending. RowBlocks([4, 32]).cut(39) gives blocks of 32 and 32 rows: 39 are
    more than 32, and 7 more than 4."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)

    def cut(self, rows: int) -> Iterator[Block]:
        """The fewest blocks that hold `rows` rows, the last one as small as is allowed."""
        most = self.counts[-1]
        for start in range(0, rows, most):
            stop = min(start + most, rows)
            yield Block(start, stop, next(count for count in self.counts if count >= stop - start))

    def run(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function` of tensors with as many rows each, block by block."""
        return join([b.drop(function(*map(b.of, tensors))) for b in self.cut(len(tensors[0]))])


class Seen(NamedTuple):
    """Rows [start, stop) of a block and the storage of their context, of each row ([n, T]) or of all ([1, T])."""

    start: int
    stop: int
    storage: Tensor
    mask_n11T: Tensor


class BlockKV:
    """What the rows of one block write and see: `models.base.KV` for a part of a turn's TurnKV.

    Rows of a prompt see what their block and those before it wrote, so the blocks of a turn have to run in order.
    """

    def __init__(self, turn: TurnKV, block: Block) -> None:
        self.positions = block.of(turn.positions)
        self._pool, self._write = turn.pool, turn.write_N[block.start : block.stop]
        self._seen = list(_seen(turn, block))

    def attend(self, layer: int, q_nHD: Tensor, k_nGD: Tensor, v_nGD: Tensor) -> Tensor:
        keys, values = self._pool.data[layer].unbind()
        real = len(self._write)
        keys.index_copy_(0, self._write, k_nGD[:real].flatten(1))
        values.index_copy_(0, self._write, v_nGD[:real].flatten(1))
        mixed = torch.zeros_like(q_nHD)  # of the padding too: it has no context
        for start, stop, storage, mask in self._seen:
            k, v = (x.index_select(0, storage.view(-1)).view(*storage.shape, *k_nGD.shape[1:]) for x in (keys, values))
            mixed[start:stop] = attend_each(q_nHD[start:stop], k, v, mask)
        return mixed


def attend_each(q_nHD: Tensor, k: Tensor, v: Tensor, mask_n11T: Tensor) -> Tensor:
    """One query position a row over its own context ([n, T, G, D]) or over one that all share ([1, T, G, D]).

    It runs on one thread: with two, torch's kernel gave a row other bits by the thread that took it.
    """
    k, v = (x.expand(len(q_nHD), -1, -1, -1) for x in (k, v))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return attend_rows(q_nHD, k, v, mask_n11T)
    finally:
        torch.set_num_threads(threads)


def _seen(turn: TurnKV, block: Block) -> Iterator[Seen]:
    done = 0
    for part in turn.parts:
        if isinstance(part, Together) and part.mask_B1nT.shape[2] == 1:
            start, stop = max(block.start, done), min(block.stop, done + part.positions)
            if start < stop:
                own = slice(start - done, stop - done)
                yield _padded(start - block.start, stop - block.start, part.storage_BT[own], part.mask_B1nT[own])
            done += part.positions
            continue
        for positions, storage in _contexts(turn, part, done):
            start, stop = max(block.start, done), min(block.stop, done + positions)
            done += positions
            if start >= stop:
                continue
            # Later rows have not been written yet: the context ends at the block's last row of it.
            storage = storage[: len(storage) - (done - stop)]
            mask = causal_mask(stop - start, len(storage), turn.pool.data.dtype, storage.device)
            yield _padded(start - block.start, stop - block.start, storage.unsqueeze(0), mask[:, None, None])


def _contexts(turn: TurnKV, part: Chunk | Together, done: int) -> Iterator[tuple[int, Tensor]]:
    """Of each request, how many positions it has here and the storage of its context up to the last of them."""
    if isinstance(part, Together):
        count = part.mask_B1nT.shape[2]
        for row, storage in enumerate(part.storage_BT, start=1):
            yield count, storage[: int(turn.positions[done + row * count - 1]) + 1]
        return
    storage = part.storage_T
    if isinstance(storage, slice):
        storage = torch.arange(storage.start, storage.stop, device=turn.positions.device)
    yield part.positions, storage


def _padded(start: int, stop: int, storage: Tensor, mask_n11T: Tensor) -> Seen:
    """The context made a multiple of KV_BLOCK, with zeros (storage 0, the null page) that no row sees."""
    more = -storage.shape[1] % KV_BLOCK
    return Seen(start, stop, pad(storage, (0, more)), pad(mask_n11T, (0, more), value=float("-inf")))
