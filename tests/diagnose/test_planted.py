"""A fault planted in the code behind a rung is named by the ladder as that rung. nano answers for real, every rung that
runs on this machine does too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from anydepth.diagnose.command import bisect_sides
from anydepth.diagnose.sides import Workplace
from anydepth.engine.completions import Buffers
from anydepth.engine.late import LateScheduler
from anydepth.engine.resident import ResidentScheduler
from anydepth.engine.resident_runner import ResidentRunner
from anydepth.engine.sampling import Sampler
from anydepth.exits import base
from tests.engine.planting import plant

GATE: dict[str, Any] = {"exit_threshold": 0.7}


class Planted(NamedTuple):
    """In `owner.name`, `old` becomes `new`; the rung that must be named, on the way from `GATE` to `towards`."""

    owner: Any
    name: str
    old: str
    new: str
    rung: str
    towards: dict[str, Any]


PLANTED = [
    Planted(
        LateScheduler, "_leave", "depth, kept = s.leaves_at, True", "depth, kept = s.leaves_at + 1, False",
        "late signals, one stream", {"signals": "exact"},
    ),
    Planted(
        ResidentScheduler, "_heard", "sequence.issued, sequence.depth", "read = read._replace(token_id=read.token_id ^ "
        "(sequence.issued == 3)) ;sequence.issued, sequence.depth", "late signals, one stream", {"signals": "resident"},
    ),
    Planted(
        Buffers, "take", "return self._idle.pop() if self._idle else",
        "one = self.__dict__.setdefault('one', Buffer(self._size, self._device)); return one if self._static else",
        "static buffers", {"signals": "exact", "lateness": 2},
    ),
    Planted(
        ResidentRunner, "_decode_of", "(*places, *[slots.padding] * padded)", "(*[slots.padding] * padded, *places)",
        "padding", {"signals": "resident"},
    ),
    Planted(
        Sampler, "_draw", "draws[j].output for j in drawn", "len(self.uniform_SI) % 2 + draws[j].output for j in drawn",
        "batch size", {"temperature": 1.0},
    ),
    Planted(
        base, "wide", "x if x.dtype == torch.float64", "x + 1 if x.dtype == torch.float64", "dtype", {},
    ),
]  # fmt: skip


def walk(out: Path, towards: dict[str, Any]) -> Any:
    place = Workplace(model="nano", task="nano", limit=9, concurrency=8, out=out, progress=False)
    ask = GATE | {key: value for key, value in towards.items() if key == "temperature"}
    return bisect_sides(place, ask, ask | towards)


@pytest.mark.parametrize("fault", PLANTED, ids=[f"{fault.rung}, {fault.name}" for fault in PLANTED])
def test_a_fault_behind_a_rung_is_named_by_it(fault, monkeypatch, tmp_path):
    assert walk(tmp_path / "sound", fault.towards).named is None
    plant(monkeypatch, *fault[:4])
    assert walk(tmp_path / "planted", fault.towards).named == fault.rung
