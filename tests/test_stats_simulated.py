"""What the statistics promise, over 2,000 simulated studies each.

False positives: at most alpha plus two Monte-Carlo standard errors. Coverage of 95 % intervals: 94 to 97 % on average.
The seed is fixed; every draw is numpy's, every verdict the package's own.
"""

from functools import cache

import numpy as np
import pytest

from anydepth.stats import (
    Paired,
    clustered_difference,
    clustered_interval,
    conformal_risk_control,
    fixed_sequence,
    hoeffding_bentkus,
    holm,
    mcnemar_exact,
    newcombe_paired,
    wilson,
)

STUDIES = 2000
mcnemar = cache(mcnemar_exact)
certify = cache(hoeffding_bentkus)


def at_most(alpha):
    return alpha + 2 * (alpha * (1 - alpha) / STUDIES) ** 0.5


def draws(*key):
    return np.random.default_rng([2024, *(int(1e6 * part) for part in key)])


def covers(interval, truth):
    return interval.low <= truth <= interval.high


def pairs(n, right, gain, loss):
    """Counts of 2,000 studies: the baseline is right at rate `right`, the arm gains and loses at the rates given."""
    cells = [right - loss, gain, loss, 1 - right - gain]
    return draws(n, right, gain, loss).multinomial(n, cells, size=STUDIES).tolist()


def questions(number, answers, gain, loss, alike):
    """Score differences of 2,000 studies, as the mean of each question's answers.

    `answers` a question (up to so many, evenly spread, where negative), each a gain or a loss at rates that are
    Dirichlet draws around those given; `alike` is the correlation of two answers of one question.
    """
    rng = draws(number, abs(answers), gain, loss, alike)
    sizes = rng.integers(answers if answers > 0 else 1, abs(answers) + 1, (STUDIES, number))
    weights = np.array([gain, loss, 1 - gain - loss]) * (1 - alike) / alike
    rates = rng.gamma(np.maximum(weights, 1e-9), size=(STUDIES, number, 3)) + 1e-300
    gains = rng.binomial(sizes, rates[..., 0] / rates.sum(-1))
    losses = rng.binomial(sizes - gains, rates[..., 1] / rates[..., 1:].sum(-1))
    return [[(mean,) for mean in study] for study in ((gains - losses) / sizes).tolist()]


@pytest.mark.parametrize("n", [400, 1319])
@pytest.mark.parametrize("discordant", [0.01, 0.05, 0.15, 0.4])
def test_mcnemar_finds_no_difference_where_there_is_none(n, discordant):
    found = [mcnemar(g, b) for _, g, b, _ in pairs(n, 0.5, discordant / 2, discordant / 2)]
    assert np.mean(np.array(found) <= 0.05) <= at_most(0.05)


@pytest.mark.parametrize("n", [400, 1319])
def test_wilson_covers(n):
    intervals = [wilson(right, n) for right in range(n + 1)]
    shares = np.arange(0.05, 0.951, 0.05)
    rights = draws(n).binomial(n, shares, size=(STUDIES, len(shares)))
    coverage = [np.mean([covers(intervals[right], p) for right in column]) for p, column in zip(shares, rights.T)]
    assert 0.94 <= np.mean(coverage) <= 0.97 and min(coverage) > 0.93


CELLS = [  # accuracy of the baseline, rates of gain and of loss
    (0.6, 0.10, 0.10),
    (0.6, 0.10, 0.04),
    (0.9, 0.02, 0.05),
    (0.3, 0.03, 0.03),
    (0.1, 0.02, 0.01),
    (0.5, 0.01, 0.03),
    (0.7, 0.002, 0.012),
]


@pytest.mark.parametrize("n", [400, 1319])
def test_newcombe_covers(n):
    coverage = []
    for right, gain, loss in CELLS:
        truth = gain - loss
        coverage.append(np.mean([covers(newcombe_paired(*c), truth) for c in pairs(n, right, gain, loss)]))
    assert 0.94 <= np.mean(coverage) <= 0.97 and min(coverage) > 0.93, coverage


BOUNDARY = [(0.6, 0.10, 0.13), (0.9, 0.02, 0.05), (0.6, 0.0005, 0.0105), (0.3, 0.0, 0.03), (0.6, 0.005, 0.025)]


@pytest.mark.parametrize("n", [400, 1319])
@pytest.mark.parametrize(("right", "gain", "loss"), BOUNDARY)
def test_an_arm_worse_by_the_margin_is_not_non_inferior(n, right, gain, loss):
    cells = pairs(n, right, gain, loss)
    margin = loss - gain + 1e-9
    verdicts = [Paired(both=a, gains=g, losses=b, neither=d).non_inferior(margin) for a, g, b, d in cells]
    assert np.mean(verdicts) <= at_most(0.025)


def test_newcombes_limit_alone_would_let_too_many_through():
    """Why `lower_limit` looks at Tango's too."""
    alone = np.mean([newcombe_paired(*cells).low > -0.01 for cells in pairs(400, 0.6, 0.0005, 0.0105)])
    assert alone > 2 * at_most(0.025)


def test_non_inferiority_is_found_where_it_is():
    cells = pairs(1319, 0.6, 0.02, 0.02)
    found = [Paired(both=a, gains=g, losses=b, neither=d).non_inferior(0.02) for a, g, b, d in cells]
    assert np.mean(found) > 0.9


