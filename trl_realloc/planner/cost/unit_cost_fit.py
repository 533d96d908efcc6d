"""Fits unit costs to observations: sums of unit costs times counts, and lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls


def dot(rates: Sequence[float], counts: Sequence[float]) -> float:
    return sum(rate * count for rate, count in zip(rates, counts, strict=True))


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0 units, seconds of a unit) of the line through the smallest and the largest of (units, seconds).

    The points between are not used: a network that lets bursts pass moves some hundred KB faster than its rate, and
    plans move large messages.
    """
    (few, short), (many, long) = min(points), max(points)
    slope = (long - short) / (many - few) if many > few and long > short else long / many
    return max(0.0, short - slope * few), slope


def fit_unit_costs(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative unit costs that explain the seconds, by least squares of the relative error.

    Args:
        counts: of each observation, one count for each unit cost.
        seconds: of each observation, above 0.
    """
    relative = np.asarray(counts, float) / np.asarray(seconds, float)[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0  # what was never counted costs nothing
    costs, _ = nnls(relative / scale, np.ones(len(seconds)))
    return tuple(float(cost) for cost in costs / scale)
