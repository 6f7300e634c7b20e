"""A certificate: the exit setting that was shown, on questions of its own, to keep a risk below a bound, and what it
holds for. `anydepth.eval.calibrate` makes it, `LLM(certificate=...)` keeps to it. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from anydepth.record import read_versioned, write_atomically
from anydepth.types import Sampling

VERSION = 1
FILE = "certificate.json"
NEVER: Literal["never"] = "never"
# What may vary between the settings that are tried: these two, or the profile of `confidence` and `probe`.
GRID_SETTINGS = ("exit_threshold", "min_depth")
PROFILED = ("confidence", "probe")
# Fields of Sampling that it decides, and that it holds for.
EXIT_SETTINGS = ("exit_policy", *GRID_SETTINGS, "max_depth", "depth", "interval", "shallow_depth", "trace", "profile")
DRAW_SETTINGS = ("temperature", "top_k", "top_p", "first_token")
LOSSES = {
    "lost": "full depth is right and early exit wrong",
    "wrong": "early exit is wrong",
    "disagree": "early exit does not answer as full depth does",
    "disagree_tokens": "early exit says another token than full depth",  # a question's loss: the share of its tokens
}
OF_TOKENS = ("disagree_tokens",)
_DEFAULTS = {name: getattr(Sampling(), name) for name in EXIT_SETTINGS}
_CHECKSUM = "sha256"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What certificate.json says; `sha256` of the file covers it.

    `policy` has the exit settings that all of the `grid` share and the model's number of `segments`; `grid` those that
    were tried, the most conservative first; `points`, for each of them, n, the sum of losses, how many questions have
    loss 1 because they could not be scored, p (None without a test) and, of a profile, its `profile_hash`. `chosen`
    is one of the grid, or "never" where none was certified. `eps` bounds the mean loss, with confidence 1 - `delta`;
    `delta` is None where it is bounded in expectation only. `fitted_on`, `certified_on`: `question_set_hash` of the
    ids, None for no questions.
    """

    model_hash: str
    head_hash: str | None
    policy: Mapping[str, Any]
    fill: str
    signals: str
    dtype: str
    gate_dtype: str
    sampling: Mapping[str, Any]
    protocol_hash: str
    loss: str
    grid: tuple[Mapping[str, Any], ...]
    n: int
    eps: float
    delta: float | None
    method: str
    points: tuple[Mapping[str, Any], ...]
    chosen: Mapping[str, Any] | Literal["never"]
    fitted_on: str | None
    certified_on: str
    seed: int
    made_by: Mapping[str, Any]
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.chosen != NEVER and self.chosen not in self.grid:
            raise ValueError(f"chosen is {self.chosen!r}; allowed: one of the grid, or {NEVER!r}")

    @classmethod
    def read(cls, path: str | Path) -> Certificate:
        """The certificate in a file. Raises ValueError for one that is missing, malformed, of another version, with
        fields beyond it or without some of it, or edited."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no certificate {path}; make one with: anydepth calibrate")
        content = read_versioned(
            path,
            what="no certificate",
            version=VERSION,
            advice=": use the version of anydepth that wrote it, or calibrate again",
        )
        if wrong := {*(f.name for f in fields(cls)), _CHECKSUM} ^ content.keys():
            raise ValueError(f"{path} lacks or has beyond version {VERSION}: {', '.join(sorted(wrong))}")
        checksum = content.pop(_CHECKSUM)
        if checksum != _hash(content):
            raise ValueError(
                f"{path} was edited after it was made (its {_CHECKSUM} does not fit); what it says was not shown: "
                f"get it again, or calibrate again"
            )
        return cls(**{**content, "grid": tuple(content["grid"]), "points": tuple(content["points"])})

    @property
    def sha256(self) -> str:
        """Hash (hex) of all that it says."""
        return _hash(asdict(self))

    def write(self, path: str | Path) -> None:
        """Write it to a file, as a whole or not at all."""
        content = {**asdict(self), _CHECKSUM: self.sha256}
        write_atomically(Path(path), json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of Sampling that decide depth, as every request has them under this certificate."""
        segments = self.policy["segments"]
        if self.chosen == NEVER:
            return {**_DEFAULTS, "exit_policy": NEVER, "max_depth": segments}
        shared = {name: value for name, value in self.policy.items() if name != "segments"}
        return {**_DEFAULTS, **shared, **self.chosen}

    def match(
        self,
        *,
        model_hash: str,
        head_hash: str | None,
        segments: int,
        fill: str,
        signals: str,
        dtype: str,
        gate_dtype: str,
        profiles: Mapping[str, str] | None = None,
    ) -> None:
        """ValueError naming everything in which a loaded model is not the one that was certified. `profiles`: the
        hashes of the loaded ones by their names."""
        here = {
            "model_hash": model_hash,
            "head_hash": head_hash,
            "segments": segments,
            "fill": fill,
            "signals": counted_signals(signals),
            "dtype": dtype,
            "gate_dtype": gate_dtype,
        }
        there = {**asdict(self), "segments": self.policy["segments"], "signals": counted_signals(self.signals)}
        if wrong := [
            f"{name} is {value!r}, not {there[name]!r}" for name, value in here.items() if value != there[name]
        ]:
            raise ValueError(
                f"the certificate is for something else: {'; '.join(wrong)}. Load what was certified, leave the "
                f"certificate out, or calibrate this"
            )
        if self.chosen != NEVER and "profile" in self.chosen:
            name = self.chosen["profile"]
            certified = self.points[self.grid.index(self.chosen)].get("profile_hash")
            if name not in (profiles or {}):
                raise ValueError(f"the certificate is for profile {name!r}, which is not loaded; give profile={name!r}")
            if certified not in (None, (profiles or {})[name]):
                raise ValueError(f"profile {name!r} was changed after it was certified; get it again, or calibrate it")

    def hold(self, sampling: Sampling, *, policy: str) -> Sampling:
        """A request's sampling under this certificate: without an exit setting it gets the certified one.

        policy: the name of the policy that `sampling` means. Raises ValueError for an exit setting, or a temperature,
        top_k, top_p or first_token, other than the certified one.
        """
        certified = self.settings
        asked = {name: getattr(sampling, name) for name in (*DRAW_SETTINGS, *EXIT_SETTINGS)}
        if all(asked[name] == value for name, value in _DEFAULTS.items()):
            asked |= certified
        else:
            asked["exit_policy"] = policy
            if asked["max_depth"] is None:
                asked["max_depth"] = self.policy["segments"]
        for name, value in {**self.sampling, **certified}.items():
            if asked[name] != value:
                raise ValueError(
                    f"{name} is {asked[name]!r}, certified is {value!r}; leave exit settings out and keep to "
                    f"{_said(self.sampling)}, or load the model without the certificate"
                )
        return replace(sampling, **certified)


