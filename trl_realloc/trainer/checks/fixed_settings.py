"""`fixed_settings`: settings that have determined a run's plan, engines and data, so that changing one during the run
is refused.

Settings that may change are read again for every update: PPO's in `ppo_trainer`, those of TRL's GRPO and RLOO by TRL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .config_checks import ConfigError


if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


_OF_ALL = ("max_grad_norm", "max_staleness", "skip_nonfinite_updates")
OF_PPO = (
    *_OF_ALL,
    *("response_length", "temperature", "seed", "match_trl", "reward_weights"),
    *("batch_size", "local_batch_size", "mini_batch_size", "local_mini_batch_size", "num_mini_batches"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "local_rollout_forward_batch_size"),
    "vllm_importance_sampling_correction",
)
OF_POLICY = _OF_ALL
# attributes that TRL's trainers of one policy read whenever they generate or compute a loss
DRAWN_BY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")


def fixed_settings(args: TrainingArguments, names: Iterable[str]) -> dict[str, Any]:
    """The current values of these settings, by name."""
    return {name: getattr(args, name) for name in names}


def fixed_attributes(trainer: Trainer) -> dict[str, Any]:
    """The current values of the settings of a trainer of one policy, and of its attributes derived from other settings,
    by their names in messages."""
    attributes = {f"the trainer's {name}": getattr(trainer, name, None) for name in DRAWN_BY}
    generation = vars(getattr(trainer, "generation_config", None) or SimpleNamespace())  # TRL's sampling settings
    attributes |= {f"generation_config.{name}": value for name, value in generation.items()}
    # with a reference, the weight of its penalty may change
    beta = {} if trainer.ref_model is not None else {"the trainer's beta": trainer.beta}
    return fixed_settings(trainer.args, OF_POLICY) | attributes | beta


def refuse_changed(first: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse a setting that has changed since the trainer's construction.

    Raises:
        ConfigError: names the setting, both values and the remedy.
    """
    for name, value in first.items():
        if now.get(name) != value:
            raise ConfigError(
                f"{name} was {value!r} when the trainer was made and is now {now.get(name)!r}, which the plan's "
                f"engines would not follow; make a new trainer that resumes from a checkpoint."
            )


__all__ = ["OF_PPO", "fixed_attributes", "fixed_settings", "refuse_changed"]
