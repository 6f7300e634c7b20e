"""What every exit would say at every decode token of full depth's own answers. Imports no torch.

Shape suffixes: R rows (decode tokens), E exits, Q questions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anydepth.profile import Exit, Profile

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Bools = NDArray[np.bool_]
TESTS = ("logit", "margin", "entropy")


@dataclass(frozen=True, kw_only=True)
class Table:
    """`layers` are the exits'. `logit`, `margin`, `entropy`: what `confidence` tests, at gate temperature
    `temperature`; `probe`: the probe's probability, nan without one; `agrees`: the exit's token is full depth's;
    `answers`: it may answer (a shortlist head may decline). `question_R`: the number of the row's question."""

    layers: tuple[int, ...]
    temperature: float
    questions: int
    question_R: Whole
    logit_RE: Floats
    margin_RE: Floats
    entropy_RE: Floats
    probe_RE: Floats
    agrees_RE: Bools
    answers_RE: Bools

    def __len__(self) -> int:
        return len(self.question_R)

    def of(self, first: int, last: int) -> Table:
        """The rows of questions first .. last - 1, which count from 0 again."""
        rows = (self.question_R >= first) & (self.question_R < last)
        arrays: dict[str, Any] = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name[-2:] == "RE"}
        return replace(self, **arrays, question_R=self.question_R[rows] - first, questions=last - first)

    def score(self, test: str, e: int) -> Floats:
        """[R], larger is surer: of entropy, its negative."""
        values: Floats = getattr(self, f"{test}_RE")[:, e]
        return -values if test == "entropy" else values


@dataclass(frozen=True)
class Walk:
    """How rows go through a profile's exits: `asked` at an exit, `passes` each of the tests there [tests, R, E], and
    where they leave, E for those that go to the end."""

    asked_RE: Bools
    passes_TRE: Bools
    left_R: Whole


def tests_of(policy: str) -> tuple[str, ...]:
    """Names of a policy's tests, which are fields of a profile's exit."""
    return TESTS if policy == "confidence" else ("probe",)


def walk(table: Table, profile: Profile, policy: str) -> Walk:
    """Where each row leaves under `fill` full or deferred: the first exit of the profile whose tests all pass and
    whose head may answer."""
    by_layer = {exit.layer: exit for exit in profile.exits}
    tests = tests_of(policy)
    there, left = np.ones(len(table), dtype=bool), np.full(len(table), len(table.layers))
    asked = np.zeros((len(table), len(table.layers)), dtype=bool)
    passes = np.zeros((len(tests), *asked.shape), dtype=bool)
    for e, layer in enumerate(table.layers):
        exit = by_layer.get(layer)
        if exit is None or any(getattr(exit, test) is None for test in tests):
            continue
        asked[:, e] = there
        for t, test in enumerate(tests):
            passes[t, :, e] = _passes(table, test, e, exit)
        leaves = there & passes[:, :, e].all(0) & table.answers_RE[:, e]
        left[leaves] = e
        there &= ~leaves
    return Walk(asked, passes, left)


def _passes(table: Table, test: str, e: int, exit: Exit) -> Bools:
    limit = getattr(exit, test)
    return table.score(test, e) >= (-limit if test == "entropy" else limit)


def agrees(table: Table, walked: Walk) -> Bools:
    """[R], whether the row's token is full depth's; at full depth it is."""
    whole = np.concatenate((table.agrees_RE, np.ones((len(table), 1), dtype=bool)), 1)
    return np.take_along_axis(whole, walked.left_R[:, None], 1)[:, 0]
