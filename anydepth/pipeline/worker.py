"""One worker: its segments, their K/V, the gate and the readout beside each of them.

A worker knows of a request what `Seat` says, and of a micro-batch what comes with it. It takes slot and pages when a
request is seated and gives them back when it is released; both ride on batches, in order. Shape suffixes: N positions
of the batch, L rows that are asked or read, S numbers of a policy's state, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import replace

import torch
from torch import Tensor

from anydepth.engine.pages import Pages
from anydepth.engine.plan import Sequence
from anydepth.engine.sampling import Draw, Sampler
from anydepth.exits.base import Policy
from anydepth.exits.load import load_policy
from anydepth.ops.kv import KVMap, KVPool
from anydepth.ops.send import send
from anydepth.pipeline.messages import Batch, Held, Row, Seat, Token
from anydepth.pipeline.part import Part
from anydepth.pipeline.passage import PASSAGES, Tenant
from anydepth.types import Request


class Worker:
    """Runs micro-batches through the segments of `part`. The router never seats more than `slots` requests, nor ones
    that together may need more than `pages` pages. `fill`: see `passage`."""

    def __init__(self, part: Part, *, slots: int, pages: int, page_size: int, fill: str = "full") -> None:
        self.part, self.segments, self.fill = part, part.shape.segments, fill
        self._sizes = slots, pages, page_size
        context = min(part.shape.max_positions, pages * page_size)
        pool = KVPool(part.plane_shape, 1, pages, page_size, dtype=part.dtype, device=part.device)
        self.map = KVMap(pool, slots, context)
        self.sampler = Sampler(slots, context, part.shape.vocab, part.device)
        self.epoch = self.batches = self.rows = 0
        self.tallies = Counter[str]()
        self._policies: dict[str, Policy] = {}
        self.join(0)

    def join(self, epoch: int) -> None:
        """Begin an epoch: nobody is seated and nothing is held."""
        slots, pages, page_size = self._sizes
        self.epoch, self.pages = epoch, Pages(pages, page_size)
        self.tenants: dict[int, Tenant] = {}
        self._slots = list(range(slots - 1, -1, -1))
        self._passage = PASSAGES[self.fill](self.part, self.map, self.tenants)

    def held(self) -> Held:
        """What is held now, and counts since the start."""
        waiting = sum(len(h) for t in self.tenants.values() for parts in t.waiting.values() for h in parts)
        tensors, tallies = self.part.held(), dict(self.tallies)
        return Held(self.pages.in_use, len(self.tenants), waiting, tensors, self.batches, self.rows, tallies)

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
        states = self._states(rows, batch)
        for k in self.part.own:
            rows, h_Nd = self._passage.through(k, rows, h_Nd)
            if not rows:
                break
            self.rows += len(h_Nd)
            tokens += self._read(k, rows, h_Nd, states)
        self.batches += 1
        return replace(batch, rows=tuple(rows), ids=(), h=h_Nd, states=self._stacked(rows, states)), tokens

    def _seat(self, seat: Seat) -> None:
        slot, pages = self._slots.pop(), self.pages.take(self.pages.needed(seat.positions))
        policy = self._policy(seat.policy or "never")
        request = Request(
            id=str(seat.key),
            prompt_ids=(),
            sampling=seat.sampling,
            policy=policy,
            bounds=(1, seat.deepest),
            stop_ids=frozenset(),
            seed=seat.seed,
            max_tokens=seat.max_tokens,
        )
        self.map.seat(slot, pages)
        self.sampler.seat(slot, request)
        start = None
        if seat.policy is not None:
            start = policy.start(torch.tensor([seat.numbers], dtype=torch.float64, device=self.part.device))[0]
        self.tenants[seat.key] = Tenant(slot, pages, seat, Sequence(request, 0), start, {})

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            self._policies[name] = load_policy(name)
        return self._policies[name]

    def _states(self, rows: List[Row], batch: Batch) -> dict[int, Tensor]:
        """The policy's state of every row that has not been decided, by the row's key."""
        states = dict[int, Tensor]()
        for name, places in self._by_policy(rows, _undecided(rows)).items():
            keys = [rows[i].key for i in places]
            if self.part.is_first:
                given: Iterable[Tensor | None] = [self.tenants[key].start for key in keys]
            else:
                given = (batch.states or {})[name].to(self.part.device)
            states.update({key: state for key, state in zip(keys, given, strict=True) if state is not None})
        return states

    def _stacked(self, rows: List[Row], states: dict[int, Tensor]) -> dict[str, Tensor]:
        groups = self._by_policy(rows, _undecided(rows))
        return {name: torch.stack([states[rows[i].key] for i in places]) for name, places in groups.items()}

    def _by_policy(self, rows: List[Row], places: Iterable[int]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for i in places:
            name = self.tenants[rows[i].key].seat.policy
            assert name is not None, "a row without a plan has a policy that decides"
            groups.setdefault(name, []).append(i)
        return groups

    def _read(self, k: int, rows: list[Row], h_Nd: Tensor, states: dict[int, Tensor]) -> list[Token]:
        """Read the rows that leave at depth k, and note that they have."""
        out = [i for i, row in enumerate(rows) if row.read == k and not row.left]
        undecided = _undecided(rows)
        out += [i for i in undecided if self.tenants[rows[i].key].seat.deepest == k]
        asked = [i for i in undecided if k in self.tenants[rows[i].key].seat.asked]
        if not out and not asked:
            return []
        ends = list(itertools.accumulate(row.length for row in rows))
        known = self._decided(k, rows, asked, h_Nd, ends, states)
        out += known
        if not out:
            return []
        unknown = [i for i in out if known.get(i) is None]
        if unknown:
            logits = self.part.readout(k, h_Nd.index_select(0, self._index(ends[i] - 1 for i in unknown)))
            known |= dict(zip(unknown, logits, strict=True))
        logits_LV = torch.stack([known[i] for i in out])  # type: ignore[misc]
        return self._tokens(k, rows, out, logits_LV)

    def _decided(
        self, k: int, rows: List[Row], asked: List[int], h_Nd: Tensor, ends: List[int], states: dict[int, Tensor]
    ) -> dict[int, Tensor | None]:
        """The rows whose policy says that they leave at depth k, with the logits that it was shown, if it was."""
        out = dict[int, Tensor | None]()
        for name, places in self._by_policy(rows, asked).items():
            policy, h_Ld = self._policy(name), h_Nd.index_select(0, self._index(ends[i] - 1 for i in places))
            before = torch.stack([states[rows[i].key] for i in places])
            seen = policy.seen(self.part, k, h_Ld)
            leave, after = policy.decide(before, self._index([k] * len(places)), seen)
            for tally, column in policy.tallies.items():
                self.tallies[tally] += int((after - before)[:, column].sum())
            states.update(zip((rows[i].key for i in places), after, strict=True))
            left = [n for n, leaves in enumerate(leave.tolist()) if leaves]
            if not left:
                continue
            logits_LC = seen[left] if policy.needs == "logits" else None
            if self.part.declines(k):
                logits_LC = self.part.listed(k, h_Ld[left]) if logits_LC is None else logits_LC
                may = self.part.answers(k, h_Ld[left], logits_LC).tolist()
                left, logits_LC = [n for n, answers in zip(left, may, strict=True) if answers], logits_LC[may]
            shown = [None] * len(left) if logits_LC is None else self.part.over_vocabulary(k, logits_LC)
            out |= {places[n]: given for n, given in zip(left, shown, strict=True)}
        return out

    def _tokens(self, k: int, rows: list[Row], out: List[int], logits_LV: Tensor) -> list[Token]:
        draws = [Draw((tenant := self.tenants[rows[i].key]).sequence, tenant.slot, rows[i].output) for i in out]
        choice = self.sampler.choose(draws, logits_LV)
        values = [None] * len(out) if choice.logprob_L is None else choice.logprob_L.tolist()
        tokens = []
        for i, draw, token_id, value in zip(out, draws, choice.token_L.tolist(), values, strict=True):
            logprob = value if draw.sequence.reports_logprob else None
            executed = self.segments if self._passage.runs_on else rows[i].ran
            tokens.append(Token(rows[i].key, rows[i].output, token_id, k, logprob, executed))
            rows[i] = rows[i]._replace(left=k)
        return tokens

    def _index(self, values: Iterable[int]) -> Tensor:
        return send(values, self.part.device)


def _undecided(rows: List[Row]) -> list[int]:
    return [i for i, row in enumerate(rows) if row.read is None and not row.left]
