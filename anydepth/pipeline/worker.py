"""One worker: its segments, their K/V, the gate and the readout beside each of them.

A worker knows of a request what `Seat` says, and of a micro-batch what comes with it. It takes slot and pages when a
request is seated and gives them back when it is released; both ride on batches, in order. Shape suffixes: N positions
of the batch, B rows, L rows that are read, S numbers of a policy's state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as List
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.engine.pages import Pages
from anydepth.engine.plan import Sequence
from anydepth.engine.sampling import Draw, Sampler
from anydepth.exits.base import Policy
from anydepth.exits.load import load_policy
from anydepth.ops.kv import Group, KVMap, KVPool, TurnKV
from anydepth.ops.send import send
from anydepth.pipeline.messages import Batch, Held, Row, Seat, Token
from anydepth.pipeline.part import Part
from anydepth.types import Request


class Tenant(NamedTuple):
    """A seated request. `start` is the state [S] in which its policy begins each token."""

    slot: int
    pages: list[int]
    seat: Seat
    sequence: Sequence
    start: Tensor | None


class Worker:
    """Runs micro-batches through the segments of `part`. The router never seats more than `slots` requests, nor ones
    that together may need more than `pages` pages."""

    def __init__(self, part: Part, *, slots: int, pages: int, page_size: int) -> None:
        self.part, self.segments = part, part.shape.segments
        self._sizes = slots, pages, page_size
        context = min(part.shape.max_positions, pages * page_size)
        self.pool = KVPool(part.plane_shape, 1, pages, page_size, dtype=part.dtype, device=part.device)
        self.map = KVMap(self.pool, slots, context)
        self.sampler = Sampler(slots, context, part.shape.vocab, part.device)
        self.epoch = self.batches = self.rows = 0
        self._policies: dict[str, Policy] = {}
        self.join(0)

    def join(self, epoch: int) -> None:
        """Begin an epoch: nobody is seated and nothing is held."""
        slots, pages, page_size = self._sizes
        self.epoch, self.pages = epoch, Pages(pages, page_size)
        self.tenants: dict[int, Tenant] = {}
        self._slots = list(range(slots - 1, -1, -1))

    def held(self) -> Held:
        """What is held now, by whom it may be counted."""
        return Held(self.pages.in_use, len(self.tenants), self.part.held(), self.batches, self.rows)

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[Batch, list[Token]]:
        """The batch as the next worker needs it, and the tokens that were read here."""
        for key in batch.released:
            tenant = self.tenants.pop(key)
            self.pages.give_back(tenant.pages)
            self._slots.append(tenant.slot)
        for seat in batch.seats:
            self._seat(seat)
        if not batch.rows:
            return batch, []
        rows, tokens = list(batch.rows), list[Token]()
        h_Nd = self.part.embed(self._index(batch.ids)) if self.part.is_first else batch.h.to(self.part.device)
        # A layered model's planes lie at the same places for all its segments, so one TurnKV serves them all.
        kv = self._kv(rows)
        ends = self._index(end - 1 for end in itertools.accumulate(row.length for row in rows))
        states = self._states(rows, batch)
        for k in self.part.own:
            h_Nd = self.part.segment(k, h_Nd, kv)
            tokens += self._read(k, rows, h_Nd, ends, states)
        self.batches, self.rows = self.batches + 1, self.rows + len(h_Nd)
        return replace(batch, rows=tuple(rows), ids=(), h=h_Nd, states=self._stacked(rows, states)), tokens

    def _seat(self, seat: Seat) -> None:
        slot, pages = self._slots.pop(), self.pages.take(self.pages.needed(seat.positions))
        policy = self._policy(seat.policy or "never")
        request = Request(
            id=str(seat.key),
            prompt_ids=(),
            sampling=seat.sampling,
            policy=policy,
            bounds=seat.bounds,
            stop_ids=frozenset(),
            seed=seat.seed,
            max_tokens=seat.max_tokens,
        )
        self.map.seat(slot, pages)
        self.sampler.seat(slot, request)
        start = None
        if seat.policy is not None:
            start = policy.start(torch.tensor([seat.numbers], dtype=torch.float64, device=self.part.device))[0]
        self.tenants[seat.key] = Tenant(slot, pages, seat, Sequence(request, 0), start)

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            self._policies[name] = load_policy(name)
        return self._policies[name]

    def _kv(self, rows: List[Row]) -> TurnKV:
        """What the rows write and see: those of one position together, then each longer one."""
        slots = [self.tenants[row.key].slot for row in rows]
        single = sum(row.length == 1 for row in rows)
        groups = []
        if single > 1:
            starts = [row.start for row in rows[:single]]
            numbers = self._index([*slots[:single], *starts, *[1] * single]).view(3, -1)
            groups = [Group(numbers[0], numbers[1], numbers[2], 1, max(starts) + 1)]
        lone = single if groups else 0
        chunks = [(slot, row.start, row.length, 1) for slot, row in zip(slots[lone:], rows[lone:], strict=True)]
        return self.map.turn(groups, chunks)

    def _states(self, rows: List[Row], batch: Batch) -> dict[int, Tensor]:
        """The policy's state of every row that has not been decided, by its place in the batch."""
        if self.part.is_first:
            starts = {i: self.tenants[rows[i].key].start for i in _undecided(rows)}
            return {i: start for i, start in starts.items() if start is not None}
        states = dict[int, Tensor]()
        for name, places in self._by_policy(rows, _undecided(rows)).items():
            states.update(zip(places, (batch.states or {})[name].to(self.part.device), strict=True))
        return states

    def _stacked(self, rows: List[Row], states: dict[int, Tensor]) -> dict[str, Tensor]:
        groups = self._by_policy(rows, _undecided(rows))
        return {name: torch.stack([states[i] for i in places]) for name, places in groups.items()}

    def _by_policy(self, rows: List[Row], places: list[int]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for i in places:
            groups.setdefault(self.tenants[rows[i].key].seat.policy or "never", []).append(i)
        return groups

    def _read(self, k: int, rows: list[Row], h_Nd: Tensor, ends: Tensor, states: dict[int, Tensor]) -> list[Token]:
        """Read the rows that leave at depth k, and note that they have."""
        leaving = [i for i, row in enumerate(rows) if row.read == k and not row.left]
        leaving += self._decided(k, rows, h_Nd, ends, states)
        if not leaving:
            return []
        draws = [Draw((tenant := self.tenants[rows[i].key]).sequence, tenant.slot, rows[i].output) for i in leaving]
        choice = self.sampler.choose(draws, self.part.readout(k, h_Nd.index_select(0, ends[self._index(leaving)])))
        values = [None] * len(leaving) if choice.logprob_L is None else choice.logprob_L.tolist()
        tokens = []
        for i, draw, token_id, value in zip(leaving, draws, choice.token_L.tolist(), values, strict=True):
            logprob = value if draw.sequence.reports_logprob else None
            tokens.append(Token(rows[i].key, rows[i].output, token_id, k, logprob))
            rows[i] = rows[i]._replace(left=k)
        return tokens

    def _decided(self, k: int, rows: List[Row], h_Nd: Tensor, ends: Tensor, states: dict[int, Tensor]) -> list[int]:
        """Rows whose policy says that they leave at depth k, or that may go no deeper."""
        open_ = _undecided(rows)
        out = [i for i in open_ if self.tenants[rows[i].key].seat.bounds[1] == k]
        for name, places in self._by_policy(rows, [i for i in open_ if i not in out]).items():
            policy, h_Ld = self._policy(name), h_Nd.index_select(0, ends[self._index(places)])
            depth_L = self._index([k] * len(places))
            state_LS = torch.stack([states[i] for i in places])
            leave_L, state_LS = policy.decide(state_LS, depth_L, policy.seen(self.part, k, h_Ld))
            if (may := self.part.answers(k, h_Ld)) is not None:
                leave_L = leave_L & may
            states.update(zip(places, state_LS, strict=True))
            out += [i for i, leave in zip(places, leave_L.tolist(), strict=True) if leave]
        return out

    def _index(self, values: object) -> Tensor:
        return send(values, self.part.device)  # type: ignore[arg-type]


def _undecided(rows: List[Row]) -> list[int]:
    return [i for i, row in enumerate(rows) if row.read is None and not row.left]
