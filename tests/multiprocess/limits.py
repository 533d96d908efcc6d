"""Time limits that follow the machine's speed."""

from __future__ import annotations

import time


def patience(seconds: float) -> float:
    """A time limit for this machine as it is now: longer in proportion where it is slower, or busier, than a quiet one
    of two cores on which the limits were chosen."""
    begun = time.perf_counter()
    for _ in range(5_000_000):  # 0.09 s there
        pass
    return seconds * max(1.0, (time.perf_counter() - begun) / 0.09)
