"""`GRPOTrainer` and `RLOOTrainer`: TRL's classes of the same names under a plan. What a plan replaces is in
`policy_trainer`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .accelerate_plugin import ReallocationPlugin
from .checks.config_checks import ConfigError
from .grpo_config import GRPOConfig, RLOOConfig
from .policy.ahead import PolicyAheadMixin
from .policy.policy_trainer import PlannedPolicyTrainer
from .policy.record import PolicyRecordMixin
from .policy.sampled_completions import PolicyCompletionsMixin
from .trainer_inputs import path_as_text
from .trl_policy_trainers import TRLGRPOTrainer, TRLRLOOTrainer


class GRPOTrainer(PlannedPolicyTrainer, PolicyAheadMixin, PolicyRecordMixin, PolicyCompletionsMixin, TRLGRPOTrainer):
    """TRL's `GRPOTrainer` with every model call on the devices that the execution plan gives it.

    Takes the arguments of the installed TRL's class, in its order, and a `ReallocationPlugin` as `reallocation_plugin`.
    Data, tools, environments, reward functions, advantages, losses and logs are TRL's own code.
    """

    _tag_names = ["trl", "grpo", "trl-realloc"]

    def __init__(self, *args: Any, reallocation_plugin: ReallocationPlugin | None = None, **kwargs: Any) -> None:
        arguments = _named(TRLGRPOTrainer, GRPOConfig, args, kwargs)
        arguments = self._plan(arguments, reallocation_plugin)
        with _hidden(arguments["args"], **self._hidden_settings):
            super().__init__(**arguments)
        self._take_over()


class RLOOTrainer(PlannedPolicyTrainer, PolicyAheadMixin, PolicyRecordMixin, PolicyCompletionsMixin, TRLRLOOTrainer):
    """TRL's `RLOOTrainer` with every model call on the devices that the execution plan gives it.

    Takes the arguments of the installed TRL's class, in its order, and a `ReallocationPlugin` as `reallocation_plugin`.
    Data, reward functions, advantages, losses and logs are TRL's own code. With `vllm_importance_sampling_correction`
    the loss gets, as the log-probabilities of the policy before the update, those of the policies that drew the
    completions.
    """

    _tag_names = ["trl", "rloo", "trl-realloc"]

    def __init__(self, *args: Any, reallocation_plugin: ReallocationPlugin | None = None, **kwargs: Any) -> None:
        arguments = _named(TRLRLOOTrainer, RLOOConfig, args, kwargs)
        arguments = self._plan(arguments, reallocation_plugin)
        with _hidden(arguments["args"], **self._hidden_settings):
            super().__init__(**arguments)
        self._take_over()

    vllm_importance_sampling_correction = False  # of a run that the plan's engines train

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        made: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.vllm_importance_sampling_correction and self.model.training:
            before = made["old_logps"]
            made["old_logps"] = drawn = drawn_logps(self.vllm_generation.logprobs, made["completion_mask"], before)
            ratios = self.accelerator.gather(torch.exp(before - drawn))
            for name in ("min", "mean", "max"):
                value = getattr(ratios, name)().item() if len(ratios) else 0.0
                self._metrics["train"][f"sampling/importance_sampling_ratio/{name}"].append(value)
        return made


def drawn_logps(logprobs: Sequence[torch.Tensor], mask: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The log-probabilities (rows,) of completions by the policies that drew them.

    Args:
        logprobs: of the tokens of each completion, as its engine has told them; NaN for a token that it has none of.
        mask: (rows, tokens), of the tokens that the loss reads; on the right it may be padded.
        before: (rows,) the same by another policy, taken for completions with such a token.
    """
    sums = [(row * of_row[: len(row)].to(row)).sum() for row, of_row in zip(logprobs, mask, strict=True)]
    drawn = torch.stack(sums).to(before) if sums else before
    return torch.where(drawn.isnan(), before, drawn)


def _named(trl: type, config: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor by name, with models' paths as text, and with a default configuration where there
    is none.

    Raises:
        TypeError: the installed TRL's class has no such argument, or one is missing.
        ConfigError: `args` is not a configuration of this package.
    """
    try:
        named: dict[str, Any] = dict(inspect.signature(trl).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"{trl.__name__}: {error}; its arguments are those of TRL's {trl.__name__}") from None
    for argument in {"model", "reward_funcs"} & named.keys():
        given = named[argument]
        named[argument] = [path_as_text(one) for one in given] if isinstance(given, list) else path_as_text(given)
    if named.get("args") is None:
        model = named["model"]
        name = model if isinstance(model, str) else model.config._name_or_path
        kind = config.__name__.removesuffix("Config")
        named["args"] = config(f"{name.split('/')[-1]}-{kind}")
    if not isinstance(named["args"], config):
        given = type(named["args"])
        raise ConfigError(
            f"args must be a trl_realloc.{config.__name__}, not a {given.__module__}.{given.__name__}; import "
            f"{config.__name__} from trl_realloc."
        )
    return named


@contextlib.contextmanager
def _hidden(args: Any, **values: Any) -> Iterator[None]:
    """Inside, the settings have these values, so that TRL's constructor makes no engine and no reference of its own."""
    kept = {name: getattr(args, name) for name in values if hasattr(args, name)}
    for name in kept:
        setattr(args, name, values[name])
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(args, name, value)


__all__ = ["GRPOTrainer", "RLOOTrainer"]
