"""Recipes: a run as one YAML file (`--config`), read by TRL's parser, with errors for the person who wrote it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trl import TrlParser

from .checkpoint import CheckpointError
from .config import ConfigError
from .data import DataError
from .errors import PlanError, suggest
from .models import ModelError
from .planner.task import read_settings
from .rewards import RewardError
from .runtime.alarm import JobFailed


class RecipeError(ValueError):
    """A recipe that cannot be read. The message names the file, the key and the nearest right one."""


SENTENCES = (RecipeError, CheckpointError, ConfigError, DataError, ModelError, RewardError, PlanError, JobFailed)


def parse_recipe(dataclass_types: Sequence[type], arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """The dataclasses filled from `--config recipe.yaml` and the command line, which comes first.

    Raises:
        RecipeError: no such file, no mapping in it, or a key that no dataclass has.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--config" in given[:-1]:
        _check_keys(Path(given[given.index("--config") + 1]), dataclass_types)
    parsed = TrlParser(list(dataclass_types)).parse_args_and_config(args=given)
    return tuple(parsed)


def _check_keys(path: Path, dataclass_types: Sequence[type]) -> None:
    try:
        recipe = read_settings(path)
    except PlanError as error:
        raise RecipeError(str(error)) from None
    known = {field.name for kind in dataclass_types for field in dataclasses.fields(kind) if field.init} | {"env"}
    problems = [f"no setting {key!r}; {suggest(str(key), sorted(known))}" for key in recipe if key not in known]
    if problems:
        raise RecipeError(f"{path}: {' '.join(problems)}")


def run(main: Callable[[], object]) -> None:
    """Call a script's `main`; what the person got wrong ends it with one sentence on stderr and exit code 2."""
    try:
        main()
    except SENTENCES as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
