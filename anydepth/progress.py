"""What is done, of how much, and how long the rest will take: bars on stderr, or lines for a log. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """One line. Its clock runs from the beginning, or, if it was made to wait, from `begin`."""

    def __init__(self, display: Progress, line: TaskID) -> None:
        self._display, self._line = display, line

    def begin(self, total: float) -> None:
        """Start the clock of a bar that waited, now that it is known how much is to be done."""
        self._display.update(self._line, total=total)
        self._display.start_task(self._line)

    def advance(self, count: float = 1) -> None:
        """So much more is done."""
        self._display.advance(self._line, count)

    def reached(self, done: float, total: float) -> None:
        """So much is done by now, of so much."""
        self._display.update(self._line, completed=done, total=total)

    def tell(self, what: str) -> None:
        """Say what is under way, in the place of the bar's name."""
        self._display.update(self._line, description=what)


class Countdown:
    """A line for every `every` and a last one: Countdown("scored", 640, "answers", print).advance(50) says
    "scored 50 of 640 answers, 0:05:12 to go".

    `before`: how many there were at the beginning, of which nothing is known but that.
    """

    def __init__(
        self, done: str, total: int, of: str, say: Callable[[str], None], *, every: int = 50, before: int = 0
    ) -> None:
        self._words, self._total, self._say, self._every = (done, of), total, say, every
        self._done = self._before = before
        self._began = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        lines, self._done = self._done // self._every, self._done + count
        if self._done // self._every > lines or self._done == self._total:
            pace_s = (time.monotonic() - self._began) / (self._done - self._before)
            left = timedelta(seconds=round(pace_s * (self._total - self._done)))
            self._say(f"{self._words[0]} {self._done} of {self._total} {self._words[1]}, {left} to go")


@contextmanager
def bars(*names: str, total: float | None = None, waiting: bool = False, shown: bool = True) -> Iterator[list[Bar]]:
    """A bar for each name, gone on with while the block runs; `total` of each, None if it is not known yet.

    with bars("answers", total=300) as (answers,):
        answers.advance()

    shows "answers ━━━ 1/300 0:00:02 left 0:09:58".
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as display:
        yield [Bar(display, display.add_task(name, total=total, start=not waiting)) for name in names]
