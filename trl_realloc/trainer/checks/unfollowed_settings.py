"""Settings of Transformers' and TRL's trainers that a plan's engines do not follow: one row each, with the consequence.

The command line reads the rows too, without torch. Ranges of settings, and settings that exclude each other, are in
`config_checks`; models and adapters that the engines do not train, in `trainable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class Then(Enum):
    """Consequence of a setting with a value other than its default."""

    REFUSE = "the configuration is refused"
    ACCELERATE = "Accelerate trains, as in TRL"
    LOG = "the log says that the setting has no effect"


PPO, GRPO_AND_RLOO = "PPO", "GRPO and RLOO"


@dataclass(frozen=True)
class Row:
    """A setting that the engines do not follow.

    Args:
        sentence: message, which may contain `{value}`. A reason for `ACCELERATE` has no full stop.
        trainers: trainers that the row applies to.
        when: predicate for the values that the row applies to. By default, values that are not empty, "no" or the
            default.
    """

    name: str
    then: Then
    sentence: str
    trainers: tuple[str, ...] = (PPO, GRPO_AND_RLOO)
    when: Callable[[object], bool] | None = None

    def applies(self, value: object, default: object = None) -> bool:
        if self.when is not None:
            return self.when(value)
        return bool(value) and value not in (default, "no")


def _is_default(accelerator_config: object) -> bool:
    """True for the value that Transformers creates from an unset `accelerator_config`."""
    try:
        return accelerator_config == type(accelerator_config)()
    except TypeError:  # a file's name
        return False


def _no_effect(name: str, reason: str, *trainers: str, when: Callable[[object], bool] | None = None) -> Row:
    return Row(name, Then.LOG, f"{name} has no effect: {reason}.", trainers or (PPO, GRPO_AND_RLOO), when)


_EVALUATION = "evaluations compute in the dtype of the training"
_NO_DDP = "no model is wrapped in DistributedDataParallel"
_LOADER = "prompts are tokenized before the training, and no process loads them"
_CONTINUOUS = "use_transformers_continuous_batching has no engine here; leave it out, vLLM batches continuously."
_SERVER = (
    "vllm_mode 'server' is a separate command on separate GPUs; here the plan assigns the engines' GPUs: leave it out, "
    "and set plan: separate."
)
_TP = "vllm_tensor_parallel_size {value} is the plan's: set tp of actor.generate in a plan, or leave it to plan: auto."

UNFOLLOWED: tuple[Row, ...] = (
    # change a run's speed or logs but not what it learns, or have no effect in TRL's PPO either
    _no_effect("torch_compile", "ragged batches change the shape of every forward"),
    _no_effect("bf16_full_eval", _EVALUATION),
    _no_effect("fp16_full_eval", _EVALUATION),
    _no_effect("ddp_find_unused_parameters", _NO_DDP),
    _no_effect("ddp_bucket_cap_mb", _NO_DDP),
    _no_effect("ddp_broadcast_buffers", _NO_DDP),
    _no_effect("ddp_static_graph", _NO_DDP),
    _no_effect("save_on_each_node", "each host writes files of a checkpoint where the hosts have separate disks"),
    _no_effect("cache_implementation", "the engines keep keys and values in their own way", GRPO_AND_RLOO),
    _no_effect(
        "auto_find_batch_size",
        "a batch that has run out of memory is not repeated with a smaller one; plan: auto fits",
        PPO,
    ),
    _no_effect("neftune_noise_alpha", "no noise is added to embeddings, in TRL's PPO neither", PPO),
    _no_effect("use_liger_kernel", "PPO's losses are computed outside of the models", PPO),
    _no_effect("torch_empty_cache_steps", "memory is freed when another engine needs it", PPO),
    _no_effect("include_num_input_tokens_seen", "episode and tokens/s are logged", PPO),
    _no_effect("debug", "numbers that are not finite are refused with the sample's name", PPO),
    _no_effect(
        "accelerator_config",
        "every process reads the whole batch, and the plan distributes its samples",
        PPO,
        when=lambda value: bool(value) and not _is_default(value),
    ),
    _no_effect("dataloader_num_workers", _LOADER, PPO),
    _no_effect("dataloader_persistent_workers", _LOADER, PPO),
    _no_effect("dataloader_prefetch_factor", _LOADER, PPO),
    _no_effect("dataloader_multiprocessing_context", _LOADER, PPO),
    _no_effect("train_sampling_strategy", "the order of the prompts is drawn from the seed", PPO),
    # change what is learned
    Row(
        "use_liger_kernel",
        Then.ACCELERATE,
        "use_liger_kernel computes the loss inside Liger's kernel, and the engines need it outside of the model",
        (GRPO_AND_RLOO,),
    ),
    Row(
        "sync_ref_model",
        Then.ACCELERATE,
        "sync_ref_model changes the reference while the run goes on, and the plan's reference stays as it is",
        (GRPO_AND_RLOO,),
    ),
    Row(
        "neftune_noise_alpha",
        Then.ACCELERATE,
        "neftune_noise_alpha {value:g} adds noise to embeddings while the model trains, and the engines add none",
        (GRPO_AND_RLOO,),
        lambda value: value is not None,
    ),
    Row(
        "cast_lm_head_to_fp32",
        Then.ACCELERATE,
        "cast_lm_head_to_fp32 gives the language head another dtype than the engines compute in",
        (GRPO_AND_RLOO,),
    ),
    # decided by a plan, or not supported by any engine
    Row("vllm_mode", Then.REFUSE, _SERVER, (GRPO_AND_RLOO,), lambda value: value == "server"),
    Row("vllm_tensor_parallel_size", Then.REFUSE, _TP, (GRPO_AND_RLOO,), lambda value: value != 1),
    Row("use_transformers_continuous_batching", Then.REFUSE, _CONTINUOUS, (GRPO_AND_RLOO,)),
    Row("use_transformers_paged", Then.REFUSE, _CONTINUOUS, (GRPO_AND_RLOO,)),  # the name in older releases of TRL
    Row(
        "vllm_model_impl",
        Then.REFUSE,
        "vllm_model_impl {value!r} is not supported; leave it out.",
        (GRPO_AND_RLOO,),
        lambda value: value != "vllm",
    ),
)


def unfollowed_settings(args: object, then: Then) -> Iterator[str]:
    """The sentences of all applicable rows with the consequence `then`.

    Args:
        args: a `PPOConfig`, `GRPOConfig` or `RLOOConfig`.
    """
    trainer = PPO if hasattr(args, "num_ppo_epochs") else GRPO_AND_RLOO
    defaults = {row.name: getattr(type(args), row.name, None) for row in UNFOLLOWED}
    return _sentences({row.name: getattr(args, row.name, None) for row in UNFOLLOWED}, defaults, trainer, then)


def unfollowed_by_recipe(settings: Mapping[str, object], algorithm: str, then: Then) -> Iterator[str]:
    """Like `unfollowed_settings`, for the settings of a `ppo`, `grpo` or `rloo` recipe."""
    return _sentences(settings, {}, PPO if algorithm == "ppo" else GRPO_AND_RLOO, then)


def _sentences(
    settings: Mapping[str, object], defaults: Mapping[str, object], trainer: str, then: Then
) -> Iterator[str]:
    rows = (
        row
        for row in UNFOLLOWED
        if row.then is then and trainer in row.trainers and row.name in settings
        if row.applies(settings[row.name], defaults.get(row.name))
    )
    # two names of one setting have the same sentence
    yield from dict.fromkeys(row.sentence.format(value=settings[row.name]) for row in rows)
