"""`PolicyAdapter`: adapts a trainer of one policy, such as GRPO's, whose loop is TRL's, to a planned run.

It combines the calls of the loop (`runtime.call_server`), the loss (`loss`), the rewards
(`rewards`), the prompts of later generations (`ahead`) and the difference of engine and trainer (`mismatch`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from ...algorithms.async_functions import event_loop, is_async
from ...algorithms.prompts import columns_of, is_made_when_read
from ...algorithms.rollout import Rollouts
from ...common.notices import notice
from ...engines.generation.sampling_checks import engine_only_settings
from ...plan.dataflow import Role
from ...runtime.call_server import CallServer
from ...runtime.calls.generate_and_score import TurnSource
from ...runtime.calls.training_calls import check_first_weights
from ...runtime.executor import Executor
from ...runtime.process_groups import all_gather_object, barrier
from ...runtime.samples.partial_rollouts import PartialRollouts
from ..checkpoint.identity import Identity, prompts_checksum
from ..checkpoint.resuming import ENTROPY_STATE, ResumeSetting
from ..checkpoint.write_errors import WriteErrors
from ..checks.data_checks import check_rows, stream_too_short
from ..checks.fixed_settings import fixed_attributes, refuse_changed
from ..run.optimizers import check_own_optimizer
from .ahead import PromptsAhead
from .loss import REFERENCE, EngineLoss, ModelInEngine, ReferenceInEngine
from .mismatch import EngineMismatch
from .planned_generation import EngineGeneration
from .rewards import Scoring
from .sampled_routes import SampledRoutes
from .single_candidates import SingleCandidates
from .taken_over import TakenOver
from .trl_sampling import tokenizer_of
from .turns import Turns
from .user_spans import FunctionSpans


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


logger = logging.get_logger(__name__)
CORRECTS = "corrects_mismatch"  # in a checkpoint's manifest: `EngineMismatch.corrects`
_NOT_CORRECTED = ", and vllm_importance_sampling_correction is left out"


class PolicyAdapter:
    """The trainer's side of a run of GRPO or RLOO (`placed_plan.TrainerAdapter`).

    Args:
        trainer: a `PlannedPolicyTrainer`.

    Attributes:
        calls: serves the calls that TRL's loop asks for; set by `follow`, like `loss`.
    """

    iteration = "generation"
    calls_on_save = False
    counters: tuple[str, ...] = ("global_step",)
    calls: CallServer
    loss: EngineLoss
    mismatch: EngineMismatch
    forced: SingleCandidates
    turns: Turns

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.spans = FunctionSpans(trainer)
        self.scoring, self.ahead = Scoring(trainer, self.spans), PromptsAhead(trainer)
        self.routes = SampledRoutes()
        self._generations = 0  # generations under earlier plans
        self._random_states = _random_states()  # before the latest generation of the training

    def take_over(self) -> None:
        """Replace TRL's calls by the plan's, after the constructor of TRL's class. All ranks together."""
        trainer, args, run = self.trainer, self.trainer.args, self.trainer.run
        sampling, full = run.placed.setup.call_settings.sampling, args.full_vocabulary_logprobs
        # TRL's loss is corrected with the log-probabilities of vLLM engines
        by_vllm = run.placed.plan["actor.generate"].engine == "vllm"
        engine_only = engine_only_settings(sampling, full_vocabulary=full) if by_vllm else []
        corrects = by_vllm and bool(args.vllm_importance_sampling_correction)
        if engine_only and trainer.accelerator.is_main_process:
            logger.warning(
                f"{', '.join(engine_only)}: the engine draws tokens from another distribution than the trainer's "
                f"log-probabilities are of. Their mismatch is not measured{_NOT_CORRECTED * corrects}."
            )
        self.forced = SingleCandidates(sampling, full_vocabulary=full, by_vllm=by_vllm)
        # a plan change replaces `self.calls`
        self.turns = Turns(trainer, lambda: self.calls, self.spans, self.forced, self.scoring.groups)
        policy = run.placed.setup.models_before_start[Role.ACTOR]
        has_reference = REFERENCE in run.placed.plan.graph.order
        has_async = any(map(is_async, [*trainer.reward_funcs, *(getattr(trainer, "tools", None) or ())]))
        TakenOver(
            model=policy,
            model_wrapped=policy,
            ref_model=ReferenceInEngine() if has_reference else None,
            beta=args.beta,
            vllm_importance_sampling_correction=corrects and not engine_only,
            async_loop=event_loop() if has_async else getattr(trainer, "async_loop", None),
            turns=self.turns.methods(),
            _compute_loss=self._in_loss(trainer._compute_loss),
            backward=lambda loss, **_: self.loss.backward(loss),
            _wrap_model=lambda *_, **__: ModelInEngine(trainer),
        ).put_on(trainer)
        run.follow_callbacks()
        run.place()
        self._fixed = fixed_attributes(trainer)  # the settings that may not change
        self.mismatch = EngineMismatch(trainer, engine_only)

    def in_turns(self, samples: Rollouts, source: TurnSource) -> list[bytes]:
        """`CallSettings.in_turns`."""
        return self.turns.ahead(samples, source)

    def _in_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """TRL's `_compute_loss`, or the user's, which either's `compute_loss` calls."""

        @functools.wraps(compute_loss)
        def in_loss(model: Any, inputs: Any) -> Any:
            with self.forced.of_loss(inputs), self.mismatch.of_loss(inputs):
                return compute_loss(model, inputs)

        return in_loss

    # --- around what Trainer's loop does ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def training(self, resume: ResumeSetting) -> Iterator[str | None]:
        """Context of a training; yields the folder of the checkpoint to resume from, or `None`.

        Args:
            resume: the argument of `PlannedPolicyTrainer.train`.
        """
        self.turns.refuse_use()
        trainer, run = self.trainer, self.trainer.run
        check_rows(trainer.args, trainer.train_dataset, trainer.accelerator.num_processes)
        placed, rates = run.placed, run.placed.setup.rates
        check_own_optimizer(trainer.optimizer, rates)
        trainer.is_in_train, self._has_trained = True, False
        with run.failing_together(), rates.unstepped(lambda: self.loss.train_step()):
            self._resumed = run.checkpoints.find(resume)
            run.start()
            check_first_weights(placed.placement, "they were given")
            trainer.record.begin_training()
            reason = None if trainer.args.max_staleness else self.turns.why_in_rounds
            if reason is not None and trainer.accelerator.is_main_process:
                notice(f"completions that call tools take their turns together, in rounds: {reason}")
            yield None if self._resumed is None else str(self._resumed.folder)
            if trainer.accelerator.is_main_process:
                trainer.record.save()
            run.checkpoints.finish()
            self.calls.stop()
            placed.end_together()
        trainer.is_in_train = False
        is_stream = not hasattr(trainer.train_dataset, "__len__")
        if is_stream and not self._has_trained and trainer.state.global_step < trainer.state.max_steps:
            raise stream_too_short(trainer.args, trainer.accelerator.num_processes)

    def prepare_for_training(self, max_steps: int, train_dataloader: Any) -> tuple[Any, Any]:
        """Create the scheduler, and load a checkpoint's state. The engines own model and optimizer."""
        trainer = self.trainer
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        trainer.create_scheduler(num_training_steps=max_steps)
        trainer.model_wrapped = ModelInEngine(trainer)
        self.ahead.begin_training(train_dataloader)
        if self._resumed is not None:
            trainer.run.checkpoints.load(self._resumed)
            is_open = trainer.args.vllm_importance_sampling_correction is None
            self.mismatch.corrects = is_open and bool(self._resumed.manifest.about.get(CORRECTS))
            # loads the state that TRL saves itself; Trainer's optimizer has no file
            trainer._load_optimizer_and_scheduler(str(self._resumed.folder))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        trainer.callback_handler.train_dataloader = train_dataloader
        return trainer.model_wrapped, train_dataloader

    def begin_micro_batch(self) -> None:
        """A micro-batch of the training begins, maybe with its generation."""
        self._begin_calls(evaluates=False)
        if not self._is_within_generation:
            self._random_states = _random_states()
        self._has_trained = True
        self.ahead.advance()

    def _begin_calls(self, *, evaluates: bool) -> None:
        self.turns.refuse_use()
        refuse_changed(self._fixed, fixed_attributes(self.trainer))
        self.calls.at(self.trainer.state.global_step, evaluates=evaluates)

    @contextlib.contextmanager
    def generating_and_scoring(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Context of the generation and scoring of completions for rows of the data set."""
        trains = self.trainer.model.training
        self._begin_calls(evaluates=not trains)
        self.trainer.vllm_generation.begin([row.get("prompt") for row in rows])
        self.scoring.groups.begin_generation(rows)
        self.mismatch.begin_generation()
        self.routes.begin_generation(trains=trains)
        with self.trainer.run.checkpoints.saving_good_state() if trains else contextlib.nullcontext():
            yield
        self.forced.end_generation()

    @contextlib.contextmanager
    def between_updates(self) -> Iterator[None]:
        """Context of Trainer's work after an optimizer step. After a generation's last step the plan may change to a
        faster one, because TRL then holds no outputs of the engines."""
        trainer, run = self.trainer, self.trainer.run
        run.checkpoints.finish(wait=False)
        # a callback may have delayed one rank, and the loss is gathered next
        barrier(run.placed.placement.control)
        self.mismatch.end_update()
        yield
        if trainer.control.should_training_stop:
            run.checkpoints.finish()  # Trainer loads the best checkpoint at the end, and may delete others
        period = trainer.record.period
        # Trainer also does this at the end of an epoch
        if self._is_within_generation or not period.generations or not period.seconds:
            return
        trainer.record.begin_period()
        if trainer.control.should_training_stop:
            return
        placed = run.placed
        lengths = [n for local in all_gather_object(period.lengths, placed.placement.control) for n in local]
        updates = trainer.state.max_steps - trainer.state.global_step
        left = updates * trainer.args.gradient_accumulation_steps // self._micro_batches
        with self.mode_kept():
            is_first = placed.rank == 0
            run.change.note(period.spans, lengths if is_first else [], period.seconds, left, period.generations)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of an evaluation."""
        self.turns.refuse_use()
        run = self.trainer.run
        with run.failing_together():
            run.placed.start()
            self.calls.begin_evaluation()
            yield

    @contextlib.contextmanager
    def mode_kept(self) -> Iterator[None]:
        """Context that restores `trainer.model.training`: engines switch a module to evaluation, and TRL reads it to
        tell training from evaluation."""
        training = self.trainer.model.training
        try:
            yield
        finally:
            self.trainer.model.train(training)

    # --- the adapter of a run ---------------------------------------------------------------------------------------

    def hold(self, models: Mapping[Role, PreTrainedModel]) -> None:
        trainer = self.trainer
        trainer.model = trainer.callback_handler.model = models[Role.ACTOR]
        if not isinstance(trainer.model_wrapped, ModelInEngine):
            trainer.model_wrapped = trainer.model

    def follow(self, executor: Executor) -> None:
        trainer = self.trainer
        self.calls = CallServer(executor, self.mode_kept, self._generations)
        self.loss = EngineLoss(trainer, self.calls, self.routes)
        context_length = executor.placement.options.context_length
        trainer.vllm_generation = EngineGeneration(
            self.calls,
            context_length,
            self.ahead,
            self.forced,
            self.turns,
            self.routes,
            tokenizer_of(trainer.processing_class).eos_token_id,
        )
        # TRL's loop then begins with a generation, like a new trainer's
        trainer._step, trainer._buffered_inputs = 0, None

    def stop_early(self) -> None:
        self.calls.end()
        self._generations = self.calls.generation

    def samples_under_way(self) -> PartialRollouts | None:
        return self.calls.samples_under_way(again=self._untrained_generations)

    @property
    def _untrained_generations(self) -> int:
        """Number of the latest generations that a resumed run makes again: TRL's loop generates if it resumes within a
        generation, or before an optimizer step that failed and whose micro-batches are counted."""
        micro_batches, on_each = self.trainer._step, self._micro_batches
        return -(-micro_batches // on_each) - (micro_batches - self.loss.untrained) // on_each

    @contextlib.contextmanager
    def random_states_to_save(self) -> Iterator[None]:
        """Context in which the global random generators are as they were before a generation that a resumed run makes
        again: TRL shuffles its samples by them."""
        latest = _random_states()
        _set_random_states(self._random_states if self._untrained_generations else latest)
        try:
            yield
        finally:
            _set_random_states(latest)

    def go_on_with(self, partial_samples: PartialRollouts | None) -> None:
        self.calls.go_on_with(partial_samples)

    @property
    def _micro_batches(self) -> int:
        """Number of micro-batches that are trained on one generation."""
        count: int = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        return count

    @property
    def _is_within_generation(self) -> bool:
        """True if the next micro-batch comes from responses that have already been generated."""
        return bool(self.trainer._step % self._micro_batches)

    def forget_step(self) -> None:
        self.loss.forget_step()

    def identity(self, optimizer: str) -> Identity:
        args, data = self.trainer.args, self.trainer.setup.train_dataset
        readable = hasattr(data, "__len__") and not is_made_when_read(data) and "prompt" in columns_of(data)
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        # settings that TRL's RepeatSampler reads
        names = ("seed", "num_generations", "generation_batch_size", "num_iterations", "shuffle_dataset")
        order = {name: getattr(args, name) for name in names}
        rows, checksum = (len(data), prompts_checksum(data)) if readable else (None, None)
        return Identity(optimizer, size, rows, checksum, order)

    def about_checkpoint(self) -> dict[str, Any]:
        return {CORRECTS: self.mismatch.corrects}

    def write_state(self, folder: Path, problems: WriteErrors) -> None:
        """Write the state that TRL saves in a separate file."""
        trainer = self.trainer
        if getattr(trainer, "use_adaptive_entropy", False) and not trainer.accelerator.process_index:
            state = {"entropy_coef": trainer.entropy_coef, "last_world_entropy": trainer._last_world_entropy}
            with problems.writing(folder / ENTROPY_STATE):
                (folder / ENTROPY_STATE).write_text(json.dumps(state), encoding="utf-8")


def _random_states() -> tuple[Any, Any, Tensor]:
    """The states of the generators of Python, NumPy and torch on the host."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_states(states: tuple[Any, Any, Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


__all__ = ["PolicyAdapter"]
