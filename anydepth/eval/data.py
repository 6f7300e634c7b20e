"""Where tasks find their data, and how a JSONL file is read. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anydepth.record import HEADER, Record

FOLDER = "ANYDEPTH_DATA"


def data_file(name: str, *, folder: str | Path | None = None) -> Path:
    """A data file by name: in `folder`, or in the one that the environment variable ANYDEPTH_DATA names.

    Raises ValueError, saying where was looked, when it is not there.
    """
    where = folder if folder is not None else os.environ.get(FOLDER)
    if not where:
        raise ValueError(
            f"{name} is needed, and no data folder is named; set {FOLDER} (or give --data) to the folder that has it"
        )
    path = Path(where).expanduser() / name
    if not path.is_file():
        raise ValueError(
            f"there is no {name} in {path.parent}; set {FOLDER} (or give --data) to the folder that has it"
        )
    return path


def read_ids(path: str | Path) -> list[str]:
    """Question ids from the folder of a Record, or from a text file, one a line."""
    path = Path(path)
    if (path / HEADER).exists():
        return sorted({sample["id"] for sample in Record.read(path).samples})
    if not path.is_file():
        raise ValueError(f"{path} is neither a Record's folder nor a file; give one of them, a file with an id a line")
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]


def read_text(path: Path) -> str:
    """A UTF-8 file's text, without a byte order mark. ValueError for other encodings."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); save it as such") from error


def read_jsonl(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with at least these fields, none of them empty.

    Raises ValueError naming file and line for a line that is no JSON object or lacks a field.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); mend the line") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number} is a {type(row).__name__}; allowed: an object with {', '.join(fields)}"
            )
        for name in fields:
            if row.get(name) in (None, "", []):
                raise ValueError(f"{path}, line {number} has no {name}; each line needs {', '.join(fields)}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty; it needs one JSON object a line with {', '.join(fields)}")
    return rows
