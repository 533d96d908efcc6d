"""Training and scoring with a full replica of the role on every rank of the mesh: `zero_stage: 0`.

Plain torch, so one process needs neither DeepSpeed nor a launcher. Gradients are summed over the mesh after the last
micro-batch; the loss is already divided by the global number of tokens.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...algorithms.base import TokenLoss
from ...algorithms.nonfinite import NonFiniteError
from ...algorithms.rollout import Ragged, Rollouts
from ...realloc.transfer import Parts
from ..base import BUCKET_BYTES, GROUP, Bucket, Rate
from ..mesh_group import MeshGroup
from .master_weights import MasterWeights, in_dtype_of, is_low
from .nonfinite_guard import refusal
from .packed_forward import RoleHead, run_forward, run_training
from .weight_export import buckets, check_state


if TYPE_CHECKING:
    from ..base import InPlaceEngine, TrainingEngine


class ReplicatedEngine:
    """Args:
    head: the role's model and what is asked of it.
    group: the mesh.
    device: where the model lives while it computes.
    compute_dtype: bfloat16 or float16 for mixed precision (float32 parameters, autocast), `None` for the model's own.
    make_optimizer: from the module to its optimizer; `None` for a frozen role. Parameters of 16 bits are trained
        through float32 master weights.
    max_grad_norm: clip the global gradient to this norm; 0 or less for never.
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
        self.head, self.group, self.device = head.to(device), group, device
        self.compute_dtype, self.max_grad_norm = compute_dtype, max_grad_norm
        self.optimizer = make_optimizer(head.model) if make_optimizer else None
        self.masters = MasterWeights(self.optimizer) if self.optimizer else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=compute_dtype is torch.float16)
        self.version = 0
        if self.optimizer is None:
            head.requires_grad_(False).eval()

    @property
    def parameter_names(self) -> list[str]:
        """Of the whole model."""
        return [name for name, _ in self.head.model.named_parameters()]

    @property
    def has_replicas(self) -> bool:
        return self.group.size > 1

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> dict[str, Ragged]:
        with self._evaluating():
            return run_forward(self._call, samples, micro_batch_tokens, self.group, self.device)

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> dict[str, Tensor]:
        assert self.optimizer is not None, "a frozen role was asked to train"
        self.head.train()
        statistics = run_training(
            self._call,
            samples,
            loss,
            micro_batch_tokens,
            self.group,
            self.device,
            lambda value, is_last: self.scaler.scale(value).backward(),
        )
        self._sum_gradients()
        self.scaler.unscale_(self.optimizer)
        if not self._clip().isfinite():
            self._refuse(samples, statistics)
        set_learning_rate(self.optimizer, learning_rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._masters.publish()
        self.version += 1
        return statistics

    @property
    def _masters(self) -> MasterWeights:
        assert self.masters is not None, "a frozen role has no masters"
        return self.masters

    def _stepped(self) -> list[nn.Parameter]:
        """What the optimizer steps, with the gradients: the parameters, or their masters."""
        return [self._masters.of(p) for p in self.head.parameters() if p.requires_grad]

    def _clip(self) -> Tensor:
        """Clip the gradients to `max_grad_norm`; returns their norm before that, 0-dimensional."""
        stepped = self._stepped()
        gradients = [p.grad for p in stepped if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(stepped, self.max_grad_norm, norm)
        return norm

    def _refuse(self, samples: Rollouts, statistics: Mapping[str, Tensor]) -> None:
        """Raises:
        NonFiniteError: the step cannot be taken; its gradients are dropped. Not under float16's scaler where the
            losses are finite: it leaves the step out by itself, and scales the next one less.
        """
        assert self.optimizer is not None, "a frozen role has no gradients"
        error = refusal(self.group, samples, statistics)
        if self.scaler.is_enabled() and error.sample < 0:
            if self.scaler.get_scale() >= 1.0:
                return
            error = NonFiniteError(f"{error}, with float16's losses scaled by {self.scaler.get_scale():g}")
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(self.scaler.get_scale() if self.scaler.is_enabled() else None)
        raise error

    def export(self, bucket_bytes: int = BUCKET_BYTES, *, merged: bool = True) -> Iterator[Bucket]:
        return buckets(self.head.model, None, bucket_bytes, merged=merged)

    def parts(self) -> Parts:
        """The parameters that training changes, of a frozen role all: whole, live tensors by the module's names."""
        return whole_parts(self.head.model)

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """The model with all its parameters, for generating in place."""
        with self._evaluating(), self._autocast():
            yield self.head.model

    def state_dict(self) -> dict[str, Any]:
        """What training goes on from, by parameter name and whatever the layout, so that one plan's state loads under
        another: `parameters[name]` holds `master` (the float32 weights) and each of the optimizer's tensors in the
        parameter's shape; `scalars[name]` the rest."""
        assert self.optimizer is not None, "a frozen role has no state"
        parameters: dict[str, dict[str, Tensor]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for name, parameter in self.head.model.named_parameters():
            if parameter.requires_grad:
                master = self._masters.of(parameter)
                slots = self.optimizer.state.get(master, {})
                full = {key: cell for key, cell in slots.items() if torch.is_tensor(cell) and cell.dim()}
                cells = {key: cell.detach() for key, cell in {**full, "master": master}.items()}
                parameters[name] = {
                    key: cell.float().cpu() if cell.is_floating_point() and is_low(cell) else cell.to("cpu", copy=True)
                    for key, cell in cells.items()
                }
                scalars[name] = copy.deepcopy({key: cell for key, cell in slots.items() if key not in full})
        scaler = {"scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}
        return {"version": self.version, "parameters": parameters, "scalars": scalars, **scaler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.optimizer is not None, "a frozen role has no state to load"
        trained = [(name, p) for name, p in self.head.model.named_parameters() if p.requires_grad]
        check_state(state, [name for name, _ in trained])
        if self.scaler.is_enabled() and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        for name, parameter in trained:
            master = self._masters.of(parameter)
            slots = {key: in_dtype_of(master, cell) for key, cell in state["parameters"][name].items()}
            master.data.copy_(slots.pop("master"))
            slots |= {k: c.clone() if torch.is_tensor(c) else c for k, c in state["scalars"][name].items()}
            if slots:
                self.optimizer.state[master] = slots
        self._masters.publish()
        self.version = state["version"]

    def close(self) -> None:
        pass

    def _call(self, samples: Rollouts) -> Mapping[str, Ragged]:
        with self._autocast():
            outputs: Mapping[str, Ragged] = self.head(samples)
        return outputs

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)

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
        parameters = self._stepped()
        has = torch.tensor([float(p.grad is not None) for p in parameters], device=self.group.device)
        self.group.sum_([has])  # a rank without samples has no gradients; a parameter without use has none anywhere
        used = [p for p, count in zip(parameters, has.tolist(), strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.group.sum_([p.grad for p in used if p.grad is not None])


def whole_parts(model: nn.Module) -> Parts:
    """A replica's parameters as layouts see them: the trained ones, or all where none is."""
    named = list(model.named_parameters())
    trained = [(name, p) for name, p in named if p.requires_grad] or named
    return {name: [(tuple((0, size) for size in p.shape), p.data)] for name, p in trained}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: Rate) -> None:
    """To every parameter group; of settings by group, each gets those with its number."""
    for group in optimizer.param_groups:
        group.update({"lr": learning_rate} if isinstance(learning_rate, (int, float)) else learning_rate[group[GROUP]])


if TYPE_CHECKING:  # the type checker proves that the engine keeps its protocols
    _TRAINS: type[TrainingEngine] = ReplicatedEngine
    _LENDS: type[InPlaceEngine] = ReplicatedEngine
