"""Selection bias of estimates: how much longer the layout with the lowest estimate takes than estimated, on average.

Estimates err, and of several layouts a search takes the one whose estimate errs most in its favour. The bias is larger
the more layouts there are and the less their estimates differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


DRAWS = 400


def selection_bias(seconds: Sequence[float], error: float) -> float:
    """The mean share by which the layout that is chosen takes longer than its estimate, where each estimate errs by
    itself: a parametric bootstrap, in which the layouts take their estimated seconds and are chosen by estimates of
    these that err.

    Args:
        seconds: estimated, of each layout.
        error: standard deviation of an estimate, as a share.
    """
    if not error or len(seconds) < 2:
        return 0.0
    draw, real, expected = Random(0), 0.0, 0.0
    for _ in range(DRAWS // 2):
        errors = [draw.gauss(0.0, error) for _ in seconds]
        for sign in (1, -1):  # errors whose mean is 0 in a few draws too
            estimates = [each * max(0.1, 1 + sign * share) for each, share in zip(seconds, errors, strict=True)]
            chosen = min(range(len(seconds)), key=estimates.__getitem__)
            real, expected = real + seconds[chosen], expected + estimates[chosen]
    return max(0.0, real / expected - 1) if expected else 0.0