def question_set_hash(ids: Iterable[str]) -> str:
    """sha256 (hex) of a set of question ids, whatever their order: `fitted_on` and `certified_on`."""
    return hashlib.sha256("\n".join(sorted(set(ids))).encode()).hexdigest()


def counted_signals(signals: str) -> str:
    """The mode of signals whose tokens and depths a mode has: `sync` for `exact` and `resident`."""
    return "sync" if signals in ("exact", "resident") else signals


def describe(certificate: Certificate) -> str:
    """A certificate in one line.

    Example: certified: gate_cdf exit_threshold 0.5, min_depth 1: on at most 5 % of questions full depth is right and
    early exit wrong, with 95 % confidence (n 600, losses 12, p 0.00056; fill last_exited, float32, temperature 0)
    """
    c = certificate
    surely = "in expectation" if c.delta is None else f"with {100 * (1 - c.delta):g} % confidence"
    of = "an answer's tokens, on average," if c.loss in OF_TOKENS else "questions"
    claim = f"on at most {100 * c.eps:g} % of {of} {LOSSES[c.loss]}, {surely}"
    place = f"fill {c.fill}, {c.dtype}, temperature {c.sampling['temperature']:g}"
    if c.chosen == NEVER:
        return (
            f"nothing certified, every token runs at full depth: not even for {_said(c.grid[0])} was it shown that "
            f"{claim} ({_evidence(c.points[0])}; {place})"
        )
    point = c.points[c.grid.index(c.chosen)]
    return f"certified: {c.policy['exit_policy']} {_said(c.chosen)}: {claim} ({_evidence(point)}; {place})"


def _evidence(point: Mapping[str, Any]) -> str:
    unscored = f", {point['unscored']} of them unscored" if point["unscored"] else ""
    p = "" if point["p"] is None else f", p {point['p']:.2g}"
    return f"n {point['n']}, losses {point['losses']:g}{unscored}{p}"


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
