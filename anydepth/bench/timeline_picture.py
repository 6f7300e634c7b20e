"""How a timeline looks: a strip of cells for what the device ran, a line of marks under it for what the host heard.

Needs matplotlib, which comes with the extra `eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anydepth.bench.timeline import Kind, Lane, Left, Ran, Timeline

INK, SOFT, FRAME, FAINT, PAPER, WASTE = "#1f2430", "#5d6675", "#b6bdc9", "#e4e7ec", "#fefefe", "#d55e00"
SAYS = {
    "sync": "the host reads what a round decided before it submits the next one",
    "delayed": "one round more than the policy asked for, and the token is read from it",
    "exact": "one round more, but the token is read from the state its policy saw",
    "resident": "the device decides; no round more, and the host is told afterwards",
}
CELL, HEAD, LANE, MARKS = 0.86, 1.75, 2.2, 1.45  # width of a cell; heights of a title and a lane; where the marks stand
INCH = (0.31, 0.3)  # of a turn, of a unit of height


def draw(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write the runs under each other, on one axis of turns, as a PNG; the same numbers give the same bytes.

    Raises ValueError without matplotlib and without a timeline.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"the picture needs matplotlib ({error}); run: pip install 'anydepth[eval]'") from error
    if not timelines:
        raise ValueError("there is no timeline to draw; record at least one run")
    figure = _picture(Figure, timelines)
    figure.savefig(path, format="png", metadata={"Software": None}, facecolor=figure.get_facecolor())


def _picture(make: Any, timelines: Sequence[Timeline]) -> Any:
    turns = max(timeline.turns for timeline in timelines)
    height = sum(HEAD + LANE * len(timeline.lanes) for timeline in timelines)
    left, right, below, above = 0.35, 1.55, 1.25, 0.1  # margins in inches
    width_in, height_in = left + turns * INCH[0] + right, above + height * INCH[1] + below
    figure = make(figsize=(width_in, height_in), dpi=150, facecolor=PAPER)
    place = (left / width_in, below / height_in, turns * INCH[0] / width_in, height * INCH[1] / height_in)
    axes = figure.add_axes(place, facecolor=PAPER)
    axes.set_xlim(0, turns)
    axes.set_ylim(height, 0)
    colour = depth_colours(max(timeline.segments for timeline in timelines))
    top = 0.0
    for timeline in timelines:
        _title(axes, timeline, top)
        top += HEAD
        for lane in timeline.lanes:
            _lane(axes, lane, top, colour)
            top += LANE
    _dress(axes, turns)
    _legend(figure, colour, {row.kind for timeline in timelines for lane in timeline.lanes for row in lane.rows})
    return figure


def depth_colours(segments: int) -> list[tuple[str, str]]:
    """(fill, ink) of depths 1 .. segments: light to dark, told apart by lightness, without colour vision too."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    scale = colormaps["viridis_r"]
    places = [0.05 + 0.9 * n / max(1, segments - 1) for n in range(segments)]
    return [(to_hex(scale(place)), INK if place < 0.5 else PAPER) for place in places]


def _title(axes: Any, timeline: Timeline, top: float) -> None:
    late = f", {timeline.lateness} turn{'s' * (timeline.lateness != 1)} late" if timeline.signals != "sync" else ""
    name = axes.text(0, top + 0.75, timeline.signals, fontsize=10.5, fontweight="bold", color=INK, va="center")
    axes.annotate(
        f"{late}: {SAYS[timeline.signals]}", (1, 0.5), xycoords=name, fontsize=9, color=SOFT, va="center", ha="left"
    )


def _lane(axes: Any, lane: Lane, top: float, colour: Sequence[tuple[str, str]]) -> None:
    marks, right = top + MARKS, axes.get_xlim()[1]
    axes.plot((0, right), (marks, marks), color=FAINT, linewidth=1, zorder=1)
    for row in lane.rows:
        _cell(axes, row, top, colour)
        if row.heard is not None and row.kind not in ("wasted", "idle"):
            _heard(axes, row, top, marks)
    for left in lane.left:
        _left(axes, left, top, marks, colour)
    usage = lane.output.usage
    costs = f"{usage.segments_executed} executed" + f"\n{usage.segments_wasted} wasted" * (usage.segments_wasted > 0)
    axes.text(right + 0.2, top + 0.75, costs, fontsize=9, color=INK, va="center")


