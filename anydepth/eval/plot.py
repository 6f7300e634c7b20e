"""The picture of a trade-off: accuracy against work. Needs matplotlib, which comes with the extra `eval`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

FIXED, ADAPTIVE, INK, FAINT = "#8a94a6", "#5b3fa0", "#1f2430", "#e4e7ec"
WIDE, HIGH = 26, 11  # points that a label takes


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
    _dress(axes)
    for row in fixed:
        _name(axes, row, f"depth {row['depth']}", (9, -13), FIXED)
    # Full depth and the middle of the range are always labelled, the others where there is room.
    for row in _spread(axes, sorted(adaptive, key=lambda row: (1.0, 0.5).count(row["exit_threshold"]), reverse=True)):
        full = row["exit_threshold"] == 1
        _name(axes, row, "never early" if full else f"{row['exit_threshold']:g}", (-9, 7), ADAPTIVE)
    png = io.BytesIO()
    # Without its own metadata the same numbers give the same bytes.
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _work(row: Mapping[str, Any]) -> float:
    work: float = row["segments_per_question"]
    return work


def _line(axes: Any, rows: Sequence[Mapping[str, Any]], *, color: str, marker: str, label: str) -> None:
    heights = [100 * row["accuracy"] for row in rows]
    errors = [[100 * abs(row["accuracy"] - row[bound]) for row in rows] for bound in ("low", "high")]
    axes.errorbar([_work(row) for row in rows], heights, yerr=errors, color=color, marker=marker, markersize=5.5,
                  linewidth=1.8, elinewidth=1, capsize=2.5, label=label)


def _spread(axes: Any, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those rows whose points are not close to one that comes before them in the list."""
    kept: list[tuple[float, float]] = []
    chosen = []
    for row in rows:
        x, y = axes.transData.transform((_work(row), 100 * row["accuracy"])) * 72 / axes.figure.dpi
        if all(abs(x - other_x) > WIDE or abs(y - other_y) > HIGH for other_x, other_y in kept):
            kept.append((x, y))
            chosen.append(row)
    return chosen


def _name(axes: Any, row: Mapping[str, Any], text: str, offset: tuple[int, int], color: str) -> None:
    axes.annotate(text, (_work(row), 100 * row["accuracy"]), xytext=offset, textcoords="offset points", color=color,
                  fontsize=8.5, ha="left" if offset[0] > 0 else "right")


def _dress(axes: Any) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(0, 104)
    axes.set_xlabel("segments a question: passes run for the generated tokens (fewer is cheaper)", color=INK)
    axes.set_ylabel("right answers, %", color=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#b6bdc9")
    axes.tick_params(colors="#556070", length=3)
    axes.legend(frameon=False, loc="lower right", fontsize=9.5, labelcolor=INK)
