"""Numbers in few characters: the same in a verdict's message and in every report, so that a reader can match them."""

from __future__ import annotations

import math

__all__ = ["figure"]

_BEYOND_ALL = 1e300  # record files have no infinities: they stand there as the largest finite number


def figure(value: float | None) -> str:
    """Three significant digits: 0, 1.31, 812, 3.1e-6, 4.2e12, nan, ∞; an en dash for None."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "nan"
    if abs(value) >= _BEYOND_ALL:
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
