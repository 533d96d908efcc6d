"""Durations of the decode steps of a generation, by their number of samples. `vllm_requests` records them in the
engine's process; `planner.cost.specification` derives the host's share from them. This file does not import vLLM."""

from __future__ import annotations

from ..base import DecodeStep


MIN_STEPS = 4  # fewest decode steps that a mean is taken of


class DecodeTimes:
    """Sums over decode steps, grouped by the bit length of their number of samples."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int, int, float]] = {}  # steps, samples, cached tokens, seconds

    def add(self, samples: int, cached: int, seconds: float) -> None:
        """Add a step. `cached` is the total number of cached tokens of its samples."""
        bits = samples.bit_length()
        steps, all_samples, all_cached, all_seconds = self._sums.get(bits, (0, 0, 0, 0.0))
        self._sums[bits] = steps + 1, all_samples + samples, all_cached + cached, all_seconds + seconds

    def means(self) -> list[DecodeStep]:
        """In ascending order of the number of samples."""
        sums = (self._sums[bits] for bits in sorted(self._sums))
        return [
            (samples / steps, cached / samples, seconds / steps)
            for steps, samples, cached, seconds in sums
            if steps >= MIN_STEPS
        ]
