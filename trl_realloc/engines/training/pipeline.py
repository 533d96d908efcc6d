"""Pipeline parallelism of a Transformers model: cuts the model to this rank's stage.

In a stage the other stages' layers are replaced by identities, so every stage runs the family's own code and parameters
keep their names. Micro-batches go through the stages in `stage_run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...algorithms.algorithm import TokenLoss
from ...algorithms.nonfinite import guarded
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.model_spec import stage_layers
from ..mesh_group import MeshGroup
from .heads import RoleHead, tied_weight
from .packed_attention import backbone_of, base_of
from .packed_row import PackedRow
from .probe_model import PassThrough


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def keep_stage(model: PreTrainedModel, stage: int, stages: int) -> None:
    """Reduce the model to one stage, in place. The first stage has the embedding, the last one the final norm and the
    head, and the embedding too if the head shares its weight."""
    backbone, base = backbone_of(model), base_of(model)
    kept_layers = stage_layers(len(backbone.layers), stages)[stage]
    for index in range(len(backbone.layers)):
        if index not in kept_layers:
            backbone.layers[index] = _with_buffers_of(backbone.layers[index])
    first, last = stage == 0, stage == stages - 1
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not first and not (last and tied_weight(model) is not None):
        _replace(base, embedding)
    if not first and hasattr(backbone, "embedding_multiplier"):
        backbone.embedding_multiplier = 1.0  # of embeddings, not of the hidden states that stand in for them
    if not last:
        for name in ("norm", "final_layer_norm"):
            if hasattr(backbone, name):
                setattr(backbone, name, PassThrough())
        for module in (head, getattr(base, "score", None)):
            if module is not None:
                _replace(base, module)


def _with_buffers_of(layer: nn.Module) -> PassThrough:
    """A `PassThrough` with a layer's persistent buffers (the bias of GLM-4's routers), which the first stage saves."""
    result = PassThrough()
    for name in layer.state_dict():
        *path, leaf = name.split(".")
        if (buffer := layer.get_submodule(".".join(path))._buffers.get(leaf)) is not None:
            holder: nn.Module = result
            for part in path:
                holder.add_module(part, holder._modules.get(part) or nn.Module())
                holder = holder.get_submodule(part)
            holder.register_buffer(leaf, buffer)
    return result


def _replace(model: nn.Module, module: nn.Module) -> None:
    name = next(name for name, other in model.named_modules() if other is module)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, PassThrough())


@dataclass(frozen=True)
class PackedSamples:
    """A micro-batch of a pipeline.

    Args:
        samples: samples on the device.
        row: row of the samples if they share tokens.
    """

    samples: Rollouts
    row: PackedRow | None = None

    @property
    def tokens(self) -> int:
        """Number of computed tokens."""
        return self.samples.tokens if self.row is None else self.row.tokens


@dataclass
class MiniBatch:
    """A mini-batch of one pipeline, divided into micro-batches.

    Args:
        batches: indices of each micro-batch's samples.
        micros: micro-batches.
        loss: loss of a micro-batch, and its statistics.
        statistics: statistics of each micro-batch, filled on the last stage, and on stages with a part of the loss.
    """

    batches: Sequence[Sequence[int]]
    micros: Sequence[PackedSamples]
    loss: TokenLoss
    statistics: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def finish(self, micro_batch: int, outputs: Mapping[str, Ragged]) -> Tensor:
        """The loss of a micro-batch, 0-dimensional, or a stage's part of it, from the head's outputs. Stores its
        statistics."""
        value, statistics = self.loss(outputs, self.micros[micro_batch].samples)
        self.statistics[micro_batch] = {name: sums.detach() for name, sums in statistics.items()}
        return guarded(value.float())


class StagePipeline:
    """One role's pipeline, on the rank of one stage.

    Args:
        head: the role's model, reduced to this stage.
        group: ranks of the pipeline, in the order of its stages.
        device: device of the model.
        hidden: width of the hidden states that are sent from stage to stage, in the model's dtype.
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

    @property
    def before(self) -> int | None:
        """Global rank of the previous stage; `None` on the first stage."""
        return None if self.is_first else self.group.ranks[self.group.index - 1]

    @property
    def after(self) -> int | None:
        """Global rank of the next stage; `None` on the last stage."""
        return None if self.is_last else self.group.ranks[self.group.index + 1]
