"""Intervals, tests and certificates for what was measured, in plain Python.

One arm: `wilson`, `clustered_interval`. Two arms on the same questions: `compare_paired`, `clustered_difference`;
several such pairs in one report: `holm`. A threshold's risk: `hoeffding_bentkus` with `fixed_sequence`, or
`conformal_risk_control`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, e, erfc, exp, fsum, log, sqrt
from statistics import NormalDist
from typing import NamedTuple


class Interval(NamedTuple):
    """Two-sided bounds, `low <= estimate <= high`."""

    low: float
    high: float


def wilson(successes: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion, without continuity correction (Wilson 1927; Newcombe 1998, method 3).

    Partial credit counts: `successes` is a sum of n scores in [0, 1], for which the interval is on the wide side.
    Raises ValueError for n < 1, successes outside 0..n, confidence outside (0, 1).
    Example: wilson(81, 263) is (0.2553, 0.3662) to four digits.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}; allowed: 0 <= successes <= n and n >= 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; allowed: above 0 and below 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / n
    centre = share + z * z / (2 * n)
    reach = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At 0 and n one bound is exactly 0 or 1; rounding must not move it past the estimate.
    return Interval(min(share, max(0.0, (centre - reach) / scale)), max(share, min(1.0, (centre + reach) / scale)))


def binomial_cdf(k: int, n: int, p: float) -> float:
    """Probability of at most k successes in n trials of probability p, to about 12 digits up to n = 100,000.

    Terms are summed outwards from the most likely one, relative to it, so that no factorial is ever formed. Below the
    smallest float (about 1e-308) it is 0. Raises ValueError for k outside 0..n or p outside 0..1.
    Example: binomial_cdf(2, 200, 0.05) is 0.002336.
    """
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k is {k} of n = {n}; allowed: 0 <= k <= n and n >= 1")
    _check_share("p", p, closed=True)
    if k == n or p == 0:
        return 1.0
    if p == 1:
        return 0.0
    odds, mode = p / (1 - p), min(n, int((n + 1) * p))
    at_most_k = above_k = 0.0
    term = 1.0
    for i in range(mode, -1, -1):
        if i > k:
            above_k += term
        else:
            at_most_k += term
            if term < at_most_k * 1e-18:
                break
        term *= i / ((n - i + 1) * odds)
    term = 1.0
    for i in range(mode, n):
        term *= (n - i) * odds / (i + 1)
        if i < k:
            at_most_k += term
        else:
            above_k += term
        if term < (at_most_k + above_k) * 1e-18:
            break
    return at_most_k / (at_most_k + above_k)


def mcnemar_exact(gains: int, losses: int) -> float:
    """Two-sided exact p-value of "as many gains as losses": questions that only one of two arms has right.

    McNemar 1947 on the binomial: twice the tail of the rarer kind, at most 1, and 1 without any. It never says too
    often that there is a difference. Raises ValueError for negative counts.
    Example: mcnemar_exact(132, 56) is 2.9488e-8.
    """
    _check_counts(gains=gains, losses=losses)
    if gains + losses == 0:
        return 1.0
    return min(1.0, 2 * binomial_cdf(min(gains, losses), gains + losses, 0.5))


def newcombe_paired(both: int, gains: int, losses: int, neither: int, *, confidence: float = 0.95) -> Interval:
    """Interval of the difference (gains - losses) / n of two shares right on the same n questions.

    Newcombe 1998 (Statistics in Medicine 17:2635-2650), method 10: the two Wilson intervals put together with the
    correlation phi of the arms, whose numerator is brought n / 2 nearer to 0 where it is positive. `both` counts
    questions that both arms have right, `gains` those that only the first, `losses` only the second, `neither` none.
    Raises ValueError for negative counts, n < 1, confidence outside (0, 1).
    Example: newcombe_paired(675, 132, 56, 456) is (0.03740, 0.07773).
    """
    _check_counts(both=both, gains=gains, losses=losses, neither=neither)
    n = both + gains + losses + neither
    first, second = both + gains, both + losses
    first_low, first_high = wilson(first, n, confidence=confidence)
    second_low, second_high = wilson(second, n, confidence=confidence)
    product = both * neither - gains * losses
    corrected = max(product - n / 2, 0.0) if product > 0 else product
    margins = first * (n - first) * second * (n - second)
    phi = corrected / sqrt(margins) if margins else 0.0

    def reach(one: float, other: float) -> float:
        return sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))

    down = reach(first / n - first_low, second_high - second / n)
    up = reach(first_high - first / n, second / n - second_low)
    difference = (gains - losses) / n
    return Interval(max(-1.0, difference - down), min(1.0, difference + up))


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two arms on the same questions, each right or wrong; a positive difference is in favour of the first arm.

    Counts as in `newcombe_paired`. `difference`, `interval` (Newcombe, 95 %) and `lower_limit` are shares, not points.
    Raises ValueError for negative counts or none at all.
    Example: Paired(both=675, gains=132, losses=56, neither=456) has difference 0.05762 and p 2.9488e-8.
    """

    both: int
    gains: int
    losses: int
    neither: int

    def __post_init__(self) -> None:
        _check_counts(both=self.both, gains=self.gains, losses=self.losses, neither=self.neither)
        if self.n < 1:
            raise ValueError("there is no question in the pair; allowed: one or more")

    @property
    def n(self) -> int:
        return self.both + self.gains + self.losses + self.neither

    @property
    def difference(self) -> float:
        return (self.gains - self.losses) / self.n

    @property
    def p(self) -> float:
        return mcnemar_exact(self.gains, self.losses)

    @property
    def interval(self) -> Interval:
        return newcombe_paired(self.both, self.gains, self.losses, self.neither)

    @property
    def lower_limit(self) -> float:
        """The limit that a verdict of non-inferiority stands on: the lower of Newcombe's and Tango's, two-sided 95 %.

        Newcombe's alone lets too many inferior arms through where nearly every change is a loss: of arms worse by
        just one point (n = 400, on average 4.2 losses and 0.2 gains) nearly 8 % pass for non-inferior at that margin,
        where 2.5 % are meant. Tango's score limit (1998, Statistics in Medicine 17:891-908) keeps to 2.5 % there.
        """
        values = {1.0: self.gains, -1.0: self.losses, 0.0: self.n - self.gains - self.losses}
        return min(self.interval.low, _score_limit(values, -1.0, low=-1.0, high=1.0))

    def non_inferior(self, margin: float) -> bool:
        """Whether the first arm is worse by less than `margin` (a share), one-sided error at most 2.5 %.

        False means "not shown", never "worse"; and "no significant difference" doesn't mean "equal".
        """
        _check_share("margin", margin, closed=True)
        return self.lower_limit > -margin


