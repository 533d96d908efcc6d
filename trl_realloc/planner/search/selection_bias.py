"""Selection bias of estimates: how much longer the layout with the lowest estimate takes than estimated, on average.

Estimates have errors, and a search tends to choose a layout that was underestimated. The bias grows with the number of
layouts and with the similarity of their estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


DRAWS = 400


def selection_bias(seconds: Sequence[float], error: float) -> float:
    """The mean share by which the chosen layout takes longer than its estimate, with independent errors. A parametric
    bootstrap: the estimates count as true seconds, and the choice is by these seconds with random errors.

    Args:
        seconds: estimated seconds of each layout.
        error: relative standard deviation of an estimate.
    """
    if not error or len(seconds) < 2:
        return 0.0
    draw, real, expected = Random(0), 0.0, 0.0
    for _ in range(DRAWS // 2):
        errors = [draw.gauss(0.0, error) for _ in seconds]
        for sign in (1, -1):  # antithetic errors, whose mean is 0
            estimates = [true * max(0.1, 1 + sign * share) for true, share in zip(seconds, errors, strict=True)]
            chosen = min(range(len(seconds)), key=estimates.__getitem__)
            real, expected = real + seconds[chosen], expected + estimates[chosen]
    return max(0.0, real / expected - 1) if expected else 0.0
