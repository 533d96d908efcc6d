"""The micro-batches of two fused models, and their time and memory on each stage of a line.

Every rank knows the micro-batches of its own pipelines and the figures of its own stage; `exchanged_shape` collects
them. The caller of `fused_training` chooses the order of the tasks from the shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..mesh_group import MeshGroup
from .megatron import MegatronEngine
from .packed_attention import backbone_of, base_of
from .pipeline import MiniBatch
from .probe_model import PassThrough
from .stage_times import StageTimes


# Numbers of 16 bits that a layer stores for its backward, per token and unit of the hidden width (Korthikanti et al.
# 2022, section 4, without attention scores); and the same with activation checkpointing.
KEPT_NUMBERS, KEPT_INPUTS = 17, 1


@dataclass(frozen=True)
class StageFigures:
    """The time and the memory that one model's micro-batches need on one stage.

    Args:
        forward, backward: (a, b) of a micro-batch's time a + b * tokens, in seconds, or as estimates in any unit that
            is the same on all stages and for both models.
        memory: activation memory per token, in any unit that is the same on all stages and for both models.
    """

    forward: tuple[float, float]
    backward: tuple[float, float]
    memory: float


@dataclass(frozen=True)
class FusedShape:
    """The micro-batches and the figures from which the order of the tasks is chosen.

    Args:
        tokens: tokens of each micro-batch, by model and by pipeline, counted from the line's first stage.
        figures: figures by model and by stage of the line.
        is_measured: whether the figures' times are seconds; otherwise estimates.
    """

    tokens: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    figures: tuple[tuple[StageFigures, ...], tuple[StageFigures, ...]]
    is_measured: bool

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of both models in all of their pipelines."""
        return sum(len(pipeline) for pipelines in self.tokens for pipeline in pipelines)


def exchanged_shape(
    engines: Sequence[MegatronEngine],
    batches: Sequence[MiniBatch],
    line: MeshGroup,
    times: StageTimes | None,
) -> FusedShape:
    """The shape of a line's mini-batches, on all of its ranks. Collective over the line.

    Args:
        times: measured times of this rank; `None` to use estimates. Times are used if every stage that has
            micro-batches has measured some.
    """
    local_tokens = [[micro.tokens for micro in batch.micros] for batch in batches]
    counts = line.gather(torch.tensor([len(tokens) for tokens in local_tokens], device=line.device))
    width = max(1, *(int(count.max()) for count in counts))
    rows = [[*tokens, *[0] * (width - len(tokens))] for tokens in local_tokens]
    all_tokens = [row.tolist() for row in line.gather(torch.tensor(rows, dtype=torch.int64, device=line.device))]
    figures = torch.tensor([_figures(engine, model, times) for model, engine in enumerate(engines)], device=line.device)
    all_figures = [row.tolist() for row in line.gather(figures)]
    has_all = all(
        not count[model] or not any(map(math.isnan, row[model][:4]))
        for row, count in zip(all_figures, counts, strict=True)
        for model in range(2)
    )
    tokens, chosen = [], []
    for model, engine in enumerate(engines):
        heads = range(0, line.size, engine.groups.pp.size)  # each pipeline's first device in the line
        tokens.append(tuple(tuple(all_tokens[head][model][: int(counts[head][model])]) for head in heads))
        chosen.append(tuple(_chosen(row[model], has_all) for row in all_figures))
    return FusedShape((tokens[0], tokens[1]), (chosen[0], chosen[1]), has_all)


def _figures(engine: MegatronEngine, model: int, times: StageTimes | None) -> list[float]:
    """Seconds of a forward and of a backward, NaN if not measured; the estimate of a forward; and the memory."""
    unknown = (math.nan, math.nan)
    lines = [unknown if times is None else times.fits[model, is_backward].line() for is_backward in (False, True)]
    return [*lines[0], *lines[1], _products(engine), _memory(engine)]


def _chosen(figures: Sequence[float], measured: bool) -> StageFigures:
    a, b, c, d, estimate, memory = figures
    if measured:
        return StageFigures((a, b), (c, d), memory) if math.isfinite(a + c) else StageFigures((0, 0), (0, 0), memory)
    return StageFigures((0.0, estimate), (0.0, 2 * estimate), memory)


def _products(engine: MegatronEngine) -> float:
    """Multiplications per token on this rank: the elements of its matrices, without the embedding's."""
    model = engine.head.model
    embedding = getattr(base_of(model).get_input_embeddings(), "weight", None)
    is_last = engine.groups.pp.index == engine.groups.pp.size - 1
    sizes = [p.numel() for p in model.parameters() if p.dim() > 1 and (p is not embedding or is_last)]
    return float(sum(sizes)) / engine.groups.tp.size


def _memory(engine: MegatronEngine) -> float:
    """Numbers per token that a forward stores for its backward on this rank."""
    base, backbone = base_of(engine.head.model), backbone_of(engine.head.model)
    layers = sum(not isinstance(layer, PassThrough) for layer in backbone.layers)
    is_recomputed = any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules())
    per_unit = KEPT_INPUTS if is_recomputed else KEPT_NUMBERS
    numbers = float(layers * per_unit * base.config.hidden_size)
    head = base.get_output_embeddings()
    if head is not None and not isinstance(head, PassThrough):
        numbers += base.config.vocab_size / engine.groups.tp.size
    return numbers
