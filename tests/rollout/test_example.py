"""The example runs, and its engine draws what the eager reference draws."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/rollout.py"


def test_every_interval_equals_the_eager_reference(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("rollout_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "PROMPTS", 1)
    monkeypatch.setattr(example, "N", 2)
    monkeypatch.setattr("sys.argv", ["rollout.py"])
    example.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0], row[-1]) for row in rows] == [(n, "equal") for n in ("1", "2", "4", "8")]
    assert rows[0][1] == "4.00" > rows[1][1] > rows[3][1] >= "2.00"
