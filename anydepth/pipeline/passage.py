"""How the rows of a micro-batch go through one segment: what a fill means for rows that were read before it.

| fill | a row that was read at depth d, at the segments after d |
|---|---|
| `full` | runs through them |
| `project` | is carried along as the state it was read from; every layer writes the K/V that it makes of that |
| `deferred` | waits at segment d + 1, with its state, until a later token of its request goes there |

The looped fills (`last_exited`, `shared`) are for models whose planes lie in one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from anydepth.engine.plan import Sequence
from anydepth.ops.kv import Group, KVMap, TurnKV
from anydepth.ops.send import send
from anydepth.pipeline.messages import Row, Seat
from anydepth.pipeline.part import Part


class Tenant(NamedTuple):
    """A seated request. `start` is the state [S] in which its policy begins each token; `waiting` has, by segment,
    states of positions that have yet to run it, in order: at most one a position, and each owns its storage."""

    slot: int
    pages: list[int]
    seat: Seat
    sequence: Sequence
    start: Tensor | None
    waiting: dict[int, list[Tensor]]


class Passage:
    """`full`, and the base of the others."""

    runs_on: ClassVar[bool] = True

    def __init__(self, part: Part, map: KVMap, tenants: Mapping[int, Tenant]) -> None:
        self.part, self.map, self.tenants = part, map, tenants
        self._known: tuple[list[tuple[int, int, int]], TurnKV] | None = None

    def through(self, k: int, rows: list[Row], h_Nd: Tensor) -> tuple[list[Row], Tensor]:
        """Rows and states after segment k, one of the worker's own. Rows of one position come first, here and there."""
        return rows, self._run(k, rows, h_Nd)

    def _run(self, k: int, rows: List[Row], h_Nd: Tensor) -> Tensor:
        return self.part.segment(k, h_Nd, self._kv(rows))

    def _kv(self, rows: List[Row]) -> TurnKV:
        """What the rows write and see: those of one position together, then each longer one. A layered model's planes
        lie at the same places for all its segments, so one TurnKV serves as long as the rows stay as they are."""
        spans = [(self.tenants[row.key].slot, row.start, row.length) for row in rows]
        if self._known is None or self._known[0] != spans:
            self._known = spans, self._turn(spans)
        return self._known[1]

    def _turn(self, spans: List[tuple[int, int, int]]) -> TurnKV:
        together = sum(length == 1 for _, _, length in spans)
        if together < 2:
            return self.map.turn([], [(*span, 1) for span in spans])
        slots, starts, lengths = zip(*spans[:together], strict=True)
        numbers = self._index((*slots, *starts, *lengths)).view(3, -1)  # of one position each: also their depth
        group = Group(numbers[0], numbers[1], numbers[2], 1, max(starts) + 1)
        return self.map.turn([group], [(*span, 1) for span in spans[together:]])

    def _index(self, values: Iterable[int]) -> Tensor:
        return send(values, self.part.device)


class Project(Passage):
    runs_on = False

    def through(self, k: int, rows: list[Row], h_Nd: Tensor) -> tuple[list[Row], Tensor]:
        left = [i for i, row in enumerate(rows) if row.left]
        if left:
            self._project(k, [rows[i] for i in left], h_Nd[self._index(left)])
        running = [i for i, row in enumerate(rows) if not row.left]
        if running:
            # Only rows of one position, which come first, are ever read early.
            at = [i for i in running if rows[i].length == 1]
            at += range(sum(row.length == 1 for row in rows), len(h_Nd))
            places = self._index(at)
            h_Nd = h_Nd.index_copy(0, places, self._run(k, [rows[i] for i in running], h_Nd[places]))
        return [row if row.left else row._replace(ran=row.ran + row.length) for row in rows], h_Nd

    def _project(self, k: int, rows: List[Row], h_Ld: Tensor) -> None:
        places = [self.map.place(self.tenants[row.key].slot, row.start) for row in rows]
        storage_L = self.map.at(self._index(places), self._index([1] * len(rows)))
        layers, positions_L = self.part.shape.segment_layers[k - 1], self._index(row.start for row in rows)
        for layer, (keys, values) in zip(layers, self.part.keys_values(layers, h_Ld, positions_L), strict=True):
            self.map.pool.write(layer - self.part.first_layer, storage_L, keys, values)


class Deferred(Passage):
    """Which positions wait where is as in `engine.deferral`: of a request, those that have been through segment k - 1
    and not through k lie in a row and end where the next block to enter k begins."""

    runs_on = False

    def through(self, k: int, rows: list[Row], h_Nd: Tensor) -> tuple[list[Row], Tensor]:
        blocks = list[tuple[Row, Tensor]]()
        for row, own_nd in zip(rows, h_Nd.split([row.length for row in rows]), strict=True):
            waiting = self.tenants[row.key].waiting.setdefault(k, [])
            if row.left:
                waiting.append(own_nd.clone())
                continue
            before = sum(map(len, waiting))
            length = before + row.length
            row = row._replace(start=row.start - before, length=length, ran=row.ran + length)
            blocks.append((row, torch.cat([*waiting, own_nd]) if before else own_nd))
            waiting.clear()
        if not blocks:
            return [], h_Nd[:0]
        blocks.sort(key=lambda block: block[0].length > 1)
        running = [row for row, _ in blocks]
        return running, self._run(k, running, torch.cat([block_nd for _, block_nd in blocks]))


PASSAGES: dict[str, type[Passage]] = {"full": Passage, "project": Project, "deferred": Deferred}
