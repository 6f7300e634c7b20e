"""Profiles as files. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from anydepth.profile import Exit, Profile
from anydepth.record import write_atomically


def profile_text(profile: Profile, comments: Sequence[str]) -> str:
    """A profile's TOML, numbers to the last bit, with lines of comment before it."""
    lines = [f"# {line}" for line in comments]
    lines.append(f"name = {json.dumps(profile.name)}")
    for key in ("model_hash", "head_hash"):
        if (value := getattr(profile, key)) is not None:
            lines.append(f"{key} = {json.dumps(value)}")
    lines.append(f"gate_temperature = {float(profile.gate_temperature)!r}")
    for exit in profile.exits:
        lines += ["", "[[exit]]", f"layer = {exit.layer}"]
        given = {f.name: getattr(exit, f.name) for f in fields(Exit) if f.name != "layer"}
        lines += [f"{name} = {float(value)!r}" for name, value in given.items() if value is not None]
    return "\n".join(lines) + "\n"


def write_profile(folder: Path, profile: Profile, comments: Sequence[str]) -> Path:
    """Write `folder`/NAME.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{profile.name}.toml"
    write_atomically(path, profile_text(profile, comments).encode())
    return path
