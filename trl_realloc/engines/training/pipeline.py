"""Pipeline parallelism of a Transformers model: cuts the model to this rank's stage, and runs micro-batches through the
stages.

A stage is the model with the other stages' layers replaced by identities, so every stage runs the family's own code and
parameters keep their names. The schedules of training, and their messages, are torch.distributed.pipelining's. What a
pipeline trains is in `megatron`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from ...algorithms.base import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.model_spec import stage_layers
from ..device import is_accelerator
from ..mesh_group import MeshGroup
from ..torch_compat import LeanStage
from .nonfinite_guard import guarded
from .packed_attention import backbone_of, base_of
from .packed_forward import RoleHead, tied_weight
from .probe_model import Identity
from .stage_messages import Inbox, Outbox, Route


def keep_stage(model: Any, stage: int, stages: int) -> None:
    """Reduce the model to one stage, in place. The first stage has the embedding, the last one the final norm and the
    head, and the embedding too if the head shares its weight."""
    backbone, base = backbone_of(model), base_of(model)
    kept_layers = stage_layers(len(backbone.layers), stages)[stage]
    for at in range(len(backbone.layers)):
        if at not in kept_layers:
            backbone.layers[at] = Identity()
    first, last = stage == 0, stage == stages - 1
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not first and not (last and tied_weight(model) is not None):
        _replace(base, embedding)
    if not last:
        for name in ("norm", "final_layer_norm"):
            if hasattr(backbone, name):
                setattr(backbone, name, Identity())
        for module in (head, getattr(base, "score", None)):
            if module is not None:
                _replace(base, module)


def _replace(model: nn.Module, module: nn.Module) -> None:
    name = next(name for name, other in model.named_modules() if other is module)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, Identity())


@dataclass
class MiniBatch:
    """A mini-batch of one pipeline, divided into micro-batches.

    Args:
        batches: the indices of each micro-batch's samples.
        micros: the micro-batches, on the device.
        loss: of a micro-batch.
        statistics: of each micro-batch, filled on the last stage.
    """

    batches: Sequence[Sequence[int]]
    micros: Sequence[Rollouts]
    loss: TokenLoss
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def finish(self, at: int, outputs: Mapping[str, Ragged]) -> Tensor:
        """The loss of a micro-batch, 0-dimensional, from the head's outputs. Keeps its statistics."""
        value, statistics = self.loss(outputs, self.micros[at])
        self.statistics[at] = {name: sums.detach() for name, sums in statistics.items()}
        return guarded(value.float())


