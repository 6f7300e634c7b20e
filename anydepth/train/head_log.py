"""What a training of heads logs: two CSV files, which a resumed run goes on with, and TensorBoard if it is there."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anydepth.record import write_atomically

STEPS, EVALUATIONS = "steps.csv", "evaluations.csv"


class Log:
    """Rows of numbers by step. Rows of steps after `step`, where the run goes on, are dropped, and evaluations after
    `evaluated`."""

    def __init__(self, folder: Path, *, step: int, evaluated: int, report: Callable[[str], None]) -> None:
        self._folder, self._board = folder, _board(folder, step, report)
        keep(folder / STEPS, step)
        keep(folder / EVALUATIONS, evaluated)

    def step(self, row: Mapping[str, Any]) -> None:
        """One row of steps.csv; "step" is among its names."""
        self._write(STEPS, row, {f"train/{name}": value for name, value in row.items()})

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """One row of evaluations.csv; "step" and "exit" are among its names."""
        named = {f"exit {row['exit']}/{name}": value for name, value in row.items() if name != "exit"}
        self._write(EVALUATIONS, row, named)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _write(self, name: str, row: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        path = self._folder / name
        text = io.StringIO()
        writer = csv.DictWriter(text, list(row), lineterminator="\n")
        if not path.exists():
            writer.writeheader()
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
        with path.open("a") as file:
            file.write(text.getvalue())
        if self._board is not None:
            for tag, value in scalars.items():
                if not tag.endswith("/step"):
                    self._board.add_scalar(tag, value, row["step"])


def keep(path: Path, step: int) -> None:
    """Drop whole and half rows of steps after `step`."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    columns = lines[0].strip().split(",") if lines else []
    kept = [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= step]
    if kept and columns[0] == "step":
        write_atomically(path, "".join([lines[0], *kept]).encode())
    else:
        path.unlink()


def _board(folder: Path, step: int, report: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        report("TensorBoard is not installed (pip install tensorboard); the CSV files have the same numbers")
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
