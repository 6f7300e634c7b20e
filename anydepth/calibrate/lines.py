"""JSON lines that a run appends to as results come. Imports no torch."""

from __future__ import annotations

from pathlib import Path


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, none if it is not there; one at the end that was only half written is cut off the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.splitlines()
