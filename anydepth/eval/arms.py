"""Studies, arms and rules: what is compared, and by which rules, as arms.toml says it. Imports no torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from anydepth.eval.data import read_text
from anydepth.types import Sampling, unknown

BACKENDS = ("engine", "transformers", "reference")
SAMPLING_FIELDS = tuple("policy" if f.name == "exit_policy" else f.name for f in fields(Sampling))


class Field(NamedTuple):
    """What a field may be."""

    holds: Callable[[Any], bool]
    allowed: str


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


_TEXT = Field(lambda value: isinstance(value, str), "a string")
ENGINE = {  # options of LLM
    "fill": _TEXT,
    "signals": _TEXT,
    "lateness": Field(_whole(0), "whole turns from 0"),
    "dtype": _TEXT,
    "gate_dtype": _TEXT,
    "segments": Field(
        lambda value: _whole(1)(value) or isinstance(value, list), "a whole number or a list of exit layers"
    ),
    "heads": Field(_name, "a folder of exit heads"),
    "certificate": _TEXT,
    "batch_invariant": Field(lambda value: isinstance(value, bool), "true or false"),
}
ENGINE_FIELDS = tuple(ENGINE)
FIELDS = ("name", "backend", *ENGINE_FIELDS, *SAMPLING_FIELDS)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting under a name. `options` are the fields of Sampling that were given, `policy` for `exit_policy`;
    `engine` those of LLM.

    Example: Arm.parse({"name": "B1-0.5", "policy": "gate_cdf", "exit_threshold": 0.5, "fill": "last_exited"})
    Raises ValueError for a name that is no folder name, an unknown field (naming the nearest) and wrong values.
    """

    name: str
    backend: str = "engine"
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(
                f"an arm's name is {self.name!r}; allowed: letters, digits and _ . + -, a letter or "
                f"digit first, because its Record's folder has that name"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"arm {self.name!r}: {unknown('backend', str(self.backend), BACKENDS)}")
        for key, value in self.engine.items():
            if not ENGINE[key].holds(value):
                raise ValueError(f"arm {self.name!r}: {key} is {value!r}; allowed: {ENGINE[key].allowed}")
        if self.profile is not None and not _name(self.profile):
            raise ValueError(
                f"arm {self.name!r}: profile is {self.profile!r}; allowed: a .toml, or a name beside heads"
            )
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
        return cls(
            name=given["name"],
            backend=given.get("backend", "engine"),
            engine={key: value for key, value in given.items() if key in ENGINE_FIELDS},
            options={key: value for key, value in given.items() if key in SAMPLING_FIELDS},
        )

    @property
    def fill(self) -> str | None:
        return self.engine.get("fill")

    @property
    def heads(self) -> str | None:
        return self.engine.get("heads")

    @property
    def profile(self) -> str | None:
        """As it was given: a path, or a name in the folder of the heads."""
        return self.options.get("profile")

    def sampling(self, **defaults: Any) -> Sampling:
        """The arm's Sampling. `defaults` (a task's caps and stop strings) hold where the arm gives nothing itself."""
        options = {**defaults, **self.options}
        return Sampling(**{"exit_policy" if key == "policy" else key: value for key, value in options.items()})

    def passed(self) -> dict[str, Any]:
        """What was given, in arms.toml's words, but for the name."""
        backend = {} if self.backend == "engine" else {"backend": self.backend}
        return {**backend, **self.engine, **self.options}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A verdict fixed beforehand: it is met where every bound that it names holds for the pair `compare`, [A, B].

    `p_below`: of exact McNemar; `min_abs_difference_pp`: of the accuracies; `non_inferior_margin_pp`: A is at most so
    much worse than B, by the lower limit of the 95 % interval of A - B. `identical` stands alone: every answer of A has
    the token ids and depths of B's.
    """

    name: str
    compare: tuple[str, str]
    p_below: float | None = None
    min_abs_difference_pp: float | None = None
    non_inferior_margin_pp: float | None = None
    identical: bool | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any], arms: Sequence[str]) -> Rule:
        """A rule from the fields of arms.toml's [[rule]], over arms of these names."""
        known = [f.name for f in fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(f"rule {given.get('name')!r}: {unknown('field', key, known)}")
        pair, name = given.get("compare"), given.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"a rule needs a name; given: {dict(given)}")
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"rule {name!r}: compare is {pair!r}; allowed: the names of two arms")
        if pair[0] == pair[1]:
            raise ValueError(f"rule {name!r}: compare names {pair[0]!r} twice; give two arms")
        for arm in pair:
            if arm not in arms:
                raise ValueError(f"rule {name!r}: {unknown('arm', str(arm), arms)}")
        bounds = {key: value for key, value in given.items() if key not in ("name", "compare")}
        if (identical := bounds.get("identical")) is not None and identical is not True:
            raise ValueError(f"rule {name!r}: identical is {identical!r}; allowed: true, or leave it out")
        if identical and (others := [key for key in bounds if key != "identical"]):
            raise ValueError(
                f"rule {name!r}: identical stands beside {', '.join(others)}, which identical answers decide; give a "
                f"rule of its own"
            )
        for key, value in bounds.items() if not identical else ():
            most = 1 if key == "p_below" else 100
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise ValueError(f"rule {name!r}: {key} is {value!r}; allowed: a number from 0 to {most}")
        if not bounds:
            raise ValueError(f"rule {name!r} bounds nothing; give one of {', '.join(known[2:])}")
        return cls(name=name, compare=(pair[0], pair[1]), **bounds)

    def asdict(self) -> dict[str, Any]:
        given = {key: value for key, value in asdict(self).items() if value is not None}
        return {**given, "compare": list(self.compare)}


