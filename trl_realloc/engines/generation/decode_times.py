"""`DecodeTimes`: how long the decode steps of a generation took, by the number of samples in them.

`vllm_requests` keeps it in the engine's process; `planner.cost.specification` finds the host's share in it. This file
does not import vLLM.
"""

from __future__ import annotations

from ..base import DecodeStep


MIN_STEPS = 4  # decode steps, of which a mean is taken


class DecodeTimes:
    """Sums over decode steps, by the power of two that is next below their number of samples."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int, int, float]] = {}  # steps, samples, cached tokens, seconds

    def add(self, samples: int, cached: int, seconds: float) -> None:
        """Add a step.

        Args:
            cached: tokens of all samples.
        """
        at = samples.bit_length()
        steps, all_samples, all_cached, all_seconds = self._sums.get(at, (0, 0, 0, 0.0))
        self._sums[at] = steps + 1, all_samples + samples, all_cached + cached, all_seconds + seconds

    def means(self) -> list[DecodeStep]:
        """In ascending order of the number of samples."""
        sums = (self._sums[at] for at in sorted(self._sums))
        return [
            (samples / steps, cached / samples, seconds / steps)
            for steps, samples, cached, seconds in sums
            if steps >= MIN_STEPS
        ]
