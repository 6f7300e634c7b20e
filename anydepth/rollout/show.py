"""What `anydepth rollout` prints. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anydepth.record import Record


@contextmanager
def answers_bar(total: int) -> Iterator[Callable[[int], object]]:
    """A line on stderr with answers done and time left; gives out what moves it on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("answers", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        line = progress.add_task("", total=total)
        yield lambda count: progress.advance(line, count)


def print_rollout(record: Record) -> None:
    found = record.aggregates
    depth = "" if found["mean_depth"] is None else f", mean depth {found['mean_depth']:.2f}"
    ends = ", ".join(f"{count} {reason}" for reason, count in found["finish_reasons"].items())
    print(f"{found['n']} answers to {found['prompts']} prompts in {record.path}: {ends}")
    print(f"{found['output_tokens']} tokens{depth}, {found['segments_executed']} segments executed in decoding")
