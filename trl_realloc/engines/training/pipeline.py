"""Pipeline parallelism of a Transformers model: this rank's stage, and micro-batches through all of them.

A stage is the model itself with the layers of the other stages passed over, so a family's own code runs in every stage
and parameters keep their names. The schedules and the sending are torch.distributed.pipelining's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ...algorithms.rollout import Ragged, Rollouts
from ...plan.model_spec import stage_layers
from ..mesh_group import MeshGroup
from .packed_attention import backbone_of, base_of
from .packed_forward import RoleHead, tied_weight


class _PassedOver(nn.Module):
    """In the place of what another stage has."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


def keep_stage(model: Any, stage: int, stages: int) -> None:
    """Reduce the model, in place, to one stage: its layers; in the first the embedding, in the last the final norm and
    the head, with the embedding too where that is the head."""
    backbone, base = backbone_of(model), base_of(model)
    own = stage_layers(len(backbone.layers), stages)[stage]
    for at in range(len(backbone.layers)):
        if at not in own:
            backbone.layers[at] = _PassedOver()
    first, last = stage == 0, stage == stages - 1
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not first and not (last and tied_weight(model) is not None):
        _replace(base, embedding)
    if not last:
        for name in ("norm", "final_layer_norm"):
            if hasattr(backbone, name):
                setattr(backbone, name, _PassedOver())
        for module in (head, getattr(base, "score", None)):
            if module is not None:
                _replace(base, module)


def _replace(model: nn.Module, module: nn.Module) -> None:
    name = next(name for name, other in model.named_modules() if other is module)
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, _PassedOver())


class Pipeline:
    """One role's pipeline, on the rank of one stage.

    Args:
        head: the role's model, reduced to this stage.
        group: the pipeline's ranks, in the order of its stages.
        device: where the model lives.
        hidden: the width of what goes from stage to stage; its dtype is the model's.
    """

    def __init__(self, head: RoleHead, group: MeshGroup, device: torch.device, hidden: int) -> None:
        self.head, self.group, self.device, self.hidden = head, group, device, hidden
        self.dtype = next(p.dtype for p in head.parameters() if p.is_floating_point())

    @property
    def is_last(self) -> bool:
        return self.group.index == self.group.size - 1

    def run(
        self,
        micros: Sequence[Rollouts],
        finish: Callable[[int, Mapping[str, Ragged]], Tensor],
        *,
        learns: bool,
        call: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """All micro-batches forward, and where `learns` backward. Every rank of the pipeline calls it with the same.

        Each is padded to the longest one's tokens by a sample of its own, for what goes from stage to stage has one
        shape; shapes are known to all, so none is sent.

        Args:
            micros: samples on the device; at least one.
            finish: on the last stage, from a micro-batch's number and the head's outputs to its loss (0-dimensional).
            call: runs a stage's forward in its context, such as autocast.
        """
        width = max(micro.tokens for micro in micros)
        padded = [_with_tail(micro, width - micro.tokens) for micro in micros]
        stage = _Stage(self, micros, padded, finish, call, learns)
        shape = torch.empty((1, width, self.hidden), dtype=self.dtype, device="meta", requires_grad=learns)
        ids = torch.zeros((len(micros), width), dtype=torch.long, device=self.device)
        number = torch.empty((), dtype=torch.float32, device="meta", requires_grad=learns)
        is_first = self.group.index == 0
        made = PipelineStage(
            stage,
            self.group.index,
            self.group.size,
            self.device,
            input_args=(ids[:1].to("meta") if is_first else shape,),
            output_args=(number if self.is_last else shape,),
            group=self.group.group,
        )
        loss = (lambda output, target: output) if learns else None
        # 1F1B holds activations of no more micro-batches than stages, and wants as many at least
        kind = Schedule1F1B if learns and len(micros) >= self.group.size else ScheduleGPipe
        schedule = kind(made, len(micros), loss_fn=loss, scale_grads=False)
        target = torch.zeros(len(micros), device=self.device) if self.is_last else None
        arguments = (ids,) if is_first else ()
        with _errors_of_stages():
            if learns:
                schedule.step(*arguments, target=target, return_outputs=False)
            else:
                with torch.no_grad():
                    schedule.step(*arguments, return_outputs=False)


@contextlib.contextmanager
def _errors_of_stages() -> Iterator[None]:
    """Let a stage's own exception out. torch's schedule raises a `RuntimeError` of the stage's arguments in its place,
    which says nothing of the cause and hides its class (out of memory, say).
    """
    try:
        yield
    except RuntimeError as error:
        if "failed to run forward" in str(error) and isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise


class _Stage(nn.Module):
    """What `PipelineStage` calls for one micro-batch after the other, in order."""

    def __init__(
        self,
        pipeline: Pipeline,
        micros: Sequence[Rollouts],
        padded: Sequence[Rollouts],
        finish: Callable[[int, Mapping[str, Ragged]], Tensor],
        call: Callable[[Callable[[], Any]], Any],
        learns: bool,
    ) -> None:
        super().__init__()
        self.head, self.learns = pipeline.head, learns
        self._pipeline, self._micros, self._padded = pipeline, micros, padded
        self._finish, self._call = finish, call
        self._at = 0

    def forward(self, received: Tensor) -> Tensor:
        at, self._at = self._at, self._at + 1
        samples = self._padded[at]
        hidden = None if self._pipeline.group.index == 0 else received
        if not self._pipeline.is_last:
            sent = self._call(lambda: self.head(samples, received=hidden, returns_hidden=True)).to(self._pipeline.dtype)
            # where nothing up to here is trained, the later stages send gradients back all the same
            if self.learns and not sent.requires_grad:
                sent = sent.detach().requires_grad_()
            return sent
        outputs = self._call(lambda: self.head(samples, received=hidden))
        kept = {name: _without_tail(column, len(self._micros[at])) for name, column in outputs.items()}
        return self._finish(at, kept)


def _with_tail(micro: Rollouts, tokens: int) -> Rollouts:
    """The samples and one more of so many tokens, that has no response."""
    wanted = micro.only(("index", "prompts", "responses"))
    if not tokens:
        return wanted
    device = micro.tensor("index").device
    tail = Ragged(torch.zeros(tokens, dtype=torch.long), torch.tensor([tokens]))
    nothing = Ragged(torch.zeros(0, dtype=torch.long), torch.tensor([0]))
    one = Rollouts(index=torch.tensor([-1]), prompts=tail, responses=nothing).to(device)
    return Rollouts.cat([wanted, one])


def _without_tail(column: Ragged, samples: int) -> Ragged:
    lengths = column.lengths[:samples]
    return Ragged(column.values[: int(lengths.sum())], lengths)
