"""How outcomes of turns travel to the host, late: buffers that the device writes, and the order in which they arrive.

Order is kept for one sequence, not between sequences. On a GPU a buffer is pinned and an event says when its copies are
done; on a CPU they are done at once, and only their delivery is late, so that the same rules are kept and tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor

from anydepth.engine.plan import Outcome, Read, Row, Sequence

TOKENS, DEPTHS, ANSWERS = range(3)  # lines of a buffer's numbers
ALL_LINES = slice(None)


class Buffer:
    """Host memory for the outcomes of one turn. What is put in is read once, after the device has written it; whoever
    has read the last of it gives it back.

    numbers [3, n], n <= size: tokens, their readout depths, and answers (1: leaves). logprob, matches [size]: of the
    tokens. Every copy goes to contiguous memory: any other from a GPU would pass through memory that is not pinned, and
    wait.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._memory = torch.zeros(3 * size, dtype=torch.int64, pin_memory=pinned)
        self.numbers = self._memory.view(3, size)
        self.logprob = torch.zeros(size, dtype=torch.float64, pin_memory=pinned)
        self.matches = torch.zeros(size, dtype=torch.bool, pin_memory=pinned)
        self._device = device
        self._done: Any = torch.cuda.Event() if pinned else None
        self._lists: dict[str, Any] = {}

    def write(
        self,
        numbers: Iterable[tuple[int | slice, Tensor | None]],
        *,
        logprob: Tensor | None = None,
        matches: Tensor | None = None,
    ) -> None:
        """Copy all that the turn gives to the beginnings of the fields, of the numbers line by line (or, whoever writes
        a buffer so, always all lines at once), without waiting for it."""
        for line, values in numbers:
            if values is None:
                continue
            if line == ALL_LINES:
                if self.numbers.shape != values.shape:
                    self.numbers = self._memory[: values.numel()].view(values.shape)
                self.numbers.copy_(values, non_blocking=True)
            else:
                self.numbers[line, : len(values)].copy_(values, non_blocking=True)
        if logprob is not None:
            self.logprob[: len(logprob)].copy_(logprob, non_blocking=True)
        if matches is not None:
            self.matches[: len(matches)].copy_(matches, non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))

    def read(self, name: str) -> Any:
        """A field as a list; waits for the device when it has to."""
        if name not in self._lists:
            if self._done is not None:
                self._done.synchronize()
            self._lists[name] = getattr(self, name).tolist()
        return self._lists[name]

    def clear(self) -> None:
        self._lists.clear()


class Buffers:
    """Buffers to write to: one that is in flight is not given out again. Without `static` none is used twice."""

    def __init__(self, size: int, device: torch.device, *, static: bool = True) -> None:
        self._size, self._device, self._static = size, device, static
        self._idle: list[Buffer] = []
        self.in_flight = 0

    def take(self) -> Buffer:
        self.in_flight += 1
        return self._idle.pop() if self._idle else Buffer(self._size, self._device)

    def give_back(self, buffer: Buffer) -> None:
        if self._static:
            buffer.clear()
            self._idle.append(buffer)
        self.in_flight -= 1


# One sequence's part of a turn: (sequence, its row or None if it only left, the place in the buffer of the token with
# which it left as the turn began, that token's depth where the host knows it, the place of its policy's answer).
Part = tuple[Sequence, Row | None, int | None, int | None, int | None]


class Submitted:
    """A turn on its way: its parts, and the buffer that is being written. Where rows decide on the device (`if_left`),
    a part has a token only if its answer is yes."""

    def __init__(self, parts: list[Part], buffer: Buffer, buffers: Buffers, *, if_left: bool = False) -> None:
        self.parts, self._buffer, self._buffers, self._if_left = parts, buffer, buffers, if_left
        self._unread = len(parts)

    def open(self, parts: Iterable[Part]) -> list[Outcome]:
        """What came of some of the parts, each once. With the last of them the buffer goes back."""
        tokens, depths, answers = self._buffer.read("numbers")
        opened: list[Outcome] = []
        for sequence, row, at, depth, answer_at in parts:
            leaves = None if answer_at is None else answers[answer_at] == 1
            read = None
            if at is not None and (leaves or not self._if_left):
                request = sequence.request
                logprob = self._buffer.read("logprob")[at] if sequence.reports_logprob else None
                matches = not request.forced or self._buffer.read("matches")[at]
                read = Read(tokens[at], depths[at] if depth is None else depth, logprob, matches)
            opened.append((sequence, read, row, leaves))
        self._unread -= len(opened)
        if self._unread == 0:
            self._buffers.give_back(self._buffer)
        return opened


class Completions:
    """Turns on their way. What came of each arrives `lateness` turns after it was submitted (0: with it)."""

    def __init__(self, lateness: int) -> None:
        self.lateness = lateness
        self._turn = 0
        self._queue: deque[tuple[int, Submitted, list[Part]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, turn: Submitted) -> None:
        """The turn under way."""
        self._queue.append((self._turn + self.lateness, turn, turn.parts))

    def take(self) -> list[Outcome]:
        """End the turn; what has arrived by now."""
        arrived: list[Outcome] = []
        while self._queue and self._queue[0][0] <= self._turn:
            _, turn, parts = self._queue.popleft()
            arrived += turn.open(parts)
        self._turn += 1
        return arrived

    def drain(self) -> None:
        """Wait for all that is on its way, and throw it away."""
        while self._queue:
            _, turn, parts = self._queue.popleft()
            turn.open(parts)


class AdversarialCompletions(Completions):
    """Every sequence's part of a turn is late by a number of turns of its own, 0 to `lateness`, from a seed."""

    def __init__(self, seed: int, lateness: int = 3) -> None:
        super().__init__(lateness)
        self._random = Random(seed)

    def put(self, turn: Submitted) -> None:
        last = {part[0]: due for due, _, parts in self._queue for part in parts}
        for part in turn.parts:
            due = max(self._turn + self._random.randint(0, self.lateness), last.get(part[0], 0))
            # Before others of its turn or after them, but never before an earlier one of its own sequence.
            places = [n for n in range(len(self._queue) + 1) if self._fits(n, due, part)]
            self._queue.insert(self._random.choice(places), (due, turn, [part]))

    def _fits(self, n: int, due: int, part: Part) -> bool:
        before, after = list(self._queue)[:n], list(self._queue)[n:]
        return (
            all(other <= due for other, _, _ in before)
            and all(other >= due for other, _, _ in after)
            and all(parts[0][0] is not part[0] for _, _, parts in after)
        )
