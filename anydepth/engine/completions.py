"""How outcomes of turns travel to the host, late: buffers that the device writes, and the order in which they arrive.

Order is kept for one sequence, not between sequences. On a GPU a buffer is pinned and an event says when its copies are
done; on a CPU they are done at once, and only their delivery is late, so that the same rules are kept and tested.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import torch
from torch import Tensor

from anydepth.engine.plan import Outcome, Read, Row, Sequence


class Buffer:
    """Host memory for the outcomes of one turn. What is put in is read once, after the device has written it; whoever
    has read the last of it gives it back."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.token, self.depth = (torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
        self.logprob = torch.zeros(size, dtype=torch.float64, pin_memory=pinned)
        self.leaves, self.matches = (torch.ones(size, dtype=torch.bool, pin_memory=pinned) for _ in range(2))
        self.done: Any = torch.cuda.Event() if pinned else None
        self.unread = 0
        self._lists: dict[str, list[Any]] = {}

    def write(self, name: str, values: Tensor) -> None:
        """Copy values to the beginning of one of the fields, without waiting for it."""
        getattr(self, name)[: len(values)].copy_(values, non_blocking=True)

    def read(self, name: str, at: int) -> Any:
        """A value of a field; waits for the device when it has to."""
        if name not in self._lists:
            if self.done is not None:
                self.done.synchronize()
            self._lists[name] = getattr(self, name).tolist()
        return self._lists[name][at]

    def clear(self) -> None:
        self._lists.clear()


class Buffers:
    """Buffers to write to: one that is in flight is not given out again."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._idle: list[Buffer] = []
        self.in_flight = 0

    def take(self) -> Buffer:
        self.in_flight += 1
        return self._idle.pop() if self._idle else Buffer(self._size, self._device)

    def give_back(self, buffer: Buffer) -> None:
        assert buffer.unread == 0
        buffer.clear()
        self._idle.append(buffer)
        self.in_flight -= 1


class Ticket:
    """One sequence's outcome in a turn's buffer: where its token stands, and where the answer to its row. A row that
    decides on the device (`if_left`) has a token only where that answer is yes."""

    __slots__ = ("_buffer", "_buffers", "_if_left", "_leave_at", "_read_at", "row", "sequence")

    def __init__(
        self,
        sequence: Sequence,
        buffers: Buffers,
        buffer: Buffer,
        *,
        read_at: int | None = None,
        row: Row | None = None,
        leave_at: int | None = None,
        if_left: bool = False,
    ) -> None:
        self.sequence, self.row, self._if_left = sequence, row, if_left
        self._buffers, self._buffer, self._read_at, self._leave_at = buffers, buffer, read_at, leave_at
        buffer.unread += 1

    def open(self) -> Outcome:
        """The outcome, once. The buffer goes back when all of its tickets were opened."""
        buffer, at, read = self._buffer, self._read_at, None
        leaves = None if self._leave_at is None else buffer.read("leaves", self._leave_at)
        if at is not None and (leaves or not self._if_left):
            logprob = buffer.read("logprob", at) if self.sequence.reports_logprob else None
            matches = not self.sequence.request.forced or buffer.read("matches", at)
            read = Read(buffer.read("token", at), buffer.read("depth", at), logprob, matches)
        buffer.unread -= 1
        if buffer.unread == 0:
            self._buffers.give_back(buffer)
        return Outcome(self.sequence, read, self.row, leaves)


class Completions:
    """Tickets on their way. Each arrives `lateness` turns after its turn (0: with it)."""

    def __init__(self, lateness: int) -> None:
        self.lateness = lateness
        self._turn = 0
        self._queue: deque[tuple[int, list[Ticket]]] = deque()

    def __len__(self) -> int:
        return sum(len(tickets) for _, tickets in self._queue)

    def put(self, tickets: list[Ticket]) -> None:
        """Tickets of the turn under way."""
        if tickets:
            self._queue.append((self._turn + self.lateness, tickets))

    def take(self) -> list[Outcome]:
        """End the turn; what has arrived by now."""
        arrived = []
        while self._queue and self._queue[0][0] <= self._turn:
            arrived += [ticket.open() for ticket in self._queue.popleft()[1]]
        self._turn += 1
        return arrived

    def drain(self) -> None:
        """Wait for all that is on its way, and throw it away."""
        for _, tickets in self._queue:
            for ticket in tickets:
                ticket.open()
        self._queue.clear()


class AdversarialCompletions(Completions):
    """Every ticket is late by a number of turns of its own, 0 to `lateness`, from a seed."""

    def __init__(self, seed: int, lateness: int = 3) -> None:
        super().__init__(lateness)
        self._random = Random(seed)

    def put(self, tickets: list[Ticket]) -> None:
        last = {ticket.sequence: due for due, earlier in self._queue for ticket in earlier}
        for ticket in tickets:
            due = max(self._turn + self._random.randint(0, self.lateness), last.get(ticket.sequence, 0))
            # Before others of its turn or after them, but never before an earlier one of its own sequence.
            places = [n for n in range(len(self._queue) + 1) if self._fits(n, due, ticket)]
            self._queue.insert(self._random.choice(places), (due, [ticket]))

    def _fits(self, n: int, due: int, ticket: Ticket) -> bool:
        before, after = list(self._queue)[:n], list(self._queue)[n:]
        return (
            all(other <= due for other, _ in before)
            and all(other >= due for other, _ in after)
            and all(tickets[0].sequence is not ticket.sequence for _, tickets in after)
        )
