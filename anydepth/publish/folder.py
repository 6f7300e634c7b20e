"""A folder that appears whole or not at all, in the place of an earlier one of its kind. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydepth.record import write_atomically

MARKER = "export.json"


def write_folder(target: Path, files: Mapping[str, bytes | Path], marker: Mapping[str, Any]) -> Path:
    """Write files (contents, or files to copy) by their names in the folder, in their order, and return `target`.

    They are written beside it, to TARGET.new, which is then renamed. export.json says what the folder holds, which is
    how an earlier export is known. ValueError for folders with anything else in them, and where writing fails.
    """
    new, old = (target.with_name(f"{target.name}.{word}") for word in ("new", "old"))
    for folder in (target, new, old):
        _check_free(folder)
    try:
        _remove(new)
        new.mkdir(parents=True)
        write_atomically(new / MARKER, json.dumps(marker, indent=1).encode() + b"\n")
        for name, content in files.items():
            path = new / name
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, path)
            else:
                path.write_bytes(content)
        if target.exists():
            _remove(old)
            target.rename(old)
        new.rename(target)
        _remove(old)
    except OSError as error:
        raise ValueError(
            f"{target} could not be written ({error}); what was there is there, or in {old.name}. Free some space or "
            f"give a folder where you may write, and export again"
        ) from error
    return target


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _check_free(folder: Path) -> None:
    """ValueError unless the folder is absent, empty, or an earlier export, finished or not, with nothing added."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a new folder, an empty one or an earlier export")
    try:
        listed = {*json.loads((folder / MARKER).read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        listed = set()
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if foreign := sorted(there - listed - {MARKER, f"{MARKER}.partial"}):
        raise ValueError(
            f"{folder} holds {foreign[0]} and is not (only) an earlier export; give a new or empty folder, or remove "
            f"what is there"
        )
