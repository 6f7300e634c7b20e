"""Statistics against published values, scipy, statsmodels and second derivations written here."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anydepth.stats import (
    Paired,
    binomial_cdf,
    clustered_difference,
    clustered_interval,
    compare_paired,
    conformal_risk_control,
    fixed_sequence,
    hoeffding_bentkus,
    holm,
    mcnemar_exact,
    newcombe_paired,
    wilson,
)

# both, gains, losses, neither
CELLS = [
    (675, 132, 56, 456),
    (59, 6, 16, 80),
    (36, 12, 2, 0),
    (0, 9, 4, 20),
    (300, 0, 5, 95),
    (20, 0, 0, 0),
    (0, 3, 0, 0),
]
counts = st.integers(0, 60)


@pytest.mark.parametrize(  # Newcombe 1998 (single proportion), table I
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_known_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 7, 300, 1319])
def test_mirrors_and_holds_the_estimate(n):
    for successes in range(0, n + 1, max(1, n // 13)):
        low, high = wilson(successes, n)
        assert 0 <= low <= successes / n <= high <= 1
        assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)
    assert wilson(0, n).low == 0 and wilson(n, n).high == 1


def test_wider_with_more_confidence_and_fewer_questions():
    assert wilson(8, 10, confidence=0.99).low < wilson(8, 10).low < wilson(80, 100).low


@pytest.mark.parametrize(("successes", "n", "confidence"), [(0, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_refuses_what_is_no_proportion(successes, n, confidence):
    with pytest.raises(ValueError, match="allowed"):
        wilson(successes, n, confidence=confidence)


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (1, 29), (81, 263), (1300, 1319)])
def test_wilson_is_that_of_statsmodels(successes, n):
    confint = pytest.importorskip("statsmodels.stats.proportion").proportion_confint
    assert wilson(successes, n) == pytest.approx(confint(successes, n, method="wilson"), abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 17, 60])
@pytest.mark.parametrize("p", [Fraction(1, 2), Fraction(1, 20), Fraction(29, 32)])
def test_binomial_cdf_is_the_sum(n, p):
    for k in range(n + 1):
        exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
        assert binomial_cdf(k, n, float(p)) == pytest.approx(float(exact), rel=1e-13)


@pytest.mark.parametrize(
    ("n", "p", "ks"),
    [
        (3000, 0.5, (0, 1000, 1499, 1500, 1600, 3000)),
        (100_000, 0.05, (1, 4500, 5000, 5001, 5600, 99_999)),
        (100_000, 0.5, (48_000, 49_999, 50_400)),
        (100_000, 1e-7, (0, 1, 3)),
        (100_000, 1 - 1e-6, (99_990, 99_999)),
    ],
)
def test_binomial_cdf_is_that_of_scipy(n, p, ks):
    binom = pytest.importorskip("scipy.stats").binom
    for k in ks:
        assert binomial_cdf(k, n, p) == pytest.approx(binom.cdf(k, n, p), rel=1e-9, abs=1e-300), k


def test_binomial_cdf_at_its_ends():
    assert binomial_cdf(0, 9, 0.0) == 1 and binomial_cdf(8, 9, 1.0) == 0 and binomial_cdf(9, 9, 1.0) == 1
    assert binomial_cdf(0, 100_000, 0.5) == 0  # 1e-30103, below any float


def test_mcnemar_known_value():
    assert mcnemar_exact(132, 56) == pytest.approx(2.9488e-8, rel=1e-5)
    assert mcnemar_exact(6, 16) == pytest.approx(0.052479, abs=5e-7)  # Cavo et al. 2012, in Fagerland et al. 2017


@given(counts, counts)
def test_mcnemar_is_symmetric_and_a_probability(gains, losses):
    p = mcnemar_exact(gains, losses)
    assert p == mcnemar_exact(losses, gains) and 0 < p <= 1
    assert p >= mcnemar_exact(min(gains, losses), max(gains, losses) + 1)
    assert gains != losses or p == 1


@pytest.mark.parametrize(
    ("gains", "losses"), [(0, 0), (0, 1), (1, 5), (5, 5), (132, 56), (1600, 1400), (1500, 1500), (50_400, 49_600)]
)
def test_mcnemar_is_that_of_scipy_and_statsmodels(gains, losses):
    stats = pytest.importorskip("scipy.stats")
    mcnemar = pytest.importorskip("statsmodels.stats.contingency_tables").mcnemar
    p = mcnemar_exact(gains, losses)
    if gains + losses:
        assert p == pytest.approx(stats.binomtest(gains, gains + losses).pvalue, rel=1e-9)
    assert p == pytest.approx(mcnemar([[7, gains], [losses, 9]], exact=True).pvalue, rel=1e-9)


@pytest.mark.parametrize(
    ("cells", "low", "high"),
    [
        ((675, 132, 56, 456), 0.03740, 0.07773),
        ((59, 6, 16, 80), -0.1186, -0.0046),  # Cavo et al. 2012, in Fagerland, Lydersen and Laake 2017, chapter 8
        ((36, 12, 2, 0), 0.0569, 0.3404),  # Newcombe 1998 (paired), table II
        ((14, 5, 0, 22), 0.0115, 0.2265),  # Altman et al. 2000, table 6.2
    ],
)
def test_newcombe_known_values(cells, low, high):
    assert newcombe_paired(*cells) == pytest.approx((low, high), abs=5.1e-5)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
@pytest.mark.parametrize("cells", CELLS)
def test_newcombe_from_correlated_answers_and_inverted_tests(cells, confidence):
    """A second derivation: Wilson's limits as roots of the score test, phi as the answers' correlation."""
    np, optimize = pytest.importorskip("numpy"), pytest.importorskip("scipy.optimize")
    answers = np.repeat([[1, 1], [1, 0], [0, 1], [0, 0]], cells, axis=0)
    z, n = pytest.importorskip("scipy.stats").norm.ppf((1 + confidence) / 2), len(answers)

    def limits(share):
        def outside(p):
            return n * (share - p) ** 2 - z * z * p * (1 - p)

        low = optimize.brentq(outside, 0, min(share, 1 - 1e-9), xtol=1e-15) if share else 0.0
        return low, optimize.brentq(outside, max(share, 1e-9), 1, xtol=1e-15) if share < 1 else 1.0

    one, two = answers.mean(axis=0)
    (one_low, one_high), (two_low, two_high) = limits(one), limits(two)
    spread = answers.std(axis=0).prod()
    covariance = ((answers[:, 0] - one) * (answers[:, 1] - two)).mean()
    if covariance > 0:
        covariance = max(0, covariance - 1 / (2 * n))
    phi = covariance / spread if spread else 0
    correlation = np.array([[1, -phi], [-phi, 1]])
    down, up = np.array([one - one_low, two_high - two]), np.array([one_high - one, two - two_low])
    expected = one - two - (down @ correlation @ down) ** 0.5, one - two + (up @ correlation @ up) ** 0.5
    assert newcombe_paired(*cells, confidence=confidence) == pytest.approx(expected, abs=1e-9)


@given(counts, counts, counts, counts)
def test_pairs_mirror_when_the_arms_are_swapped(both, gains, losses, neither):
    if not both + gains + losses + neither:
        return
    pair = Paired(both=both, gains=gains, losses=losses, neither=neither)
    swapped = Paired(both=both, gains=losses, losses=gains, neither=neither)
    low, high = pair.interval
    assert -1 <= low <= pair.difference <= high <= 1 and low < high
    assert swapped.interval == pytest.approx((-high, -low), abs=1e-12) and swapped.p == pair.p
    assert newcombe_paired(both, gains, losses, neither, confidence=0.99).low <= low
    assert newcombe_paired(neither, gains, losses, both) == pytest.approx((low, high), abs=1e-12)
    assert pair.lower_limit <= low


def test_a_pair_from_scores():
    pair = compare_paired([1, 1, 0, 0.0, 1], [1.0, 0, 1, 0, 0])
    assert pair == Paired(both=1, gains=2, losses=1, neither=1) and pair.n == 5 and pair.difference == 0.2
    known = Paired(both=675, gains=132, losses=56, neither=456)
    assert known.difference == pytest.approx(0.05762, abs=5e-6) and known.p == mcnemar_exact(132, 56)
    assert known.interval == newcombe_paired(675, 132, 56, 456)


def test_non_inferior_needs_the_lower_limit_above_minus_margin():
    pair = Paired(both=700, gains=20, losses=25, neither=255)
    assert not pair.non_inferior(-pair.lower_limit) and pair.non_inferior(-pair.lower_limit + 1e-9)
    assert pair.p > 0.05 and not pair.non_inferior(0.01)  # no significant difference, and yet not shown to be equal


@pytest.mark.parametrize(
    ("gains", "losses", "n"), [(6, 16, 161), (0, 2, 400), (3, 9, 400), (56, 132, 1319), (0, 0, 50)]
)
def test_the_verdict_stands_on_tangos_limit_where_that_is_lower(gains, losses, n):
    """Tango's limit from its definition: the losses' probability maximises the likelihood under the difference."""
    optimize = pytest.importorskip("scipy.optimize")

    def z(difference):
        def minus_log_likelihood(loss):
            cells = zip((gains, losses, n - gains - losses), (loss + difference, loss, 1 - 2 * loss - difference))
            return -sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

        bounds = (max(0, -difference), (1 - difference) / 2)
        loss = optimize.minimize_scalar(minus_log_likelihood, bounds=bounds, options={"xatol": 1e-13}).x
        return (gains - losses - n * difference) / math.sqrt(n * (2 * loss + difference - difference**2))

    tango = optimize.brentq(lambda difference: z(difference) - 1.959964, -0.9, (gains - losses) / n - 1e-9)
    pair = Paired(both=(n - gains - losses) // 2, gains=gains, losses=losses, neither=(n + 1 - gains - losses) // 2)
    assert pair.lower_limit == pytest.approx(min(tango, pair.interval.low), abs=2e-6)
    if (gains, losses) == (6, 16):  # Tango's interval of Cavo et al. 2012, in Fagerland et al. 2017, chapter 8
        assert tango == pytest.approx(-0.1240, abs=5e-5)


@pytest.mark.parametrize(("right", "n"), [(0, 1), (0, 400), (8, 10), (500, 1319), (20, 20)])
@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_one_answer_a_question_is_wilson(right, n, confidence):
    questions = [(1,)] * right + [(0,)] * (n - right)
    found = clustered_interval(questions, confidence=confidence)
    assert found == pytest.approx(wilson(right, n, confidence=confidence), abs=1e-10)


def test_repeating_an_answer_adds_no_evidence():
    once, twice = [(1,), (0,), (0.5,)] * 30, [(1, 1), (0, 0), (0.5, 0.5)] * 30
    assert clustered_interval(once) == clustered_interval(twice)
    unlike = clustered_interval([(1, 0), (0, 1), (1, 0)] * 30)
    assert unlike.high - unlike.low < 0.3 * (clustered_interval(once).high - clustered_interval(once).low)


def test_a_question_counts_once_however_many_answers_it_has():
    assert clustered_difference([(1, 1, 1, 1), (0,)]).difference == 0.5


questions_st = st.lists(st.lists(st.integers(-10, 10).map(lambda i: i / 10), min_size=1, max_size=4), min_size=1)


@given(questions_st)
def test_clustered_differences_mirror_and_agree_with_their_interval(questions):
    found = clustered_difference(questions)
    mirrored = clustered_difference([[-value for value in values] for values in questions])
    low, high = found.interval
    assert -1 <= low <= found.difference + 1e-12 and found.difference - 1e-12 <= high <= 1 and low < high
    assert mirrored.interval == pytest.approx((-high, -low), abs=1e-9) and mirrored.p == pytest.approx(found.p)
    if any(sum(values) / len(values) not in (-1, 0, 1) for values in questions) and abs(found.p - 0.05) > 1e-6:
        assert (found.p < 0.05) == (not low < 0 < high)


def test_a_single_difference_of_whole_answers_is_mcnemar_and_tango():
    pair = Paired(both=300, gains=2, losses=11, neither=87)
    found = clustered_difference([(1,)] * 2 + [(-1,)] * 11 + [(0,)] * 387)
    assert found.p == pair.p and found.lower_limit == pytest.approx(pair.lower_limit, abs=1e-12)
    assert pair.lower_limit < pair.interval.low  # so that it is Tango's which was compared
    assert found.non_inferior(0.05) and not found.non_inferior(0.04)


def test_many_questions_give_what_a_t_test_gives():
    stats = pytest.importorskip("scipy.stats")
    np = pytest.importorskip("numpy")
    answers = np.random.default_rng(5).choice([-1, 0, 0, 0.1, 0.9], size=(5000, 3))
    found = clustered_difference(answers.tolist())
    test = stats.ttest_1samp(answers.mean(axis=1), 0)
    low, high = test.confidence_interval()
    assert 0.01 < found.p == pytest.approx(test.pvalue, rel=0.02)
    assert found.interval == pytest.approx((low, high), abs=0.01 * (high - low))


def test_no_difference_at_all_still_leaves_a_width():
    found = clustered_difference([(0, 0, 0)] * 400)
    assert found.p == 1 and found.difference == 0
    assert found.interval == pytest.approx((-0.0095, 0.0095), abs=5e-5)  # z^2 / (n + z^2)
    assert not found.non_inferior(0.009)


def test_holm_known_and_of_statsmodels():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == [] and holm([0.7, 0.9]) == [1, 1]
    multipletests = pytest.importorskip("statsmodels.stats.multitest").multipletests
    for p_values in ([0.02], [0.04, 0.001, 0.04, 0.9, 0.0126], [0.5, 0.5, 0.01, 0.0], [0.013] * 7):
        assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1])


@pytest.mark.parametrize(
    ("risk", "n", "epsilon", "p"), [(0.01, 200, 0.05, 0.0064), (0.02, 500, 0.05, 0.0013), (0.05, 900, 0.05, 1.0)]
)
def test_hoeffding_bentkus_known_values(risk, n, epsilon, p):
    assert hoeffding_bentkus(risk, n, epsilon) == pytest.approx(p, abs=5e-5)


@pytest.mark.parametrize(("n", "epsilon"), [(1, 0.5), (200, 0.05), (500, 0.02), (1319, 0.1), (100_000, 0.3)])
def test_hoeffding_bentkus_from_its_two_parts(n, epsilon):
    """Both parts in use; a whole number of losses stays itself whichever way its share was rounded."""
    binom = pytest.importorskip("scipy.stats").binom
    entropy = pytest.importorskip("scipy.special").rel_entr
    used = set()
    for losses in sorted({0, 1, *range(0, n + 1, max(1, n // 97)), int(n * epsilon)}):
        for risk in (losses / n, math.nextafter(losses / n, 2), math.nextafter(losses / n, -1)):
            if not 0 <= risk <= 1:
                continue
            held = min(risk, epsilon)
            hoeffding = math.exp(-n * (entropy(held, epsilon) + entropy(1 - held, 1 - epsilon)))
            bentkus = math.e * binom.cdf(losses, n, epsilon)
            used.add(hoeffding < bentkus)
            assert hoeffding_bentkus(risk, n, epsilon) == pytest.approx(
                min(1, hoeffding, bentkus), rel=1e-9, abs=1e-290
            )
    assert n == 1 or used == {True, False}


def test_part_of_a_loss_counts_as_a_whole_one():
    assert hoeffding_bentkus(2.99 / 200, 200, 0.05) == pytest.approx(math.e * binomial_cdf(3, 200, 0.05))


@given(st.integers(1, 400), st.floats(0.01, 0.99), st.floats(0, 1), st.floats(0, 1))
def test_hoeffding_bentkus_grows_with_the_risk(n, epsilon, one, other):
    low, high = sorted(hoeffding_bentkus(risk, n, epsilon) for risk in (one, other))
    assert 0 <= low <= high <= 1
    if one <= other:
        assert hoeffding_bentkus(one, n, epsilon) <= hoeffding_bentkus(other, n, epsilon) * (1 + 1e-12)
    assert hoeffding_bentkus(max(one, epsilon), n, epsilon) == 1


@pytest.mark.parametrize(
    ("p_values", "certified"),
    [([], 0), ([0.2, 0.001], 0), ([0.001, 0.05, 0.2, 0.01], 2), ([0.01, 0.02], 2)],
)
def test_a_fixed_sequence_stops_at_the_first_that_fails(p_values, certified):
    assert fixed_sequence(p_values, 0.05) == certified


def one_in_a_hundred(*losses):
    """Losses of 99 questions at each setting: the first so many lose 1."""
    return [[1.0] * lost + [0.0] * (99 - lost) for lost in losses]


def test_conformal_risk_control_adds_one_full_loss():
    assert conformal_risk_control(one_in_a_hundred(0, 4, 5, 6), 0.05) == (2, 0)
    assert conformal_risk_control(one_in_a_hundred(5, 9), 0.05) == (0, 0)
    assert conformal_risk_control(one_in_a_hundred(0, 28, 28, 29), 0.29) == (3, 0)
    assert conformal_risk_control(one_in_a_hundred(0, 4), 0.05, bound=2.0) == (1, 0)


def test_conformal_risk_control_refuses_falling_losses_or_says_how_many_it_raised():
    losses = [[0, 0, 0.5, 1], [0, 1, 0.25, 1], [0, 0, 0.5, 0]]
    with pytest.raises(ValueError, match=r"question 2 falls from 0\.5 to 0\.25 at setting 1 .* monotonise=True"):
        conformal_risk_control(losses, 0.6)
    assert conformal_risk_control(losses, 0.6, monotonise=True) == (1, 3)
    assert conformal_risk_control(losses, 0.7, monotonise=True) == (3, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: binomial_cdf(3, 2, 0.5),
        lambda: binomial_cdf(-1, 2, 0.5),
        lambda: binomial_cdf(0, 0, 0.5),
        lambda: binomial_cdf(1, 2, 1.5),
        lambda: mcnemar_exact(-1, 2),
        lambda: mcnemar_exact(1.5, 2),
        lambda: mcnemar_exact(True, 2),
        lambda: newcombe_paired(0, 0, 0, 0),
        lambda: newcombe_paired(1, 1, 1, -1),
        lambda: newcombe_paired(1, 1, 1, 1, confidence=95),
        lambda: Paired(both=0, gains=0, losses=0, neither=0),
        lambda: Paired(both=1, gains=0, losses=0, neither=0).non_inferior(-0.5),
        lambda: Paired(both=1, gains=0, losses=0, neither=0).non_inferior(1.5),
        lambda: clustered_difference([(0, 1)]).non_inferior(-0.01),
        lambda: compare_paired([1, 0], [1]),
        lambda: compare_paired([], []),
        lambda: compare_paired([0.5], [1]),
        lambda: compare_paired([None], [1]),
        lambda: clustered_difference([]),
        lambda: clustered_difference([(0,), ()]),
        lambda: clustered_difference([(0, 1.5)]),
        lambda: clustered_difference([(math.nan,)]),
        lambda: clustered_interval([(-0.5,)]),
        lambda: clustered_interval([(1,)], confidence=1),
        lambda: holm([0.1, 1.1]),
        lambda: fixed_sequence([math.nan], 0.1),
        lambda: fixed_sequence([0.1], 0),
        lambda: hoeffding_bentkus(1.1, 10, 0.1),
        lambda: hoeffding_bentkus(0.1, 0, 0.1),
        lambda: hoeffding_bentkus(0.1, 10, 1),
        lambda: conformal_risk_control([], 0.1),
        lambda: conformal_risk_control([[]], 0.1),
        lambda: conformal_risk_control([[0], [0, 0]], 0.1),
        lambda: conformal_risk_control([[2]], 0.1),
        lambda: conformal_risk_control([[0]], 1.0),
        lambda: conformal_risk_control([[0]], 0.1, bound=-1),
    ],
)
def test_says_what_is_allowed(wrong):
    with pytest.raises(ValueError, match=r"allowed|leave it out"):
        wrong()
