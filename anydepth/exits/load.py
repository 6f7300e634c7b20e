"""Policies by name: `gate_cdf` is `anydepth.exits.gate_cdf`, and `pkg.module:Class` is anybody's own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

import anydepth.exits
from anydepth.exits import gate_cdf
from anydepth.exits.base import Policy, Thresholds
from anydepth.types import Sampling, unknown

_NOT_POLICIES = {"base", "load"}


def known_policies() -> list[str]:
    """Names of the policies in the package."""
    found = {module.name for module in pkgutil.iter_modules(anydepth.exits.__path__)}
    return sorted(found - _NOT_POLICIES)


def load_policy(name: str, *, gate_dtype: str = "float32", profiles: Mapping[str, Thresholds] | None = None) -> Policy:
    """The policy of that name, which knows these profiles. ValueError names the nearest known one."""
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in known_policies():
            raise unknown("exit_policy", name, known_policies())
        if name == gate_cdf.Policy.name and gate_dtype == "bfloat16":
            return gate_cdf.ReleasedArithmetic()
        module, attribute = f"anydepth.exits.{name}", "Policy"
    try:
        policy = getattr(importlib.import_module(module), attribute)()
        if not isinstance(policy, Policy):
            raise TypeError(f"it is no {Policy.__module__}.Policy")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"exit_policy {name!r} cannot be loaded ({error}); give one of {known_policies()} or the "
            f"importable pkg.module:Class of your own"
        ) from error
    policy.profiles = profiles or {}
    return policy


def policy_name(sampling: Sampling) -> str:
    """Which policy a Sampling means: the one named, else the one its options imply."""
    implied = [
        name
        for name, given in (
            ("fixed", sampling.depth is not None),
            ("trace", sampling.trace is not None),
            ("interval", sampling.interval is not None),
            ("gate_cdf", sampling.exit_threshold < 1),
        )
        if given
    ]
    named = sampling.exit_policy
    others = [name for name in implied if name != named]
    if others and ((named is not None and ":" not in named) or len(implied) > 1):
        owner = {"fixed": "depth", "trace": "trace", "interval": "interval", "gate_cdf": "exit_threshold"}
        asked = [f"exit_policy={named!r}"] * (named is not None) + [f"{owner[n]}=" for n in implied]
        raise ValueError(f"{' and '.join(asked)} contradict each other; give one way to choose the depth")
    return named if named is not None else (implied[0] if implied else "never")
