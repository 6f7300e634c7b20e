"""In which factors two runs differ. An exit policy with all of its parameters is one factor; what has no effect in one
of the runs is none: a fill where every token runs at full depth, a top-p where nothing is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from anydepth.types import EXACT_FILLS

Settings = Mapping[str, Any]

# What each policy's decision depends on, beside the model. A policy of somebody's own may use any of them.
_BOUNDS = ("min_depth", "max_depth")
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "never": (),
    "fixed": ("depth",),
    "trace": ("trace",),
    "interval": ("interval", "shallow_depth", *_BOUNDS),
    "gate_cdf": ("exit_threshold", *_BOUNDS, "gate_dtype"),
    "confidence": ("profile", "profile_hash", *_BOUNDS),
    "probe": ("profile", "profile_hash", *_BOUNDS),
}
_ALL = tuple(dict.fromkeys(name for names in _PARAMETERS.values() for name in names))
_KNOWN_BEFOREHAND = ("never", "fixed", "interval", "trace")  # no signal, so none comes late
# What holds where a Record does not speak of it: older ones, other backends.
_SILENT: Settings = {"signals": "sync", "lateness": 0, "batch_invariant": False}
EXACT_KV = "exact"
_BESIDE = (
    "name",
    "task",
    "model",
    "questions",
    "question_ids_sha256",
    "split",
    "logprobs",
    "concurrency",
    "certificate",
    "heads",  # as their hash says it
    "exit_layers",  # as segments does
    "profile_thresholds",
)
# What runs of one protocol share, as far as settings say it: for telling what differs where the hashes do.
PROTOCOL = ("task", "model", "split", "question_ids_sha256", "max_tokens", "stop", "ignore_eos", "first_token", "n")


class Factor(NamedTuple):
    """One thing that differs: its name, and its value in either run, in words."""

    name: str
    a: str
    b: str


class Factors(NamedTuple):
    """`counted`: what can make a difference. `without_effect`: settings that differ but cannot, as these runs are."""

    counted: tuple[Factor, ...]
    without_effect: tuple[Factor, ...]


def factors(a: Settings, b: Settings) -> Factors:
    """What differs in the settings of two runs of one protocol (`Record.settings_used`).

    Example: `never` against `gate_cdf` at 0.5 is one factor, "exit policy"; with another dtype there are two. `sync`
    against `exact`, a turn late, is one, "signals".
    """
    counted: list[Factor] = []
    idle: list[Factor] = []
    if effective_policy(a) != effective_policy(b):
        counted.append(Factor("exit policy", policy_words(a), policy_words(b)))
        used: tuple[str, ...] = ()
    else:
        used = _PARAMETERS.get(effective_policy(a), _ALL)
    for name in sorted({*a, *b} - {"policy", *_BESIDE}):
        if _value(a, name) == _value(b, name) or _of_another(name, a, b):
            continue
        words = _WORDS.get(name, lambda settings, name=name: value_words(_value(settings, name)))
        factor = Factor("heads" if name == "head_hash" else name, words(a), words(b))
        if name in _ALL:
            counted += [factor] if name in used else []
        else:
            (counted if _matters(name, a, b) else idle).append(factor)
    return Factors(tuple(counted), tuple(idle))


def _value(settings: Settings, name: str) -> Any:
    return settings.get(name, _SILENT.get(name))


def _of_another(name: str, a: Settings, b: Settings) -> bool:
    """Whether a difference is another factor's: how late signals come is part of their mode, and what one backend does
    not speak of is part of the backend."""
    if name == "lateness":
        return bool(_value(a, "signals") != _value(b, "signals"))
    if name in ("profile", "profile_hash"):  # one factor: by name, or where that says nothing by what stands in them
        same_name, same = (a.get(key) == b.get(key) for key in ("profile", "profile_hash"))
        return (same and a.get("profile_hash") is not None) if name == "profile" else not same_name
    return name not in _SILENT and a.get("backend") != b.get("backend") and (name in a) != (name in b)


def heads_words(settings: Settings) -> str:
    """Exit heads by folder and hash: "heads (1a2b3c4d)"."""
    return f"{settings['heads']} ({settings['head_hash'][:8]})" if settings.get("head_hash") else "none"


def signals_words(settings: Settings) -> str:
    """The mode of signals, and how late they come: "delayed, 1 turn late"."""
    mode, turns = _value(settings, "signals"), _value(settings, "lateness")
    return f"{mode}, {turns} turn{'s' if turns > 1 else ''} late" if turns else str(mode)


_WORDS = {"signals": signals_words, "head_hash": heads_words}


def effective_policy(settings: Settings) -> str:
    """The policy's name, "never" for one whose parameters keep every token at full depth."""
    name: str = settings["policy"]
    neutral = (
        (name == "fixed" and settings.get("depth") == settings.get("segments"))
        or (name == "interval" and settings.get("interval") == 1)
        # bfloat16 rounds a running sum up to 1: there a threshold of 1 can be reached.
        or (name == "gate_cdf" and settings["exit_threshold"] >= 1 and settings.get("gate_dtype") != "bfloat16")
    )
    return "never" if neutral else name


