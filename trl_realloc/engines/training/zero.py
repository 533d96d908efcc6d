"""Engine that trains and scores with DeepSpeed ZeRO, stages 1 to 3, on the ranks of one mesh.

A job has several of these engines on different meshes. Accelerate's DeepSpeed integration spans the whole job, so
`deepspeed.initialize` is called here with the mesh's process groups. The settings and workarounds for this are in
`zero_setup`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...algorithms.base import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts
from ...realloc.transfer import Parts
from ..base import BUCKET_BYTES, Bucket, Rate
from ..mesh_group import MeshGroup
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
from .compiled_ops import clear_stale_locks, compiles, extensions_folder
from .nonfinite_guard import refusal
from .packed_forward import RoleHead, run_forward, run_training
from .replicated import set_learning_rate, whole_parts
from .weight_export import buckets, check_names, specs_of
from .weight_source import fill, source_of
from .zero_partition import partition_of, partition_unread
from .zero_setup import (
    Topology,
    cast_parameters,
    deepspeed_config,
    initializing,
    memory_efficient_linear,
    parameter_dtype,
)


if TYPE_CHECKING:
    from ..base import InPlaceEngine, TrainingEngine


class ZeroEngine:
    """Keeps `base.TrainingEngine` and `base.InPlaceEngine`, whose docstrings describe the methods. The arguments that
    are not listed are those of `ReplicatedEngine`.

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
        alone: Any,
        config: Mapping[str, Any] | None = None,
        compute_dtype: torch.dtype | None = None,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        max_grad_norm: float = 0.0,
    ) -> None:
        import deepspeed

        self.head, self.group, self.device, self.stage = head, group, device, stage
        self.frozen = make_optimizer is None
        settings = deepspeed_config(stage, config, max_grad_norm, trains=not self.frozen)
        self.compute_dtype = None if parameter_dtype(settings) else compute_dtype
        self._linear = partial(memory_efficient_linear, stage, settings)
        if self.frozen:
            head.requires_grad_(False).eval()
        if compiles(settings):
            clear_stale_locks(extensions_folder())
        topology = Topology(group, alone)
        with initializing(group, device):
            if stage == 3:
                partition_unread(head.model, settings, topology, device)
            else:
                dtype = parameter_dtype(settings)
                if dtype is not None and source_of(head.model) is not None:
                    cast_parameters(head.model, dtype)  # as DeepSpeed does, before the device has them in float32
                fill(head.model, device)
            self.engine, *_ = deepspeed.initialize(
                model=head,
                optimizer=make_optimizer(head.model) if make_optimizer else None,
                config=settings,
                mpu=topology,
                dist_init_required=False,
            )
        self.version = 0

    @property
    def parameter_specs(self) -> Mapping[str, TensorSpec]:
        """See `base.ScoringEngine`."""
        return specs_of(self.head.model)

    @property
    def has_replicas(self) -> bool:
        return self.group.size > 1 and self.stage < 3  # in stage 3 each rank has a part of its own

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> dict[str, Ragged]:
        self.engine.eval()
        return run_forward(self._call, samples, micro_batch_tokens, self.group, self.device, in_step=self.stage == 3)

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> dict[str, Tensor]:
        self.engine.train()
        set_learning_rate(self.engine.optimizer, learning_rate)

        def backward(value: Tensor, is_last: bool) -> None:
            self.engine.set_gradient_accumulation_boundary(is_last)
            # DeepSpeed averages gradients over the mesh, but the loss needs their sum
            self.engine.backward(value * self.group.size)
            self.engine.step()

        with self._linear():
            statistics = run_training(
                self._call, samples, loss, micro_batch_tokens, self.group, self.device, backward, in_step=True
            )
        self._check_step(samples, statistics)
        self.version += 1
        return statistics

    def _check_step(self, samples: Rollouts, statistics: Mapping[str, Tensor]) -> None:
        """DeepSpeed skips a step whose gradients are not finite, on all ranks of the mesh, and sets `overflow`. With
        DeepSpeed's float16 and finite losses this is no error: its scaler then lowers the scale.

        Raises:
            NonFiniteError: the step was skipped.
        """
        if getattr(self.engine.optimizer, "overflow", False):
            error = refusal(self.group, samples, statistics)
            if error.sample >= 0 or not self.engine.fp16_enabled():
                raise error

    def export(
        self, bucket_bytes: int = BUCKET_BYTES, *, merged: bool = True, names: Collection[str] | None = None
    ) -> Iterator[Bucket]:
        return buckets(self.head.model, self._gather, bucket_bytes, merged=merged, names=names)

    def parts(self) -> Parts:
        """See `base.ScoringEngine.parts`. In stage 3 a rank has a contiguous range of every flattened parameter, which
        is several boxes of it. Their tensors are views of DeepSpeed's partition."""
        if self.stage < 3:
            return whole_parts(self.head.model)
        named = list(self.head.model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad] or named
        return {name: partition_of(p, self.group) for name, p in trained}

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """See `base.InPlaceEngine`. Ranks may run different numbers of forwards inside, or none."""
        self.engine.eval()
        with self._gather(list(self.head.model.parameters())), self._without_hooks(), self._autocast():
            yield self.head.model

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Inside, the modules have no hooks of DeepSpeed's. In stage 3 the hooks partition a module's parameters after
        its forward, the gathered ones too, and gather them for the next forward over the whole mesh: ranks that decode
        for different numbers of steps would wait for each other for ever. The hooks are put back and not created again,
        because that would lose the recorded order of modules by which DeepSpeed prefetches."""
        if self.stage < 3:
            yield
            return
        zero = getattr(self.engine.optimizer, "parameter_offload", self.engine.optimizer)
        ids = {handle.id for handle in (zero.fwd_pre_hook, *zero.forward_hooks, *zero.backward_hooks)}
        saved: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for module in self.head.modules():
            for table in (module._forward_pre_hooks, module._forward_hooks):
                if not ids.isdisjoint(table):
                    saved.append((table, dict(table)))
                    for hook in ids.intersection(table):
                        del table[hook]
        try:
            yield
        finally:
            for table, hooks in saved:
                table.clear()
                table.update(hooks)

    def training_state(self) -> TrainingState:
        """See `base.TrainingEngine`: here ranges of the flattened parameters, as views of DeepSpeed's partitions."""
        self._link_state()
        keys, scalars = [MASTER, *self._state_names()], self._scalars()
        state = TrainingState(self.version, scalars={name: scalars_of(scalars) for name, _ in self._trained()})
        state.tensors = {name: {key: self._state_part(p, key) for key in keys} for name, p in self._trained()}
        return state

    @contextlib.contextmanager
    def loading(self, specs: StateSpecs) -> Iterator[TrainingState]:
        """See `base.TrainingEngine`."""
        trained = self._trained()
        check_names(specs, [name for name, _ in trained])
        keys = sorted({key for tensors in specs.values() for key in tensors} - {MASTER})
        for flat in self._flats():
            values = self.engine.optimizer.optimizer.state[flat]
            values.update({key: torch.zeros_like(flat) for key in keys if key not in values})
        self._link_state()
        # a partition has many parameters and one step count, which is the same for all of them
        first = trained[0][0]
        state = TrainingState(scalars={first: {}})
        state.tensors = {name: {key: self._state_part(p, key) for key in (MASTER, *keys)} for name, p in trained}
        yield state
        optimizer = self.engine.optimizer.optimizer
        for flat in self._flats() if keys else ():
            optimizer.state[flat].update(loaded_scalars(optimizer, flat, state.scalars[first]))
        self._publish()
        self.version = state.version

    def _state_part(self, parameter: Any, key: str) -> StateTensor:
        """This rank's part of one tensor of the training state: a range of the flattened tensor."""
        zero, optimizer_key = self.engine.optimizer, None if key == MASTER else key
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if self.stage == 3:
            group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            flat = zero.fp32_partitioned_groups_flat[group]
            tensor = flat if optimizer_key is None else zero.optimizer.state[flat][key]
            start = self.group.index * parameter.ds_tensor.numel()
            return StateTensor(TensorSpec(shape, tensor.dtype), flat_cells(shape, start, tensor.data[offset:][:length]))
        fragment = parameter._hp_mapping
        if fragment is None:  # the parameter is in other ranks' partitions
            return StateTensor(TensorSpec(shape, torch.float32), [])
        tensor = fragment.get_hp_fragment(optimizer_key).data
        return StateTensor(
            TensorSpec(shape, tensor.dtype), flat_cells(shape, fragment.lp_fragment_address.start, tensor)
        )

    def _publish(self) -> None:
        """Copy the float32 weights into the parameters. Collective over the mesh."""
        zero = self.engine.optimizer
        if self.stage < 3:
            zero.update_lp_params()
            return
        parameter: Any
        for _, parameter in self._trained():
            group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            parameter.ds_tensor.data[:length].copy_(zero.fp32_partitioned_groups_flat[group].data[offset:][:length])
        if persistent := zero.persistent_parameters:  # small ones, which stay full beside their partitions
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def _flats(self) -> list[Tensor]:
        """The float32 weights of this rank's flat partitions."""
        zero = self.engine.optimizer
        # stage 3; stages 1 and 2; stage 1 in bfloat16 with gradients in float32
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        return list(next(getattr(zero, name) for name in names if hasattr(zero, name)))

    def _link_state(self) -> None:
        """Give every parameter views of its optimizer state, which stages 1 and 2 read. DeepSpeed 0.19.8 creates the
        views once, after the first step of the first parameter group, when the other groups have no state yet."""
        zero = self.engine.optimizer
        if self.stage < 3 and self._state_names():
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        self.engine.destroy()

    def _call(self, samples: Rollouts) -> Mapping[str, Ragged]:
        with self._autocast():
            outputs: Mapping[str, Ragged] = self.engine(samples)
        return outputs

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.compute_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

    def _gather(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """Inside, the parameters are full."""
        if self.stage < 3:
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters))

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.head.model.named_parameters() if p.requires_grad]

    def _flat_states(self) -> list[dict[str, Any]]:
        """The optimizer state of each of this rank's flat partitions."""
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


if TYPE_CHECKING:  # the type checker proves that the engine keeps its protocols
    _TRAINS: type[TrainingEngine] = ZeroEngine
    _LENDS: type[InPlaceEngine] = ZeroEngine