class Pipeline:
    """One role's pipeline, on the rank of one stage.

    Args:
        head: the role's model, reduced to this stage.
        group: the pipeline's ranks, in the order of its stages.
        device: of the model.
        hidden: the width of the hidden states that are sent from stage to stage, in the model's dtype.
    """

    def __init__(self, head: RoleHead, group: MeshGroup, device: torch.device, hidden: int) -> None:
        self.head, self.group, self.device, self.hidden = head, group, device, hidden
        self.dtype = next(p.dtype for p in head.parameters() if p.is_floating_point())

    @property
    def is_first(self) -> bool:
        return self.group.index == 0

    @property
    def is_last(self) -> bool:
        return self.group.index == self.group.size - 1

    def run(
        self,
        micros: Sequence[Rollouts],
        finish: Callable[[int, Mapping[str, Ragged]], Tensor],
        *,
        trains: bool,
        call: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """Run all micro-batches forward, and backward if `trains`. Every rank of the pipeline calls it with the same
        micro-batches.

        Without a backward they follow each other without a stop, and of the hidden states that a stage sends it keeps
        as many as there are stages.

        Args:
            micros: micro-batches on the device; at least one.
            finish: called on the last stage with the index of a micro-batch and the head's outputs; returns the loss, a
                0-dimensional tensor.
            call: runs a stage's forward in its context, such as autocast.
        """
        if trains:
            self._train(micros, finish, call)
        else:
            self._score(micros, finish, call)

    def _score(
        self,
        micros: Sequence[Rollouts],
        finish: Callable[[int, Mapping[str, Ragged]], Tensor],
        call: Callable[[Callable[[], Any]], Any],
    ) -> None:
        group, order, inbox, outbox = self.group, range(len(micros)), None, None

        def empty(at: int) -> Tensor:
            return torch.empty((1, micros[at].tokens, self.hidden), dtype=self.dtype, device=self.device)

        if not self.is_first:
            before = Route(group.group, group.ranks[group.index - 1], 0)
            inbox = Inbox(before, order, empty, ahead=not is_accelerator(self.device))
        if not self.is_last:
            outbox = Outbox(Route(group.group, group.ranks[group.index + 1], 0))
        with torch.no_grad():
            for at in order:
                samples = micros[at].only(("index", "prompts", "responses"))
                hidden = None if inbox is None else inbox.take(at)
                if outbox is None:
                    finish(at, call(partial(self.head, samples, received=hidden)))
                    continue
                computed = call(partial(self.head, samples, received=hidden, returns_hidden=True))
                outbox.send(at, computed.to(self.dtype))
                outbox.wait(at - group.size)
        if outbox is not None:
            outbox.wait_all()

    def _train(
        self,
        micros: Sequence[Rollouts],
        finish: Callable[[int, Mapping[str, Ragged]], Tensor],
        call: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """One step of torch's schedule.

        All hidden states that are sent need one shape, so each micro-batch is padded to the tokens of the longest one
        with an additional sample. Every rank knows the shapes, so they are not sent.
        """
        width = max(micro.tokens for micro in micros)
        padded = [_padded(micro, width - micro.tokens) for micro in micros]
        module = _Stage(self, micros, padded, finish, call)
        shape = torch.empty((1, width, self.hidden), dtype=self.dtype, device="meta", requires_grad=True)
        ids = torch.zeros((len(micros), width), dtype=torch.long, device=self.device)
        number = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        pipeline_stage = LeanStage(
            module,
            self.group.index,
            self.group.size,
            self.device,
            input_args=(ids[:1].to("meta") if self.is_first else shape,),
            output_args=(number if self.is_last else shape,),
            group=self.group.group,
        )
        # torch takes the ranks of the group in ascending order, also those of a reversed pipeline
        ascending = sorted(self.group.ranks)
        pipeline_stage.stage_index_to_group_rank = {
            stage: ascending.index(rank) for stage, rank in enumerate(self.group.ranks)
        }
        # 1F1B has the activations of at most as many micro-batches as stages, and needs at least as many
        kind = Schedule1F1B if len(micros) >= self.group.size else ScheduleGPipe
        schedule = kind(pipeline_stage, len(micros), loss_fn=lambda output, target: output, scale_grads=False)
        target = torch.zeros(len(micros), device=self.device) if self.is_last else None
        arguments = (ids,) if self.is_first else ()
        with _errors_of_stages():
            schedule.step(*arguments, target=target, return_outputs=False)


@contextlib.contextmanager
def _errors_of_stages() -> Iterator[None]:
    """Raise a stage's exception itself. torch's schedule raises a `RuntimeError` about the stage's arguments instead,
    which hides the cause and its class, such as out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        wraps = "failed to run forward" in said or "failed to run stage backward" in said
        if wraps and isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise


class _Stage(nn.Module):
    """The module of a `PipelineStage`, which calls it once per micro-batch, in order."""

    def __init__(
        self,
        pipeline: Pipeline,
        micros: Sequence[Rollouts],
        padded: Sequence[Rollouts],
        finish: Callable[[int, Mapping[str, Ragged]], Tensor],
        call: Callable[[Callable[[], Any]], Any],
    ) -> None:
        super().__init__()
        self.head = pipeline.head
        self._pipeline, self._micros, self._padded = pipeline, micros, padded
        self._finish, self._call = finish, call
        self._at = 0

    def forward(self, received: Tensor) -> Tensor:
        at, self._at = self._at, self._at + 1
        samples = self._padded[at]
        hidden = None if self._pipeline.is_first else received
        if not self._pipeline.is_last:
            sent = self._call(lambda: self.head(samples, received=hidden, returns_hidden=True)).to(self._pipeline.dtype)
            # the later stages send gradients back even if no parameter up to here is trained
            if not sent.requires_grad:
                sent = sent.detach().requires_grad_()
            return sent
        outputs = self._call(lambda: self.head(samples, received=hidden))
        kept = {name: _unpadded(column, len(self._micros[at])) for name, column in outputs.items()}
        return self._finish(at, kept)


def _padded(micro: Rollouts, tokens: int) -> Rollouts:
    """The samples, and one more of `tokens` tokens without a response."""
    inputs = micro.only(("index", "prompts", "responses"))
    if not tokens:
        return inputs
    device = micro.tensor("index").device
    prompt = Ragged(torch.zeros(tokens, dtype=torch.long), torch.tensor([tokens]))
    response = Ragged(torch.zeros(0, dtype=torch.long), torch.tensor([0]))
    padding = Rollouts(index=torch.tensor([-1]), prompts=prompt, responses=response).to(device)
    return Rollouts.cat([inputs, padding])


def _unpadded(column: Ragged, samples: int) -> Ragged:
    """The column's first `samples` rows."""
    lengths = column.lengths[:samples]
    return Ragged(column.values[: int(lengths.sum())], lengths)
