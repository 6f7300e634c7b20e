"""The picture of a trade-off: accuracy against work. Needs matplotlib, which comes with the extra `eval`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from math import ceil, cos, hypot, pi, sin
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, SOFT, FRAME, FAINT, PAPER = "#1f2430", "#5d6675", "#b6bdc9", "#e4e7ec", "#fefefe"
# Okabe and Ito's colours, which the colour-blind can tell apart; each series has its own marker too.
_SERIES = (("#7a8496", "s"), ("#1f83c6", "o"), ("#d55e00", "^"), ("#009e73", "D"), ("#cc79a7", "v"), ("#e69f00", "P"))
LEGEND_COLUMNS, LEGEND_CHARACTERS, LEGEND_GAP = 3, 125, 10  # most columns, what a line holds, what a mark takes of it
_THEME = {INK: "--ink", SOFT: "--soft", FRAME: "--frame", FAINT: "--rule", PAPER: "--paper"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """An arm: `x` segments a question, `accuracy` with `low` and `high` in 0..1. Points of one `series` are joined.
    `hollow`: it computed more than it read."""

    label: str
    x: float
    accuracy: float
    low: float
    high: float
    series: str
    hollow: bool = False


class Box(NamedTuple):
    """A rectangle, in display units."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """Area of what both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)


def pareto(points: Sequence[Point], *, x_label: str) -> Figure:
    """Accuracy with its interval over segments a question; every point has its name beside it, none on another.

    Raises ValueError without matplotlib and without a point.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"the picture needs matplotlib ({error}); run: pip install 'anydepth[eval]'") from error
    if not points:
        raise ValueError("there is no point to draw; give at least one arm with an accuracy")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "anydepth", "font.family": "DejaVu Sans"}):
        names = list(dict.fromkeys(point.series for point in points))
        figure, axes = _frame(Figure, legend_lines=ceil(len(names) / legend_columns(names)) if len(names) > 1 else 0)
        for name, (color, marker) in zip(names, _styles(len(names)), strict=True):
            _series(axes, [point for point in points if point.series == name], name, color, marker)
        _dress(axes, points, x_label=x_label)
        _name(figure, axes, points)
    return figure


def png(figure: Figure) -> bytes:
    """The picture as PNG; without its own metadata the same numbers give the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None}, facecolor=figure.get_facecolor())
    return file.getvalue()


def svg(figure: Figure, *, title: str) -> str:
    """The picture as an <svg> element to stand in a page, in the page's own colours and type (CSS variables)."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "anydepth"}):
        figure.savefig(file, format="svg")
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = (
        re.sub(r' (xmlns(:\w+)?|version|width|height)="[^"]*"', "", text.partition(">")[0], flags=re.S)
        + text[text.index(">") :]
    )
    for color, variable in _THEME.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([\w-]+)"', lambda m: m[0] if m[1] in used else "", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()


def _frame(make: Any, *, legend_lines: int) -> tuple[Any, Any]:
    """A figure and its axes, with room below for the legend, which so covers no point."""
    width, height, below = 8.4, 4.45, 0.55 + 0.22 * legend_lines
    figure = make(figsize=(width, height + below), dpi=180, facecolor=PAPER)
    place = (0.6 / width, below / (height + below), 1 - 0.7 / width, (height - 0.08) / (height + below))
    return figure, figure.add_axes(place, facecolor=PAPER)


def legend_columns(names: Sequence[str]) -> int:
    """As many columns, filled one after the other, as the picture's width holds."""
    for columns in range(min(LEGEND_COLUMNS, len(names)), 1, -1):
        lengths = iter([len(name) for name in names])
        lines, longer = divmod(len(names), columns)  # the first columns have a line more
        longest = [max(islice(lengths, lines + (column < longer))) for column in range(columns)]
        if sum(longest) + LEGEND_GAP * columns <= LEGEND_CHARACTERS:
            return columns
    return 1


