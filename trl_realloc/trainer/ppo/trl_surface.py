"""`TrlSurface`: the attributes of TRL 1.12's PPO trainer, under its names, and saving.

`PolicyAndValueWrapper` is `trainer.model`, the loop is in `ppo_trainer`. An attribute without a meaning under
a plan raises an `AttributeError` that names the alternative.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerState

from ...algorithms.prompt_batches import PromptBatch, prompt_loader
from ...engines.models import adapters_off, has_adapters
from ...plan.dataflow import CallKind, Role
from ...plan.execution_plan import ExecutionPlan
from ..run.planned_run import PlannedRun
from ..trl_compat import PPOTrainerBase
from .evaluation import dataset_of
from .ppo_adapter import PPOAdapter
from .prompt_data import PromptData


@dataclass
class OnlineTrainerState(TrainerState):
    """`TrainerState` with the number of episodes so far, as in TRL."""

    episode: int = 0


class PolicyAndValueWrapper(nn.Module):
    """Policy and critic as one module, with the attributes of TRL's class of this name: `policy`, `value_model`, and
    `critic_backbone`, the critic without its score layer.

    The trainer sets the modules. Which modules a rank has follows from the plan. The object stays the same during
    a run, because callbacks keep references to it. Missing attributes (`config`, `generate`, `save_pretrained`,
    `push_to_hub`, `add_model_tags`, …) are looked up on the policy.

    Args:
        policy, value_model: this rank's modules. On a rank without a part of a role, the role's structure with
            parameters on the `meta` device.
    """

    is_quantized = False  # Trainer refuses a quantized model that is not a PEFT model itself

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        self.hold(policy, value_model)

    def hold(self, policy: nn.Module, value_model: nn.Module) -> None:
        """Replace the modules, for example after a plan change."""
        self.policy, self.value_model = policy, value_model
        self.critic_backbone = getattr(value_model, str(getattr(value_model, "base_model_prefix", "")), value_model)

    def forward(self, **inputs: Any) -> tuple[Any, Tensor]:
        """The policy's outputs, and the critic's value at every token, (rows, tokens, 1). Both models must be whole on
        this rank: not under tensor or pipeline parallelism or ZeRO-3, and not on `meta`."""
        backbone = self.critic_backbone(**{**inputs, "output_hidden_states": True})
        values: Tensor = self.value_model.score(backbone.hidden_states[-1])  # type: ignore[operator]
        return self.policy(**inputs), values

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "policy":  # not yet set
                raise
            return getattr(self.policy, name)


class TrlSurface(PPOTrainerBase):
    """Attributes and methods of TRL's trainer that scripts and callbacks use, for a trainer that holds a run.

    Attributes:
        run: planned run.
        prompts: tokenized datasets of the trainer.
    """

    _tag_names = ["trl", "ppo", "trl-realloc"]
    _name = "PPO"
    _paper = {
        "title": "Fine-Tuning Language Models from Human Preferences",
        "id": "1909.08593",
        "citation": (
            "@article{ziegler2019finetuning,\n    title = {{Fine-Tuning Language Models from Human Preferences}},\n"
            "    author = {Daniel M. Ziegler and others},\n    year = 2019,\n    eprint = {arXiv:1909.08593}\n}"
        ),
    }

    run: PlannedRun[PPOAdapter]
    prompts: PromptData
    state: OnlineTrainerState
    control: Any
    model: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    setup = property(attrgetter("run.placed.setup"))
    placement = property(attrgetter("run.placed.placement"))
    executor = property(attrgetter("run.placed.executor"))
    alarm = property(attrgetter("run.placed.alarm"))
    observer = property(attrgetter("run.change.observer"))
    replanner = property(attrgetter("run.change.replanner"))
    measuring = property(attrgetter("run.change.measuring"))

    @property
    def plan(self) -> ExecutionPlan:
        """The execution plan of this run."""
        return self.run.placed.plan

    _ref_model: Any = None  # as the user passed it

    @property
    def policy_model(self) -> Any:
        """This rank's module of the policy."""
        return self.model.policy

    @property
    def value_model(self) -> Any:
        """This rank's module of the critic."""
        return self.model.value_model

    @property
    def ref_model(self) -> Any:
        """This rank's module of the reference. Before the first `train()`, `evaluate()` or `save_model()` it is the
        constructor's argument. `None` if the reference is the policy without its adapters, and on ranks without a part
        of it."""
        if not self.placement.started:
            return self._ref_model
        engines = map(self.placement.engine, self.plan.graph.calls_of(CallKind.FORWARD, Role.REFERENCE))
        return next((engine.head.model for engine in engines if engine is not None), None)

    @ref_model.setter
    def ref_model(self, model: Any) -> NoReturn:
        raise AttributeError("ref_model cannot be replaced, the plan has placed it; give another to the constructor.")

    @property
    def is_peft_model(self) -> bool:
        """True if the policy trains adapters."""
        return bool(self.setup.roles[Role.ACTOR].adapted)

    @property
    def model_adapter_name(self) -> str | None:
        name: str | None = self.args.model_adapter_name
        return name

    @property
    def stop_token_id(self) -> int | None:
        """The token that ends a response; `None` if every response has `response_length` tokens."""
        return next(iter(self.setup.call_settings.sampling.stop_token_ids), None)

    @stop_token_id.setter
    def stop_token_id(self, token: Any) -> NoReturn:
        raise AttributeError("stop_token_id cannot be changed, the engines end responses by it; give it to the config.")

    @property
    def ref_adapter_name(self) -> str | None:
        name: str | None = self.args.ref_adapter_name
        return name

    @contextlib.contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """Context in which this rank's policy module computes the reference: its adapters are disabled, or those of
        `ref_adapter_name` are enabled. Does nothing for a policy without adapters."""
        policy = self.model.policy
        if not has_adapters(policy):
            yield
            return
        with adapters_off(self.ref_adapter_name, self.model_adapter_name)(policy):
            yield

    @property
    def callbacks(self) -> list[Any]:
        """All callbacks: Transformers' defaults, the reporters', and the user's."""
        callbacks: list[Any] = self.callback_handler.callbacks
        return callbacks

    @property
    def data_seed(self) -> int:
        """The seed of the order of the prompts."""
        seed: int = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return seed

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[PromptBatch]:
        """Global batches of evaluation prompts, the same on every rank; by default from the constructor's dataset. A
        name selects one of its datasets."""
        rows = dataset_of(eval_dataset, self.eval_dataset)
        size = self.args.per_device_eval_batch_size * self.args.world_size
        return prompt_loader(rows, size, self.prompts.collate, None)

    @property
    def train_dataset_len(self) -> int:
        """Number of prompts in a pass over the data."""
        return len(self.train_dataset)

    @property
    def eval_dataloader(self) -> DataLoader[PromptBatch] | None:
        """A loader of the global batches of evaluation prompts, the same on every rank. It reads the first of several
        datasets; `None` if there is none."""
        rows = self.eval_dataset
        if isinstance(rows, dict):
            rows = next(iter(rows.values()), None)
        return None if rows is None else self.get_eval_dataloader(rows)

    @property
    def sample_generations_freq(self) -> int:
        """Number of updates between two tables of completions.

        Raises:
            AttributeError: no tables are shown.
        """
        if self.args.num_sample_generations <= 0:
            raise AttributeError("sample_generations_freq: no completions are shown, num_sample_generations is 0.")
        return max(1, self.args.num_total_batches // self.args.num_sample_generations)

    @property
    def local_seed(self) -> NoReturn:
        raise AttributeError(
            "local_seed: processes have no separate seeds here; a sample's seed follows from args.seed, the update and "
            "its place in the batch."
        )

    @property
    def local_dataloader_batch_size(self) -> NoReturn:
        raise AttributeError(
            "local_dataloader_batch_size: every process reads the whole batch and the plan deals it out; use "
            "args.batch_size, or args.local_batch_size for a process's share of it."
        )

    def predict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not available for PPO, whose data have no labels.

        Raises:
            NotImplementedError: names the methods to use.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no predict, which compares logits with labels; evaluate(dataset) scores the "
            f"completions of a data set, and generate_completions() returns them."
        )

    # --- methods of Trainer that are replaced -------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.run.place()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer to `output_dir`, and the critic to
        `output_dir/value_model`. Collective over the job.

        Raises:
            SaveError: a rank could not write. Raised on every rank.
        """
        self.run.save_model(output_dir, pushes=not _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.run.checkpoints.save()

    def _load_best_model(self) -> None:
        self.run.checkpoints.load_best()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Does nothing: each engine moves its model to its device."""

    def close(self) -> None:
        """Stop the engines. They also stop when the process exits."""
        self.run.placed.placement.close()


__all__ = ["OnlineTrainerState", "PolicyAndValueWrapper", "TrlSurface"]
