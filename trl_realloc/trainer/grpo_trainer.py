"""`GRPOTrainer` and `RLOOTrainer`: TRL's classes of the same names under a plan.

TRL keeps the host's work: data, tools, rewards, advantages, loss, logs, and Trainer's loop. The plan's devices run
generation, the log-probabilities of policy and reference, and training. `PlannedPolicyTrainer` overrides TRL's and
Trainer's methods; the code behind them is in `policy.policy_adapter`. Checks and planning are in `policy_setup`,
failures in `planned_run`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import Trainer
from transformers.utils import logging

from ..engines.child_process import obey_sigterm_of_parent
from ..engines.training.packed_attention import base_of
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Timeline
from ..runtime.failures.alarm import Alarm
from ..runtime.failures.watchdog_client import watch
from .accelerate_plugin import ReallocationPlugin
from .checkpoint.saving import make_output_dir
from .checks.config_checks import ConfigError
from .checks.data_checks import check_columns, check_rows, check_types, stream_too_short
from .checks.trainable import why_not_trained
from .grpo_config import GRPOConfig, RLOOConfig, given_quantization
from .plan_settings import use_one_device
from .policy.accelerate_fallback import (
    check_resumable,
    checkpoint_of_trainer,
    config_or_model,
    follow_trl,
)
from .policy.policy_adapter import PolicyAdapter
from .policy.policy_setup import check_turns, prepare_policy, turn_makers
from .policy.prompt_lengths import check_tokenized
from .policy.record import PolicyRecord, sampled_completions
from .policy.rewards import REWARD, planned_rewards
from .report.completions import CompletionRow
from .run.planned_run import PlannedRun
from .trainer_inputs import path_as_text
from .trl_policy_trainers import TRLGRPOTrainer, TRLRLOOTrainer


logger = logging.get_logger(__name__)


class under_plan:  # noqa: N801 - a decorator
    """A method of `PlannedPolicyTrainer` for planned runs. If Accelerate trains, a look-up finds TRL's method instead,
    so no call runs through this class."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        if trainer is None or trainer.run is not None:
            return self._method.__get__(trainer, kind)
        return getattr(super(PlannedPolicyTrainer, trainer), self._method.__name__)


