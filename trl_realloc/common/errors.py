"""How a wrong plan is refused: `PlanError`, and the nearest right word for a misspelt one.

Owns no checks: each vocabulary file checks its own values. Imports nothing of ours, so that every floor may use it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher


MOST_LISTED = 10  # problems of one kind that a refusal lists
MOST_SHOWN = 30  # right words that a message lists
LONGEST_WORD = 100  # characters; a longer one is no misspelt word, and comparing it takes seconds


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


class Problems(list[str]):
    """Sentences gathered while a value is read, so that all of them are refused at once."""

    @contextmanager
    def of(self, where: str = "") -> Iterator[None]:
        """Gather the problems of a `PlanError` raised in the block, each after `where`, and go on behind it."""
        try:
            yield
        except PlanError as error:
            self += [f"{where}: {problem}" if where else problem for problem in error.problems]

    def refuse(self) -> None:
        """Raises `PlanError` if there are any."""
        if self:
            raise PlanError(*self)


_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 120
_shortened.maxlist = _shortened.maxtuple = _shortened.maxset = 6


def shown(value: object) -> str:
    """`repr(value)`, cut to some hundred characters, for a message about what a person wrote."""
    try:
        return _shortened.repr(value)
    except ValueError:  # Python refuses to write a whole number of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to show"


def unknown_keys(given: Iterable[object], known: Collection[str], what: str) -> list[str]:
    """A sentence for each key of `given` that is not `known`, with the nearest that is; of many, the first ones.

    Args:
        what: the beginning of each sentence, like `a plan has no key`.
    """
    unknown = [key for key in given if key not in known]
    sentences = [f"{what} {shown(key)}; {suggest(key, known)}" for key in unknown[:MOST_LISTED]]
    if len(unknown) > MOST_LISTED:
        sentences.append(f"{len(unknown) - MOST_LISTED:,} more keys are unknown.")
    return sentences


def nearest(word: object, right: Iterable[str], at_least: float = 0.5) -> str | None:
    """The word of `right` most like `word`, whatever its case; the first of equals; `None` where difflib's ratio is
    below `at_least` for all of them.

    `difflib.get_close_matches` takes the alphabetically last of equals: for `dpp` it gives `pp`, not `dp`.
    """
    if not isinstance(word, str) or len(word) > LONGEST_WORD:
        return None

    def likeness(candidate: str) -> float:
        return SequenceMatcher(None, word.lower(), candidate.lower()).ratio()

    best = max(right, key=likeness, default=None)
    return best if best is not None and likeness(best) >= at_least else None


def suggest(word: object, right: Iterable[str]) -> str:
    """The end of a refusal of `word`: the nearest of the right words, or where none is near all of them, if they are
    few."""
    right = list(right)
    near = nearest(word, right)
    if near is None and len(right) > MOST_SHOWN:
        return f"none of the {len(right)} that there are is like it."
    return f"did you mean {near!r}?" if near else f"choose from {', '.join(right) or 'none'}."
