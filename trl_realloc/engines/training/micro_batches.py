"""The loops over micro-batches that training engines share, for scoring (`run_forward`) and training (`run_training`),
and the autograd graphs that the first keeps for the second (`CachedGraphs`).

Training on the same samples with the same parameters begins with the backward of such a graph: GRPO's old
log-probabilities and PPO's values are outputs of the forward that the first optimizer step would compute again.
`runtime/calls/generate_and_score` decides which calls keep their graph. What a micro-batch computes is in `heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from ...algorithms.algorithm import TokenLoss
from ...algorithms.nonfinite import guarded
from ...algorithms.rollout import Ragged, Rollouts, token_keys
from ...plan.algorithm_graphs import ROUTES
from ...plan.batching import PrefixTree, micro_batches
from ..device import has_room, is_accelerator
from ..mesh_group import MeshGroup
from .packed_row import PackedRow


# A backward takes twice as long as a forward. If the trained samples have a smaller share of a graph's tokens than
# this, a new forward and backward of them cost less than the graph's backward.
MIN_USED = 2 / 3
MIN_FREE = 1 / 4  # least share of the host's memory that must be free to keep a graph there


class CachedGraphs:
    """The outputs of micro-batches with their graphs; empty at first."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Rollouts, Mapping[str, Ragged]]] = []
        self.tokens = 0  # computed tokens of the kept outputs

    def run(
        self,
        head: Callable[[Rollouts, PackedRow | None], Mapping[str, Ragged]],
        samples: Rollouts,
        row: PackedRow | None,
        device: torch.device,
    ) -> Mapping[str, Ragged]:
        """The head's outputs for one micro-batch, without gradients, on the device. They are kept with their graph,
        unless too little memory is left.

        Args:
            samples: samples on the CPU, with `index`, `prompts` and `responses`.
            row: row of the samples if they share tokens.
        """
        before = _allocated(device)
        with torch.enable_grad():
            outputs = head(samples.to(device), row)
        if _has_room(device, before):
            self._micro_batches.append((samples, outputs))
            self.tokens += samples.tokens if row is None else row.tokens
        return {name: column.like(column.values.detach()) for name, column in outputs.items()}

    def take(self, samples: Rollouts) -> list[tuple[list[int], Mapping[str, Ragged]]]:
        """The kept outputs that are worth a backward for these samples. Nothing is kept afterwards.

        Args:
            samples: samples on the CPU, with `prompts` and `responses`.

        Returns:
            For each such micro-batch the positions of its samples, and their outputs with the graph. No position is in
            two of them.
        """
        graphs = self._micro_batches
        self.forget()
        keys, taken = token_keys(samples), list[tuple[list[int], Mapping[str, Ragged]]]()
        left = dict.fromkeys(range(len(keys))) if graphs else {}
        for batch, outputs in graphs:
            row_of = {key: row for row, key in enumerate(token_keys(batch))}
            positions = [position for position in left if keys[position] in row_of]
            if not positions or samples.select(positions).tokens < MIN_USED * batch.tokens:
                continue
            rows = [row_of[keys[position]] for position in positions]
            taken.append((positions, {name: column.select(rows) for name, column in outputs.items()}))
            for position in positions:
                del left[position]
        return taken

    def forget(self) -> None:
        """Free the graphs, because the parameters change or no training on them follows."""
        self._micro_batches, self.tokens = [], 0


def _has_room(device: torch.device, before: int) -> bool:
    """True if there is memory to keep a graph while other calls run. `before` is the accelerator's allocated memory
    without it."""
    if is_accelerator(device):
        return has_room(device, _allocated(device) - before)
    memory = psutil.virtual_memory()
    return bool(memory.available >= MIN_FREE * memory.total)


def _allocated(device: torch.device) -> int:
    memory: Any = torch.get_device_module(device) if is_accelerator(device) else None
    return 0 if memory is None else int(memory.memory_allocated(device))


def cut(
    samples: Rollouts, budget: int, group: MeshGroup, in_step: bool, tree: PrefixTree | None = None
) -> list[list[int]]:
    """This rank's micro-batches as indices of samples. If a forward is collective (`in_step`, for ZeRO), empty
    micro-batches are added so that every rank of the mesh has the same number.

    Args:
        tree: prefix tree of the samples if they share tokens.
    """
    batches = micro_batches(samples.lengths.tolist(), budget, tree)
    return batches + [[] for _ in range(group.max(len(batches)) - len(batches))] if in_step else batches


def model_inputs(samples: Rollouts) -> Rollouts:
    """The columns that a forward reads."""
    return samples.only([name for name in ("index", "prompts", "responses", ROUTES) if name in samples])


def placeholder() -> Rollouts:
    """One sample of one token, for a rank without samples that takes part in a collective forward."""
    token = Ragged(torch.ones(1, dtype=torch.long), torch.ones(1, dtype=torch.long))
    return Rollouts(index=torch.zeros(1, dtype=torch.long), prompts=token, responses=token)


