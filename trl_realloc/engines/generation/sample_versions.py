"""The parameter version of each token of a sample, while a vLLM engine loads new parameters. `vllm_requests` records it
in the engine's process, `background_generation` reads it. This file does not import vLLM."""

from __future__ import annotations

from collections.abc import Iterable


Run = tuple[int, int]  # a version, and the number of consecutive tokens sampled with it


class VersionMarks:
    """The versions of one request's tokens.

    Args:
        version: parameter version of the first token.
    """

    def __init__(self, version: int) -> None:
        self._marks = [(0, version)]  # (index of the first token, version)

    def change(self, count: int, version: int) -> None:
        """Tokens after the first `count` get `version`."""
        if self._marks[-1][0] == count:  # no token has the version before
            self._marks.pop()
        self._marks.append((count, version))

    def runs(self, count: int) -> list[Run]:
        """The versions of the first `count` tokens, in order."""
        ends = [first for first, _ in self._marks[1:]] + [count]
        return [(version, end - first) for (first, version), end in zip(self._marks, ends, strict=True)]


def versions_of(runs: Iterable[Run]) -> tuple[int, ...]:
    return tuple(version for version, count in runs for _ in range(count))
