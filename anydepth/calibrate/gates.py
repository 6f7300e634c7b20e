"""What each exit's gates decided: rows asked and left, agreement, and which test alone kept rows. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anydepth.calibrate.table import Table, agrees, tests_of, walk
from anydepth.profile import Profile

IDLE_SHARE = 0.001  # of the rows asked: a test that alone keeps fewer decides nothing


def summary(table: Table, profile: Profile, policy: str, *, layers: int) -> dict[str, Any]:
    """Agreement with full depth, mean depth in layers, how many rows left after which layer, and the gates."""
    walked = walk(table, profile, policy)
    depths = np.array([*table.layers, layers])
    counts = np.bincount(walked.left_R, minlength=len(depths))
    rows = max(1, len(table))
    return {
        "questions": table.questions,
        "rows": len(table),
        "agreement": float(agrees(table, walked).sum() / rows),
        "mean_layers": float((counts * depths).sum() / rows),
        "left_after_layer": {str(layer): int(count) for layer, count in zip(depths, counts, strict=True)},
        "gates": gates(table, profile, policy),
    }


def gates(table: Table, profile: Profile, policy: str) -> list[dict[str, Any]]:
    """One entry for each exit that is asked.

    `kept_alone`: rows that one test kept though the others let them go. Such a test that keeps hardly any row (fewer
    than one in a thousand of those asked) is in `idle`: its number decides nothing. `declined`: rows that passed but
    whose head may not answer.
    """
    walked, tests = walk(table, profile, policy), tests_of(policy)
    found = []
    for e, layer in enumerate(table.layers):
        asked = walked.asked_RE[:, e]
        if not asked.any():
            continue
        fails = ~walked.passes_TRE[:, asked, e]
        alone = fails & (fails.sum(0) == 1)
        left = walked.left_R == e
        kept = {test: int(alone[t].sum()) for t, test in enumerate(tests)}
        found.append(
            {
                "layer": layer,
                "asked": int(asked.sum()),
                "left": int(left.sum()),
                "agreement": float(table.agrees_RE[left, e].mean()) if left.any() else None,
                "declined": int((~fails.any(0) & ~table.answers_RE[asked, e]).sum()),
                "kept_alone": kept,
                "idle": [test for test in tests if kept[test] < IDLE_SHARE * asked.sum()],
            }
        )
    return found


def show_gates(title: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The gates of a profile as a table of text."""
    tests = list(found[0]["kept_alone"]) if found else []
    head = ["after layer", "asked", "left", "agrees", "declined", *(f"{test} alone" for test in tests)]
    rows = [head]
    for gate in found:
        agreement = "" if gate["agreement"] is None else f"{100 * gate['agreement']:.1f} %"
        alone = [f"{gate['kept_alone'][test]}{' idle' if test in gate['idle'] else ''}" for test in tests]
        rows.append([*(str(gate[key]) for key in ("layer", "asked", "left")), agreement, str(gate["declined"]), *alone])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *lines])
