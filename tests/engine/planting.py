"""Breaking a guard on purpose, to see that a check notices."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Fault(NamedTuple):
    """In `owner.name`, `old` becomes `new`; `check` must fail then, and only then. `also` is another such change that
    goes with it."""

    owner: Any
    name: str
    old: str
    new: str
    check: Callable[..., None]
    also: tuple[Any, str, str, str] | None = None


def notice(fault: Fault, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check passes as it is, and fails with the fault."""
    extra = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    arguments = {key: extra[key] for key in inspect.signature(fault.check).parameters if key in extra}
    fault.check(**arguments)
    plant(monkeypatch, *fault[:4])
    if fault.also:
        plant(monkeypatch, *fault.also)
    with pytest.raises((AssertionError, LookupError, ValueError, RuntimeError, pytest.fail.Exception)):
        fault.check(**arguments)


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Give the function the code of its text with `old` replaced; whoever holds the function runs it from now on."""
    function = plain(inspect.getattr_static(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {function.__qualname__}"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), "<fault>", "exec"), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", plain(made[name]).__code__)


def plain(found: Any) -> Any:
    """The function inside a property or a decorator."""
    return inspect.unwrap(found.fget if isinstance(found, property) else found)
