"""A profile: named thresholds of the policies `confidence` and `probe`, one set an exit. Imports no torch.

name = "careful"
model_hash = "..."            # of the backbone, and
head_hash = "..."             # of heads.safetensors; leave both out for a profile that is only an example
gate_temperature = 2.0        # of the entropy test
[[exit]]
layer = 4
logit = 5.1093                # least largest logit
margin = 0.1577               # least lead of the largest over the second
entropy = 11.3805             # most entropy, in nats
probe = 0.9                   # least probability of the probe
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from anydepth.types import unknown

FOLDER = "profiles"  # beside the heads


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Thresholds of one exit; None: not given. `layer` is the one after which it reads."""

    layer: int
    logit: float | None = None
    margin: float | None = None
    entropy: float | None = None
    probe: float | None = None

    @property
    def has_confidence(self) -> bool:
        return None not in (self.logit, self.margin, self.entropy)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a profile's file says."""

    name: str
    exits: tuple[Exit, ...]
    gate_temperature: float = 1.0
    model_hash: str | None = None
    head_hash: str | None = None

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """From a TOML file. ValueError, naming the file, for what is missing, unknown or no number."""
        path = Path(path).expanduser()
        if not path.is_file():
            there = _names(path.parent)
            beside = f"there are: {', '.join(there)}" if there else "give the path of a .toml, or a name beside heads="
            raise ValueError(f"there is no profile {path}; {beside}")
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path} is no profile ({error}); give a TOML file as docs/heads.md shows it") from error
        content.setdefault("name", path.stem)
        _known(path, content, [*(f.name for f in fields(cls) if f.name != "exits"), "exit"])
        exits = content.pop("exit", [])
        if not isinstance(exits, list) or not exits:
            raise ValueError(f"{path} has no [[exit]]; a profile has one for every exit that may be taken")
        for key in ("name", "model_hash", "head_hash"):
            if key in content and not (isinstance(content[key], str) and content[key]):
                raise ValueError(f"{path}: {key} is {content[key]!r}; allowed: texts")
        for each in exits:
            _exit(path, each)
        read = tuple(sorted((Exit(**each) for each in exits), key=lambda each: each.layer))
        if len({each.layer for each in read}) < len(read):
            raise ValueError(f"{path} has two [[exit]] of one layer; give each layer once")
        _number(path, "gate_temperature", content.get("gate_temperature", 1.0))
        if content.get("gate_temperature", 1.0) <= 0:
            raise ValueError(f"{path}: gate_temperature is {content['gate_temperature']}; allowed: numbers above 0")
        return cls(exits=read, **content)

    def thresholds(self) -> dict[str, Any]:
        """Its numbers as JSON takes them, infinite ones as words: {"gate_temperature": 2.0, "exits": [{"layer": 4,
        "probe": 0.9}]}."""
        exits = [{f.name: getattr(each, f.name) for f in fields(Exit)} for each in self.exits]
        return {
            "gate_temperature": float(self.gate_temperature),
            "exits": [
                {key: value if key == "layer" else _plain(value) for key, value in each.items() if value is not None}
                for each in exits
            ],
        }

    @property
    def hash(self) -> str:
        """sha256 (hex) of its thresholds, under whatever name."""
        return hashlib.sha256(json.dumps(self.thresholds(), sort_keys=True).encode()).hexdigest()

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that it has thresholds for."""
        found = {"confidence": any(exit.has_confidence for exit in self.exits)}
        found["probe"] = any(exit.probe is not None for exit in self.exits)
        return tuple(name for name, has in found.items() if has)

    def check_hashes(self, *, model_hash: str, head_hash: str | None) -> None:
        """ValueError where it is for another model or other heads."""
        for what, mine, given in (("model", self.model_hash, model_hash), ("heads", self.head_hash, head_hash)):
            if mine is not None and mine != given:
                raise ValueError(
                    f"profile {self.name!r} was made for {what} {mine[:16]}, not for {str(given)[:16]}; calibrate one "
                    f"for these"
                )

    def check_exits(self, exits: Sequence[int]) -> None:
        """ValueError for an exit after a layer after which no segment ends."""
        if missing := [each.layer for each in self.exits if each.layer not in exits]:
            raise ValueError(
                f"profile {self.name!r} has exits after layers {missing}, but the model's segments end after "
                f"{list(exits)}; give segments= or heads= that end there"
            )


def policy_of(profiles: Sequence[Profile]) -> str | None:
    """The policy that a profile is for; None where there are several, or one that two policies may use."""
    return profiles[0].policies[0] if len(profiles) == 1 and len(profiles[0].policies) == 1 else None


def profile_path(name: str | Path, heads: str | Path | None) -> Path:
    """The file of a profile: a path (.toml), or a name in the folder `profiles` beside the heads."""
    path = Path(name).expanduser()
    if path.suffix != ".toml" and heads is not None:
        return Path(heads).expanduser() / FOLDER / f"{name}.toml"
    return path


def profiles_beside(heads: str | Path) -> list[str]:
    """Names of the profiles that lie beside the heads."""
    return _names(Path(heads).expanduser() / FOLDER)


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _plain(value: float) -> float | str:
    return str(float(value)) if math.isinf(value) else float(value)


def _known(path: Path, content: Any, names: Sequence[str]) -> None:
    for name in content:
        if name not in names:
            raise ValueError(f"{path}: {unknown('key', str(name), names)}")


def _exit(path: Path, given: Any) -> None:
    """ValueError for what is no [[exit]], or has a part of what `confidence` needs, which would never let a row go."""
    if not isinstance(given, dict) or "layer" not in given:
        raise ValueError(f"{path}: an exit is {given!r}; write it as [[exit]] with the layer after which it reads")
    _known(path, given, [f.name for f in fields(Exit)])
    for key, value in given.items():
        _number(path, key, value)
    parts = ("logit", "margin", "entropy")
    if 0 < sum(part in given for part in parts) < len(parts):
        raise ValueError(
            f"{path}: the exit after layer {given['layer']} has not all of {', '.join(parts)}; give the three, of "
            f"which -inf, 0 and inf let every row go"
        )


def _number(path: Path, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{path}: {key} is {value!r}; allowed: numbers")
    if key == "layer" and (not isinstance(value, int) or value < 1):
        raise ValueError(f"{path}: layer is {value!r}; allowed: whole numbers from 1")
    if key == "probe" and not 0 <= value <= 1:
        raise ValueError(f"{path}: probe is {value!r}; allowed: probabilities, 0 to 1")
