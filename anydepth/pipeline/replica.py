"""One pipeline: who sits in it, what is under way, and how it starts again when one of its workers has died.

It hands rows to the first worker and hears of tokens from whichever worker read them. Pages are reserved whole: a
request is let in when every worker has room for all the positions it may need, so nobody inside has to give way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from anydepth.engine.answers import add_token, cut_short
from anydepth.engine.plan import Read, Sequence
from anydepth.exits.base import Policy
from anydepth.exits.load import policy_name
from anydepth.pipeline.admission import asked_depths
from anydepth.pipeline.links import Link
from anydepth.pipeline.manifest import Manifest
from anydepth.pipeline.messages import Batch, Broken, Gone, Hello, Join, Joined, Reads, Row, Seat, Token
from anydepth.types import Chunk, Request

TRIES = 3  # starts of a worker without the pipeline's coming up


class Replica:
    """`start` starts a stage's worker; its messages come back, through the router, as `hear(stage, life, message)`."""

    def __init__(self, manifest: Manifest, segments: int, *, start: Callable[[int, int], Link]) -> None:
        self.manifest, self.segments, self._start = manifest, segments, start
        stages = range(len(manifest.stages))
        self.lives = [0 for _ in stages]
        self.links = [start(stage, 0) for stage in stages]
        self.addresses: list[Any] = [None for _ in stages]
        self.epoch = self.restarts = self.peak_in_flight = 0
        self._tries = [1 for _ in stages]  # starts since the pipeline was up
        self._unreached = dict[int, str]()  # who is ended because the one before cannot reach it, and why not
        self.lost: str | None = None  # why it has been given up
        self._joined = set[int]()
        self._numbers = 0
        self._empty()

    def _empty(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._ready: deque[int] = deque()  # whose next token may enter
        self._prompts: deque[int] = deque()  # whose prompt has not entered whole
        self._released, self._seats = list[int](), list[Seat]()
        self._in_flight = set[int]()
        self.free_slots, self.free_pages = self.manifest.max_batch, self.manifest.pages

    @property
    def up(self) -> bool:
        """Whether all its workers are there and know each other."""
        return len(self._joined) == len(self.links)

    @property
    def idle(self) -> bool:
        return not (self.sequences or self._in_flight or self._released)

    def pages_for(self, request: Request) -> int:
        return -(-(len(request.prompt_ids) + request.max_tokens - 1) // self.manifest.page_size)

    def has_room(self, request: Request) -> bool:
        return self.up and self.free_slots > 0 and self.pages_for(request) <= self.free_pages

    def seat(self, key: int, request: Request) -> None:
        """Let a request in; there must be room."""
        last = len(request.prompt_ids) - 1
        sequence = Sequence(request, last + (request.sampling.first_token == "prefill"), last, order=key)
        sequence.usage.prompt_tokens = len(request.prompt_ids)
        self.sequences[key] = sequence
        self.free_slots -= 1
        self.free_pages -= self.pages_for(request)
        (low, high), sampling, policy = request.bounds, request.sampling, request.policy
        assert isinstance(policy, Policy)
        seat = Seat(key, last + request.max_tokens, sampling, request.seed, request.max_tokens, high)
        if policy.needs != "nothing":
            numbers = policy.parameters(sampling, (low, high), self.segments)
            seat = seat._replace(policy=policy_name(sampling), numbers=numbers, asked=frozenset(asked_depths(request)))
        self._seats.append(seat)
        (self._prompts if sequence.prefilling else self._ready).append(key)

    def feed(self) -> None:
        """Send micro-batches as long as there are rows and the workers can take more."""
        while self.up and len(self._in_flight) < self.manifest.in_flight:
            rows, ids = self._rows()
            if not rows and not (self._released and not self._in_flight):
                return
            self._numbers += 1
            self._in_flight.add(self._numbers)
            self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))
            released, seats, self._released, self._seats = self._released, self._seats, [], []
            batch = Batch(
                epoch=self.epoch,
                number=self._numbers,
                released=tuple(released),
                seats=tuple(seats),
                rows=tuple(rows),
                ids=tuple(ids),
            )
            self.links[0].send(batch)

    def _rows(self) -> tuple[list[Row], list[int]]:
        """The next micro-batch: tokens that may enter, shared out so that every worker has some, and prompts."""
        decoding = sum(not s.prefilling for s in self.sequences.values())
        most = min(self.manifest.micro_batch, -(-decoding // len(self.links)))
        rows, ids = list[Row](), list[int]()
        while self._ready and len(rows) < most:
            sequence = self.sequences[key := self._ready.popleft()]
            request, position = sequence.request, sequence.position
            planned = request.policy.planned(request.sampling, sequence.issued, self.segments)
            rows.append(Row(key, position, 1, sequence.issued, planned))
            ids.append(sequence.token_ids[-1] if sequence.issued else request.prompt_ids[-1])
            sequence.in_flight = self.segments
        room = self.manifest.max_batched_tokens
        chunks = list[tuple[Row, tuple[int, ...]]]()
        while self._prompts and room:
            sequence = self.sequences[key := self._prompts[0]]
            start, prompt = sequence.prefilled, sequence.request.prompt_ids
            length = min(sequence.prefill_end - start, room)
            room -= length
            sequence.prefilled += length
            sequence.usage.segments_prefill += length * self.segments
            read = self.segments if sequence.prefilled == len(prompt) else 0
            chunks.append((Row(key, start, length, 0, read), prompt[start : start + length]))
            if not sequence.prefilling:
                self._prompts.popleft()
                if not read:  # its last token is a decode row, which may follow at once
                    self._ready.append(key)
        chunks.sort(key=lambda chunk: chunk[0].length > 1)
        return rows + [row for row, _ in chunks], ids + [id for _, own in chunks for id in own]

    def abort(self, key: int) -> Chunk:
        """End a request. Rows of it that are under way are run, and dropped."""
        return self._leave(key, cut_short(self.sequences[key], "abort"))

    def _leave(self, key: int, chunk: Chunk) -> Chunk:
        request = self.sequences.pop(key).request
        self.free_slots += 1
        self.free_pages += self.pages_for(request)
        for waiting in (self._ready, self._prompts):
            if key in waiting:
                waiting.remove(key)
        # One that no worker has heard of needs no release.
        unheard = [seat for seat in self._seats if seat.key == key]
        if unheard:
            self._seats.remove(unheard[0])
        else:
            self._released.append(key)
        return chunk

    def hear(self, stage: int, life: int, message: Any) -> tuple[list[Chunk], str]:
        """Tokens, or last words of requests that a worker's death has ended, and why."""
        if life != self.lives[stage]:
            return [], ""
        match message:
            case Hello(address):
                self.addresses[stage] = address
                if None not in self.addresses:
                    for at, link in enumerate(self.links):
                        link.send(Join(self.epoch, self.addresses[at + 1] if at + 1 < len(self.links) else None))
            case Joined(epoch) if epoch == self.epoch:
                self._joined.add(stage)
                if self.up:
                    self._tries = [0 for _ in self.links]
            case Broken(epoch, reason) if epoch == self.epoch:
                self._joined.clear()
                self._unreached[stage + 1] = reason
                self.links[stage + 1].kill()  # all else follows from its end, which it may have met by itself
            case Reads() if message.epoch == self.epoch:
                if message.done:
                    self._in_flight.discard(message.batch)
                return [c for token in message.tokens if (c := self._token(token)) is not None], ""
            case Gone(reason):
                return self._died(stage, reason)
        return [], ""

    def _token(self, token: Token) -> Chunk | None:
        sequence = self.sequences.get(token.key)
        if sequence is None:  # aborted
            return None
        assert token.output == sequence.issued
        if sequence.issued or sequence.prefill_end < len(sequence.request.prompt_ids):
            sequence.usage.segments_executed += token.executed
        sequence.issued += 1
        sequence.in_flight = 0
        chunk = add_token(sequence, Read(token.token_id, token.depth, token.logprob, True))
        if chunk.finish_reason:
            return self._leave(token.key, chunk)
        self._ready.append(token.key)
        return chunk

    def _died(self, stage: int, reason: str) -> tuple[list[Chunk], str]:
        """Everybody inside had K/V in the worker that has gone, so all of them end; it is started again."""
        why = f"worker {stage + 1} of {len(self.links)} has died: {reason}"
        if stage in self._unreached:
            why += f" (worker {stage} could not reach it: {self._unreached[stage]})"
        chunks = [cut_short(sequence, "error") for sequence in self.sequences.values()]
        started = self.addresses[stage] is not None
        self._empty()
        self.epoch, self.addresses[stage] = self.epoch + 1, None
        self._joined.clear()
        self._unreached.clear()
        self.lives[stage] += 1
        if self._tries[stage] >= TRIES:
            self.lost = why
        else:
            self._tries[stage] += 1
            self.restarts += started
            self.links[stage] = self._start(stage, self.lives[stage])
        return chunks, why
