"""`PolicyHost`: a trainer of one policy, such as GRPO's, whose loop is TRL's, as the host of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...plan.dataflow import Role
from ...runtime.executor import Executor
from ...runtime.host_calls import HostCalls
from ...runtime.samples.drawn_samples import DrawnSamples
from ..checkpoint.identity import Identity, prompts_checksum
from ..checkpoint.resuming import ENTROPY_STATE
from ..checkpoint.write_errors import WriteErrors
from .engine_modules import ModelInEngine
from .host_generation import HostGeneration
from .window import Window


class PolicyHost:
    """The trainer's side of a run of GRPO or RLOO (`placed_plan.Host`).

    Args:
        trainer: a `PlannedPolicyTrainer`.

    Attributes:
        calls: runs the calls that TRL's loop asks for.
        window: the micro-batches of the optimizer step that is being made.
        untrained: micro-batches of an optimizer step that has not been made yet, or has failed.
    """

    iteration = "generation"
    calls_on_save = False
    counters: tuple[str, ...] = ("global_step",)
    calls: HostCalls
    window: Window

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.untrained = 0
        self._generations = 0  # under the plans before

    def hold(self, models: Mapping[Role, Any]) -> None:
        trainer = self.trainer
        trainer.model = trainer.callback_handler.model = models[Role.ACTOR]
        if not isinstance(trainer.model_wrapped, ModelInEngine):
            trainer.model_wrapped = trainer.model

    def follow(self, executor: Executor) -> None:
        trainer = self.trainer
        self.calls = HostCalls(executor, trainer._mode_kept, self._generations)
        self.window = Window(self.calls, trainer.accelerator.device)
        context_length = executor.placement.options.context_length
        trainer.vllm_generation = HostGeneration(self.calls, context_length, trainer)
        # TRL's loop then begins with a generation, as that of a new trainer
        trainer._step, trainer._buffered_inputs, trainer._leaves, self.untrained = 0, None, None, 0

    def stop_early(self) -> None:
        self.calls.stop()
        self._generations = self.calls.generation

    def samples_under_way(self) -> DrawnSamples | None:
        # TRL's loop generates again where a run goes on in the middle of a generation, or before an optimizer step that
        # has not been made, whose micro-batches it has counted
        given, on_each = self.trainer._step, self._micro_batches
        begun, trained = -(-given // on_each), (given - self.untrained) // on_each
        return self.calls.samples_under_way(again=begun - trained)

    def go_on_with(self, drawn: DrawnSamples | None) -> None:
        self.calls.go_on_with(drawn)

    @property
    def _micro_batches(self) -> int:
        """Number of micro-batches that are trained on one generation."""
        count: int = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        return count

    @property
    def is_within_generation(self) -> bool:
        """True if the next micro-batch comes from responses that have already been generated."""
        return bool(self.trainer._step % self._micro_batches)

    def forget_step(self) -> None:
        self.trainer.forget_step()

    def identity(self, optimizer: str) -> Identity:
        args, data = self.trainer.args, self.trainer.setup.train_dataset
        readable = hasattr(data, "__len__") and "prompt" in (data.column_names or ())
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        # of TRL's RepeatSampler
        names = ("seed", "num_generations", "generation_batch_size", "num_iterations", "shuffle_dataset")
        order = {name: getattr(args, name) for name in names}
        rows, checksum = (len(data), prompts_checksum(data)) if readable else (None, None)
        return Identity(optimizer, size, rows, checksum, order)

    def about_checkpoint(self) -> dict[str, Any]:
        return {}

    def write_state(self, folder: Path, problems: WriteErrors) -> None:
        """Write the state that TRL keeps in a file of its own."""
        trainer = self.trainer
        if getattr(trainer, "use_adaptive_entropy", False) and not trainer.accelerator.process_index:
            state = {"entropy_coef": trainer.entropy_coef, "last_world_entropy": trainer._last_world_entropy}
            with problems.writing(folder / ENTROPY_STATE):
                (folder / ENTROPY_STATE).write_text(json.dumps(state), encoding="utf-8")


__all__ = ["PolicyHost"]