def row_of(tree: PrefixTree | None, batch: Sequence[int]) -> PackedRow | None:
    """The row of a micro-batch, given the positions of its samples in the tree; `None` if they share nothing."""
    return None if tree is None or not batch else PackedRow.of(tree.select(batch))


def run_forward(
    head: Callable[[Rollouts, PackedRow | None], Mapping[str, Ragged]],
    samples: Rollouts,
    budget: int,
    group: MeshGroup,
    device: torch.device,
    *,
    in_step: bool = False,
    graphs: CachedGraphs | None = None,
    tree: PrefixTree | None = None,
) -> dict[str, Ragged]:
    """Run this rank's samples through a head without gradients. The outputs are on the CPU, in the samples' order. They
    are copied there after the last micro-batch, so that the host prepares a micro-batch while the device computes the
    one before.

    Args:
        graphs: stores the graphs for `run_training`.
        tree: prefix tree of the samples if they share tokens.
    """
    inputs = model_inputs(samples)
    batches = cut(inputs, budget, group, in_step, tree)
    parts: list[Mapping[str, Ragged]] = []
    with torch.no_grad():
        for batch in batches:
            micro = inputs.select(batch) if batch else placeholder()
            row = row_of(tree, batch)
            out = head(micro.to(device), row) if graphs is None else graphs.run(head, micro, row, device)
            if batch:
                parts.append(out)
    return in_order(parts, batches)


def in_order(parts: Sequence[Mapping[str, Ragged]], batches: Sequence[Sequence[int]]) -> dict[str, Ragged]:
    """The outputs of micro-batches, copied to the CPU, in the samples' order.

    Args:
        parts: outputs of each micro-batch that has samples.
        batches: indices of each micro-batch's samples.
    """
    if not parts:
        return {}
    order = torch.argsort(torch.tensor([i for batch in batches for i in batch]))
    return {name: Ragged.cat([part[name] for part in parts]).to("cpu").select(order) for name in parts[0]}


def statistics_in_order(
    parts: Sequence[Mapping[str, Tensor]], batches: Sequence[Sequence[int]], lengths: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The statistics of micro-batches, float32 on the CPU, in the samples' order: (n,), or (tokens,) for response
    tokens. Copies all of them at once.

    Args:
        parts: statistics of each micro-batch that has samples.
        batches: indices of each micro-batch's samples.
        lengths: response lengths of each micro-batch that has samples, (its samples,) int64 on the CPU.
    """
    if not parts or not parts[0]:
        return {}
    order = torch.argsort(torch.tensor([i for batch in batches for i in batch]))
    columns = [torch.cat([part[name] for part in parts]).float() for name in parts[0]]
    on_host = torch.cat(columns).cpu().split([len(column) for column in columns])
    of_tokens = torch.cat(list(lengths))
    return {
        name: column[order] if len(column) == len(order) else Ragged(column, of_tokens).select(order).values
        for name, column in zip(parts[0], on_host, strict=True)
    }


def run_training(
    head: Callable[[Rollouts, PackedRow | None], Mapping[str, Ragged]],
    samples: Rollouts,
    loss: TokenLoss,
    budget: int,
    group: MeshGroup,
    device: torch.device,
    backward: Callable[[Tensor, bool], None],
    *,
    in_step: bool = False,
    graphs: CachedGraphs | None = None,
    tree: PrefixTree | None = None,
) -> dict[str, Tensor]:
    """Run the forward and backward of this rank's share of one mini-batch, micro-batch by micro-batch.

    Args:
        graphs: forwards of some of the samples that a scoring call has computed.
        backward: adds the gradients of a loss, a 0-dimensional tensor, to the accumulated ones. Its second argument is
            True for the last micro-batch.
        tree: prefix tree of the samples if they share tokens.

    Returns:
        The statistics of `base.TrainingEngine.train`.
    """
    begun = [] if graphs is None else graphs.take(samples)
    done = {position for positions, _ in begun for position in positions}
    rest = [position for position in range(len(samples)) if position not in done]
    of_rest = tree.select(rest) if tree is not None and begun else tree
    cuts = cut(samples.select(rest) if begun else samples, budget, group, in_step, of_rest)
    batches = [positions for positions, _ in begun] + [[rest[index] for index in batch] for batch in cuts]
    parts, lengths = list[dict[str, Tensor]](), list[Tensor]()
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        if batch:
            micro = samples.select(batch).to(device)
            value, statistics = loss(begun.pop(0)[1] if begun else head(micro, row_of(tree, batch)), micro)
            parts.append({name: sums.detach() for name, sums in statistics.items()})
            lengths.append(micro.ragged("responses").lengths)
        else:  # the mesh's collectives need this rank's backward; its gradients are zero
            out = head(placeholder().to(device), None)
            differentiable = [column.values.sum() for column in out.values() if column.values.requires_grad]
            value = 0.0 * torch.stack(differentiable).sum()
        backward(guarded(value), is_last)
    return statistics_in_order(parts, batches, lengths)
