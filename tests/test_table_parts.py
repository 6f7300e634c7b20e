"""Tables that are wider than the terminal keep the names of their rows."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from rich.console import Console

from anydepth.bench.table import print_tables
from anydepth.eval.show import show_arms
from anydepth.record import Record

STUDY = Path(__file__).parent.parent / "results/exit_heads"
LONG = "heads-smollm2-135m_probe_profile-probe-0.9_project"


def test_arms_are_named_beside_all_their_figures_at_80_columns(capsys, monkeypatch):
    record = Record.read(STUDY / "screen/gsm8k/confidence-0.8-deferred")

    def rows(width):
        monkeypatch.setenv("COLUMNS", str(width))
        show_arms([record], folder=None)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" confidence-0.8-deferred ")]
        assert max(map(len, lines)) <= width
        return [line.split()[1:] for line in lines]

    (whole,), (one, other) = rows(160), rows(80)
    assert one + other == whole and len(whole) > 10


@pytest.mark.parametrize("name", ["never", "heads-mine_probe_profile-p_project", LONG, LONG + LONG])
def test_cells_are_named_beside_all_their_figures_at_80_columns(name, capsys):
    record = Record.read(STUDY / "bench", samples=False)
    few = record.aggregates["rows"] = [row for row in record.aggregates["rows"] if row["concurrency"] == 1][:3]
    few[0]["name"] = name

    def rows(width):
        print_tables(record, console=Console(width=width))
        said = capsys.readouterr().out
        lines = said.splitlines()
        assert "…" not in said and max(map(len, lines)) <= width
        rows = [line.removeprefix(" 1").split() for line in lines if line.startswith((" 1 ", f" {name[:20]}"))]
        assert all(name.startswith(row[0]) and len(row[0]) >= min(len(name), 40) for row in rows)
        end = name[len(rows[0][0]) :]  # of a folded name, below
        assert end[:20] in said and end[-8:] in said
        return [row[1:] for row in rows]

    whole, parts = rows(300), rows(80)
    assert len(whole) == 3 and [*chain(*parts)] == [*chain(*whole)]
    assert parts[0][:2] == whole[0][:2]  # a figure beside its range
