"""Seconds of the forwards and backwards of a pipeline's stage, measured while they run."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..device import is_accelerator


DECAY = 0.5  # weight of earlier mini-batches, per mini-batch
MIN_SPREAD = 0.05  # relative spread of the tokens; below it seconds are taken as proportional to tokens


@dataclass
class TokenFit:
    """Sums for a straight line through (tokens, seconds)."""

    n: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.n += 1
        self.tokens += tokens
        self.seconds += seconds
        self.squares += tokens * tokens
        self.products += tokens * seconds

    def fade(self) -> None:
        for name in vars(self):
            setattr(self, name, DECAY * getattr(self, name))

    def line(self) -> tuple[float, float]:
        """(seconds of a micro-batch, seconds per token of it), neither negative; NaN before the first measurement."""
        if not self.n:
            return float("nan"), float("nan")
        tokens, seconds = self.tokens / self.n, self.seconds / self.n
        slope, spread = seconds / tokens, self.squares / self.n - tokens * tokens
        if spread > (MIN_SPREAD * tokens) ** 2:
            slope = min(slope, max(0.0, (self.products / self.n - tokens * seconds) / spread))
        return seconds - slope * tokens, slope


class StageTimes:
    """The times of one rank. On an accelerator they are device times, for which the host does not wait: a task begins
    when the device has its input and has finished its earlier work, not when the host launches it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fits: dict[tuple[int, bool], TokenFit] = defaultdict(TokenFit)
        self._events: list[tuple[tuple[int, bool], int, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def of(self, model: int, is_backward: bool, tokens: int) -> Iterator[None]:
        """Measure what runs in the context."""
        key = model, is_backward
        if is_accelerator(self.device):
            start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((key, tokens, start, end))
        else:
            began = time.perf_counter()
            yield
            self.fits[key].add(tokens, time.perf_counter() - began)

    def begin_mini_batch(self) -> None:
        """Collect what the device has measured until now; its weight decays with each mini-batch."""
        for fit in self.fits.values():
            fit.fade()
        running = []
        for key, tokens, start, end in self._events:
            if end.query():
                self.fits[key].add(tokens, start.elapsed_time(end) / 1e3)
            else:
                running.append((key, tokens, start, end))
        self._events = running
