"""Tables on a terminal that is too narrow for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

_UNBOUNDED = 10_000


def print_in_parts(table: Table, console: Console, *, names: int = 1) -> None:
    """Print a table whole if it fits, else its columns in several tables one below the other, each with the `names`
    leading columns, the last of which may then be folded to half the width. A column whose heading begins empty belongs
    to the one before it and stays beside it."""
    first, parts = [copy(column) for column in table.columns[:names]], list[list["Column"]]()
    if _width(table, console) > console.width:
        first[-1].max_width = console.width // 2
    for group in _groups(table.columns[names:]):
        if parts and _width(_of(table, [*first, *parts[-1], *group]), console) <= console.width:
            parts[-1] += group
        else:
            parts.append(group)
    for number, part in enumerate(parts):
        shown = _of(table, [*first, *part])
        shown.title = None if number else table.title
        console.print(shown)


def _groups(columns: Sequence[Column]) -> list[list[Column]]:
    found = list[list["Column"]]()
    for column in columns:
        if found and not str(column.header).partition("\n")[0]:
            found[-1].append(column)
        else:
            found.append([column])
    return found


def _of(table: Table, columns: Sequence[Column]) -> Table:
    part = copy(table)
    part.columns = list(columns)
    return part


def _width(table: Table, console: Console) -> int:
    """What it takes to show every cell on one line."""
    return console.measure(table, options=console.options.update_width(_UNBOUNDED)).maximum