def _styles(count: int) -> list[tuple[str, str]]:
    """Colour and marker of each series; the first is grey."""
    markers = [marker for _, marker in _SERIES]
    return [
        (color, markers[(i + i // len(_SERIES)) % len(markers)])
        for i, (color, _) in zip(range(count), _SERIES * (count // len(_SERIES) + 1), strict=False)
    ]


def _series(axes: Any, points: Sequence[Point], name: str, color: str, marker: str) -> None:
    """Points with their intervals, joined in order of work; hollow markers on top of the line."""
    ordered = sorted(points, key=lambda point: point.x)
    xs, ys = [p.x for p in ordered], [100 * p.accuracy for p in ordered]
    errors = [[100 * (p.accuracy - p.low) for p in ordered], [100 * (p.high - p.accuracy) for p in ordered]]
    axes.errorbar(xs, ys, yerr=errors, color=color, linewidth=1.6, elinewidth=0.9, capsize=2.2, zorder=2)
    for point in ordered:
        face = PAPER if point.hollow else color
        axes.plot(point.x, 100 * point.accuracy, marker, markersize=5.5, color=color, markerfacecolor=face, zorder=3)
    axes.plot([], [], marker=marker, color=color, linewidth=1.6, markersize=5.5, label=name)


def _dress(axes: Any, points: Sequence[Point], *, x_label: str) -> None:
    xs = [point.x for point in points]
    low, high = 100 * min(p.low for p in points), 100 * max(p.high for p in points)
    room = max(0.12 * (high - low), 1.0)
    # From 0 where that does not leave half the picture empty: lengths then compare.
    left = 0.0 if min(xs) < 0.45 * max(xs) else min(xs) - 0.12 * (max(xs) - min(xs) or max(xs))
    axes.set_xlim(left, max(xs) + 0.09 * (max(xs) - left or 1))
    axes.set_ylim(max(-2.0, low - room), min(103.0, high + room))
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel("right answers, % (95 % interval)", color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(FRAME)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, color=FRAME, length=3, labelsize=10)
    if len({point.series for point in points}) > 1:
        style = {"frameon": False, "fontsize": 9, "labelcolor": INK, "handlelength": 1.8, "columnspacing": 2}
        columns = legend_columns(list(dict.fromkeys(point.series for point in points)))
        axes.figure.legend(loc="lower left", bbox_to_anchor=(0.06, 0.0), ncols=columns, borderpad=0.2, **style)


def _name(figure: Any, axes: Any, points: Sequence[Point]) -> None:
    """Write each point's label where it covers no marker, no interval and no other label."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    renderer, unit = figure.canvas.get_renderer(), figure.dpi / 72
    anchors, taken, sizes = [], [], []
    for point in points:
        x, y = axes.transData.transform((point.x, 100 * point.accuracy))
        low, high = (axes.transData.transform((point.x, 100 * bound))[1] for bound in (point.low, point.high))
        anchors.append((float(x), float(y)))
        taken += [Box(x - 4 * unit, y - 4 * unit, x + 4 * unit, y + 4 * unit), Box(x - unit, low, x + unit, high)]
        text = axes.text(0, 0, point.label, fontsize=8.5)
        extent = text.get_window_extent(renderer)
        text.remove()
        sizes.append((extent.width + 3 * unit, extent.height))
    for line in axes.lines:  # those that join the points of a series
        ends = axes.transData.transform(line.get_xydata())
        taken += [box for one, other in pairwise(ends) for box in _along(one, other, 3 * unit)]
    frame = axes.get_window_extent(renderer)
    area = Box(frame.x0, frame.y0, frame.x1, frame.y1)
    for point, anchor, box in zip(points, anchors, place(anchors, sizes, taken, area, unit=unit), strict=True):
        _write(axes, point.label, anchor, box, unit)


def _write(axes: Any, label: str, anchor: tuple[float, float], box: Box, unit: float) -> None:
    """A label in its box, with a thin line from its point where it stands apart."""
    middle = ((box.left + box.right) / 2, (box.bottom + box.top) / 2)
    near = min(max(anchor[0], box.left), box.right), min(max(anchor[1], box.bottom), box.top)
    if hypot(near[0] - anchor[0], near[1] - anchor[1]) > 12 * unit:
        ends = axes.transData.inverted().transform([anchor, near])
        axes.plot(*ends.T, color=FRAME, linewidth=0.7, zorder=1, scalex=False, scaley=False)
    x, y = axes.transData.inverted().transform(middle)
    back = {"facecolor": PAPER, "alpha": 0.7, "pad": 0.5, "linewidth": 0}
    axes.text(x, y, label, fontsize=8.5, color=INK, ha="center", va="center", zorder=4, bbox=back)


def _along(one: Sequence[float], other: Sequence[float], size: float) -> Iterator[Box]:
    """Small boxes along a straight line."""
    steps = int(hypot(other[0] - one[0], other[1] - one[1]) / size) + 1
    for i in range(steps + 1):
        x, y = (one[d] + (other[d] - one[d]) * i / steps for d in (0, 1))
        yield Box(x - size / 2, y - size / 2, x + size / 2, y + size / 2)


def place(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    taken: Sequence[Box],
    area: Box,
    *,
    unit: float = 1.0,
) -> list[Box]:
    """A box for each label, near its anchor and inside the area, on nothing that is taken and on no other label.

    anchors: (x, y); sizes: (width, height); unit: display units a point. The nearest free place is taken, point by
    point; where there is none, the one that covers least.
    """
    import numpy as np

    covered, found = np.array([*taken], dtype=float).reshape(-1, 4), []
    for anchor, size in zip(anchors, sizes, strict=True):
        best, least = None, float("inf")
        for box in _candidates(anchor, size, unit):
            widths = np.minimum(box.right, covered[:, 2]) - np.maximum(box.left, covered[:, 0])
            heights = np.minimum(box.top, covered[:, 3]) - np.maximum(box.bottom, covered[:, 1])
            on_others = float((widths.clip(0) * heights.clip(0)).sum())
            cost = on_others + 4 * (size[0] * size[1] - box.overlap(area))
            if cost < least - 1e-6:
                best, least = box, cost
            if least <= 1e-6:
                break
        assert best is not None
        covered = np.vstack([covered, best])
        found.append(best)
    return found


def _candidates(anchor: tuple[float, float], size: tuple[float, float], unit: float) -> Iterator[Box]:
    """Boxes around an anchor, nearest first; to the right above it, then left, then the others."""
    width, height = size
    turns = (0.25, 0.75, -0.25, -0.75, 0.0, 1.0, 0.5, -0.5, 0.12, 0.88, -0.12, -0.88, 0.38, 0.62, -0.38, -0.62)
    for distance, turn in product((5, 9, 14, 20, 28, 38, 50, 64, 80, 100, 125), turns):
        across, up = cos(turn * pi), sin(turn * pi)
        x = anchor[0] + across * (distance * unit + width / 2)
        y = anchor[1] + up * (distance * unit + height / 2)
        yield Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
