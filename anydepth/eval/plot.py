"""The picture of a trade-off: accuracy against work. Needs matplotlib, which comes with the extra `eval`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

FIXED, ADAPTIVE, INK, FAINT = "#8a94a6", "#5b3fa0", "#1f2430", "#e4e7ec"


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
    _dress(axes, right=1.07 * max(map(_work, scored), default=1))
    for row in fixed:
        _name(axes, row, f"depth {row['depth']}", (9, -13), FIXED)
    early = [row for row in adaptive if row["exit_threshold"] != 1]
    span = axes.get_xlim()[1]
    if len(early) > 2 and _work(early[-1]) - _work(early[0]) < 0.4 * span:
        _enlarge(axes, early)
        early = []
    right = float("inf")
    for row in [*(row for row in adaptive if row["exit_threshold"] == 1), *reversed(early)]:
        if right - _work(row) > 0.03 * span:  # else the labels would cover each other
            right = _work(row)
            _name(axes, row, "never early" if row["exit_threshold"] == 1 else _value(row), (-9, 7), ADAPTIVE)
    png = io.BytesIO()
    # Without its own metadata the same numbers give the same bytes.
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _work(row: Mapping[str, Any]) -> float:
    work: float = row["segments_per_question"]
    return work


def _value(row: Mapping[str, Any]) -> str:
    return f"{row['exit_threshold']:g}"


def _line(axes: Any, rows: Sequence[Mapping[str, Any]], *, color: str, marker: str, label: str) -> None:
    heights = [100 * row["accuracy"] for row in rows]
    errors = [[100 * abs(row["accuracy"] - row[bound]) for row in rows] for bound in ("low", "high")]
    axes.errorbar(
        [_work(row) for row in rows],
        heights,
        yerr=errors,
        color=color,
        marker=marker,
        markersize=5.5,
        linewidth=1.8,
        elinewidth=1,
        capsize=2.5,
        label=label,
    )


def _enlarge(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Thresholds that lie close together once more, larger and with their values."""
    inset = axes.inset_axes((0.59, 0.25, 0.39, 0.34))
    inset.plot(
        [_work(row) for row in rows],
        [100 * row["accuracy"] for row in rows],
        color=ADAPTIVE,
        marker="o",
        markersize=5.5,
        linewidth=1.8,
    )
    inset.margins(0.17, 0.2)
    inset.locator_params(nbins=5)
    for index, row in enumerate(rows):
        _name(inset, row, _value(row), ((-5, 5), (6, -11))[index % 2], ADAPTIVE)
    inset.set_title("enlarged, with thresholds", fontsize=8.5, color="#556070", loc="left", pad=4)
    _quiet(inset, size=8)
    # No lines from the one frame to the other: they would cross what is in between.
    for line in axes.indicate_inset_zoom(inset, edgecolor="#98a1b1", linewidth=0.8, alpha=1).connectors:
        line.set_visible(False)


def _name(axes: Any, row: Mapping[str, Any], text: str, offset: tuple[int, int], color: str) -> None:
    axes.annotate(
        text,
        (_work(row), 100 * row["accuracy"]),
        xytext=offset,
        textcoords="offset points",
        color=color,
        fontsize=8.5,
        ha="left" if offset[0] > 0 else "right" if offset[0] < 0 else "center",
    )


def _dress(axes: Any, *, right: float) -> None:
    axes.set_xlim(0, right)
    axes.set_ylim(0, 106)
    axes.set_xlabel("segments a question: passes run for the generated tokens (fewer is cheaper)", color=INK)
    axes.set_ylabel("right answers, %", color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _quiet(axes, size=10)
    axes.legend(frameon=False, loc="lower right", fontsize=9.5, labelcolor=INK)


def _quiet(axes: Any, *, size: int) -> None:
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color("#b6bdc9")
    axes.tick_params(colors="#556070", length=3, labelsize=size)
