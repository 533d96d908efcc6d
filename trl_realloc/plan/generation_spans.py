"""`GenerationSpans`: the spans of an engine's generation, divided at the ends of samples."""

from __future__ import annotations

from .spans import Span


SHORTEST_SPAN = 0.1  # shortest span, as a share of the time since the generation's start; gives some 30 spans


class GenerationSpans:
    """The spans of one call's generation on one device. All times are seconds of one clock."""

    def __init__(self, call: str, device: int, step: int, start: float) -> None:
        self.call, self.device, self.step, self.start = call, device, step, start
        self.spans: list[Span] = []
        self._begun = start  # start of the open span
        self._samples = self._tokens = 0  # counts of the open span

    def finished(self, now: float, samples: int, tokens: int = 0) -> None:
        """Record the end of samples."""
        self._samples += samples
        self._tokens += tokens
        if now - self._begun > SHORTEST_SPAN * (now - self.start):
            self._close(now)

    def end(self, end: float) -> list[Span]:
        """End the generation. Returns all spans."""
        if end > self._begun or self._samples or not self.spans:
            self._close(end)
        return self.spans

    def _close(self, end: float) -> None:
        end = max(end, self._begun)
        self.spans.append(
            Span(self.call, self.device, self._begun, end, self.step, self._tokens, samples=self._samples)
        )
        self._begun, self._samples, self._tokens = end, 0, 0
