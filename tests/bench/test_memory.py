"""Peak memory of one run among several in a process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from anydepth.bench.memory import watch_peak

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process set its peak back")
def test_the_peak_is_what_was_held_since_the_start_and_not_before():
    quiet, watch = watch_peak(CPU)(), watch_peak(CPU)
    block = torch.ones(256 * MIB // 4)
    del block
    loud, after = watch(), watch_peak(CPU)()
    assert quiet.of == loud.of == "resident set of the process"
    assert quiet.bytes + 200 * MIB < loud.bytes < quiet.bytes + 300 * MIB
    assert after.bytes < quiet.bytes + 64 * MIB


def test_a_system_that_refuses_gives_none_and_the_reason(monkeypatch):
    def refuse(self, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    found = watch_peak(CPU)()
    assert found.bytes is None and "Permission denied" in found.of
