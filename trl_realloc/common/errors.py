"""`PlanError`, and helpers for its messages: shortened values and suggestions for misspelt names.

Checks are in the files that define the values. This file imports nothing from this package, so that every other package
can use it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher


MAX_LISTED = 10  # problems of one kind in a message
MAX_SHOWN = 30  # valid names in a message
LONGEST_WORD = 100  # characters; longer texts are not misspelt names, and comparing them takes seconds


class PlanError(ValueError):
    """A user's input (a plan, a mesh, a graph, a preset's name) that cannot be run.

    Args:
        problems: sentences, each with the problem, the value, and the remedy. `str()` puts each on a line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Problems(list[str]):
    """Problems collected while a value is read, so that one error reports all of them."""

    @contextmanager
    def of(self, where: str = "") -> Iterator[None]:
        """Collect the problems of a `PlanError` raised in the block, each with the prefix `where`. The error is not
        propagated."""
        try:
            yield
        except PlanError as error:
            self += [f"{where}: {problem}" if where else problem for problem in error.problems]

    def refuse(self) -> None:
        if self:
            raise PlanError(*self)


@contextmanager
def in_file(path: object) -> Iterator[None]:
    """Prefix a file's path to each problem of a `PlanError` raised in the block, unless the problem has it."""
    try:
        yield
    except PlanError as error:
        problems = (problem if str(path) in problem else f"{path}: {problem}" for problem in error.problems)
        raise PlanError(*problems) from None


_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 120
_shortened.maxlist = _shortened.maxtuple = _shortened.maxset = 6


def shown(value: object) -> str:
    """`repr(value)`, shortened to some hundred characters, for a message about a user's input."""
    try:
        return _shortened.repr(value)
    except ValueError:  # Python does not format integers of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to show"


def unknown_keys(keys: Iterable[object], valid: Collection[str], what: str) -> list[str]:
    """A sentence with a suggestion for each key that is not `valid`, at most `MAX_LISTED` of them.

    Args:
        what: beginning of each sentence, like `a plan has no key`.
    """
    unknown = [key for key in keys if key not in valid]
    sentences = [f"{what} {shown(key)}; {suggest(key, valid)}" for key in unknown[:MAX_LISTED]]
    if len(unknown) > MAX_LISTED:
        sentences.append(f"{len(unknown) - MAX_LISTED:,} more keys are unknown.")
    return sentences


def nearest(name: object, valid: Iterable[str], at_least: float = 0.5) -> str | None:
    """The valid name most similar to `name`, ignoring case; the first of equally similar ones. `None` if difflib's
    ratio is below `at_least` for all of them.

    `difflib.get_close_matches` returns the alphabetically last of equally similar names: `pp` for `dpp`, not `dp`.
    """
    if not isinstance(name, str) or len(name) > LONGEST_WORD:
        return None

    def similarity(candidate: str) -> float:
        return SequenceMatcher(None, name.lower(), candidate.lower()).ratio()

    best = max(valid, key=similarity, default=None)
    return best if best is not None and similarity(best) >= at_least else None


def suggest(name: object, valid: Iterable[str]) -> str:
    """The end of a message about an invalid name: the nearest valid name, or if none is near, all valid names, unless
    there are more than `MAX_SHOWN`."""
    names = list(valid)
    near = nearest(name, names)
    if near is None and len(names) > MAX_SHOWN:
        return f"none of the {len(names)} that there are is like it."
    return f"did you mean {near!r}?" if near else f"choose from {', '.join(names) or 'none'}."
