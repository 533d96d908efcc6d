"""Engine that trains and scores with a full replica of the model on every rank of the mesh (`zero_stage: 0`).

Uses plain torch, so a single process needs neither DeepSpeed nor a launcher. Gradients are summed over the mesh after
the last micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...algorithms.algorithm import TokenLoss
from ...algorithms.nonfinite import NonFiniteError, refusal
from ...algorithms.rollout import Ragged, Rollouts
from ...realloc.transfer import Parts
from ..base import BUCKET_BYTES, Bucket, Rate, SourceDigests
from ..mesh_group import MeshGroup
from ..parameter_pieces import Piece
from ..training_state import (
    MASTER,
    StateSpecs,
    StateTensor,
    TensorSpec,
    TrainingState,
    is_elementwise,
    loaded_scalars,
    room_for,
    scalars_of,
)
from .heads import RoleHead, autocast
from .micro_batches import CachedGraphs, run_forward, run_training
from .optimizer_state import GroupSettings, MasterWeights
from .packed_row import PackedRow
from .weight_export import buckets, check_names, source_digests, specs_of, whole_pieces
from .weight_source import fill


if TYPE_CHECKING:
    from ..base import InPlaceEngine, TrainingEngine


class ReplicatedEngine:
    """Implements `base.TrainingEngine` and `base.InPlaceEngine`.

    Args:
        head: the role's model in its head. Parameters on the meta device are read onto `device`.
        group: the mesh.
        device: device of the computation.
        compute_dtype: bfloat16 or float16 for mixed precision (float32 parameters, autocast); `None` to compute in the
            parameters' dtype.
        make_optimizer: makes the optimizer of a module; `None` for a frozen role. 16-bit parameters are trained through
            float32 master weights.
        max_grad_norm: norm to which the global gradient is clipped; not clipped if 0 or less.
    """

    def __init__(
        self,
        head: RoleHead,
        group: MeshGroup,
        device: torch.device,
        *,
        compute_dtype: torch.dtype | None = None,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        max_grad_norm: float = 0.0,
    ) -> None:
        fill(head.model, device)
        self.head, self.group, self.device = head.to(device), group, device
        self.compute_dtype, self.max_grad_norm = compute_dtype, max_grad_norm
        self.optimizer = make_optimizer(head.model) if make_optimizer else None
        self.masters = MasterWeights(self.optimizer) if self.optimizer else None
        self._settings = GroupSettings(self.optimizer) if self.optimizer else None
        self._left_out = [] if self.optimizer is None else self._not_of(self.optimizer)
        self.scaler = torch.amp.GradScaler(device.type, enabled=compute_dtype is torch.float16)
        self.version, self.grad_norm = 0, math.nan
        self._kept = CachedGraphs()
        if self.optimizer is None:
            head.requires_grad_(False).eval()

    @property
    def parameter_specs(self) -> Mapping[str, TensorSpec]:
        return specs_of(self.head.model)

    @property
    def has_replicas(self) -> bool:
        return self.group.size > 1

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> dict[str, Ragged]:
        with self._evaluating():
            tree = self.head.tree(samples)
            return run_forward(self._call, samples, micro_batch_tokens, self.group, self.device, tree=tree)

    def forward_to_train(self, samples: Rollouts, micro_batch_tokens: int, most_tokens: int) -> dict[str, Ragged]:
        """`forward` of samples that the role will be trained on. Keeps their graphs for this training, if they are not
        too large.

        Args:
            micro_batch_tokens: most tokens of one forward of the training.
            most_tokens: most tokens of all kept graphs.
        """
        self.head.train()
        tree = self.head.tree(samples)
        if self._kept.tokens + (samples.tokens if tree is None else tree.tokens) > most_tokens:
            return self.forward(samples, micro_batch_tokens)
        return run_forward(
            self._call, samples, micro_batch_tokens, self.group, self.device, graphs=self._kept, tree=tree
        )

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> dict[str, Tensor]:
        statistics = self.add_gradients(samples, loss, micro_batch_tokens, graphs=self._kept)
        self._step(samples, statistics, learning_rate)
        return statistics

    def add_gradients(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, *, graphs: CachedGraphs | None = None
    ) -> dict[str, Tensor]:
        """See `base.TrainingEngine`.

        Args:
            graphs: forwards of some of the samples that a scoring call has computed.
        """
        assert self.optimizer is not None, "a frozen role cannot be trained"
        self.head.train()
        return run_training(
            self._call,
            samples,
            loss,
            micro_batch_tokens,
            self.group,
            self.device,
            lambda value, is_last: self.scaler.scale(value).backward(),
            graphs=graphs,
            tree=self.head.tree(samples),
        )

    def _step(self, samples: Rollouts, statistics: Mapping[str, Tensor], learning_rate: Rate) -> None:
        assert self.optimizer is not None and self._settings is not None, "a frozen role cannot be trained"
        self.scaler.scale(torch.zeros((), device=self.device))  # creates its scale, which a rank without samples lacks
        self._sum_gradients()
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled():  # other gradients would be neither unscaled nor checked
            self._clear_others()
        self.grad_norm = float(self._clip())
        if not math.isfinite(self.grad_norm):
            self._refuse(samples, statistics)
        self._settings.give(learning_rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._clear()
        self._masters.publish()
        self.version += 1

    def drop(self) -> None:
        assert self.optimizer is not None, "a frozen role has no gradients"
        self.optimizer.zero_grad(set_to_none=True)
        self._clear_others()

    def _not_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """The trainable parameters that an optimizer does not step."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trainable = [p for p in self.head.parameters() if p.requires_grad]
        return [p for p in trainable if id(self._masters.of(p)) not in stepped]

    @property
    def _masters(self) -> MasterWeights:
        assert self.masters is not None, "a frozen role has no master weights"
        return self.masters

    def _clear(self) -> None:
        self.drop()
        self._kept.forget()

    def _clear_others(self) -> None:
        """Discard the gradients of trainable parameters that a user's optimizer leaves out. They count only in the
        norm, as in Trainer."""
        for parameter in self._left_out:
            parameter.grad = None

    def _with_gradients(self) -> list[nn.Parameter]:
        """The tensors that have the gradients: the trainable parameters, or their master weights."""
        return [self._masters.of(p) for p in self.head.parameters() if p.requires_grad]

    def _clip(self) -> Tensor:
        """Clip the gradients to `max_grad_norm`. Returns the norm before clipping, a 0-dimensional tensor."""
        parameters = self._with_gradients()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        return norm

    def _refuse(self, samples: Rollouts, statistics: Mapping[str, Tensor]) -> None:
        """Drop the gradients of a step that is not finite.

        Raises:
            NonFiniteError: always, except if the losses are finite and the float16 scaler has a scale of 1 or more: it
                then skips the step itself and lowers the scale.
        """
        assert self.optimizer is not None, "a frozen role has no gradients"
        error = refusal(samples, statistics, self.group.max)
        if self.scaler.is_enabled() and error.sample < 0:
            if self.scaler.get_scale() >= 1.0:
                return
            error = NonFiniteError(f"{error}, with the loss scaled by {self.scaler.get_scale():g}")
        self._clear()
        self.scaler.update(self.scaler.get_scale() if self.scaler.is_enabled() else None)
        raise error

    def source_digests(self) -> SourceDigests:
        return source_digests(self.head.model)

    def export(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        merged: bool = True,
        names: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> Iterator[Bucket]:
        return buckets(self.head.model, None, bucket_bytes, merged=merged, names=names, without=without)

    def pieces(self, piece_bytes: int, names: Collection[str] | None = None) -> Iterator[Sequence[Piece]]:
        return whole_pieces(self.export(piece_bytes, merged=False, names=names))

    def parts(self) -> Parts:
        """The full parameters."""
        return whole_parts(self.head.model)

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        with self._evaluating(), autocast(self.device, self.compute_dtype, keeps_weights=True):
            yield self.head.model

    def training_state(self) -> TrainingState:
        """The full tensors."""
        assert self.optimizer is not None and self._settings is not None, "a frozen role has no training state"
        state = TrainingState(self.version, scaler=self.scaler.state_dict() if self.scaler.is_enabled() else {})
        state.group_numbers = self._settings.numbers()
        for name, master in self._named_masters():
            values = self.optimizer.state.get(master, {})
            tensors = {MASTER: master, **{key: value for key, value in values.items() if is_elementwise(value)}}
            state.tensors[name] = {key: StateTensor.of(tensor) for key, tensor in tensors.items()}
            state.scalars[name] = scalars_of(values)
        return state

    @contextlib.contextmanager
    def loading(self, specs: StateSpecs) -> Iterator[TrainingState]:
        assert self.optimizer is not None and self._settings is not None, "a frozen role has no training state"
        masters = self._named_masters()
        check_names(specs, [name for name, _ in masters])
        state = TrainingState(scalars={name: {} for name, _ in masters}, group_numbers=self._settings.empty())
        values: dict[str, dict[str, Tensor]] = {}
        for name, master in masters:
            current, shape = self.optimizer.state.get(master, {}), tuple(master.shape)
            others = [(key, spec) for key, spec in specs[name].items() if key != MASTER]
            values[name] = {key: room_for(spec, current.get(key), master, shape) for key, spec in others}
            state.tensors[name] = {k: StateTensor.of(t) for k, t in {MASTER: master, **values[name]}.items()}
        yield state
        self._kept.forget()
        for name, master in masters:
            self.optimizer.state.pop(master, None)
            if loaded := {**values[name], **loaded_scalars(self.optimizer, master, state.scalars[name])}:
                self.optimizer.state[master] = loaded
        self._settings.load(state.group_numbers)
        self._masters.publish()
        if self.scaler.is_enabled() and state.scaler:
            self.scaler.load_state_dict(state.scaler)
        self.version = state.version

    def _named_masters(self) -> list[tuple[str, nn.Parameter]]:
        """The name of each trained parameter, with the tensor that the optimizer steps."""
        return [(name, self._masters.of(p)) for name, p in self.head.model.named_parameters() if p.requires_grad]

    def close(self) -> None:
        pass

    def _call(self, samples: Rollouts, row: PackedRow | None) -> Mapping[str, Ragged]:
        with autocast(self.device, self.compute_dtype):
            outputs: Mapping[str, Ragged] = self.head(samples, row)
        return outputs

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.head.training
        self.head.eval()
        try:
            yield
        finally:
            self.head.train(was_training)

    def _sum_gradients(self) -> None:
        if self.group.size == 1:
            return
        parameters = self._with_gradients()
        # a rank without samples has no gradients; a parameter that the loss does not use has none on any rank
        gradients = torch.tensor([float(p.grad is not None) for p in parameters], device=self.group.device)
        self.group.sum_([gradients])
        used = [p for p, count in zip(parameters, gradients.tolist(), strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.sum_([p.grad for p in used if p.grad is not None])


def whole_parts(model: nn.Module) -> Parts:
    """The full parameters of a replica as `Parts`: the trained ones, or all if none is trained."""
    named = list(model.named_parameters())
    trained = [(name, p) for name, p in named if p.requires_grad] or named
    return {name: [(tuple((0, size) for size in p.shape), p.data)] for name, p in trained}


if TYPE_CHECKING:  # the type checker verifies that the protocols are implemented
    _TRAINS: type[TrainingEngine] = ReplicatedEngine
    _LENDS: type[InPlaceEngine] = ReplicatedEngine
