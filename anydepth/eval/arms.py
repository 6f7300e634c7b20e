"""Arms: what is compared. Settings that differ between runs over the same questions. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from anydepth.types import Sampling, unknown

BACKENDS = ("engine",)
SAMPLING_FIELDS = tuple("policy" if f.name == "exit_policy" else f.name for f in fields(Sampling))
FIELDS = ("name", "backend", "fill", *SAMPLING_FIELDS)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting under a name. `options` are the fields of Sampling that were given, `policy` for `exit_policy`.

    Example: Arm.parse({"name": "B1-0.5", "policy": "gate_cdf", "exit_threshold": 0.5, "fill": "last_exited"})
    Raises ValueError for a name that is no folder name, an unknown field (naming the nearest) and wrong values.
    """

    name: str
    backend: str = "engine"
    fill: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(
                f"an arm's name is {self.name!r}; allowed: letters, digits and _ . + -, a letter or "
                f"digit first, because its Record's folder has that name"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"arm {self.name!r}: {unknown('backend', self.backend, BACKENDS)}")
        try:
            self.sampling()
        except ValueError as error:
            raise ValueError(f"arm {self.name!r}: {error}") from error

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Arm:
        """An arm from the fields of arms.toml's [[arm]]."""
        if "name" not in given:
            raise ValueError(f"an arm needs a name; given: {', '.join(given) or 'nothing'}")
        for key in given:
            if key not in FIELDS:
                raise ValueError(f"arm {given['name']!r}: {unknown('field', key, FIELDS)}")
        own = {key: value for key, value in given.items() if key not in SAMPLING_FIELDS}
        return cls(**own, options={key: value for key, value in given.items() if key in SAMPLING_FIELDS})

    def sampling(self, **defaults: Any) -> Sampling:
        """The arm's Sampling. `defaults` (a task's caps and stop strings) hold where the arm gives nothing itself."""
        options = {**defaults, **self.options}
        return Sampling(**{"exit_policy" if key == "policy" else key: value for key, value in options.items()})

    def passed(self) -> dict[str, Any]:
        """What was given, in arms.toml's words, but for the name."""
        own = {key: value for key, value in asdict(self).items() if key in ("backend", "fill")}
        defaults = {"backend": "engine", "fill": None}
        return {key: value for key, value in own.items() if value != defaults[key]} | dict(self.options)
