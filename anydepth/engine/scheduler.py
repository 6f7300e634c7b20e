"""Who runs next: admission, pages, preemption, and the one place where a request's progress changes. Imports no torch.

A request waits, is prefilled in chunks (each chunk takes R turns, one a segment), then decodes: a token read at depth d
takes d turns. Entering and leaving ride on a segment's turn. A request is admitted with the pages of its prompt and
gets more as it grows; when there are none left, the last by rank gives up its own and comes back later as it was.
"""

from __future__ import annotations

from anydepth.engine.answers import add_token, cut_short
from anydepth.engine.deferral import Deferral
from anydepth.engine.pages import Pages
from anydepth.engine.plan import Copy, Grow, Leave, Move, Plan, Result, Row, Save, Seat, Sequence
from anydepth.engine.prefix import common_beginning
from anydepth.engine.waiting import Waiting, fits_host, rank
from anydepth.types import Chunk, FinishReason, Request


class Scheduler:
    """Continuous batching by depth over `slots` slots and one page pool. `host_pages` is how many pages of preempted
    requests host memory may hold.

    With `layered` a turn is one segment, which reads that segment's weights for whoever stands there: the deepest where
    a row is ready, so that rows which left early wait at segment 1 for those that go on, and all enter together. A row
    that has been ready for R turns goes first all the same, so none waits more than 2 R.
    """

    def __init__(
        self,
        *,
        segments: int,
        slots: int,
        pages: Pages,
        layered: bool,
        max_batched_tokens: int,
        prefill_rows: int | None,
        host_pages: int,
        deferral: Deferral | None = None,
    ) -> None:
        self.segments, self.pages, self.layered, self.host_pages = segments, pages, layered, host_pages
        self.max_batched_tokens, self.prefill_rows, self.deferral = max_batched_tokens, prefill_rows, deferral
        self.sequences: dict[str, Sequence] = {}  # all that have not ended
        self.waiting = Waiting()
        self.running: dict[str, Sequence] = {}
        self.turn = self.preempted = 0
        self._arrived = 0
        self._slots = list(range(slots - 1, -1, -1))
        self._moves: list[Move] = []
        self.said: list[Chunk] = []  # of the turn under way: what has ended in it stays so when it fails

    @property
    def idle(self) -> bool:
        return not self.sequences

    def positions_of(self, request: Request) -> int:
        """K/V positions a request may need: its last output token is never fed back."""
        outputs = max(map(len, request.forced)) if request.forced else request.max_tokens
        return len(request.prompt_ids) + outputs - 1

    def submit(self, request: Request) -> None:
        assert request.id not in self.sequences
        as_row = bool(request.forced) or request.sampling.first_token == "policy"
        last = len(request.prompt_ids) - 1  # the position that gives the first output, in either way
        sequence = Sequence(request, last + 1 - as_row, last, self._arrived)
        self._arrived += 1
        if self.deferral is not None:
            self.deferral.begin(sequence)
        self.sequences[request.id] = sequence
        self.waiting.add(sequence)

    def next(self) -> Plan:
        """The next turn's plan; it stands until `update`. Admits what fits, preempts where pages run out."""
        self._take_in()
        self._cut_chunks()
        ready = self._with_pages([s for s in self.running.values() if s.chunk or not s.prefilling])
        return self._plan(ready)

    def update(self, plan: Plan, result: Result) -> list[Chunk]:
        """Move every row of the plan on by what the runner reports; returns the tokens that came out, in row order."""
        self.turn += 1
        chunks = self.said = list[Chunk]()
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            sequence.ready_since = self.turn
            through = not row.prefill and self._through(row)
            if row.prefill:
                sequence.usage.segments_prefill += row.length
            else:
                sequence.usage.segments_executed += row.length
            read = result.reads.get(index)
            if read is not None:
                if row.prefill:
                    self._chunk_done(sequence)
                sequence.issued, sequence.depth = sequence.issued + 1, 1
                chunks.append(self._ended(sequence, add_token(sequence, read)))
                if not chunks[-1].finish_reason:
                    self._next_token(sequence)
            elif row.prefill and row.depth == self.segments:
                self._chunk_done(sequence)
            else:
                sequence.depth += row.prefill or through
        return chunks

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Chunk | None:
        """Drop a request wherever it stands; the Chunk that says so, or None if it is not known here."""
        sequence = self.sequences.get(request_id)
        return None if sequence is None else self._ended(sequence, cut_short(sequence, reason))

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence. It comes back by its rank, with the same state."""
        assert sequence.slot >= 0
        self._moves.append(Save(sequence, sequence.slot, tuple(sequence.pages)))
        sequence.stored = len(sequence.pages)
        self._let_go(sequence)
        self.waiting.add(sequence)
        self.preempted += 1

    def unfinished(self) -> list[str]:
        """Requests that a failed turn leaves without the state they need: those that ran, were on their way out, or
        wait for an outcome, which may be lost. Prompts that were to be written in that turn are not known any more."""
        self._moves = []
        self.pages.forget()
        return [id for id, s in self.sequences.items() if s.slot >= 0 or (s.stored and s.saved is None) or s.awaited]

    def _take_in(self) -> None:
        """Admit who fits, where there is a slot, or somebody who would give one up."""
        if not self.waiting:
            return
        if self._slots or self.waiting.first.request.priority > min(s.request.priority for s in self.running.values()):
            self.waiting.take(self._admit)

    def _plan(self, ready: list[Sequence], leaving: tuple[Leave, ...] = ()) -> Plan:
        segment = 1
        if self.layered and ready:
            oldest = min(ready, key=lambda s: s.ready_since)
            overdue = self.turn - oldest.ready_since >= self.segments
            segment = oldest.segment if overdue else max(s.segment for s in ready)
            ready = [s for s in ready if s.segment == segment]
        decode = self._decode_rows([s for s in ready if not s.prefilling])
        prefill = [self._prefill_row(s) for s in ready if s.prefilling]
        moves, self._moves = tuple(self._moves), []
        return Plan(segment, (*decode, *prefill), len(decode), moves, leaving)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and the pages it needs now; False where they are not to be had."""
        if sequence.stored:
            return self._seat(sequence, sequence.stored, [], None)
        ids = sequence.request.prompt_ids
        # The position whose state gives the first token runs in any case.
        held, at = self.pages.find(ids, sequence.prefill_end - (sequence.prefill_end == len(ids)))
        if self.pages.sharing and self._soon_more(sequence, at):
            return False
        source = held.pop() if at % self.pages.size else None
        needed = self.pages.needed(len(ids)) - len(held)
        if not self._seat(sequence, needed, held, source):
            at = len(held) * self.pages.size
            if source is None or not self._seat(sequence, needed, held, None):
                return False
        sequence.usage.prompt_tokens = len(ids)
        sequence.prefilled = sequence.shared = at
        self.pages.shared_tokens += at
        if not sequence.prefilling:
            self._plan_depth(sequence)
        return True

    def _soon_more(self, sequence: Sequence, at: int) -> bool:
        """Whether a running request of no lower priority is about to prefill more of a prompt than the `at` positions
        that are known: a whole page more, or all but its last position."""
        ids, size, most = sequence.request.prompt_ids, self.pages.size, 0
        for other in self.running.values():
            lower = other.request.priority < sequence.request.priority
            if other.prefilling and not lower and other.request.prompt_ids[:size] == ids[:size]:
                common = common_beginning(other.request.prompt_ids[: other.prefill_end], ids[:-1])
                most = max(most, common)
        return most // size > at // size or most == len(ids) - 1 > at

    def _seat(self, sequence: Sequence, needed: int, held: list[int], source: int | None) -> bool:
        """Seat a sequence on the pages `held` by others too and `needed` pages of its own, the first of them a copy of
        `source`, whose beginning is of use; False where there is no room."""
        others = held if source is None else [*held, source]
        self.pages.hold(others)  # so that they are not what is taken
        if not self._may_come_in(sequence, needed):
            self.pages.give_back(others)
            return False
        sequence.pages = held + self.pages.take(needed)
        sequence.slot, sequence.stored, sequence.overtaken = self._slots.pop(), 0, 0
        sequence.ready_since = self.turn
        self.running[sequence.request.id] = sequence
        self._moves.append(Seat(sequence, sequence.slot, tuple(sequence.pages)))
        if source is not None:
            self._moves.append(Copy(source, sequence.pages[len(held)]))
            self.pages.give_back([source])
            self.pages.copied += 1
        return True

    def _may_come_in(self, sequence: Sequence, needed: int) -> bool:
        """Whether there is a slot and room for `needed` pages, if need be after those of lower priority gave way."""
        if sequence.chunk + sum(s.chunk for s in self.running.values()) > self.max_batched_tokens:
            return False
        # One page more for every running sequence that will still grow.
        growing = sum(len(s.pages) < self.pages.needed(self.positions_of(s.request)) for s in self.running.values())
        below = [s for s in self.running.values() if s.request.priority < sequence.request.priority]
        if not (self._slots and needed + growing <= self.pages.available):
            freed = self.pages.freed_by(s.pages for s in below)
            if not below or needed > self.pages.available + freed:
                return False
        if not sequence.stored and not self._can_end(sequence):
            return False
        for other in sorted(below, key=rank, reverse=True):
            if self._slots and self.pages.can_take(needed):
                break
            self.preempt(other)
        return bool(self._slots) and self.pages.can_take(needed)

    def _can_end(self, sequence: Sequence) -> bool:
        """Whether everybody can still come to an end when this one is let in too."""
        inside = [*self.running.values(), *(s for s in self.waiting if s.stored), sequence]
        most = ((s, self.pages.needed(self.positions_of(s.request))) for s in inside)
        return fits_host(most, self.pages.count, len(self.running) + len(self._slots), self.host_pages)

    def _with_pages(self, ready: list[Sequence]) -> list[Sequence]:
        """Those of `ready` that have, or now get, the pages their next positions are written to."""
        size = self.pages.size
        lacking = [s for s in ready if self._reaches(s) > len(s.pages) * size]
        if not lacking:
            return ready
        if sum(map(self._lacks, lacking)) <= self.pages.available:
            for sequence in lacking:
                self._grow(sequence)
            return ready
        return [s for s in sorted(ready, key=rank) if s.slot >= 0 and self._grow(s)]

    def _reaches(self, sequence: Sequence) -> int:
        """How many positions it has with its next row. Those of its prompt have had their pages since it came in."""
        return 0 if sequence.prefilling else sequence.position + 1

    def _lacks(self, sequence: Sequence) -> int:
        """Pages that it needs for its next row beyond its own."""
        return max(0, self.pages.needed(self._reaches(sequence)) - len(sequence.pages))

    def _grow(self, sequence: Sequence) -> bool:
        """Give it what it lacks, if need be at the cost of the last by rank; False if that is the sequence itself."""
        while lacks := self._lacks(sequence):
            if self.pages.can_take(lacks):
                pages = self.pages.take(lacks)
                self._moves.append(Grow(sequence.slot, len(sequence.pages), tuple(pages)))
                sequence.pages += pages
                return True
            last = max(self.running.values(), key=rank)
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def _cut_chunks(self) -> None:
        """Give prefilling sequences without a chunk their next one, within the prompt tokens a turn may carry."""
        room = self.max_batched_tokens - sum(s.chunk for s in self.running.values())
        for sequence in self.running.values():
            if room < 1:
                break
            if sequence.prefilling and not sequence.chunk:
                rows = min(sequence.prefill_end - sequence.prefilled, room, self.prefill_rows or room)
                sequence.chunk, sequence.depth = rows, 1
                room -= rows

    def _decode_rows(self, ready: list[Sequence]) -> list[Row]:
        if self.deferral is None:
            return [self._decode_row(s) for s in ready]
        self.deferral.note(self.running.values())
        return self.deferral.rows(ready, self._read)

    def _decode_row(self, s: Sequence) -> Row:
        return Row(s, s.slot, s.depth, s.position, 1, self._read(s), False, False)

    def _read(self, s: Sequence) -> int | None:
        """The readout depth of its token as far as the host decides it, see Row."""
        return s.planned

    def _through(self, row: Row) -> bool:
        """Whether a decode row brings its token through the segment."""
        return self.deferral is None or self.deferral.ran(row)

    def _prefill_row(self, s: Sequence) -> Row:
        last = s.depth == self.segments and s.prefilled + s.chunk == len(s.request.prompt_ids)
        return Row(s, s.slot, s.depth, s.prefilled, s.chunk, None, True, last)

    def _chunk_done(self, sequence: Sequence) -> None:
        sequence.prefilled += sequence.chunk
        sequence.chunk, sequence.depth = 0, 1
        if not sequence.prefilling:
            self.pages.publish(sequence.request.prompt_ids[: sequence.prefill_end], sequence.pages)
            self._plan_depth(sequence)

    def _next_token(self, sequence: Sequence) -> None:
        """A token left, another one comes."""
        self._plan_depth(sequence)
        if self.deferral is not None:
            self.deferral.left(sequence)

    def _plan_depth(self, sequence: Sequence) -> None:
        request = sequence.request
        # A trace scores continuation token t with its own entry t; otherwise output i has entry i.
        sequence.planned = request.policy.planned(request.sampling, sequence.issued, self.segments)

    def _ended(self, sequence: Sequence, chunk: Chunk) -> Chunk:
        """Free what the sequence holds if this was its last chunk."""
        if chunk.finish_reason:
            del self.sequences[sequence.request.id]
            if sequence.slot >= 0:
                self._let_go(sequence)
            else:
                self.waiting.remove(sequence)
        return chunk

    def _let_go(self, sequence: Sequence) -> None:
        del self.running[sequence.request.id]
        self.pages.give_back(sequence.pages)
        self._slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []
