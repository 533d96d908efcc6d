"""The ranges of a run's settings, for `PPOConfig` and recipes: one row per setting that is a number or one of a few
strings.

Pure functions. Checks that need data, models or the number of processes are in `trainer`, except `no_room`, which
recipes need too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, Strict, TypeAdapter, ValidationError

from .errors import shown


@dataclass(frozen=True)
class Setting:
    """The values that one setting may have.

    Args:
        kind: type that pydantic checks.
        wanted: description for messages.
    """

    kind: Any
    wanted: str

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.kind)

    def read(self, value: object) -> Any:
        """The value, with NumPy's numbers converted to Python's. Raises `ValueError` if the setting cannot have it."""
        return self._adapter.validate_python(value)


def no_room(response_length: int, positions: int | None, model_name: str = "the model") -> str | None:
    """The problem, without a full stop, if a response leaves no token for a prompt; otherwise `None`.

    Args:
        response_length: maximum tokens of a response.
        positions: maximum tokens of a sample in the model; `None` for no limit.
        model_name: name of the model in the sentence.
    """
    if positions is None or response_length < positions:
        return None
    return (
        f"response_length {response_length} leaves no room for a prompt in {model_name}'s context of {positions}; "
        f"lower response_length"
    )


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _integral(value: object) -> object:
    value = _plain(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value  # such as 1e4


def _among(choices: tuple[str, ...], value: str) -> str:
    if value not in choices:
        raise ValueError("none of them")
    return value


def _setting(base: object, checks: Iterable[object], wanted: str, optional: bool) -> Setting:
    kind: Any = Annotated[(base, *checks)]  # type: ignore[misc]
    return Setting(kind | None, f"{wanted} (or None)") if optional else Setting(kind, wanted)


def _whole(least: int, most: int | None = None, *, optional: bool = False) -> Setting:
    wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    limits = [Ge(least), Le(2**62 if most is None else most)]
    return _setting(int, [Strict(), *limits, BeforeValidator(_integral)], wanted, optional)


def _number(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    optional: bool = False,
) -> Setting:
    low = f" from {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
    high = f" to {most:g}" if most is not None else f" and below {below:g}" if below is not None else ""
    wanted = f"a finite number{low}{high}"
    bounds = [kind(bound) for kind, bound in ((Ge, least), (Gt, above), (Le, most), (Lt, below)) if bound is not None]
    return _setting(float, [Strict(), AllowInfNan(False), *bounds, BeforeValidator(_plain)], wanted, optional)


def _one_of(*choices: str, optional: bool = False) -> Setting:
    return _setting(
        str, [Strict(), AfterValidator(partial(_among, choices))], " or ".join(map(repr, choices)), optional
    )


# vLLM silently raises lower temperatures to the minimum, and refuses higher ones
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
# dtypes of loaded models, in TRL's terms; "auto" is the checkpoint's dtype
DTYPES = ("auto", "bfloat16", "float16", "float32")

SETTINGS: Mapping[str, Setting] = {
    # The run
    "learning_rate": _number(least=0),
    "value_learning_rate": _number(least=0, optional=True),
    "weight_decay": _number(least=0),
    "adam_beta1": _number(least=0, below=1),
    "adam_beta2": _number(least=0, below=1),
    "adam_epsilon": _number(least=0),
    "max_grad_norm": _number(least=0, optional=True),
    "warmup_steps": _number(least=0),
    "num_train_epochs": _number(above=0),
    "max_steps": _whole(-1),
    "total_episodes": _whole(1, optional=True),
    "per_device_train_batch_size": _whole(1),
    "per_device_eval_batch_size": _whole(1),
    "gradient_accumulation_steps": _whole(1),
    "logging_steps": _number(least=0),
    "save_steps": _number(least=0),
    "eval_steps": _number(least=0, optional=True),
    "seed": _whole(0, 2**32 - 1),
    "data_seed": _whole(0, 2**32 - 1, optional=True),
    "ddp_timeout": _whole(1),
    # PPO
    "num_mini_batches": _whole(1),
    "num_ppo_epochs": _whole(1),
    "local_rollout_forward_batch_size": _whole(1),
    "num_sample_generations": _whole(0),
    "response_length": _whole(1),
    "dataset_num_proc": _whole(1, optional=True),
    "stop_token": _one_of("eos", optional=True),
    "stop_token_id": _whole(0, optional=True),
    "temperature": _number(least=0),
    "top_p": _number(above=0, most=1),
    "top_k": _whole(-1, optional=True),  # -1, 0 and None keep all
    "min_p": _number(least=0, most=1, optional=True),
    "repetition_penalty": _number(above=0),
    "missing_eos_penalty": _number(least=0, optional=True),
    "kl_coef": _number(),
    "kl_estimator": _one_of("k1", "k3"),
    "cliprange": _number(least=0),
    "cliprange_value": _number(least=0),
    "vf_coef": _number(least=0),
    "gamma": _number(least=0, most=1),
    "lam": _number(least=0, most=1),
    # GRPO and RLOO
    "num_generations": _whole(2),
    "max_completion_length": _whole(1),
    "beta": _number(least=0),
    "num_iterations": _whole(1),
    "steps_per_generation": _whole(1, optional=True),
    "generation_batch_size": _whole(1, optional=True),
    "tool_workers": _whole(0, 1024),
    "tool_timeout": _number(above=0, most=86400, optional=True),
    # Adapters
    "lora_r": _whole(1, 1 << 16),
    # Loading
    "dtype": _one_of(*DTYPES, optional=True),
    # Plans and engines
    "max_staleness": _whole(0, 64),
    "vllm_importance_sampling_mode": _one_of("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "vllm_importance_sampling_clip_max": _number(above=0, optional=True),
    "vllm_importance_sampling_clip_min": _number(least=0, optional=True),
    "generation_engine": _one_of("vllm", "transformers", optional=True),
    "vllm_gpu_memory_utilization": _number(above=0, most=1, optional=True),
    "vllm_max_model_length": _whole(1, optional=True),
    "vllm_start_timeout": _number(least=10, most=86400),
    "vllm_step_timeout": _number(least=5, most=86400),
    "vllm_load_timeout": _number(least=5, most=86400),
    "max_mismatch": _number(above=1, optional=True),
    "mismatch_action": _one_of("correct", "end"),
    "router_replay": _one_of("none", "rollout", "recompute", optional=True),
    "router_aux_loss_coef": _number(least=0, optional=True),
    "memory_headroom": _number(least=0, most=0.9),
    "heartbeat_timeout": _number(least=5, optional=True),
}


def read_settings(values: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """(converted values, problems): the values that have a row above, integers as `int`; and a sentence for each value
    that its setting cannot have."""
    read: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in values.items():
        setting = SETTINGS.get(name)
        if setting is None:
            continue
        try:
            read[name] = setting.read(value)
        except ValidationError:
            problems.append(f"{name} must be {setting.wanted}, not {shown(value)}.")
    return read, problems


def number_of_text(value: object) -> Any:
    """The number in a text such as `3e-6`, which YAML reads as text and command-line parsers as a number; any other
    value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value