@pytest.mark.parametrize(
    ("number", "answers", "rate", "alike"),
    [(50, 4, 0.1, 0.3), (400, 4, 0.01, 0.5), (400, -5, 0.05, 0.6)],
)
def test_several_answers_give_no_difference_where_there_is_none(number, answers, rate, alike):
    found = [clustered_difference(study) for study in questions(number, answers, rate, rate, alike)]
    assert np.mean([one.p <= 0.05 for one in found]) <= at_most(0.05)


@pytest.mark.parametrize(
    ("answers", "gain", "loss", "alike"), [(4, 0.10, 0.13, 0.6), (4, 0.0, 0.03, 0.5), (-6, 0.002, 0.022, 0.3)]
)
def test_several_answers_at_the_margin_are_covered_and_not_non_inferior(answers, gain, loss, alike):
    found = [clustered_difference(study) for study in questions(400, answers, gain, loss, alike)]
    assert np.mean([one.non_inferior(loss - gain + 1e-9) for one in found]) <= at_most(0.025)
    assert 0.94 <= np.mean([covers(one.interval, gain - loss) for one in found]) <= 0.97


@pytest.mark.parametrize("share", [0.05, 0.6])
def test_the_interval_of_several_answers_covers(share):
    """Four answers a question, their rate a beta draw of mean `share`: two answers correlate by a half."""
    rng = draws(share)
    scores = rng.binomial(4, rng.beta(share, 1 - share, size=(STUDIES, 400))) / 4
    coverage = np.mean([covers(clustered_interval([(one,) for one in study]), share) for study in scores.tolist()])
    assert 0.94 <= coverage <= 0.97


@pytest.mark.parametrize("different", [0, 2])
def test_holm_rejects_no_true_one(different):
    """Five arms against one baseline, so that the tests depend on each other; `different` of them are worse."""
    rng = draws(different)
    base = rng.random((STUDIES, 400, 1)) < 0.6
    flip = rng.random((STUDIES, 400, 5))
    arms = np.where(flip < 0.1, rng.random((STUDIES, 400, 5)) < 0.6, base)  # 10 % of the answers are drawn anew
    arms[..., :different] &= flip[..., :different] > 0.07
    gains, losses = (arms & ~base).sum(1).tolist(), (~arms & base).sum(1).tolist()
    adjusted = [holm([mcnemar(g, b) for g, b in zip(*study)]) for study in zip(gains, losses)]
    assert np.mean([min(study[different:]) <= 0.05 for study in adjusted]) <= at_most(0.05)
    assert not different or np.mean([study[0] <= 0.05 for study in adjusted]) > 0.5


EPSILON = 0.05
GRIDS = {  # true risks of settings, the most conservative first
    "rising": [0.005, 0.02, 0.035, 0.0501, 0.06, 0.08],
    "all a little too high": [0.0501] * 6,
    "up and down": [0.01, 0.055, 0.02, 0.08, 0.01],
    "far and near": [0.001, 0.001, 0.0501, 0.0502, 0.0503, 0.0504, 0.3, 0.5],
}


def zero_or_one(rng, n, risks, together):
    """Losses of one study; `together`: a question that loses at one setting loses at every riskier one."""
    return rng.random((n, 1 if together else len(risks))) < risks


def part(rng, n, risks, together):
    """As above, but what is lost is a quarter, a half or all of it, and more often."""
    size = rng.choice([0.25, 0.5, 1.0], size=(n, 1), p=[0.5, 0.3, 0.2])
    return zero_or_one(rng, n, np.array(risks) / 0.475, together) * size


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("delta", [0.05, 0.2])
@pytest.mark.parametrize("losses", [zero_or_one, part])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_certified_setting_has_the_risk_it_is_certified_for(grid, losses, delta, together):
    risks, rng = GRIDS[grid], draws(delta, len(grid), together)
    false = 0
    for _ in range(STUDIES):
        means = losses(rng, 500, risks, together).mean(0).tolist()
        certified = fixed_sequence([certify(mean, 500, EPSILON) for mean in means], delta)
        false += certified > 0 and risks[certified - 1] > EPSILON
    assert false / STUDIES <= at_most(delta)


def test_certificates_are_found_where_there_are_some():
    rng = draws(7)
    means = [zero_or_one(rng, 500, [0.005, 0.015, 0.08], together=True).mean(0) for _ in range(STUDIES)]
    certified = [fixed_sequence([certify(one, 500, EPSILON) for one in study], 0.1) for study in means]
    assert np.mean(np.array(certified) == 2) > 0.9


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("losses", [zero_or_one, part])
def test_conformal_risk_control_keeps_the_expected_loss(losses, together):
    """The expectation is over studies and one new question each: its risk at the chosen setting, 0 where none is.

    Drawn apart at each setting, losses fall at times: made monotone they cost no more than their running maximum.
    """
    risks = np.linspace(0.01, 0.12, 12)
    rng, chosen = draws(together), []
    for _ in range(STUDIES):
        study = losses(rng, 100, risks, together).T.astype(float).tolist()
        certified, raised = conformal_risk_control(study, EPSILON, monotonise=not together)
        assert together != (raised > 0)
        chosen.append(risks[certified - 1] if certified else 0.0)
    error = np.std(chosen) / STUDIES**0.5
    assert np.mean(chosen) <= EPSILON + 2 * error
    assert not together or np.mean(chosen) > EPSILON - 0.03  # it isn't for being useless
