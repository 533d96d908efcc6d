"""The version of the parameters that drew each token of a sample, while a vLLM engine takes new ones.

`vllm_requests` keeps it for each request in the engine's process, `background_generation` reads it. This file does not
import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable


Run = tuple[int, int]  # a version, and the number of tokens that it drew one after the other


class VersionMarks:
    """The versions of one request's tokens.

    Args:
        version: of the parameters that the first token will be drawn with.
    """

    def __init__(self, version: int) -> None:
        self._marks = [(0, version)]  # first token, version

    def change(self, drawn: int, version: int) -> None:
        """All tokens after the first `drawn` are of `version`."""
        if self._marks[-1][0] == drawn:  # the version before has drawn none
            self._marks.pop()
        self._marks.append((drawn, version))

    def runs(self, drawn: int) -> list[Run]:
        """The versions of the first `drawn` tokens, in their order."""
        ends = [first for first, _ in self._marks[1:]] + [drawn]
        return [(version, end - first) for (first, version), end in zip(self._marks, ends, strict=True)]


def versions_of(runs: Iterable[Run]) -> tuple[int, ...]:
    """The version of each token."""
    return tuple(version for version, count in runs for _ in range(count))