def compare_paired(scores: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Count gains and losses of `scores` against `baseline`: one score a question, 0 or 1, in the same order.

    Raises ValueError for unequal lengths, and for partial credit, which `clustered_difference` takes.
    """
    if len(scores) != len(baseline):
        raise ValueError(f"{len(scores)} scores against {len(baseline)}; allowed: the same questions in both arms")
    for score in (*scores, *baseline):
        if score not in (0, 1):
            raise ValueError(f"a score is {score!r}; allowed: 0 and 1 (partial credit: clustered_difference)")
    counts = Counter(zip(map(bool, scores), map(bool, baseline), strict=True))
    return Paired(
        both=counts[True, True],
        gains=counts[True, False],
        losses=counts[False, True],
        neither=counts[False, False],
    )


def clustered_interval(scores_by_question: Iterable[Sequence[float]], *, confidence: float = 0.95) -> Interval:
    """Interval of an accuracy from several answers a question, or from partial credit: scores in [0, 1].

    Answers of one question are alike, so that questions are the unit (Miller 2024, "Adding error bars to evals",
    arXiv 2411.00640): each counts once, with the mean of its answers. The interval holds every mean that a score test
    does not reject. With one answer a question, 0 or 1, this is exactly `wilson`.
    Raises ValueError for no question, a question without an answer, a score outside [0, 1], confidence outside (0, 1).
    Example: clustered_interval([(1, 1), (0, 1), (0, 0), (1, 0)]) is (0.1979, 0.8021).
    """
    means = _question_means(scores_by_question, low=0.0, high=1.0)
    return _score_interval(Counter(means), low=0.0, high=1.0, confidence=confidence)


@dataclass(frozen=True, kw_only=True)
class Clustered:
    """Two arms on the same questions, with several answers a question or partial credit (`clustered_difference`).

    `difference`, `interval` (here of a score test) and `lower_limit` are as in `Paired`.
    """

    questions: int
    difference: float
    p: float
    interval: Interval

    @property
    def lower_limit(self) -> float:
        return self.interval.low

    def non_inferior(self, margin: float) -> bool:
        """As `Paired.non_inferior`."""
        _check_share("margin", margin, closed=True)
        return self.lower_limit > -margin


def clustered_difference(differences_by_question: Iterable[Sequence[float]]) -> Clustered:
    """Mean difference of two arms, with p-value and 95 % interval, from score differences in [-1, 1].

    Each question counts once, with the mean of its differences. The test is a score test: z = mean distance from the
    supposed mean over its standard error, where the variance is taken under the supposition, by the weights nearest to
    the data that have the supposed mean (empirical likelihood, Owen 2001). With one difference of -1, 0 or 1 a
    question the interval is Tango's, and p is McNemar's exact one. A t-test on question means is simpler, but where
    nearly every change is a loss it takes 4 to 6 % of inferior arms for non-inferior instead of 2.5 %, and where no
    answer differs its interval has no width at all. Like a t-test it is for 50 questions or more.
    Raises ValueError for no question, a question without an answer, a difference outside [-1, 1].
    Example: clustered_difference([(1, 0), (0, 0), (-1, 0), (0, 1)]) has difference 0.125 and p 0.5637.
    """
    means = _question_means(differences_by_question, low=-1.0, high=1.0)
    values = Counter(means)
    if values.keys() <= {-1.0, 0.0, 1.0}:
        p = mcnemar_exact(values[1.0], values[-1.0])
    else:
        p = erfc(abs(_score(values, 0.0, low=-1.0, high=1.0)) / sqrt(2))
    return Clustered(
        questions=len(means),
        difference=fsum(means) / len(means),
        p=p,
        interval=_score_interval(values, low=-1.0, high=1.0, confidence=0.95),
    )


def _question_means(by_question: Iterable[Sequence[float]], *, low: float, high: float) -> list[float]:
    means = []
    for number, values in enumerate(by_question):
        if not len(values):
            raise ValueError(f"question {number} (from 0) has no answer; leave it out or score it")
        for value in values:
            if not low <= value <= high:
                raise ValueError(f"question {number} (from 0) has the value {value!r}; allowed: {low:g} .. {high:g}")
        means.append(fsum(values) / len(values))
    if not means:
        raise ValueError("there is no question; allowed: one or more")
    return means


def _score(values: Mapping[float, int], null: float, *, low: float, high: float) -> float:
    """z of "the mean is `null`", for counted values in [low, high] and low < null < high; positive above it.

    The weights w_j = 1 / (n (1 + tilt u_j)) with u_j = value - null and sum w_j u_j = 0 are the likeliest of mean
    `null`; what is missing from their sum to 1 lies at the bound that nothing was seen at. Their variance is
    mean(u) / tilt in either case, hence z^2 = n mean(u) tilt.
    """
    parts = [(value - null, count) for value, count in values.items() if count]
    total = fsum(count * away for away, count in parts)
    if total < 0:
        return -_score({-value: count for value, count in values.items()}, -null, low=-high, high=-low)
    below, above = 0.0, 1 / (null - low)
    if min(away for away, _ in parts) > low - null and fsum(c * away / (1 + above * away) for away, c in parts) >= 0:
        return sqrt(total * above)
    tilt = 0.0
    for _ in range(200):  # Newton's steps, halving where one leaves the bracket
        pull = slope = 0.0
        for away, count in parts:
            ratio = away / (1 + tilt * away)
            pull += count * ratio
            slope += count * ratio * ratio
        below, above = (tilt, above) if pull > 0 else (below, tilt)
        step = tilt + (pull / slope if slope else 0.0)
        step = step if below < step < above else (below + above) / 2
        if abs(step - tilt) <= 1e-11 * step:
            break
        tilt = step
    return sqrt(total * tilt)


def _score_interval(values: Mapping[float, int], *, low: float, high: float, confidence: float) -> Interval:
    """All means that `_score` does not reject."""
    _check_share("confidence", confidence)
    limits = (_score_limit(values, outer, low=low, high=high, confidence=confidence) for outer in (low, high))
    return Interval(*limits)


def _score_limit(
    values: Mapping[float, int], outer: float, *, low: float, high: float, confidence: float = 0.95
) -> float:
    """Where rejection begins on the way from the mean to the bound `outer`: regula falsi, Illinois variant."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    kept = fsum(value * count for value, count in values.items()) / sum(values.values())
    rejected, at_kept, at_rejected, last = outer, -0.5, 0.5, 0.0
    while abs(kept - rejected) > 1e-12:
        middle = kept + (rejected - kept) * at_kept / (at_kept - at_rejected)
        square = _score(values, middle, low=low, high=high) ** 2
        here = square / (square + z * z) - 0.5  # -1/2 at the mean, 0 at the limit, 1/2 at the bound
        if abs(here) < 1e-10:
            return middle
        again = 0.5 if here * last > 0 else 1.0  # the end that stays a second time pulls half as much
        if here < 0:
            kept, at_kept, at_rejected = middle, here, at_rejected * again
        else:
            rejected, at_rejected, at_kept = middle, here, at_kept * again
        last = here
    return kept


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979), in the order given: those at most alpha are rejections whose chance of any false
    one among them is at most alpha, however the tests depend on each other.

    Raises ValueError for a p-value outside [0, 1]. Example: holm([0.01, 0.04, 0.03]) is [0.03, 0.06, 0.06].
    """
    for p in p_values:
        _check_share("a p-value", p, closed=True)
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def hoeffding_bentkus(risk: float, n: int, epsilon: float) -> float:
    """p-value of "the true risk is above epsilon", from the mean `risk` of n independent losses in [0, 1].

    The smaller of Hoeffding's exp(-n h1(min(risk, epsilon), epsilon)) and Bentkus's e P(Bin(n, epsilon) <= ceil(n
    risk)), at most 1 (Bates et al. 2021; Angelopoulos et al. 2021, "Learn then test", arXiv 2110.01052). Finite n, no
    shape of the losses assumed. Raises ValueError for a risk outside [0, 1], n < 1, epsilon outside (0, 1).
    Example: hoeffding_bentkus(0.01, 200, 0.05) is 0.0064.
    """
    _check_share("risk", risk, closed=True)
    _check_share("epsilon", epsilon)
    if n < 1:
        raise ValueError(f"n is {n}; allowed: 1 or more")
    hoeffding = exp(-n * _relative_entropy(min(risk, epsilon), epsilon))
    # A whole number of losses must stay itself: 1319 * (7 / 1319) is 7.000000000000001.
    losses = ceil(n * risk * (1 - 1e-12))
    return min(1.0, hoeffding, e * binomial_cdf(losses, n, epsilon))


def _relative_entropy(a: float, b: float) -> float:
    """h1 of Hoeffding's bound, in nats."""
    return (a * log(a / b) if a else 0.0) + ((1 - a) * log((1 - a) / (1 - b)) if a < 1 else 0.0)


