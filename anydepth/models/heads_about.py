"""The folder of exit heads: heads.safetensors has their numbers, heads.json says what they are. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydepth.record import read_versioned

FILE, ABOUT, VERSION = "heads.safetensors", "heads.json", 1


def read_about(folder: str | Path) -> dict[str, Any]:
    """What heads.json says. ValueError where there are no heads, or it is malformed or of another version."""
    folder = Path(folder).expanduser()
    if not (folder / ABOUT).is_file() or not (folder / FILE).is_file():
        raise ValueError(
            f"there are no exit heads in {folder} ({ABOUT} and {FILE}); make some with: anydepth train heads"
        )
    return read_versioned(folder / ABOUT, what="no description of exit heads", version=VERSION, advice="")
