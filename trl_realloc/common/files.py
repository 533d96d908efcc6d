"""Reads text, YAML and JSON files of users and of earlier runs, within limits of size and depth.

Every error is a `PlanError` that names the file. `schema` checks the values' types, the caller their meaning.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

from .errors import PlanError, shown


MAX_BYTES = 1 << 20  # plan, recipe or model config; PyYAML reads some 100 kB/s
MAX_RECORD_BYTES = 1 << 30  # metrics, timelines and profiles, which grow with the length of a run
MAX_NESTING = 50  # depth of lists and mappings in YAML
MAX_VALUES = 20_000  # values in a YAML file; an alias counts as all its values
MAX_CHARACTERS = 1 << 21  # total of these values
MAX_DIGITS = 18  # digits of an integer


def exists(path: str | Path) -> bool:
    """True if there is a file or folder at the path. False for names that no file can have."""
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def packaged_recipes() -> dict[str, Path]:
    """The recipes and plans in the package, by name, like `llama-8b/ppo.yaml`."""
    package = Path(__file__).parent.parent
    folder = next((place for place in (package / "recipes", package.parent / "recipes") if place.is_dir()), package)
    return {str(path.relative_to(folder)): path for path in sorted(folder.glob("*/*.yaml"))}


def or_packaged(path: str | Path) -> Path:
    """The path itself, or if nothing is there, the packaged recipe or plan of that name, with or without a leading
    `recipes/`."""
    return Path(path) if exists(path) else packaged_recipes().get(str(path).removeprefix("recipes/"), Path(path))


def cache_folder() -> Path:
    """The folder of data that the user's later runs can reuse: `$TRL_REALLOC_CACHE`, or `~/.cache/trl_realloc`."""
    return Path(os.environ.get("TRL_REALLOC_CACHE", Path.home() / ".cache" / "trl_realloc"))


def read_text(path: str | Path, what: str, most_bytes: int = MAX_BYTES) -> str:
    """The text of a regular file.

    Args:
        what: the file's content, for messages, like `the plan`.

    Raises:
        PlanError: the file does not exist, is not regular (a pipe or a device would never end), is larger than
            `most_bytes`, or is not UTF-8.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise PlanError(f"{path}: {what} cannot be read (it is {kind}); give a file's path.")
        if status.st_size > most_bytes:
            raise PlanError(
                f"{path}: {what} cannot be read ({status.st_size:,} bytes, and {most_bytes:,} are the most); is this "
                f"the right file?"
            )
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"{shortened(path)}: {what} cannot be read ({error.strerror}).") from None
    except PlanError:
        raise
    except ValueError:  # a zero byte in the name
        raise PlanError(f"{shown(str(path))}: {what} cannot be read (no file has such a name).") from None
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise PlanError(f"{path}: {what} cannot be read (it is UTF-16); save it as UTF-8.")
    if b"\0" in data:
        raise PlanError(f"{path}: {what} cannot be read (it is a binary file).")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start
        raise PlanError(
            f"{path}: {what} cannot be read (byte {data[start]:#x} at position {start} is not UTF-8); save it as UTF-8."
        ) from None


def shortened(path: str | Path) -> str:
    """A path for a message, cut after 400 characters."""
    text = str(path)
    return text if len(text) <= 400 else f"{text[:400]}…"


def parse_yaml(text: str, what: str) -> Any:
    """The value of a YAML text.

    Raises:
        PlanError: the text is not YAML, has a duplicate key, or exceeds the limits above.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except PlanError:
        raise
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        raise PlanError(f"{what} is not YAML: {message[:400]}.") from None
    # a number or date that Python cannot represent, such as 2020-13-45, or a tag on a value of the wrong type
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        raise PlanError(f"{what} is not YAML: {str(error)[:400]}.") from None


def read_yaml_mapping(path: str | Path, what: str, like: str) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Args:
        like: an example line of such a file.

    Raises:
        PlanError: see `read_text` and `parse_yaml`; or the value is not a mapping.
    """
    text = read_text(path, what)
    try:
        value = parse_yaml(text, what)
    except PlanError as error:
        raise PlanError(*(f"{path}: {problem}" for problem in error.problems)) from None
    if not isinstance(value, dict):
        raise PlanError(f"{path}: {what} is a mapping of settings like `{like}`, not {shown(value)}.")
    return value


def read_json(path: str | Path, what: str, most_bytes: int = MAX_BYTES) -> Any:
    """The value of a JSON file. Raises `PlanError` like `read_text`, or if it is not JSON."""
    return parse_json(read_text(path, what, most_bytes), f"{path}: {what}")


def read_json_mapping(path: str | Path, what: str, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises `PlanError` like `read_json`, or if the value is not an object."""
    value = read_json(path, what, most_bytes)
    if not isinstance(value, dict):
        raise PlanError(f"{path}: {what} is a JSON object, not {shown(value)}.")
    return value


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises `PlanError`, whose message begins with `what`, if it is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise PlanError(f"{what} is not JSON: it is nested too deeply.") from None
    except ValueError as error:
        reason = "it is empty" if not text.strip() else str(error)[:400]
        raise PlanError(f"{what} is not JSON: {reason}.") from None


class _Loader(yaml.SafeLoader):
    """Loads YAML within limits. It refuses duplicate keys (plain YAML silently keeps the last), and counts an alias as
    all its values, because some kilobytes of nested aliases can stand for gigabytes of text."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._values = self._characters = 0
        self._weights: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        line = self.peek_event().start_mark.line + 1
        before = self._values, self._characters
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise PlanError(f"lists and mappings are nested more than {MAX_NESTING} deep (line {line}); write it flat.")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias:
            if id(node) not in self._weights:
                raise PlanError(f"an alias stands for a value that it is itself in (line {line}); write it out.")
            values, characters = self._weights[id(node)]
            self._values, self._characters = self._values + values, self._characters + characters
        else:
            self._values += 1
            self._characters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            self._weights[id(node)] = self._values - before[0], self._characters - before[1]
        if self._values > MAX_VALUES or self._characters > MAX_CHARACTERS:
            raise PlanError(f"there are more than {MAX_VALUES:,} values, with what aliases stand for (line {line}).")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise PlanError(f"{shown(key.value)} is written twice (line {key.start_mark.line + 1}); keep one.")
                keys.add(key.value)
        return node

    def construct_yaml_int(self, node: Any) -> int:
        """An integer. Raises `PlanError` for more than `MAX_DIGITS` digits, which no setting has and Python may refuse
        to print."""
        value: int = super().construct_yaml_int(node)
        if abs(value) >= 10**MAX_DIGITS:
            raise PlanError(f"a whole number of more than {MAX_DIGITS} digits (line {node.start_mark.line + 1}).")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
