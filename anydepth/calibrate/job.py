"""What is to be calibrated: `Job`, in one frozen object."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from anydepth.calibrate.fit import LEAST_ROWS, LEVELS
from anydepth.certificate import PROFILED
from anydepth.eval.calibrate import Goal
from anydepth.train.head_data import Source
from anydepth.types import unknown

FILLS = ("full", "deferred", "project")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be calibrated. `levels`: agreements with full depth that profiles aim at. `epsilon`, `delta`: of the
    certificate. `fit_share`: of the prompts, to fit on; the others certify. `dtype`, `device`, `revision`: of the
    model, as it is to be served; the certificate is for one dtype."""

    model: str
    heads: Path
    policy: str
    data: tuple[Source, ...]
    fill: str = "full"
    levels: tuple[float, ...] = LEVELS
    epsilon: float = 0.05
    delta: float = 0.05
    answer_tokens: int = 128
    limit: int | None = None
    seed: int = 0
    fit_share: float = 1 / 3
    least_rows: int = LEAST_ROWS
    dtype: str | None = None
    device: str = "cpu"
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.policy not in PROFILED:
            raise unknown("policy that has profiles", self.policy, PROFILED)
        if self.fill not in FILLS:
            raise unknown("fill", self.fill, FILLS)
        if not self.data:
            raise ValueError("no prompts were given; name a JSONL file of them with --data")
        Goal(epsilon=self.epsilon, delta=self.delta)
        for level in self.levels:
            if not 0 < level <= 1:
                raise ValueError(f"level is {level}; allowed: shares of tokens that agree, above 0 and up to 1")
        if not self.levels:
            raise ValueError("levels is (); give one or more agreements to aim at, such as 0.95")
        for name in ("answer_tokens", "least_rows", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: whole numbers from 1")

    def profile_name(self, level: float) -> str:
        """ "probe-0.95"."""
        return f"{self.policy}-{level:g}"

    @property
    def command(self) -> str:
        """The command that does it again, but for the places of files."""
        model = Path(self.model).name if self.revision is None else self.model  # only hub ids have revisions
        words = ["anydepth", "calibrate", "--model", model, "--heads", self.heads.name]
        words += ["--policy", self.policy, "--fill", self.fill]
        for source in self.data:
            words += ["--data", source.path.name + ("" if source.rows is None else f":{source.rows}")]
        for level in self.levels:
            words += ["--level", f"{level:g}"]
        words += ["--eps", f"{self.epsilon:g}", "--delta", f"{self.delta:g}"]
        words += ["--answer-tokens", str(self.answer_tokens), "--seed", str(self.seed)]
        for name, default in (("limit", None), ("dtype", None), ("device", "cpu"), ("revision", None)):
            if (value := getattr(self, name)) != default:
                words += [f"--{name}", str(value)]
        return shlex.join(words)
