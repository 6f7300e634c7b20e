"""Scheduling when signals come late: `delayed` and `exact`. Imports no torch.

The host submits round k + 1 of a token before it has read what the policy said after round k. It never submits round
k + 2 before that, so a token runs one round more than the policy asked for, and always does, also where the answer came
early: what runs does not depend on timing. A token whose depth the host knows beforehand runs no round more.

Of a token that its policy lets go at k, in turns (late by one):

| turn  | the device                                             | the host learns                              |
|-------|--------------------------------------------------------|----------------------------------------------|
| t     | runs k                                                 |                                              |
| t + 1 | keeps h_k, runs k + 1                                  | "leaves at k", before it plans t + 2         |
| t + 2 | reads h_k (`exact`) or h_{k+1} (`delayed`), embeds the |                                              |
|       | token, and runs round 1 of it                          | which token it was, before it plans t + 4    |
"""

from __future__ import annotations

from typing import Any

from anydepth.engine.answers import add_token
from anydepth.engine.plan import LateResult, Leave, Plan, Row, Sequence
from anydepth.engine.scheduler import Scheduler
from anydepth.types import Chunk


class LateScheduler(Scheduler):
    """`reads_late`: a token is read from the late round's state (`delayed`), not from the one its policy saw (`exact`).
    `runs_on`: the fill lets every row run all R segments; which state it is read from is then decided on the device."""

    def __init__(self, *, reads_late: bool, runs_on: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reads_late, self.runs_on = reads_late, runs_on
        self._complete: set[Sequence] = set()  # whose token leaves in the turn being planned

    def next(self) -> Plan:
        """The next turn's plan. Rows whose token is complete leave first, and start their next token in the same turn;
        rows that wait for an answer sit it out."""
        self._take_in()
        self._cut_chunks()
        self._complete.clear()
        going = [s for s in self.running.values() if (s.chunk if s.prefilling else self._goes(s))]
        leaving, ready = [], []
        for sequence in self._with_pages(going):
            if sequence in self._complete:
                leaving.append(self._leave(sequence))
                if sequence.issued == sequence.request.max_tokens:
                    continue
            ready.append(sequence)
        plan = self._plan(ready, tuple(leaving))
        self.turn += 1
        for row in plan.rows[: plan.decode_rows]:
            sequence = row.sequence
            sequence.in_flight += row.length
            sequence.depth += self._through(row)
            sequence.ready_since = self.turn
        for row in plan.rows[plan.decode_rows :]:
            self._prompt_submitted(row)
        return plan

    def update(self, plan: Plan, result: LateResult) -> list[Chunk]:  # type: ignore[override]
        """Take in what has arrived, of whatever turn; returns the tokens that came out. What belongs to a sequence that
        has ended is passed over: a new request of the same id is another sequence."""
        chunks = self.said = list[Chunk]()
        for sequence, read, row, leaves in result.outcomes:
            if self.sequences.get(sequence.request.id) is not sequence:
                continue
            if read is not None:
                chunks.append(self._ended(sequence, add_token(sequence, read)))
                if chunks[-1].finish_reason:
                    continue  # the row that began the next token ran for nothing
            if row is not None:
                self._ran(sequence, row, leaves)
        return chunks

    def _target(self, s: Sequence) -> int | None:
        """Segments its token runs in all; None where that depends on answers to come."""
        if self.runs_on:
            return self.segments
        if s.planned is not None:
            return s.planned
        high = s.request.bounds[1]
        if s.leaves_at is not None:
            return min(s.leaves_at + 1, high)
        return high if s.answered >= high - 1 else None

    def _goes(self, s: Sequence) -> bool:
        """Whether its token leaves now, having run all it has to, or may run another segment: round k + 2 needs the
        answer of round k."""
        if s.issued == s.request.max_tokens:
            return False
        if s.catching_up:
            return True
        ran, target = s.depth - 1, self._target(s)
        if ran == target:
            self._complete.add(s)
        return ran <= s.answered + 1 if target is None else True

    def _reaches(self, sequence: Sequence) -> int:
        if sequence.prefilling:
            return 0
        if sequence not in self._complete:
            return sequence.position + 1
        return 0 if sequence.issued + 1 == sequence.request.max_tokens else sequence.position + 2

    def _leave(self, s: Sequence) -> Leave:
        """Its token leaves and the next one begins, before the host knows which token that is."""
        depth: int | None = s.depth - 1
        kept = False
        if self.runs_on:
            depth, kept = s.planned, s.planned != self.segments
        elif s.leaves_at is not None and not self.reads_late:
            depth, kept = s.leaves_at, True
        left = Leave(s, s.slot, s.issued, s.position, depth, kept)
        s.issued, s.depth, s.answered, s.leaves_at = s.issued + 1, 1, 0, None
        if s.issued < s.request.max_tokens:
            self._next_token(s)
        return left

    def _read(self, s: Sequence) -> int | None:
        """A row whose token is known to leave is not asked again."""
        return s.planned if s.leaves_at is None else self._target(s)

    def _prompt_submitted(self, row: Row) -> None:
        s = row.sequence
        s.in_flight += row.length
        s.ready_since = self.turn
        if row.depth < self.segments:
            s.depth += 1
            return
        self._chunk_done(s)
        if row.last:  # the first token leaves in the next turn
            s.depth, s.planned = self.segments + 1, self.segments

    def _ran(self, s: Sequence, row: Row, leaves: bool | None) -> None:
        """A row of a sequence that goes on has run. An answer counts while its token has not left."""
        s.in_flight -= row.length
        if row.prefill:
            s.usage.segments_prefill += row.length
            return
        s.usage.segments_executed += row.length
        token_at = row.start + row.length - 1
        if leaves is None and row.read is None and not self.runs_on:
            leaves = False  # nobody was asked: there is no exit at this depth
        if leaves is not None and token_at == s.position and row.depth == s.answered + 1 and s.leaves_at is None:
            s.answered = row.depth
            s.leaves_at = row.depth if leaves else None