HEAD = {  # [study]
    "task": Field(_name, "a task's name, or the path of a .py file"),
    "model": Field(_name, "a model's name or path"),
    "limit": Field(_whole(1), "a whole number from 1"),
    "ids": Field(lambda value: isinstance(value, list) and all(map(_name, value)), "a list of question ids"),
    "split": Field(_name, "a split's name"),
    "seed": Field(_whole(0), "a whole number from 0"),
}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms over one task's questions, and the rules of the verdict. `limit`: the first n by hash ranking; `ids`:
    these questions instead; `split` None is the task's first."""

    task: str
    model: str
    arms: tuple[Arm, ...]
    rules: tuple[Rule, ...] = ()
    limit: int | None = None
    ids: tuple[str, ...] | None = None
    split: str | None = None
    seed: int = 0

    @classmethod
    def read(cls, path: str | Path) -> Study:
        """A study from an arms.toml. Raises ValueError naming file and line for what is wrong in it."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"there is no study file {path}; give the path of an arms.toml")
        text = read_text(path)
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:  # says line and column itself
            raise ValueError(f"{path}: {error}") from error
        try:
            return cls.parse(_beside(path.parent, given))
        except ValueError as error:
            raise ValueError(f"{path}{_line_of(text, str(error))}: {error}") from error

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Study:
        """A study from the tables of arms.toml."""
        for key in given:
            if key not in ("study", "arm", "rule"):
                raise unknown("table", key, ("study", "arm", "rule"))
        head = given.get("study", {})
        if not isinstance(head, Mapping):
            raise ValueError(f"study is {head!r}; write it as a table, [study]")
        for table in ("arm", "rule"):
            rows = given.get(table, [])
            if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
                raise ValueError(f"{table} is {rows!r}; write each as a table of its own, [[{table}]]")
        for key, value in head.items():
            if key not in HEAD:
                raise ValueError(f"[study]: {unknown('field', key, HEAD)}")
            if not HEAD[key].holds(value):
                raise ValueError(f"[study]: {key} is {value!r}; allowed: {HEAD[key].allowed}")
        for key in ("task", "model"):
            if key not in head:
                raise ValueError(f"[study] has no {key}; give {HEAD[key].allowed}")
        arms = tuple(Arm.parse(arm) for arm in given.get("arm", []))
        names = [arm.name for arm in arms]
        if not arms:
            raise ValueError("there is no [[arm]]; give at least one")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two arms have the name {twice!r}; give each its own")
        rules = tuple(Rule.parse(rule, names) for rule in given.get("rule", []))
        told = [rule.name for rule in rules]
        if twice := next((name for name in told if told.count(name) > 1), None):
            raise ValueError(f"two rules have the name {twice!r}; give each its own")
        ids = head.get("ids")
        return cls(**{**head, "ids": tuple(ids) if ids is not None else None}, arms=arms, rules=rules)

    def head(self) -> dict[str, Any]:
        """What stands in [study]."""
        every = {
            key: value for key, value in asdict(self).items() if key not in ("arms", "rules") and value is not None
        }
        return {**every, "ids": list(self.ids)} if self.ids is not None else every


def _beside(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The tables, with the paths of heads and profiles that lie beside the file made good from here."""
    arms = given.get("arm", [])
    for arm in arms if isinstance(arms, list) else ():
        for key in ("heads", "profile") if isinstance(arm, dict) else ():
            value = arm.get(key)
            if isinstance(value, str) and (key == "heads" or value.endswith(".toml")) and (folder / value).exists():
                arm[key] = str(folder / value)
    return given


def _line_of(text: str, message: str) -> str:
    """Where the complaint's word stands in the file, as ", line 7"; looked for from the arm or rule that it names."""
    lines, start = text.splitlines(), 0
    if owner := re.match(r"(arm|rule) '([^']+)'", message):
        at = next((i for i, line in enumerate(lines) if re.search(rf"name *= *.{re.escape(owner[2])}.", line)), 0)
        start = max((i for i in range(at + 1) if lines[i].strip() == f"[[{owner[1]}]]"), default=at)
    for quoted, named in reversed(re.findall(r"'([^']+)'|(\w+) is ", message.split(";")[0])):
        for number, line in enumerate(lines[start:], start=start + 1):
            if re.search(rf"(?<![\w.-]){re.escape(quoted or named)}(?![\w.-])", line):
                return f", line {number}"
    return ""
