"""How far measured values lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The 25th and 75th percentile; NaN of nothing."""
    if not values:
        return (float("nan"), float("nan"))
    low, high = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.75])
    return (float(low), float(high))


def median_interval(
    values: Sequence[float], *, samples: int = 4000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Bootstrap percentile interval of the median; values are drawn with replacement.

    NaN for fewer than two values.
    """
    if len(values) < 2:
        return (float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(0, len(values), (samples, len(values)))
    medians = np.median(np.asarray(values, dtype=np.float64)[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high))
