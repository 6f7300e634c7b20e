"""How numbers are written on terminals and pages; a dash where there is none. Imports nothing."""

from __future__ import annotations

from collections.abc import Sequence


def percent(share: float | None, places: int = 1) -> str:
    """0.9933 -> "99.3"; a dash where there is nothing."""
    return "–" if share is None else f"{100 * share:.{places}f}"


def digits(value: float | None, places: int = 2) -> str:
    """1234.567 -> "1,234.57"."""
    return "–" if value is None else f"{value:,.{places}f}"


def points(share: float | None, places: int = 2) -> str:
    """A difference of shares in percentage points, with its sign: 0.0576 -> "+5.76"."""
    return signed(None if share is None else 100 * share, places)


def signed(value: float | None, places: int = 1) -> str:
    """A difference with its sign; 0 has none."""
    text = "–" if value is None else f"{value:+.{places}f}".replace("-", "−")
    return text if text.strip("+−0.") else f"{0:.{places}f}"


def interval(limits: Sequence[float]) -> str:
    """Limits of a difference of shares, in points: "+3.74 to +7.77"."""
    return f"{points(limits[0])} to {points(limits[1])}"


def p_value(p: float | None) -> str:
    """0.04321 -> "0.0432", 2.9488e-8 -> "2.9e-08"."""
    return "–" if p is None else f"{p:.3g}" if p >= 1e-4 else f"{p:.1e}"
