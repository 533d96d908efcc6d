"""How a wrong plan is refused: `PlanError`, and the nearest right word for a misspelt one.

Owns no checks: each vocabulary file checks its own values. Imports nothing, so that every floor may use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanError(ValueError):
    """Something a person wrote (a plan, a mesh, a graph, a preset's name) cannot be run.

    Args:
        problems: one sentence each: what is wrong, which value, what to do. `str()` gives them a line each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def suggest(word: object, right: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest of `right`, or all of them where none is near."""
    right = list(right)
    near = difflib.get_close_matches(str(word), right, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(right)}."
