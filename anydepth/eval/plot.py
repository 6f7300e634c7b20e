"""The picture of a trade-off: accuracy against work. Needs matplotlib, which comes with the extra `eval`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

FIXED, ADAPTIVE, INK, FAINT = "#8a94a6", "#5b3fa0", "#1f2430", "#e4e7ec"
APART = 34  # points between two labels of thresholds


def pareto(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG of accuracy (with its interval) over segments a question: fixed depths as one line, thresholds as another.

    rows: what `report.row` makes of Records. A row without accuracy is left out. ValueError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"the picture needs matplotlib ({error}); run: pip install 'anydepth[eval]'") from error

    figure = Figure(figsize=(8.4, 5.0), dpi=180, layout="constrained")
    axes = figure.add_subplot()
    scored = [row for row in rows if row["accuracy"] is not None]
    fixed = sorted((row for row in scored if row["depth"] is not None), key=_work)
    adaptive = sorted((row for row in scored if row["depth"] is None), key=_work)
    _line(axes, fixed, color=FIXED, marker="s", label="the same depth for every token")
    _line(axes, adaptive, color=ADAPTIVE, marker="o", label="the exit gate decides, by threshold")
    for row in fixed:
        _name(axes, row, f"depth {row['depth']}", (9, -13), FIXED)
    last: float | None = None
    for row in adaptive:
        text = "never early" if row["exit_threshold"] == 1 else f"{row['exit_threshold']:g}"
        x, y = axes.transData.transform((_work(row), 100 * row["accuracy"]))
        if last is None or abs(y - last) * 72 / figure.dpi > APART / 3 or row["exit_threshold"] in (0.5, 1):
            _name(axes, row, text, (-9, 7) if row["exit_threshold"] < 1 else (-10, 9), ADAPTIVE)
            last = y
    _dress(axes)
    png = io.BytesIO()
    # Without its own metadata the same numbers give the same bytes.
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _work(row: Mapping[str, Any]) -> float:
    work: float = row["segments_per_question"]
    return work


def _line(axes: Any, rows: Sequence[Mapping[str, Any]], *, color: str, marker: str, label: str) -> None:
    heights = [100 * row["accuracy"] for row in rows]
    errors = [[100 * (row["accuracy"] - row["low"]) for row in rows], [100 * (row["high"] - row["accuracy"]) for row in rows]]
    axes.errorbar([_work(row) for row in rows], heights, yerr=errors, color=color, marker=marker, markersize=5.5,
                  linewidth=1.8, elinewidth=1, capsize=2.5, label=label)


def _name(axes: Any, row: Mapping[str, Any], text: str, offset: tuple[int, int], color: str) -> None:
    axes.annotate(text, (_work(row), 100 * row["accuracy"]), xytext=offset, textcoords="offset points", color=color,
                  fontsize=8.5, ha="left" if offset[0] > 0 else "right")


def _dress(axes: Any) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(0, 104)
    axes.set_xlabel("segments a question, executed for the generated tokens (fewer is cheaper)", color=INK)
    axes.set_ylabel("right answers, %", color=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b6bdc9")
    axes.tick_params(colors="#556070", length=3)
    axes.legend(frameon=False, loc="lower right", fontsize=9.5, labelcolor=INK)
