"""Means, medians and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    found = list(values)
    return float(np.mean(found)) if found else float("nan")


def median(values: Iterable[float]) -> float:
    """Median; NaN of nothing."""
    found = list(values)
    return float(np.median(found)) if found else float("nan")


def ratio(numerator: float, denominator: float) -> float:
    """Quotient; NaN where the denominator is zero."""
    return numerator / denominator if denominator else float("nan")


def without_nan(value: Any) -> Any:
    """Plain data with `None` in place of what JSON has no number for."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    samples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float]:
    """Bootstrap percentile interval of `sum(numerators) / sum(denominators)`.

    Each index is one independent unit (here: a context), and units are drawn with replacement.
    NaN for fewer than two units.
    """
    units = len(numerators)
    if units < 2:
        return (float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(0, units, (samples, units))
    above = np.asarray(numerators, dtype=np.float64)[drawn].sum(1)
    below = np.asarray(denominators, dtype=np.float64)[drawn].sum(1)
    ratios = above[below > 0] / below[below > 0]
    if not ratios.size:
        return (float("nan"), float("nan"))
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high))