class PlannedPolicyTrainer(Trainer):
    """Runs the model calls of a TRL trainer of one policy, such as `GRPOTrainer`, under a plan. A subclass lists this
    class before TRL's, so that its methods replace TRL's and Trainer's.

    Attributes:
        run: the planned run; `None` if the plan's engines cannot train it (`trainable`). Accelerate then trains, with
            TRL's methods.
        record: times of the updates.
    """

    run: PlannedRun[PolicyAdapter] | None = None
    setup = property(attrgetter("run.placed.setup"))
    placement = property(attrgetter("run.placed.placement"))
    executor = property(attrgetter("run.placed.executor"))
    alarm = property(attrgetter("run.placed.alarm"))
    checkpoints = property(attrgetter("run.checkpoints"))
    observer = property(attrgetter("run.change.observer"))
    replanner = property(attrgetter("run.change.replanner"))
    measuring = property(attrgetter("run.change.measuring"))
    calls = property(attrgetter("run.adapter.calls"))
    _config: type  # this package's configuration for TRL's class
    _trl: type  # TRL's class

    def __init__(self, *args: Any, reallocation_plugin: ReallocationPlugin | None = None, **kwargs: Any) -> None:
        self.record = PolicyRecord(self)
        arguments = _named(self._trl, self._config, args, kwargs)
        is_by_name, config = isinstance(arguments["model"], str), arguments["args"]
        self.plugin = (reallocation_plugin or ReallocationPlugin()).under(config)
        arguments = self._plan(arguments)
        hidden: dict[str, Any] = {}
        if self.run is not None:
            hidden = {"use_vllm": False, "beta": 0.0}  # TRL then creates no engine and no reference
            if is_by_name:  # TRL would warn that it ignores these for a loaded model
                hidden["model_init_kwargs"] = None
        model = arguments["model"] if self.run is not None else None
        with _hidden(config, **hidden), _forward_kept(model), _hidden(model, **_OF_QUANTIZED):
            super().__init__(**arguments)
        if self.run is not None:
            self.run.adapter.take_over()

    def _plan(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check the inputs and choose the plan. Returns the constructor arguments for TRL's class."""
        args = arguments["args"]
        check_types(arguments)
        check_columns(arguments)
        make_output_dir(Path(args.output_dir))
        use_one_device(args)
        world = PartialState()
        reason = why_not_trained(
            args,
            config_or_model(args, arguments["model"]),
            arguments.get("peft_config"),
            quantization_config=given_quantization(args, arguments["model"], arguments.get("quantization_config")),
            trainer=type(self),
        )
        if reason is not None:
            if args.max_staleness:
                raise ConfigError(f"{reason} It generates nothing ahead: set max_staleness to 0.")
            if world.is_main_process:
                logger.warning(reason)
            follow_trl(args, self.plugin)
            return arguments
        alarm = Alarm(watch(self.plugin.heartbeat_timeout or 0.0) if world.num_processes > 1 else None)
        with alarm.guard():
            turns = turn_makers(arguments)
            check_turns(args, turns, type(self))
            setup, reward_models = prepare_policy(args, self.plugin, world, arguments)
        adapter = PolicyAdapter(self)
        settings = replace(
            setup.call_settings,
            reward_tokens=adapter.scoring.tokens_for_reward_models,
            in_turns=adapter.in_turns if turns else None,
        )
        setup = replace(setup, call_settings=settings)
        self.run = PlannedRun(adapter, setup, self.plugin, world.process_index, alarm)
        return {
            **arguments,
            **planned_rewards(arguments, reward_models, lambda *texts: self.calls.score(REWARD, *texts)),
            # TRL's class would add a second adapter
            "model": base_of(setup.models_before_start[Role.ACTOR]),
            "peft_config": None,
            **({"quantization_config": None} if "quantization_config" in arguments else {}),
            "optimizers": (setup.rates.scheduled, (arguments.get("optimizers") or (None, None))[1]),
        }

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan of this run.

        Raises:
            ConfigError: there is none, because Accelerate trains and TRL generates.
        """
        if self.run is None:
            raise ConfigError("Accelerate trains this run and TRL generates, so it has no plan.")
        return self.run.placed.plan

    @property
    def timeline(self) -> Timeline:
        """The start and end of the calls of the latest updates; empty before the first. Rank 0 keeps up to
        `metrics.SPANS` of them, other ranks none."""
        return self.record.timeline

    @property
    def _adapter(self) -> PolicyAdapter:
        assert self.run is not None, "Accelerate trains by TRL's methods"
        return self.run.adapter

    # --- training -------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as Trainer does.

        Args:
            resume_from_checkpoint: a checkpoint's folder; True for the newest complete checkpoint in
                `args.output_dir`; or "auto" for the same if there is one, and a new run if there is none.

        Raises:
            CheckpointError: there is no checkpoint, it is not complete, or this run cannot continue its run.
            DataError: the training data set does not fill one generation.
            JobFailed: a call failed, here or on another rank.
        """
        if self.run is None:
            checkpoint = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
            folder = checkpoint_of_trainer(checkpoint, self.args.output_dir)
            check_resumable(folder, self.args.output_dir)
            check_rows(self.args, self.train_dataset, self.accelerator.num_processes)
            self.record.begin_training()
            output = super().train(folder, trial, ignore_keys_for_eval)
            if not self.state.global_step and not hasattr(self.train_dataset, "__len__"):
                raise stream_too_short(self.args, self.accelerator.num_processes)
            return output
        with self._adapter.training(resume_from_checkpoint) as resumed:
            return super().train(resumed, trial, ignore_keys_for_eval)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        _obey_parent(self.args, train_dataloader)
        if self.run is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        return self._adapter.prepare_for_training(max_steps, train_dataloader)

    @under_plan
    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Does nothing: each engine moves its model to its device."""

    @under_plan
    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        return super().get_batch_samples(self._adapter.ahead.batches(epoch_iterator), num_batches, device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.record.begin_update()
        if self.run is not None:
            self._adapter.begin_micro_batch()
        return super().training_step(*args, **kwargs)

    # --- completions and rewards ------------------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: Any) -> Any:
        tokenized = super()._tokenize_prompts(prompts)
        what = "train_dataset" if self.model.training else "eval_dataset"
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        check_tokenized(tokenized[0], prompts, what, config.vocab_size)
        return tokenized

    @under_plan
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._adapter.generating_and_scoring(inputs):
            batch = self._adapter.mismatch.of_generation(super()._generate_and_score_completions(inputs))
        return self._adapter.mismatch.corrected(batch) if "old_logps" in batch else batch

    @under_plan
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        completion_ids = [list(ids) for ids in completion_ids]  # functions read `ids[-1]`, which TRL reads otherwise
        self.record.add_responses(completion_ids)
        with self._adapter.scoring.calling():
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        return self._adapter.scoring.checked(rewards, prompts, completions)

    # --- the loss, and an optimizer step by its gradients -----------------------------------------------------------

    @under_plan
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss, for a training micro-batch on leaf tensors."""
        with self._adapter.loss.of_micro_batch(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

    @under_plan
    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        logprobs, entropies, loss = self._adapter.loss.logps_and_entropies(model, *args, **kwargs)
        logprobs = self._adapter.forced.zeroed(logprobs)
        if model is not self.ref_model:
            self._adapter.mismatch.see(logprobs)
        return logprobs, None if entropies is None else self._adapter.forced.zeroed(entropies), loss

    @under_plan
    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self._adapter.loss.grad_norm()

    # --- logs, checkpoints, evaluation ------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.nullcontext() if self.run is None else self._adapter.between_updates():
            self.record.end_update()
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer to `output_dir`. Collective over the job.

        Raises:
            SaveError: a rank could not write. Raised on every rank.
        """
        if self.run is None:
            super().save_model(output_dir, _internal_call)
        else:
            self._adapter.turns.refuse_use()
            self.run.save_model(output_dir, pushes=not _internal_call)

    @under_plan
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.checkpoints.save()

    @under_plan
    def _load_best_model(self) -> None:
        self.checkpoints.load_best()

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as Trainer does."""
        _obey_parent(self.args, dataloader)
        with contextlib.nullcontext() if self.run is None else self._adapter.evaluating():
            return super().evaluation_loop(dataloader, *args, **kwargs)

    # --- methods that TRL's class does not have ----------------------------------------------------------------------

    def generate_completions(self) -> list[CompletionRow]:
        """Near-greedy completions of the evaluation prompts, one per prompt, with their scores. A completion is a
        single turn, without tools or environments. Five are printed as a table. All ranks together.

        Returns:
            `list[dict]`: `query`, `model response` and `score` (the weighted sum of the rewards) of each prompt, in the
            dataset's order; empty without an evaluation dataset, and on ranks other than 0.

        Raises:
            ConfigError: Accelerate trains this run.
        """
        if self.run is None:
            raise ConfigError(
                "generate_completions is for runs that the plan's engines train, and Accelerate trains this one; leave "
                "it out."
            )
        return sampled_completions(self)

    def close(self) -> None:
        """Stop the engines. They also stop when the process exits."""
        if self.run is not None:
            self.run.placed.placement.close()


class GRPOTrainer(PlannedPolicyTrainer, TRLGRPOTrainer):
    """TRL's `GRPOTrainer` with every model call on the devices of the execution plan.

    Takes the arguments of the installed TRL's class, in its order, and a `ReallocationPlugin` as `reallocation_plugin`.
    Data, tools, environments, reward functions, advantages, losses and logs are TRL's code.
    """

    _tag_names = ["trl", "grpo", "trl-realloc"]
    _config, _trl = GRPOConfig, TRLGRPOTrainer


class RLOOTrainer(PlannedPolicyTrainer, TRLRLOOTrainer):
    """TRL's `RLOOTrainer` with every model call on the devices of the execution plan.

    Takes the arguments of the installed TRL's class, in its order, and a `ReallocationPlugin` as `reallocation_plugin`.
    Data, reward functions, advantages, losses and logs are TRL's code. With `vllm_importance_sampling_correction` the
    loss gets the log-probabilities of the policies that sampled the completions as those of the policy before the
    update.
    """

    _tag_names = ["trl", "rloo", "trl-realloc"]
    _config, _trl = RLOOConfig, TRLRLOOTrainer
    vllm_importance_sampling_correction = False  # set for planned runs


# Trainer refuses a quantized model that is not a PEFT model, and TRL would round its adapters to bfloat16.
_OF_QUANTIZED = {"is_quantized": False, "is_loaded_in_4bit": False, "is_loaded_in_8bit": False}


def _named(trl: type, config: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments by name, with model paths as text, and a default configuration if none is passed.

    Raises:
        TypeError: the installed TRL's class has no such argument, or one is missing.
        ConfigError: `args` is not a configuration of this package.
    """
    try:
        named: dict[str, Any] = dict(inspect.signature(trl).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"{trl.__name__}: {error}; its arguments are those of TRL's {trl.__name__}") from None
    for argument in {"model", "reward_funcs"} & named.keys():
        value = named[argument]
        named[argument] = [path_as_text(item) for item in value] if isinstance(value, list) else path_as_text(value)
    if named.get("args") is None:
        model = named["model"]
        name = model if isinstance(model, str) else model.config._name_or_path
        kind = config.__name__.removesuffix("Config")
        named["args"] = config(f"{name.split('/')[-1]}-{kind}")
    if not isinstance(named["args"], config):
        value = type(named["args"])
        raise ConfigError(
            f"args must be a trl_realloc.{config.__name__}, not a {value.__module__}.{value.__name__}; import "
            f"{config.__name__} from trl_realloc."
        )
    return named


def _obey_parent(args: Any, loader: Any) -> None:
    """Let the workers of a data loader leave SIGTERM to this process with `enable_jit_checkpoint`: a worker that it
    ends would fail the run before its checkpoint."""
    base = getattr(loader, "base_dataloader", loader)  # Accelerate's loader wraps another one
    if not args.enable_jit_checkpoint or not getattr(base, "num_workers", 0):
        return
    if getattr(base.worker_init_fn, "func", None) is not obey_sigterm_of_parent:
        base.worker_init_fn = functools.partial(obey_sigterm_of_parent, base.worker_init_fn)


@contextlib.contextmanager
def _hidden(args: Any, **values: Any) -> Iterator[None]:
    """Context in which the settings have these values, so that TRL's constructor creates no engine and no reference."""
    original = {name: getattr(args, name) for name in values if hasattr(args, name)}
    for name in original:
        setattr(args, name, values[name])
    try:
        yield
    finally:
        for name, value in original.items():
            setattr(args, name, value)


@contextlib.contextmanager
def _forward_kept(model: Any) -> Iterator[None]:
    """Context of TRL's constructor, whose newer releases replace the model's forward by a closure over this model,
    which copies of the model would run. Restores the forward, which may be the user's. Does nothing for `None`."""
    before = vars(model).get("forward") if model is not None else None
    yield
    if model is not None:
        vars(model).pop("forward", None)
        if before is not None:
            model.forward = before


__all__ = ["GRPOTrainer", "RLOOTrainer"]
