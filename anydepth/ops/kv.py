"""Paged keys and values, a plane a segment.

One storage index stands for one position of one plane: `plane * positions + page * page_size + offset`. The pages of a
request are the same in every plane, so copying between planes moves along the index by a multiple of `positions`.

| offsets in a plane             | what stands there                                               |
|--------------------------------|-----------------------------------------------------------------|
| [0, page_size)                 | the null page; plane 1's is zero, read where a row has no context |
| [page * size, (page+1) * size) | page `page`, 1 <= page <= pages                                 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.ops.attend import attend_chunk, attend_rows, causal_mask
from anydepth.ops.send import send
from anydepth.types import Shape


class KVPool:
    """K/V of every layer: `data[layer]` is [2, planes * positions, G * D] (keys, then values).

    A looped model keeps `planes` of them per layer; a layered model's layers belong to one segment each, so planes is 1
    there and a segment's plane is simply its layers.
    """

    def __init__(
        self, shape: Shape, planes: int, pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.planes, self.pages, self.page_size = planes, pages + 1, page_size  # with the null page
        self.positions = self.pages * page_size
        self.groups, self.head_dim = shape.kv_heads, shape.head_dim
        self.data = torch.empty(
            shape.layers, 2, planes * self.positions, self.groups * self.head_dim, dtype=dtype, device=device
        )
        self.data[:, :, :page_size] = 0
        self.scratch = (self.pages - 1) * page_size  # in the last page, which the runner may keep for itself
        # Row d: how far each plane lies from plane d. One that is not deeper counts as plane d itself, which is then
        # written over with its own values.
        planes_R = torch.arange(planes, device=device)
        depths = torch.arange(shape.segments + 1, device=device)
        self._offset = (depths - 1) * self.positions if planes > 1 else 0 * depths
        self._deeper = (planes_R - torch.arange(-1, planes, device=device).unsqueeze(1)).clamp(min=0) * self.positions

    def offset(self, depth_N: Tensor) -> Tensor:
        """Where the plane of segment `depth` begins."""
        return self._offset.index_select(0, depth_N)

    def copy_deeper(self, storage_N: Tensor, depth_N: Tensor) -> None:
        """Copy each row's K/V of plane `depth`, layer by layer, into every deeper plane."""
        source_NR = storage_N.unsqueeze(1).expand(-1, self.planes)
        target_NR = source_NR + self._deeper.index_select(0, depth_N)
        self.data.index_copy_(2, target_NR.view(-1), self.data.index_select(2, source_NR.reshape(-1)))


class Chunk(NamedTuple):
    """Consecutive positions of one request: how many, the storage of its context up to the last of them (a slice where
    its pages lie in a row), and the mask [n, T] (None for a single position, which sees all of it)."""

    rows: int
    storage_T: Tensor | slice
    mask_nT: Tensor | None


