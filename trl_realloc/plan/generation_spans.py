"""`GenerationSpans`: when an engine generated, divided where samples ended, so that a timeline shows their flow."""

from __future__ import annotations

from .timeline import Span


SHORTEST_SPAN = (
    0.1  # of the time since the generation's start: the shortest span, so that an engine has some 30 of them
)


class GenerationSpans:
    """The spans of one call's generation on one device. All times are seconds of one clock."""

    def __init__(self, call: str, device: int, step: int, start: float) -> None:
        self.call, self.device, self.step, self.start = call, device, step, start
        self.spans: list[Span] = []
        self._begun = start  # of the span that is not closed yet
        self._samples = self._tokens = 0  # of that span

    def finished(self, now: float, samples: int, tokens: int = 0) -> None:
        """Samples have ended."""
        self._samples += samples
        self._tokens += tokens
        if now - self._begun > SHORTEST_SPAN * (now - self.start):
            self._close(now)

    def end(self, end: float) -> list[Span]:
        """All spans of a generation that has ended."""
        if end > self._begun or self._samples or not self.spans:
            self._close(end)
        return self.spans

    def _close(self, end: float) -> None:
        end = max(end, self._begun)
        self.spans.append(
            Span(self.call, self.device, self._begun, end, self.step, self._tokens, samples=self._samples)
        )
        self._begun, self._samples, self._tokens = end, 0, 0
