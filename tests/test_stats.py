"""Wilson's interval against published values (Newcombe 1998, table I)."""

import pytest

from anydepth.stats import wilson


@pytest.mark.parametrize(
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