def _cell(axes: Any, row: Ran, top: float, colour: Sequence[tuple[str, str]]) -> None:
    """What the device ran of a request in one turn."""
    from matplotlib.patches import Rectangle

    fill, ink = colour[row.segment - 1] if row.kind in ("own", "late") else (FAINT, SOFT)
    looks: dict[Kind, dict[str, Any]] = {
        "prompt": {"facecolor": fill, "edgecolor": FRAME},
        "own": {"facecolor": fill, "edgecolor": fill},
        "late": {"facecolor": fill, "edgecolor": ink, "hatch": "////", "linewidth": 0},
        "wasted": {"facecolor": PAPER, "edgecolor": WASTE, "hatch": "xxxx"},
        "idle": {"facecolor": PAPER, "edgecolor": SOFT, "linestyle": (0, (2, 2))},
    }
    axes.add_patch(Rectangle((row.turn + (1 - CELL) / 2, top), CELL, 1, zorder=2, **looks[row.kind]))
    if row.kind in ("own", "late", "prompt"):
        where = {"ha": "center", "va": "center", "bbox": {"facecolor": fill, "pad": 1, "linewidth": 0}}
        axes.text(row.turn + 0.5, top + 0.5, row.segment, fontsize=8, color=ink, **where)


def _heard(axes: Any, row: Ran, top: float, marks: float) -> None:
    """What the host hears of a row, at the end of the turn in which it does."""
    assert row.heard is not None
    axes.plot((row.turn + 0.5, row.heard + 1), (top + 1, marks), color=FRAME, linewidth=0.8, zorder=1)
    axes.plot(row.heard + 1, marks, ".", color=SOFT, markersize=4, zorder=3, clip_on=False)


def _left(axes: Any, left: Left, top: float, marks: float, colour: Sequence[tuple[str, str]]) -> None:
    """A token as it leaves, and as the host hears which one it is."""
    fill, ink = colour[left.depth - 1]
    axes.plot((left.boundary, left.heard + 1), (top + 1, marks), color=INK, linewidth=0.8, zorder=1)
    axes.plot(
        left.boundary, top - 0.22, "o", color=fill, markeredgecolor=INK, markeredgewidth=0.8, markersize=10, zorder=4
    )
    axes.text(left.boundary, top - 0.2, left.depth, fontsize=7, color=ink, ha="center", va="center", zorder=5)
    axes.plot(left.heard + 1, marks, "D", color=PAPER, markeredgecolor=INK, markersize=5, zorder=2, clip_on=False)


def _dress(axes: Any, turns: int) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FRAME)
    axes.set_yticks([])
    axes.set_xticks([turn + 0.5 for turn in range(turns)], [str(turn) for turn in range(turns)])
    axes.tick_params(colors=SOFT, length=0, labelsize=8)
    axes.set_xlabel("turn of the device", color=INK, fontsize=9.5)
    for turn in range(turns + 1):
        axes.axvline(turn, color=FAINT, linewidth=0.6, zorder=0)


def _legend(figure: Any, colour: Sequence[tuple[str, str]], kinds: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    fill, ink = colour[len(colour) // 2]
    entries = [(Patch(facecolor=FAINT, edgecolor=FRAME), "prompt, one segment of it")]
    entries += [(Patch(color=fill), f"segment {n}") for n, (fill, _) in enumerate(colour, start=1)]
    entries.append((Patch(facecolor=fill, edgecolor=ink, hatch="////", linewidth=0), "late round"))
    entries.append((Patch(facecolor=PAPER, edgecolor=WASTE, hatch="xxxx"), "wasted: the answer had ended"))
    entries.append((Patch(facecolor=PAPER, edgecolor=SOFT, linestyle="--"), "planned, did not run"))
    entries.append((_mark(Line2D, "o", 9, FAINT), "a token leaves, read at depth n"))
    entries.append((_mark(Line2D, ".", 5, SOFT), "the host hears of a round"))
    entries.append((_mark(Line2D, "D", 5, PAPER), "the host hears the token"))
    shown = [(mark, says) for mark, says in entries if "wasted" in kinds or not says.startswith("wasted")]
    shown = [(mark, says) for mark, says in shown if "idle" in kinds or not says.startswith("planned")]
    figure.legend(
        [mark for mark, _ in shown], [says for _, says in shown],
        loc="lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK, columnspacing=1.8, handlelength=1.8,
    )  # fmt: skip


def _mark(make: Any, marker: str, size: float, face: str) -> Any:
    edge = SOFT if marker == "." else INK
    return make([], [], marker=marker, linestyle="none", markersize=size, color=face, markeredgecolor=edge)
