"""Scheduling when the device decides: `resident`. Imports no torch.

A row's depth, position and end are the device's to know. The host plans with what it has heard and with what may have
happened since: each turn in flight can have moved a sequence on by one position. Pages are there before a row can reach
them. A row whose request ended on the device runs no more, though the host still plans it until it hears of that.
"""

from __future__ import annotations

from anydepth.engine.answers import add_token
from anydepth.engine.plan import LateResult, Plan, Read, Row, Sequence
from anydepth.engine.scheduler import Scheduler
from anydepth.types import Chunk


class ResidentScheduler(Scheduler):
    """Every sequence that is through its prompt has a row in every turn. `issued` and `depth` are what was heard."""

    def next(self) -> Plan:
        plan = super().next()
        self.turn += 1
        for row in plan.rows:
            self._submitted(row)
        return plan

    def update(self, plan: Plan, result: LateResult) -> list[Chunk]:  # type: ignore[override]
        """Take in what has arrived, of whatever turn; returns the tokens that came out."""
        chunks = self.said = list[Chunk]()
        for sequence, read, row, _ in result.outcomes:
            assert row is not None
            if self.sequences.get(sequence.request.id) is sequence:
                chunks += self._heard(sequence, read, row)
        return chunks

    def _heard(self, sequence: Sequence, read: Read | None, row: Row) -> list[Chunk]:
        sequence.in_flight -= row.length
        sequence.ahead -= row.last or not row.prefill
        if row.prefill:
            sequence.usage.segments_prefill += row.length
        else:
            sequence.usage.segments_executed += 1
            sequence.depth += 1
        if read is None:
            return []
        sequence.issued, sequence.depth = sequence.issued + 1, 1
        request = sequence.request
        if read.token_id in request.stop_ids or sequence.issued == request.max_tokens:
            sequence.in_flight = 0  # the device saw the end too: the rows that follow do not run
        return [self._ended(sequence, add_token(sequence, read))]

    def _position_bound(self, s: Sequence) -> int:
        """The furthest position its next row can have, if every row in flight gave a token."""
        last = self.positions_of(s.request) - 1
        return min(s.position + s.ahead, last)

    def _reaches(self, sequence: Sequence) -> int:
        return 0 if sequence.prefilling else self._position_bound(sequence) + 1

    def _decode_row(self, s: Sequence) -> Row:
        return Row(s, s.slot, s.depth, self._position_bound(s), 1, None, False, False)

    def _submitted(self, row: Row) -> None:
        s = row.sequence
        s.in_flight += row.length
        s.ahead += row.last or not row.prefill
        s.ready_since = self.turn
        if row.prefill and row.depth < self.segments:
            s.depth += 1
        elif row.prefill:
            self._chunk_done(s)
