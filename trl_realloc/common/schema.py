"""Values from files held against types, by pydantic: its errors as sentences with the path to the key and the value.

The types are the dataclasses and annotations of whoever reads the file. Reading it is the business of `files`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .errors import LONGEST_WORD, MOST_LISTED, PlanError, shown


def checked(kind: Any, value: object, where: str, *, key: str = "") -> Any:
    """The value as that type, with all of it checked: a mapping becomes the dataclass.

    Args:
        kind: a type that pydantic knows, annotated ranges included.
        where: the file, for messages.
        key: the path of the value in it.

    Raises:
        PlanError: a sentence for each wrong value, of many the first ones.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        sentences = [f"{where}: {_sentence(one['loc'], one, key)}" for one in found[:MOST_LISTED]]
        if len(found) > MOST_LISTED:
            sentences.append(f"{where}: {len(found) - MOST_LISTED:,} more values are wrong.")
        raise PlanError(*sentences) from None


@lru_cache(maxsize=256)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _sentence(place: tuple[int | str, ...], error: Any, key: str) -> str:
    path = key
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        # a key may hold a line's end or be long
        name = part if part.isprintable() and len(part) <= LONGEST_WORD else shown(part)
        path += f".{name}" if path else name
    if error["type"] == "missing":
        return f"{path} is missing."
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"there is no key {path}; leave it out."
    said = str(error["msg"])
    said = said[:1].lower() + said[1:]
    return f"{path or 'it'} is {shown(error['input'])}; {said.replace('input should', 'it should')}."