class TurnKV:
    """What the rows of one turn write and see: `models.base.KV` over a KVPool. Valid for one call of `segment`.

    Rows [0, B) are decode rows, each over `storage_BT` with `mask_B11T`; then come the rows of each chunk in turn.
    """

    def __init__(
        self,
        pool: KVPool,
        positions_N: Tensor,
        write_N: Tensor,
        storage_BT: Tensor | None,
        mask_B11T: Tensor | None,
        chunks: list[Chunk],
    ) -> None:
        self.pool, self.positions, self.write_N = pool, positions_N, write_N
        self.storage_BT, self.mask_B11T, self.chunks = storage_BT, mask_B11T, chunks

    def attend(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        pool, both = self.pool, self.pool.data[layer]
        keys, values = both.unbind()
        keys.index_copy_(0, self.write_N, k_NGD.flatten(1))
        values.index_copy_(0, self.write_N, v_NGD.flatten(1))
        done, parts = 0, []
        if self.storage_BT is not None:
            done, context = self.storage_BT.shape
            seen = both.index_select(1, self.storage_BT.view(-1))
            k, v = seen.view(2, done, context, pool.groups, pool.head_dim).unbind()
            parts.append(attend_rows(q_NHD[:done], k, v, self.mask_B11T))
        for rows, storage_T, mask_nT in self.chunks:
            if isinstance(storage_T, slice):
                k, v = keys[storage_T], values[storage_T]
            else:
                k, v = keys.index_select(0, storage_T), values.index_select(0, storage_T)
            k, v = (x.view(-1, pool.groups, pool.head_dim) for x in (k, v))
            parts.append(attend_chunk(q_NHD[done : done + rows], k, v, mask_nT))
            done += rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class KVMap:
    """Where each slot's positions are stored, and the TurnKV of a turn. `table[slot, position]` is an index of plane 1;
    0, the null page, where the slot has no page."""

    def __init__(self, pool: KVPool, slots: int, max_positions: int) -> None:
        self.pool = pool
        device = pool.data.device
        self.table = torch.zeros(slots, max_positions, dtype=torch.int64, device=device)
        self._arange = torch.arange(max_positions, device=device)
        self._open, self._shut = torch.tensor([0.0, float("-inf")], dtype=pool.data.dtype, device=device).unbind()
        self._run: dict[int, tuple[int, int]] = {}  # slot -> (first page, pages), if its pages lie in a row

    def seat(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot its pages, in the order of positions."""
        self._run[slot] = (pages[0], 0)
        self.give(slot, 0, pages)

    def give(self, slot: int, at: int, pages: Sequence[int]) -> None:
        """Make `pages` the slot's pages from its `at`-th on."""
        size = self.pool.page_size
        starts = send(pages, self.table.device).unsqueeze(1) * size
        storage = (starts + self._arange[:size]).view(-1)[: self.table.shape[1] - at * size]
        self.table[slot, at * size : at * size + len(storage)] = storage
        first, count = self._run.get(slot, (0, -1))
        if at == count and list(pages) == list(range(first + count, first + count + len(pages))):
            self._run[slot] = (first, count + len(pages))
        else:
            self._run.pop(slot, None)

    def place(self, slot: int, position: int) -> int:
        """A slot's position as one number, for `at`."""
        return slot * self.table.shape[1] + position

    def at(self, places_N: Tensor, depth_N: Tensor) -> Tensor:
        """Where the plane of `depth` holds each place, [N]."""
        return self.table.view(-1).index_select(0, places_N) + self.pool.offset(depth_N)

    def storage(self, pages: Sequence[int]) -> Tensor:
        """Indices of all positions of these pages in every plane, [planes * pages * page_size]."""
        starts = send(pages, self.table.device).unsqueeze(1) * self.pool.page_size
        plane = (starts + self._arange[: self.pool.page_size]).view(-1)
        planes = torch.arange(self.pool.planes, device=plane.device).unsqueeze(1) * self.pool.positions
        return (planes + plane).view(-1)

    def turn(
        self,
        slots_B: Tensor,
        positions_B: Tensor,
        depth_B: Tensor,
        context: int,
        chunks: list[tuple[int, int, int, int]],
    ) -> TurnKV:
        """The TurnKV of decode rows (their largest context is `context`) and chunks (slot, start, rows, depth)."""
        storage_BT = mask = None
        positions, writes = [], []
        parts: list[Chunk] = []
        if len(slots_B):
            write_B, storage_BT, mask = self.decode_rows(slots_B, positions_B, depth_B, context)
            positions.append(positions_B)
            writes.append(write_B)
        if chunks:
            positions_P, write_P, parts = self.prompt_rows(chunks)
            positions.append(positions_P)
            writes.append(write_P)
        return TurnKV(self.pool, join(positions), join(writes), storage_BT, mask, parts)

    def decode_rows(
        self, slots_B: Tensor, positions_B: Tensor, depth_B: Tensor, context: int, ended_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(where each row writes [B], what it sees [B, T], the mask [B, 1, 1, T]). Rows that `ended_B` says so of
        write to the pool's scratch page."""
        seen = self._arange[:context] <= positions_B.unsqueeze(1)
        table = self.table[:, :context].index_select(0, slots_B) + self.pool.offset(depth_B).unsqueeze(1)
        write_B = table.gather(1, positions_B.unsqueeze(1)).squeeze(1)
        if ended_B is not None:
            write_B = write_B.masked_fill(ended_B, self.pool.scratch)
        # Beyond a row's length its pages hold anything, so it reads the null page there: zeroed by length.
        storage_BT = table * seen
        mask = torch.where(seen, self._open, self._shut)
        return write_B, storage_BT, mask.view(len(slots_B), 1, 1, context)

    def prompt_rows(self, chunks: list[tuple[int, int, int, int]]) -> tuple[Tensor, Tensor, list[Chunk]]:
        """(positions [P], where they write [P], chunks) of prompt rows alone, (slot, start, rows, depth) each."""
        positions = [self._arange[start : start + rows] for _, start, rows, _ in chunks]
        writes = [self.table[slot, start : start + rows] + self._plane(depth) for slot, start, rows, depth in chunks]
        return join(positions), join(writes), [self.chunk(*chunk) for chunk in chunks]

    def chunk(self, slot: int, start: int, rows: int, depth: int) -> Chunk:
        end, plane = start + rows, self._plane(depth)
        if (run := self._run.get(slot)) is not None:
            begin = run[0] * self.pool.page_size + plane
            storage: Tensor | slice = slice(begin, begin + end)
        else:
            storage = self.table[slot, :end] + plane
        mask = causal_mask(rows, end, self.pool.data.dtype, self.table.device) if rows > 1 else None
        return Chunk(rows, storage, mask)

    def _plane(self, depth: int) -> int:
        return (depth - 1) * self.pool.positions if self.pool.planes > 1 else 0


def join(parts: list[Tensor]) -> Tensor:
    """Their rows one after the other; a single tensor as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
