"""Who runs next: queues, admission, and the one place where a request's progress changes. Imports no torch.

A request waits, is prefilled in chunks (each chunk takes R turns, one a segment), then decodes: a token read at depth d
takes d turns. Entering and leaving ride on a segment's turn.
"""

from __future__ import annotations

from anydepth.engine.pages import Pages
from anydepth.engine.plan import Plan, Read, Result, Row, Sequence
from anydepth.types import Chunk, FinishReason, Output, Request, Score, Usage


class Scheduler:
    """Continuous batching by depth over `slots` slots and one page pool.

    A request takes all the pages it may need when it is admitted, in order of arrival. With `layered` a turn is one
    segment: the one whose oldest row has been ready longest, so that no ready row waits more than R turns.
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
    ) -> None:
        self.segments, self.pages, self.layered = segments, pages, layered
        self.max_batched_tokens, self.prefill_rows = max_batched_tokens, prefill_rows
        self.waiting: dict[str, Request] = {}  # in order of arrival
        self.running: dict[str, Sequence] = {}
        self.turn = 0
        self._slots = list(range(slots - 1, -1, -1))

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def positions_of(self, request: Request) -> int:
        """K/V positions a request may need: its last output token is never fed back."""
        outputs = max(map(len, request.forced)) if request.forced else request.max_tokens
        return len(request.prompt_ids) + outputs - 1

    def submit(self, request: Request) -> None:
        assert request.id not in self.waiting and request.id not in self.running
        self.waiting[request.id] = request

    def next(self) -> Plan:
        """The next turn's plan; it stands until `update`. Admits what fits."""
        admitted = self._admit()
        self._cut_chunks()
        ready = [s for s in self.running.values() if s.chunk or not s.prefilling]
        segment = 1
        if self.layered and ready:
            segment = min(ready, key=lambda s: s.ready_since).depth
            ready = [s for s in ready if s.depth == segment]
        decode = [Row(s, s.slot, s.depth, s.position, 1, s.planned, False, False) for s in ready if not s.prefilling]
        prefill = [self._prefill_row(s) for s in ready if s.prefilling]
        return Plan(segment, (*decode, *prefill), len(decode), admitted)

    def update(self, plan: Plan, result: Result) -> list[Chunk]:
        """Move every row of the plan on by what the runner reports; returns the tokens that came out, in row order."""
        self.turn += 1
        reads = {read.row: read for read in result.reads}
        chunks: list[Chunk] = []
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            sequence.ready_since = self.turn
            if row.prefill:
                sequence.usage.segments_prefill += row.length
            else:
                sequence.usage.segments_executed += 1
            read = reads.get(index)
            if read is not None:
                if row.prefill:
                    self._chunk_done(sequence)
                chunks.append(self._token(sequence, read))
            elif row.prefill and row.depth == self.segments:
                self._chunk_done(sequence)
            else:
                sequence.depth += 1
        return chunks

    def abort(self, request_id: str, reason: FinishReason = "abort") -> Chunk | None:
        """Drop a request wherever it stands; the Chunk that says so, or None if it is not known here."""
        if (request := self.waiting.pop(request_id, None)) is not None:
            return self._finish(Sequence(request, -1, (), 0), reason, "" if request.text else None)
        sequence = self.running.get(request_id)
        if sequence is None:
            return None
        return self._finish(sequence, reason, sequence.request.text.end() if sequence.request.text else None)

    def _admit(self) -> tuple[Sequence, ...]:
        admitted = []
        while self.waiting and self._slots:
            request = next(iter(self.waiting.values()))
            needed = self.pages.needed(self.positions_of(request))
            if not self.pages.can_take(needed):
                break
            del self.waiting[request.id]
            as_row = bool(request.forced) or request.sampling.first_token == "policy"
            sequence = Sequence(
                request,
                self._slots.pop(),
                self.pages.take(needed),
                len(request.prompt_ids) - as_row,
                ready_since=self.turn,
            )
            sequence.usage.prompt_tokens = len(request.prompt_ids)
            if not sequence.prefilling:
                self._plan_depth(sequence)
            self.running[request.id] = sequence
            admitted.append(sequence)
        return tuple(admitted)

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

    def _prefill_row(self, s: Sequence) -> Row:
        last = s.depth == self.segments and s.prefilled + s.chunk == len(s.request.prompt_ids)
        return Row(s, s.slot, s.depth, s.prefilled, s.chunk, None, True, last)

    def _chunk_done(self, sequence: Sequence) -> None:
        sequence.prefilled += sequence.chunk
        sequence.chunk, sequence.depth = 0, 1
        if not sequence.prefilling:
            self._plan_depth(sequence)

    def _plan_depth(self, sequence: Sequence) -> None:
        request = sequence.request
        # A trace scores continuation token t with its own entry t; otherwise output i has entry i.
        sequence.planned = request.policy.planned(request.sampling, len(sequence.token_ids), self.segments)

    def _token(self, sequence: Sequence, read: Read) -> Chunk:
        """Account one output token, and the end of the answer or of a scored continuation where it is one."""
        request, usage = sequence.request, sequence.usage
        sequence.token_ids.append(read.token_id)
        sequence.depths.append(read.depth)
        usage.output_tokens += 1
        if read.logprob is not None:
            sequence.logprobs.append(read.logprob)
        if sequence.prefill_end < len(request.prompt_ids) or len(sequence.token_ids) > 1:
            usage.decode_tokens += 1
            usage.segments_read += read.depth
        sequence.depth = 1
        if request.forced:
            sequence.greedy &= read.greedy
            return self._scored(sequence, read)
        reason, text = self._ending(sequence, read.token_id)
        if reason:
            return self._finish(sequence, reason, text, read)
        self._plan_depth(sequence)
        return Chunk(text, read.token_id, read.depth, read.logprob, request_id=request.id)

    def _ending(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, str | None]:
        """(finish reason or None, text that became certain). A stop id's own text is left out."""
        request = sequence.request
        text, full = request.text, len(sequence.token_ids) >= request.max_tokens
        if text is None:
            return "stop" if token in request.stop_ids else "length" if full else None, None
        if token in request.stop_ids:
            return "stop", text.end()
        piece = text.push(token)
        if full and not text.stopped:
            piece += text.end()
        return "stop" if text.stopped else "length" if full else None, piece

    def _scored(self, sequence: Sequence, read: Read) -> Chunk:
        """A teacher-forced token. After a continuation's last one the next begins at the same prefilled context."""
        request, target = sequence.request, sequence.target
        assert target is not None
        if len(sequence.token_ids) < len(target):
            self._plan_depth(sequence)
            return Chunk(None, read.token_id, read.depth, read.logprob, request_id=request.id)
        score = Score(tuple(sequence.logprobs), tuple(sequence.depths), sequence.greedy, sequence.usage)
        sequence.scored += 1
        if sequence.scored == len(request.forced):
            return self._finish(sequence, "length", None, read, score)
        sequence.token_ids, sequence.depths, sequence.logprobs = [], [], []
        sequence.greedy, sequence.usage = True, Usage(prompt_tokens=sequence.usage.prompt_tokens)
        self._plan_depth(sequence)
        return Chunk(None, read.token_id, read.depth, read.logprob, request_id=request.id, score=score)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        text: str | None,
        read: Read | None = None,
        score: Score | None = None,
    ) -> Chunk:
        """Free what the sequence holds and wrap up its answer."""
        request, sampling = sequence.request, sequence.request.sampling
        if self.running.pop(request.id, None) is not None:
            self.pages.give_back(sequence.pages)
            self._slots.append(sequence.slot)
        output = Output(
            request_id=request.id,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(sequence.token_ids),
            depths=tuple(sequence.depths),
            text=request.text.text if request.text else None,
            finish_reason=reason,
            usage=sequence.usage,
            seed=request.seed,
            logprobs=tuple(sequence.logprobs) if sampling.logprobs else None,
            logprobs_mode=sequence.logprobs_mode,
            prompt_index=request.prompt_index,
            answer_index=request.answer_index,
        )
        token, depth, logprob = (read.token_id, read.depth, read.logprob) if read else (None, None, None)
        return Chunk(text, token, depth, logprob, reason, request.id, output, score)
