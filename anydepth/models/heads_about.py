"""The folder of exit heads: heads.safetensors has their numbers, heads.json says what they are. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydepth.record import read_versioned

FILE, ABOUT, VERSION = "heads.safetensors", "heads.json", 1


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _kinds(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(layer.isdecimal() and (kind is None or _text(kind)) for layer, kind in value.items())
    )


_NEEDED = {
    "model_hash": (_text, "the sha256 of the backbone's weights"),
    "exits": (_kinds, 'kinds of heads by layer, such as {"5": "norm"}'),
    "sha256": (_text, f"that of {FILE}"),
}


def read_about(folder: str | Path) -> dict[str, Any]:
    """What heads.json says. ValueError where there are no heads, or it is malformed or of another version."""
    folder = Path(folder).expanduser()
    if not (folder / ABOUT).is_file() or not (folder / FILE).is_file():
        raise ValueError(
            f"there are no exit heads in {folder} ({ABOUT} and {FILE}); make some with: anydepth train heads"
        )
    about = read_versioned(folder / ABOUT, what="no description of exit heads", version=VERSION)
    for key, (holds, allowed) in _NEEDED.items():
        if not holds(about.get(key)):
            raise ValueError(f"{folder / ABOUT}: {key} is {about.get(key)!r}; allowed: {allowed}; get the heads again")
    return about
