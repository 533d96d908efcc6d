"""Reads recipes: a run as one YAML file (`--config`), parsed by TRL's parser, with errors that name the key.

The planner reads recipes without torch in `planner.recipe.recipe`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch.distributed as dist
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from trl import ModelConfig, TrlParser, get_peft_config

from ..algorithms.nonfinite import NonFiniteError
from ..algorithms.prompts import DataError
from ..algorithms.rewards import RewardError
from ..common.errors import PlanError, shown, unknown_keys
from ..common.files import read_yaml_mapping
from ..common.settings import SETTINGS, number_of_text, read_settings
from ..engines.model_configs import ModelError
from ..planner.recipe.defaults import ALGORITHM, LAUNCH
from ..runtime.failures.alarm import JobFailed
from ..trainer.checkpoint import CheckpointError, SaveError
from ..trainer.checks.config_checks import ConfigError
from ..trainer.grpo_config import GRPOConfig, PolicyConfig, RLOOConfig
from ..trainer.ppo_config import PPOConfig


if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig


CONFIGS: Mapping[str, type[PPOConfig | PolicyConfig]] = {"ppo": PPOConfig, "grpo": GRPOConfig, "rloo": RLOOConfig}


class RecipeError(ValueError):
    """A recipe that cannot be read. The message names the file, the key and the nearest valid one."""


SENTENCES = (
    RecipeError,
    CheckpointError,
    SaveError,
    ConfigError,
    DataError,
    ModelError,
    RewardError,
    NonFiniteError,
    PlanError,
    JobFailed,
)


def parse_recipe(dataclass_types: Sequence[type], arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
    """The dataclasses filled from `--config recipe.yaml` and the command line, which takes precedence.

    Raises:
        RecipeError: the file does not exist or is not a mapping, a key is unknown, or a value has the wrong type.
    """
    words: list[str] = []
    for argument in sys.argv[1:] if arguments is None else arguments:
        words += ["--config", argument.removeprefix("--config=")] if argument.startswith("--config=") else [argument]
    where = "the arguments"
    if "--config" in words:
        position = words.index("--config") + 1
        if position == len(words):
            raise RecipeError("--config needs the path of a recipe after it.")
        where = words[position]
        _check(Path(where), dataclass_types)
    try:
        parsed = _Parser(list(dataclass_types)).parse_args_and_config(args=words)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    except SENTENCES:
        raise
    except (ValueError, TypeError, OSError) as error:  # errors of TRL's and Transformers' checks
        raise RecipeError(f"{where}: {error}") from error
    return tuple(parsed)


def adapters_of(settings: Mapping[str, Any]) -> PeftConfig | None:
    """The adapters that a recipe with these settings trains; `None` without `use_peft`."""
    names = {field.name for field in dataclasses.fields(ModelConfig) if field.init}
    return get_peft_config(ModelConfig(**{name: settings[name] for name in names & settings.keys()}))


class _Parser(TrlParser):
    """TRL's parser, except that it raises instead of printing its usage and exiting, and accepts the planner's and the
    launcher's keys in a recipe."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(message)

    def set_defaults_with_config(self, **config: PretrainedConfig) -> list[str]:
        parser_keys = {key: value for key, value in config.items() if key not in (ALGORITHM, *LAUNCH) or self._has(key)}
        remaining: list[str] = super().set_defaults_with_config(**parser_keys)
        return remaining

    def _has(self, name: str) -> bool:
        return any(action.dest == name for action in self._actions)


def _check(path: Path, dataclass_types: Sequence[type]) -> None:
    """Raise `RecipeError` with all problems of a recipe's keys and values."""
    try:
        recipe = read_yaml_mapping(path, "the recipe", "learning_rate: 3.0e-6")
    except PlanError as error:
        raise RecipeError(str(error)) from None
    field_types: dict[str, Any] = {}
    for kind in dataclass_types:
        hints = get_type_hints(kind)
        field_types |= {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    kinds = {"env": dict[str, Any], ALGORITHM: str, **LAUNCH, **field_types}
    if "resume_from_checkpoint" in kinds:  # Transformers' type is text, but `train` also takes true
        kinds["resume_from_checkpoint"] = str | bool | None
    problems = unknown_keys(recipe, sorted(kinds), "no setting")
    _, wrong = read_settings({key: number_of_text(value) for key, value in recipe.items() if key in kinds})
    problems += wrong
    trained = {base.__name__.removesuffix("Config").lower() for kind in dataclass_types for base in kind.__mro__}
    if (named := recipe.get(ALGORITHM)) not in (None, *trained) and ALGORITHM not in field_types:
        problems.append(f"{ALGORITHM} is {shown(named)}, which this script does not train by; leave it out.")
    problems += [
        f"{key} must be {_in_words(kinds[key])}, not {shown(value)}.{_YAML_BOOLEANS if isinstance(value, bool) else ''}"
        for key, value in recipe.items()
        if key in kinds and key not in SETTINGS and not _may_be(kinds[key], value)
    ]
    if problems:
        raise RecipeError(f"{path}: {' '.join(problems)}")


def _may_be(kind: Any, value: object) -> bool:
    """True if a field of type `kind` can have the value. Text and `None` pass, because the parser reads text."""
    if value is None or isinstance(value, str):
        return True
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    except PydanticUserError:  # a type defined by the script
        return True
    return True


_YAML_BOOLEANS = " YAML reads yes, no, on and off as true and false; put the word in quotes."


def _in_words(kind: object) -> str:
    """The type of a field, for messages: `text or a list`."""
    parts = [part for part in get_args(kind) if part is not type(None)] if _is_union(kind) else [kind]
    names = [_WORDS.get(get_origin(part) or part, getattr(part, "__name__", str(part))) for part in parts]
    return " or ".join(dict.fromkeys(names))


def _is_union(kind: object) -> bool:
    return get_origin(kind) in (Union, UnionType)


_WORDS: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


def run(main: Callable[[], object]) -> None:
    """Call a script's `main`, then destroy the job's process groups, because NCCL warns if a process exits with some.
    An error of the classes `SENTENCES` ends the process with its message on stderr and exit code 2."""
    try:
        main()
    except SENTENCES as error:
        print(f"error: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        sys.exit(2)
    if dist.is_initialized():
        dist.destroy_process_group()
