"""Training and scoring with DeepSpeed ZeRO on the ranks of one mesh: stages 1 to 3.

Several of these engines live in one job, each on its own mesh, which Accelerate cannot give (its DeepSpeed path spans
the world): `deepspeed.initialize` is called here with the mesh's groups.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...algorithms.base import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts
from ...realloc.layout import Box, flat_boxes
from ...realloc.transfer import Parts
from ..base import BUCKET_BYTES, Bucket, Rate
from ..mesh_group import MeshGroup
from .compiled_ops import clear_stale_locks, compiles, extensions_folder
from .nonfinite_guard import refusal
from .packed_forward import RoleHead, run_forward, run_training
from .replicated import set_learning_rate, whole_parts
from .weight_export import buckets, check_state
from .zero_setup import Topology, deepspeed_config, initializing, memory_efficient_linear, parameter_dtype


if TYPE_CHECKING:
    from ..base import InPlaceEngine, TrainingEngine


class ZeroEngine:
    """Arguments as `ReplicatedEngine`'s, and:

    Args:
        stage: 1, 2 or 3; a frozen role only 3.
        alone: a process group of this rank by itself.
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
        with initializing(group, device):
            self.engine, *_ = deepspeed.initialize(
                model=head,
                optimizer=make_optimizer(head.model) if make_optimizer else None,
                config=settings,
                mpu=Topology(group, alone),
                dist_init_required=False,
            )
        self.version = 0

    @property
    def parameter_names(self) -> list[str]:
        """Of the whole model."""
        return [name for name, _ in self.head.model.named_parameters()]

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
            self.engine.backward(value * self.group.size)  # DeepSpeed averages over the mesh; the loss wants the sum
            self.engine.step()

        with self._linear():
            statistics = run_training(
                self._call, samples, loss, micro_batch_tokens, self.group, self.device, backward, in_step=True
            )
        self._check_step(samples, statistics)
        self.version += 1
        return statistics

    def _check_step(self, samples: Rollouts, statistics: Mapping[str, Tensor]) -> None:
        """DeepSpeed leaves a step out whose gradients are not finite, on all ranks of the mesh, and says so in
        `overflow`. Under its own float16 that is how its scaler finds the scale, where the losses are finite.

        Raises:
            NonFiniteError: the step was left out.
        """
        if getattr(self.engine.optimizer, "overflow", False):
            error = refusal(self.group, samples, statistics)
            if error.sample >= 0 or not self.engine.fp16_enabled():
                raise error

    def export(self, bucket_bytes: int = BUCKET_BYTES, *, merged: bool = True) -> Iterator[Bucket]:
        return buckets(self.head.model, self._gather, bucket_bytes, merged=merged)

    def parts(self) -> Parts:
        """As `ReplicatedEngine.parts`. In stage 3 a process holds a stretch of every flattened parameter: some boxes of
        it, live in DeepSpeed's partition."""
        if self.stage < 3:
            return whole_parts(self.head.model)
        named = list(self.head.model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad] or named
        return {name: self._partition(p) for name, p in trained}

    def _partition(self, parameter: Any) -> list[tuple[Box, Tensor]]:
        shape, flat = tuple(parameter.ds_shape), parameter.ds_tensor.data
        first = self.group.index * flat.numel()
        boxes = flat_boxes(shape, first, min(first + flat.numel(), parameter.ds_numel))
        sizes = [math.prod(stop - start for start, stop in box) for box in boxes]
        cells = flat[: sum(sizes)].split(sizes) if sizes else ()
        return [(box, cell.view([stop - start for start, stop in box])) for box, cell in zip(boxes, cells, strict=True)]

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """The model with all its parameters, for generating in place. Entering is collective over the mesh; a forward
        inside is not, so ranks may make different numbers of them, or none."""
        self.engine.eval()
        with self._gather(list(self.head.model.parameters())), self._without_hooks(), self._autocast():
            yield self.head.model

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """The modules without DeepSpeed's hooks. After a module's forward in stage 3 they partition its parameters, the
        gathered ones too, and gather them for the next forward with the whole mesh: ranks that decode for different
        numbers of steps would wait for each other for ever. They are set aside rather than made anew, which would lose
        the recorded order of modules by which DeepSpeed prefetches."""
        if self.stage < 3:
            yield
            return
        zero = getattr(self.engine.optimizer, "parameter_offload", self.engine.optimizer)
        ids = {handle.id for handle in (zero.fwd_pre_hook, *zero.forward_hooks, *zero.backward_hooks)}
        kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for module in self.head.modules():
            for table in (module._forward_pre_hooks, module._forward_hooks):
                if not ids.isdisjoint(table):
                    kept.append((table, dict(table)))
                    for hook in ids.intersection(table):
                        del table[hook]
        try:
            yield
        finally:
            for table, hooks in kept:
                table.clear()
                table.update(hooks)

    def state_dict(self) -> dict[str, Any]:
        """As `ReplicatedEngine.state_dict`. Collective; every rank has the whole."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self._link_slots()
        parameters: dict[str, dict[str, Tensor]] = {}
        for name, parameter in self._trained():
            slots = {key: safe_get_full_optimizer_state(parameter, key) for key in self._slot_names()}
            slots["master"] = safe_get_full_fp32_param(parameter)
            parameters[name] = {key: cell.detach().float().cpu().clone() for key, cell in slots.items()}
        scalars = {name: {key: cell.clone() for key, cell in self._scalars().items()} for name in parameters}
        return {"version": self.version, "parameters": parameters, "scalars": scalars}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, [name for name, _ in self._trained()])
        kinds = {key for cells in state["parameters"].values() for key in cells} - {"master"}
        # one step count for a partition of many parameters: it is the same for all of them
        scalars: dict[str, Any] = next(iter(state["scalars"].values()), {})
        self._make_slots(sorted(kinds), scalars)
        for name, parameter in self._trained():
            for key, cell in state["parameters"][name].items():
                self._set(parameter, None if key == "master" else key, cell.to(self.device))
        self.version = state["version"]

    def _make_slots(self, kinds: Sequence[str], scalars: Mapping[str, Any]) -> None:
        """The optimizer's state as its first step would make it, for every flat partition of this rank."""
        zero = self.engine.optimizer
        flats = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        for flat in flats if kinds else ():
            slots = zero.optimizer.state[flat]
            slots.update({key: torch.zeros_like(flat) for key in kinds})
            slots.update({key: cell.clone() if torch.is_tensor(cell) else cell for key, cell in scalars.items()})
        self._link_slots()

    def _link_slots(self) -> None:
        """In stages 1 and 2 a parameter keeps views of its slots. DeepSpeed 0.19.8 makes them after the first step of
        the first parameter group, when the other groups have no slots yet, and then never again."""
        zero = self.engine.optimizer
        if self.stage < 3 and self._slot_names():
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _set(self, parameter: nn.Parameter, key: str | None, value: Tensor) -> None:
        """This rank's part of a parameter's float32 weights (`key` None) or of one slot, from the whole tensor."""
        from deepspeed import utils

        if self.stage < 3:
            if key is None:
                utils.safe_set_full_fp32_param(parameter, value)
            else:
                utils.safe_set_full_optimizer_state(parameter, value, key)
        else:
            # DeepSpeed 0.19.8's safe_set_full_* take a partition's offset from its own length, which is wrong for the
            # last one of a parameter that does not divide; the local setters take what belongs here
            each = -(-value.numel() // self.group.size)
            padded = torch.nn.functional.pad(value.flatten(), (0, each * self.group.size - value.numel()))
            part = padded.narrow(0, each * self.group.index, each)
            if key is None:
                utils.safe_set_local_fp32_param(parameter, part[: utils.safe_get_local_fp32_param(parameter).numel()])
            else:
                here = utils.safe_get_local_optimizer_state(parameter, key).numel()
                utils.safe_set_local_optimizer_state(parameter, part[:here], key)
        if key is None:
            with self._gather([parameter], modifier_rank=0):
                parameter.data.copy_(value)

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

    def _gather(
        self, parameters: Sequence[nn.Parameter], modifier_rank: int | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Whole parameters inside; what rank `modifier_rank`, counted within the mesh, changed there is every rank's
        after."""
        if self.stage < 3:
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier_rank)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.head.model.named_parameters() if p.requires_grad]

    def _flat_states(self) -> list[dict[str, Any]]:
        """The states that the user's optimizer keeps of this rank's flat partitions."""
        return list(self.engine.optimizer.optimizer.state.values())

    def _slot_names(self) -> list[str]:
        """`exp_avg`, … : what the optimizer keeps per element. The same on every rank, for each is a collective."""
        flat = self._flat_states()
        names = {key for state in flat for key, cell in state.items() if torch.is_tensor(cell) and cell.dim() > 0}
        return sorted(names)

    def _scalars(self) -> dict[str, Tensor]:
        flat = self._flat_states()
        cells = {key: cell for state in flat for key, cell in state.items()}
        return {key: cell for key, cell in cells.items() if torch.is_tensor(cell) and cell.dim() == 0}


if TYPE_CHECKING:  # the type checker proves that the engine keeps its protocols
    _TRAINS: type[TrainingEngine] = ZeroEngine
    _LENDS: type[InPlaceEngine] = ZeroEngine
