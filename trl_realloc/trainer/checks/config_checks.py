"""Checks the settings of a trainer's configuration before `TrainingArguments` computes values from them, because its
errors would not name the setting.

Ranges of numbers are in `common.settings`. Checks that need data, models or the plan are in `ppo_setup`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from ...common.errors import shown
from ...common.settings import read_settings
from ...engines.generation.vllm_support import engine_argument_problems
from ...plan.execution_plan import ExecutionPlan


if TYPE_CHECKING:
    from transformers import TrainingArguments


class ConfigError(ValueError):
    """A setting that is not allowed. The message names the setting, its value and what to do."""


def by_transformers(args: TrainingArguments) -> str:
    """Advice for an error message: the setting of this configuration that selects generation by Transformers."""
    return f"set {'use_vllm: false' if hasattr(args, 'use_vllm') else 'generation_engine: transformers'}"


def check_settings(args: TrainingArguments) -> None:
    """Check a configuration, and convert numbers: NumPy's to Python's, 1e4 episodes to 10000. An `int` stays an `int`
    even if a `float` is allowed, as for `logging_steps`.

    Raises:
        ConfigError: lists all settings that are not allowed.
    """
    read, problems = read_settings({field.name: getattr(args, field.name, None) for field in fields(args)})
    for name, value in read.items():
        if type(getattr(args, name)) is not int:
            setattr(args, name, value)
    problems += [*_problems(args), *(_ppo_problems(args) if hasattr(args, "stop_token") else ())]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(args: TrainingArguments) -> Iterator[str]:
    """Sentences about settings that are not numbers, and about settings that exclude each other."""
    if not isinstance(args.plan, str | os.PathLike | Mapping | ExecutionPlan | None):
        yield f"plan must be auto, a preset, a YAML file's path, a dict or an ExecutionPlan, not {shown(args.plan)}."
    weights = args.reward_weights
    if weights is not None and not (isinstance(weights, list | tuple) and all(map(_is_finite, weights))):
        yield f"reward_weights must be a list of finite numbers, or None, not {shown(weights)}."
    for name in (
        "vllm_enable_sleep_mode",
        "vllm_repeatable_sampling",
        "full_vocabulary_logprobs",
    ):
        value, optional = getattr(args, name, False), name == "vllm_enable_sleep_mode"
        if not isinstance(value, bool) and not (optional and value is None):
            yield f"{name} must be true{', false or None' if optional else ' or false'}, not {shown(value)}."
    if args.vllm_engine_kwargs is not None:
        on_cpu = bool(args.use_cpu) or not torch.accelerator.is_available()
        yield from engine_argument_problems(_read_json(args.vllm_engine_kwargs), on_cpu)


def _ppo_problems(args: TrainingArguments) -> Iterator[str]:
    if args.stop_token is not None and args.stop_token_id is not None:
        yield "stop_token and stop_token_id are both set; keep one of them."
    yield from best_model_problems(args)
    yield from _correction_problems(args)


def best_model_problems(args: TrainingArguments) -> Iterator[str]:
    """Sentences about `load_best_model_at_end` in a run that the plan's engines train. If Accelerate trains, Trainer
    loads the best model."""
    if args.save_only_model and args.load_best_model_at_end:
        yield (
            "load_best_model_at_end loads the best checkpoint's float32 weights from its optimizer's state, which "
            "save_only_model leaves out; set one of them to false."
        )


def _correction_problems(args: TrainingArguments) -> Iterator[str]:
    """Sentences about `max_staleness` and the `vllm_importance_sampling_*` settings."""
    corrects, mode = args.vllm_importance_sampling_correction, args.vllm_importance_sampling_mode
    least, most = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if not isinstance(corrects, bool | None):
        yield f"vllm_importance_sampling_correction must be true, false or None, not {shown(corrects)}."
        return
    if _is_finite(args.max_staleness) and args.max_staleness > 0 and corrects is None:
        yield (
            f"max_staleness is {args.max_staleness}, so older policies generate some samples; choose the correction: "
            "vllm_importance_sampling_correction true weights the loss by the probability ratio trained / sampling "
            "policy, false clips PPO's ratio to the sampling policy. Neither is right for every task "
            "(docs/old_rollouts.md)."
        )
    if corrects and args.match_trl is True:
        yield (
            "match_trl reproduces TRL's PPO, which corrects for nothing; leave out match_trl or "
            "vllm_importance_sampling_correction."
        )
    if _is_finite(least) and _is_finite(most) and least >= most:
        yield (
            f"vllm_importance_sampling_clip_min {least:g} must be below vllm_importance_sampling_clip_max {most:g}; "
            "every weight would be outside of them."
        )
    if corrects and least is None and most is None and str(mode).endswith("_truncate"):
        yield (
            f"vllm_importance_sampling_mode {mode} needs a bound to truncate weights at; set "
            "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min."
        )


def _read_json(value: object) -> object:
    """The mapping in a command-line text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
