"""Thresholds at target agreements, from rows that are for fitting. Imports no torch.

Each exit gets one ordered family of thresholds with one parameter s: of `probe` s is the probability itself. Of
`confidence` s is the share of the exit's rows that the margin alone would keep back: its threshold is the s-quantile of
the rows, those of logit and entropy are their s^3-quantiles. So a triple is one number, and a larger s is stricter in
every test. The margin leads because one s for all three is best where the tests are equally good, and the largest logit
is the worst of them: with one s, early heads of SmolLM2-135M let 21 % of the tokens leave at level 0.9, so 30 %.

At a level a, exits are taken in their order, over the rows that are still there: s is the laxest at which a share of at
least a of the rows that leave agree with full depth. A stricter level's s is never below that of a laxer one, so no row
leaves earlier under it. Shape suffixes: as in `table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anydepth.calibrate.table import Bools, Floats, Table, tests_of
from anydepth.profile import Exit

LEVELS = (0.99, 0.98, 0.95, 0.9, 0.8)
LEAST_ROWS = 30
LEADING = "margin"


def fit_exits(
    table: Table, policy: str, levels: Sequence[float] = LEVELS, *, least_rows: int = LEAST_ROWS
) -> dict[float, tuple[Exit, ...]]:
    """Exits with thresholds for every level, the strictest level first. An exit at which fewer than `least_rows` could
    leave is left out; a level without any exit has ()."""
    exits = range(len(table.layers))
    families = [_Family(table, policy, e) for e in exits]
    laxer = [-np.inf for _ in exits]
    found = {}
    for level in sorted(set(levels)):
        there, chosen = np.ones(len(table), dtype=bool), list[Exit]()
        for e in exits:
            rows = there & families[e].may_R & (families[e].s_R >= laxer[e])
            laxer[e] = _laxest(families[e].s_R[rows], table.agrees_RE[rows, e], level, least_rows)
            there &= ~(families[e].may_R & (families[e].s_R >= laxer[e]))
            if np.isfinite(laxer[e]):
                chosen.append(Exit(layer=table.layers[e], **families[e].thresholds(laxer[e])))
        found[level] = tuple(chosen)
    return dict(sorted(found.items(), reverse=True))


class _Family:
    """One exit's thresholds by s. `s_R`: the largest s at which a row still passes; `may_R`: it may leave at all."""

    def __init__(self, table: Table, policy: str, e: int) -> None:
        self._scores = {test: table.score(test, e) for test in tests_of(policy)}
        self.may_R: Bools = table.answers_RE[:, e] & ~np.isnan(next(iter(self._scores.values())))
        if policy == "confidence":
            shares = {test: _shares_below(score, self.may_R) for test, score in self._scores.items()}
            self._s = {test: share if test == LEADING else np.cbrt(share) for test, share in shares.items()}
        else:
            self._s = self._scores
        self.s_R: Floats = np.min(list(self._s.values()), axis=0)

    def thresholds(self, s: float) -> Mapping[str, float]:
        """Between the scores of the rows that pass at s and of those that do not, so that rounding moves no row."""
        found = {}
        for test, score in self._scores.items():
            passing, failing = (score[self.may_R & rows] for rows in (self._s[test] >= s, self._s[test] < s))
            least = float(passing.min())
            if len(failing) and least > (most := float(failing.max())):
                middle = most + (least - most) / 2
                least = middle if middle > most else least
            found[test] = -least if test == "entropy" else least
        return found


def _shares_below(score_R: Floats, may_R: Bools) -> Floats:
    """[R], the share of the rows that may leave whose score is below a row's own."""
    ordered = np.sort(score_R[may_R])
    return np.searchsorted(ordered, score_R, side="left") / max(1, len(ordered))


def _laxest(s: Floats, agrees: Bools, level: float, least_rows: int) -> float:
    """The smallest s at which enough rows leave, a share of at least `level` of which agree; inf without one."""
    order = np.argsort(-s, kind="stable")
    s, right = s[order], np.cumsum(agrees[order])
    count = np.arange(1, len(s) + 1)
    ends = np.append(s[1:] < s[:-1], True) if len(s) else np.zeros(0, dtype=bool)  # equal ones leave together
    good = np.flatnonzero(ends & (count >= least_rows) & (right >= level * count - 1e-9))
    return float(s[good[-1]]) if len(good) else float("inf")
