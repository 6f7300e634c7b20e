"""Exit heads and profiles for a checkpoint that is loaded: what `LLM(heads=, profile=)` means."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from anydepth.models.heads import ABOUT, load_heads
from anydepth.models.llama import Llama
from anydepth.models.load import Checkpoint
from anydepth.profile import Profile

PROFILES = "profiles"  # a folder beside the heads


def exits_of(folder: str | Path) -> list[int]:
    """The layers after which heads read, as heads.json says; [] where there is none (loading the heads says so)."""
    about = Path(folder).expanduser() / ABOUT
    try:
        return sorted(map(int, json.loads(about.read_text(encoding="utf-8"))["exits"]))
    except (OSError, ValueError, KeyError, TypeError):
        return []


def attach_heads(checkpoint: Checkpoint, folder: str | Path) -> str | None:
    """Load heads onto a checkpoint's model; the hash of their file. ValueError for a looped model."""
    model = checkpoint.model
    if not isinstance(model, Llama):
        raise ValueError(
            f"heads={str(folder)!r} are for layered models; this one is looped, its exits share one readout"
        )
    heads = load_heads(
        folder, model_hash=checkpoint.model_hash, shape=model.shape, dtype=model.dtype, device=model.device
    )
    model.attach(heads)
    return heads.hash


def read_profiles(
    names: str | Path | Sequence[str | Path],
    heads: str | Path | None,
    *,
    model_hash: Callable[[], str],
    head_hash: str | None,
) -> list[Profile]:
    """Profiles by path, or by name in the folder of the heads. ValueError for ones of another model or other heads."""
    found = []
    for name in [names] if isinstance(names, str | Path) else names:
        path = Path(name).expanduser()
        if path.suffix != ".toml" and heads is not None:
            path = Path(heads).expanduser() / PROFILES / f"{name}.toml"
        profile = Profile.read(path)
        if profile.model_hash is not None or profile.head_hash is not None:
            profile.check_hashes(model_hash=model_hash(), head_hash=head_hash)
        found.append(profile)
    return found
