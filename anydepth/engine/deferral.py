"""Which positions a decode row runs under fill `deferred`. Imports no torch.

Positions that were read early wait, with their states. The row that takes a token through segment r takes along every
position before it that has not been there: one block in causal order, at the original positions. Of a request
`caught_up[r - 1]` positions, from the first on, have been through segment r; it never grows with r, so those that wait
for r are the ones in a row before the token, and all of them have been through r - 1.

Tokens read at depths 1, 1, 3 after a prompt of 5 (R = 4):

| token at | runs         | positions, segment by segment | caught_up    |
|----------|--------------|-------------------------------|--------------|
| 5        | segment 1    | 5                             | 6, 5, 5, 5   |
| 6        | segment 1    | 6                             | 7, 5, 5, 5   |
| 7        | segments 1-3 | 7; 5-7; 5-7                   | 8, 8, 8, 5   |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from anydepth.engine.plan import Row, Sequence


class Deferral:
    """At most `most` positions of a request wait: when as many do, they are brought to the deepest segment it may need
    before its next token begins. Beside the tokens themselves a turn runs `rows_per_turn` positions; a longer block
    takes several turns, so that it does not hold up the others."""

    def __init__(self, segments: int, *, most: int, rows_per_turn: int) -> None:
        self.segments, self.most, self.rows_per_turn = segments, most, rows_per_turn
        self._room = 0
        self.peak = 0  # most positions that waited in one turn

    def begin(self, s: Sequence) -> None:
        """Before the first token, or that of another continuation, there is only the prompt, which ran whole."""
        s.caught_up = [s.prefill_end] * self.segments
        request, outputs = s.request, range(s.prefill_end == len(s.request.prompt_ids), s.request.max_tokens)
        planned = [request.policy.planned(request.sampling, i, self.segments) for i in outputs]
        s.deepest = max((request.bounds[1] if depth is None else depth for depth in planned), default=1)

    def rows(self, ready: list[Sequence], read: Callable[[Sequence], int | None]) -> list[Row]:
        """The next decode rows: those of equal length together, then those alone of their length. `read` as in Row, of
        a sequence's token."""
        self._room = self.rows_per_turn
        rows = [self._row(s, read(s)) for s in ready]
        if self._room == self.rows_per_turn:
            return rows
        lengths = Counter(row.length for row in rows)
        return sorted(rows, key=lambda row: (lengths[row.length] == 1, row.length))

    def _row(self, s: Sequence, read: int | None) -> Row:
        segment, position = s.segment, s.position
        start = s.caught_up[segment - 1]
        length = position + (not s.catching_up) - start
        if length > 1:
            length = 1 + min(length - 1, self._room)
            self._room -= length - 1
        if start + length <= position:
            read = 0
        return Row(s, s.slot, segment, start, length, read, False, False)

    def ran(self, row: Row) -> bool:
        """Note what a decode row runs; whether that brings its token through the segment."""
        s, end = row.sequence, row.start + row.length
        s.caught_up[row.depth - 1] = end
        if s.catching_up and end == s.position:
            s.catching_up = row.depth + 1 if row.depth < s.deepest else 0
        return end == s.position + 1

    def left(self, s: Sequence) -> None:
        """A token was read, and another one comes: if too many wait now, they are caught up first."""
        if s.issued == 0:
            self.begin(s)
        elif self.waiting(s) >= self.most:
            s.catching_up = 1 + next(r for r, count in enumerate(s.caught_up) if count < s.position)

    def note(self, running: Iterable[Sequence]) -> None:
        """Note how many positions wait as a turn begins, those of rows that sit it out too."""
        self.peak = max(self.peak, sum(map(self.waiting, running)))

    def waiting(self, s: Sequence) -> int:
        """Positions of it that may have to run deeper."""
        return max(0, s.position - s.caught_up[s.deepest - 1])
