"""Checks values from files against types with pydantic. Its errors become sentences with the key's path and the value.

The types are dataclasses and annotations of the caller.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .errors import LONGEST_WORD, MAX_LISTED, PlanError, shown


def checked(kind: object, value: object, where: str, *, key: str = "") -> Any:
    """The value converted to a type, after checking all of it. A mapping becomes a dataclass.

    Args:
        kind: type that pydantic knows; annotated ranges are checked too.
        where: the file, for messages.
        key: the path of the value in the file, for messages.

    Raises:
        PlanError: has a sentence for each wrong value, at most `MAX_LISTED`.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        sentences = [f"{where}: {_sentence(detail['loc'], detail, key)}" for detail in details[:MAX_LISTED]]
        if len(details) > MAX_LISTED:
            sentences.append(f"{where}: {len(details) - MAX_LISTED:,} more values are wrong.")
        raise PlanError(*sentences) from None


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _sentence(location: tuple[int | str, ...], error: Any, key: str) -> str:
    path = key
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        # a key may be long or contain line breaks
        name = part if part.isprintable() and len(part) <= LONGEST_WORD else shown(part)
        path += f".{name}" if path else name
    if error["type"] == "missing":
        return f"{path} is missing."
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"there is no key {path}; leave it out."
    reason = str(error["msg"])
    reason = reason[:1].lower() + reason[1:]
    return f"{path or 'it'} is {shown(error['input'])}; {reason.replace('input should', 'it should')}."