def policy_words(settings: Settings) -> str:
    """An exit policy with its parameters that are no defaults: "gate_cdf 0.5, min_depth 2"."""
    name: str = settings["policy"]
    plain = {"min_depth": 1, "max_depth": settings.get("segments"), "gate_dtype": "float32"}
    known = [key for key in _PARAMETERS.get(name, _ALL) if key != "profile_hash"]
    used = [key for key in known if settings.get(key) not in (None, plain.get(key))]
    words = [
        value_words(settings[key])
        if key in ("exit_threshold", "depth", "trace")
        else f"{key} {value_words(settings[key])}"
        for key in used
        if not (key == "exit_threshold" and name not in _PARAMETERS and settings[key] == 1)
    ]
    return ", ".join([f"{name} {words[0]}", *words[1:]] if words else [name])


def kv_kind(settings: Settings) -> str:
    """What decides the K/V beside the tokens: EXACT_KV where every depth holds what was, or will be, computed for it,
    else the fill."""
    fill = settings.get("fill") or "full"
    exact = fill in EXACT_FILLS or (effective_policy(settings) == "never" and fill != "shared")
    return EXACT_KV if exact else fill


def _matters(name: str, a: Settings, b: Settings) -> bool:
    policies = effective_policy(a), effective_policy(b)
    if name == "head_hash":
        return "never" not in policies
    if name == "fill":
        return "never" not in policies or "shared" in (a.get(name), b.get(name))
    if name in ("signals", "lateness"):
        return not any(policy in _KNOWN_BEFOREHAND for policy in policies)
    if name in ("top_k", "top_p", "seed"):
        return bool(a.get("temperature") or b.get("temperature"))
    return True


def environment(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Factor, ...]:
    """What differs in where two runs were made (`Record.provenance`): code, packages, machine, threads."""
    one, other = surroundings(a), surroundings(b)
    names = dict.fromkeys((*one, *other))
    return tuple(Factor(n, one.get(n, "none"), other.get(n, "none")) for n in names if one.get(n) != other.get(n))


def surroundings(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Code, packages and machine behind a run, in words."""
    source, packages = provenance.get("anydepth") or {}, provenance.get("packages") or {}
    found = {
        "anydepth": source.get("commit") or source.get("version"),
        "uncommitted changes": None if source.get("dirty") is None else "yes" if source["dirty"] else "no",
        "python": provenance.get("python"),
        **{name: version for name, version in sorted(packages.items()) if version},
        "system": provenance.get("os"),
        "machine": ", ".join([provenance.get("cpu") or "", *(provenance.get("gpu") or [])]),
        "threads": provenance.get("threads"),
    }
    return {name: value_words(value) for name, value in found.items()}


def value_words(value: Any) -> str:
    """A setting's value, short: long lists by their length."""
    if value is None or value == "":
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"{len(value)} entries" if len(value) > 8 else "[" + ", ".join(map(value_words, value)) + "]"
    return str(value)
