"""Engine that trains and scores with DeepSpeed ZeRO, stages 1 to 3, on the ranks of one mesh.

A job has several of these engines on different meshes. Accelerate's DeepSpeed integration spans the whole job, so
`deepspeed.initialize` is called here with the mesh's process groups. The settings for this are in `zero_setup`, the
workarounds and undocumented interfaces in `deepspeed_compat`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...algorithms.algorithm import TokenLoss
from ...algorithms.nonfinite import refusal
from ...algorithms.rollout import Ragged, Rollouts
from ...realloc.transfer import Parts
from ..base import BUCKET_BYTES, Bucket, EngineError, Rate, SourceDigests
from ..mesh_group import MeshGroup
from ..parameter_pieces import Piece
from ..torch_compat import extensions_folder
from ..training_state import (
    MASTER,
    StateSpecs,
    StateTensor,
    TensorSpec,
    TrainingState,
    flat_cells,
    loaded_scalars,
    scalars_of,
)
from . import deepspeed_compat as compat
from .compiled_ops import clear_stale_locks, compiles
from .heads import RoleHead, autocast
from .micro_batches import placeholder, run_forward, run_training
from .optimizer_state import GroupSettings
from .packed_row import PackedRow
from .replicated import whole_parts
from .weight_export import buckets, check_names, source_digests, specs_of, whole_pieces
from .weight_source import fill, source_of
from .zero_gradients import GradientMemory, check_gradients, loss_scale, set_loss_scale
from .zero_partition import (
    has_plain_partitions,
    partition_digest,
    partition_loaded,
    partition_of,
    partition_pieces,
    partition_unread,
    summed_digests,
)
from .zero_setup import Topology, cast_parameters, deepspeed_config, parameter_dtype, unify_trained


if TYPE_CHECKING:
    from ..base import InPlaceEngine, TrainingEngine


class ZeroEngine:
    """Implements `base.TrainingEngine` and `base.InPlaceEngine`. Arguments that are not listed are those of
    `ReplicatedEngine`.

    Args:
        stage: 1, 2 or 3; 3 for a frozen role.
        alone: a process group of this rank alone.
        config: the user's DeepSpeed config, or `None`.
    """

    def __init__(
        self,
        head: RoleHead,
        group: MeshGroup,
        device: torch.device,
        *,
        stage: int,
        alone: dist.ProcessGroup | None,
        config: Mapping[str, object] | None = None,
        compute_dtype: torch.dtype | None = None,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        max_grad_norm: float = 0.0,
    ) -> None:
        import deepspeed

        self.head, self.group, self.device, self.stage = head, group, device, stage
        self.frozen = make_optimizer is None
        sizes = [getattr(p, "ds_numel", p.numel()) for p in head.parameters() if p.requires_grad]
        settings = deepspeed_config(stage, config, max_grad_norm, trained=0 if self.frozen else sum(sizes))
        self._sends_partitions = stage == 3 and has_plain_partitions(settings)
        self.compute_dtype = None if parameter_dtype(settings) else compute_dtype
        # inside DeepSpeed's forward, which turns off autocast that is on around it (torch_autocast.py:128). On a CPU it
        # would not, because it checks CUDA's autocast.
        head.context = partial(autocast, device, self.compute_dtype)
        self._linear = partial(compat.memory_efficient_linear, stage, settings)
        if self.frozen:
            head.requires_grad_(False).eval()
        if compiles(settings):
            clear_stale_locks(extensions_folder())
        topology = Topology(group, alone)
        if parameter_dtype(settings) is None:
            unify_trained(head.model)
        # before partitioning, because a user's function may look at shapes; parameters that are read get new objects
        optimizer = make_optimizer(head.model) if make_optimizer and source_of(head.model) is None else None
        with compat.initializing(group, device):
            if stage == 3:
                partition_loaded(head.model, settings, topology, device)
                partition_unread(head.model, settings, topology, device)
            else:
                dtype = parameter_dtype(settings)
                if dtype is not None and source_of(head.model) is not None:
                    cast_parameters(head.model, dtype)  # as in DeepSpeed, before the device gets them in float32
                fill(head.model, device)
            if make_optimizer and optimizer is None:
                optimizer = make_optimizer(head.model)
            self.engine, *_ = deepspeed.initialize(
                model=head,
                optimizer=optimizer,
                config=settings,
                mpu=topology,
                dist_init_required=False,
            )
        check_gradients(self.engine.optimizer)
        self._settings = None if self.frozen else GroupSettings(self.engine.optimizer.optimizer)
        self._gradients = GradientMemory(self.engine.optimizer)
        self._is_within_step = self._has_gradients = False
        self.version, self.grad_norm = 0, math.nan

    @property
    def parameter_specs(self) -> Mapping[str, TensorSpec]:
        return specs_of(self.head.model)

    @property
    def has_replicas(self) -> bool:
        return self.group.size > 1 and self.stage < 3  # in stage 3 each rank has another part

    @property
    def flat_partition(self) -> tuple[int, int] | None:
        """(index, count) of this rank's range of every flattened parameter in stage 3."""
        return (self.group.index, self.group.size) if self.stage == 3 else None

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> dict[str, Ragged]:
        self.engine.eval()
        in_step, tree = self.stage == 3, self.head.tree(samples)
        return run_forward(self._call, samples, micro_batch_tokens, self.group, self.device, in_step=in_step, tree=tree)

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> dict[str, Tensor]:
        with self._within_step() as settings:
            settings.give(learning_rate)
            statistics = self._backward(samples, loss, micro_batch_tokens, steps=True)
        self._end_step(samples, statistics)
        return statistics

    def add_gradients(self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int) -> dict[str, Tensor]:
        with self._within_step():
            self._has_gradients = True
            return self._backward(samples, loss, micro_batch_tokens, steps=False)

    def drop(self) -> None:
        """See `base.TrainingEngine`. DeepSpeed clears gradients only in a step, and skips the step if they are not
        finite. It cannot clear a part of them: `_within_step` refuses the next step."""
        if self._has_gradients and not self._is_within_step:
            with self._within_step():
                self._backward(placeholder(), _nan, 1, steps=True)
            self._forget()

    def _forget(self) -> None:
        self._gradients.free()
        self._has_gradients = False

    @contextlib.contextmanager
    def _within_step(self) -> Iterator[GroupSettings]:
        """Context of the forwards and backwards of one optimizer step, which must be completed. Yields the optimizer's
        settings.

        Raises:
            EngineError: an earlier step was not completed.
        """
        assert self._settings is not None, "a frozen role cannot be trained"
        if self._is_within_step:
            raise EngineError(
                "an optimizer step was interrupted or failed in its middle, and DeepSpeed keeps a part of its "
                "gradients; save the model, and make a new trainer to train it."
            )
        self._is_within_step = True
        try:
            yield self._settings
        except BaseException:
            self._gradients.free()
            raise
        self._is_within_step = False

    def _backward(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, *, steps: bool
    ) -> dict[str, Tensor]:
        """Compute the gradients of samples of a mini-batch, and take the optimizer step if `steps`."""

        def backward(value: Tensor, is_last: bool) -> None:
            self.engine.set_gradient_accumulation_boundary(is_last and steps)
            # DeepSpeed averages gradients over the mesh, but the loss needs their sum
            self.engine.backward(value * self.group.size)
            self.engine.step()

        self.engine.train()
        self._gradients.allocate()
        with self._linear():
            return run_training(
                self._call,
                samples,
                loss,
                micro_batch_tokens,
                self.group,
                self.device,
                backward,
                in_step=True,
                tree=self.head.tree(samples),
            )

    def _end_step(self, samples: Rollouts, statistics: Mapping[str, Tensor]) -> None:
        """Note a step that was taken. DeepSpeed skips one whose gradients are not finite, on all ranks of the mesh, and
        sets `overflow`. With DeepSpeed's float16 and finite losses this is no error: its scaler then lowers the scale.

        Raises:
            NonFiniteError: the step was skipped.
        """
        self._forget()
        # DeepSpeed computes the norm in every step, to detect gradients that are not finite (`zero_setup`)
        self.grad_norm = float(self.engine.get_global_grad_norm())
        if getattr(self.engine.optimizer, "overflow", False):
            error = refusal(samples, statistics, self.group.max)
            if error.sample >= 0 or not self.engine.fp16_enabled():
                raise error
        self.version += 1

    def source_digests(self) -> SourceDigests:
        if self.stage < 3:
            return source_digests(self.head.model)
        if not self._sends_partitions:
            return {}
        digest_of, values_of = partial(partition_digest, group=self.group), partial(summed_digests, group=self.group)
        return source_digests(self.head.model, digest_of, values_of)

    def export(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        merged: bool = True,
        names: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> Iterator[Bucket]:
        return buckets(
            self.head.model,
            self._gather,
            bucket_bytes,
            merged=merged,
            names=names,
            without=without,
            full_bytes=compat.full_bytes,
        )

    def pieces(self, piece_bytes: int, names: Collection[str] | None = None) -> Iterator[Sequence[Piece]]:
        """See `base.TrainingEngine`. In stage 3 every rank sends its partitions to the first. A gather would assemble
        each parameter on every rank, and once more inside the all-gather of a backend such as gloo."""
        if not self._sends_partitions:
            return whole_pieces(self.export(piece_bytes, merged=False, names=names))
        chosen = [(name, p) for name, p in self.head.model.named_parameters() if names is None or name in names]
        return partition_pieces(chosen, self.group, piece_bytes)

    def parts(self) -> Parts:
        """See `base.ScoringEngine`. In stage 3 a rank has a contiguous range of every flattened parameter, which is
        several boxes of it. Their tensors are views of DeepSpeed's partition."""
        if self.stage < 3:
            return whole_parts(self.head.model)
        named = list(self.head.model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad] or named
        return {name: partition_of(p, self.group) for name, p in trained}

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """See `base.InPlaceEngine`. Ranks may run different numbers of forwards inside, or none."""
        self.engine.eval()
        keeping = autocast(self.device, self.compute_dtype, keeps_weights=True)
        with self._gather(list(self.head.model.parameters())), self._without_hooks(), keeping:
            yield self.head.model

    def _without_hooks(self) -> contextlib.AbstractContextManager[object]:
        if self.stage < 3:
            return contextlib.nullcontext()
        return compat.without_hooks(self.engine.optimizer, self.head.modules())

    def training_state(self) -> TrainingState:
        """Ranges of the flattened parameters, as views of DeepSpeed's partitions."""
        if self.stage < 3 and self._state_names():
            compat.link_state(self.engine.optimizer)
        keys, scalars = [MASTER, *self._state_names()], self._scalars()
        state = TrainingState(self.version, scalars={name: scalars_of(scalars) for name, _ in self._trained()})
        state.scaler = loss_scale(self.engine.optimizer)
        state.group_numbers = self._settings.numbers() if self._settings is not None else {}
        state.tensors = {name: {key: self._state_part(p, key) for key in keys} for name, p in self._trained()}
        return state

    @contextlib.contextmanager
    def loading(self, specs: StateSpecs) -> Iterator[TrainingState]:
        assert self._settings is not None, "a frozen role has no training state"
        trained = self._trained()
        check_names(specs, [name for name, _ in trained])
        keys = sorted({key for tensors in specs.values() for key in tensors} - {MASTER})
        for flat in compat.flat_weights(self.engine.optimizer):
            values = self.engine.optimizer.optimizer.state[flat]
            values.update({key: torch.zeros_like(flat) for key in keys if key not in values})
        if self.stage < 3 and self._state_names():
            compat.link_state(self.engine.optimizer)
        # a partition has many parameters and one step count, which is the same for all of them
        first = trained[0][0]
        state = TrainingState(scalars={first: {}}, group_numbers=self._settings.empty())
        state.tensors = {name: {key: self._state_part(p, key) for key in (MASTER, *keys)} for name, p in trained}
        yield state
        optimizer = self.engine.optimizer.optimizer
        for flat in compat.flat_weights(self.engine.optimizer) if keys else ():
            optimizer.state[flat].update(loaded_scalars(optimizer, flat, state.scalars[first]))
        self._settings.load(state.group_numbers)
        compat.publish_weights(self.engine.optimizer, (p for _, p in trained), self.stage)
        set_loss_scale(self.engine.optimizer, state.scaler)
        self.version = state.version

    def _state_part(self, parameter: nn.Parameter, key: str) -> StateTensor:
        """This rank's part of one tensor of the training state: a range of the flattened tensor."""
        located = compat.state_range(self.engine.optimizer, parameter, None if key == MASTER else key, self.group.index)
        shape = compat.full_shape(parameter)
        if located is None:  # the parameter is in other ranks' partitions
            return StateTensor(TensorSpec(shape, torch.float32), [])
        start, flat = located
        return StateTensor(TensorSpec(shape, flat.dtype), flat_cells(shape, start, flat))

    def close(self) -> None:
        self.engine.destroy()

    def _call(self, samples: Rollouts, row: PackedRow | None) -> Mapping[str, Ragged]:
        outputs: Mapping[str, Ragged] = self.engine(samples, row)
        return outputs

    def _gather(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.stage < 3 else compat.full(parameters)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.head.model.named_parameters() if p.requires_grad]

    def _flat_states(self) -> list[dict[str, Any]]:
        return list(self.engine.optimizer.optimizer.state.values())

    def _state_names(self) -> list[str]:
        """The names of the optimizer's tensors with a value per element, such as `exp_avg`."""
        states = self._flat_states()
        names = {key for state in states for key, value in state.items() if torch.is_tensor(value) and value.dim() > 0}
        return sorted(names)

    def _scalars(self) -> dict[str, Tensor]:
        """The optimizer's 0-dimensional tensors, such as `step`."""
        values = {key: value for state in self._flat_states() for key, value in state.items()}
        return {key: value for key, value in values.items() if torch.is_tensor(value) and value.dim() == 0}


def _nan(outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss whose gradients are not finite."""
    return torch.nan * torch.stack([column.values.sum() for column in outputs.values()]).sum(), {}


if TYPE_CHECKING:  # the type checker verifies that the protocols are implemented
    _TRAINS: type[TrainingEngine] = ZeroEngine
    _LENDS: type[InPlaceEngine] = ZeroEngine