def fixed_sequence(p_values: Sequence[float], delta: float) -> int:
    """How many settings are certified, of a list in an order fixed beforehand, the most conservative first.

    Testing stops at the first p above delta, hence the chance that any certified setting is a false one is at most
    delta, without correction for their number (Angelopoulos et al. 2021, arXiv 2110.01052). The last certified one
    may be used: `settings[count - 1]`; with 0 none may. Raises ValueError for p outside [0, 1], delta outside (0, 1).
    Example: fixed_sequence([0.001, 0.02, 0.2, 0.01], 0.05) is 2.
    """
    _check_share("delta", delta)
    for p in p_values:
        _check_share("a p-value", p, closed=True)
    return next((count for count, p in enumerate(p_values) if p > delta), len(p_values))


class RiskControl(NamedTuple):
    """`certified` settings keep the expected loss (0: none does); `raised` questions had losses made monotone."""

    certified: int
    raised: int


def conformal_risk_control(
    losses_by_setting: Sequence[Sequence[float]], epsilon: float, bound: float = 1.0, *, monotonise: bool = False
) -> RiskControl:
    """How many settings keep the expected loss of a new question at most epsilon, the most conservative first.

    The last one with (n mean + bound) / (n + 1) <= epsilon (Angelopoulos et al. 2022, arXiv 2208.02814), from the
    losses in [0, bound] of the same n questions at every setting: `losses_by_setting[setting][question]`. This holds
    only where a question's loss never falls along the order. With `monotonise` each loss is replaced by the largest
    so far, and `raised` tells for how many questions that changed anything: the certificate has to say so.
    Raises ValueError where a loss falls (without `monotonise`) or is outside [0, bound], for unequal numbers of
    questions, for bound <= 0 and epsilon outside (0, bound).
    Example: conformal_risk_control([[0] * 99, [0] * 95 + [1] * 4, [0] * 94 + [1] * 5], 0.05) certifies 2.
    """
    if not bound > 0 or not 0 < epsilon < bound:
        raise ValueError(f"epsilon is {epsilon}, bound is {bound}; allowed: 0 < epsilon < bound")
    _check_losses(losses_by_setting, bound)
    largest = [0.0] * len(losses_by_setting[0])
    certified, raised = 0, set()
    for setting, losses in enumerate(losses_by_setting):
        for question, loss in enumerate(losses):
            if loss < largest[question]:
                if not monotonise:
                    raise ValueError(
                        f"the loss of question {question} falls from {largest[question]:g} to {loss:g} at setting "
                        f"{setting} (both from 0); conformal risk control needs losses that never fall along the "
                        f"order: give monotonise=True to use the largest so far, or certify with hoeffding_bentkus"
                    )
                raised.add(question)
            largest[question] = max(largest[question], loss)
        if (fsum(largest) + bound) / (len(largest) + 1) <= epsilon:
            certified = setting + 1
    return RiskControl(certified, len(raised))


def _check_losses(losses_by_setting: Sequence[Sequence[float]], bound: float) -> None:
    numbers = [len(losses) for losses in losses_by_setting]
    if not numbers or len(set(numbers)) > 1 or not numbers[0]:
        raise ValueError(f"the settings have losses of {numbers} questions; allowed: the same, one or more, in all")
    for losses in losses_by_setting:
        for loss in losses:
            if not 0 <= loss <= bound:
                raise ValueError(f"a loss is {loss!r}; allowed: 0 .. {bound:g}")


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} is {count!r}; allowed: whole numbers from 0")


def _check_share(name: str, value: float, *, closed: bool = False) -> None:
    if not (0 <= value <= 1 if closed else 0 < value < 1):
        raise ValueError(f"{name} is {value!r}; allowed: {'0 .. 1' if closed else 'above 0 and below 1'}")
