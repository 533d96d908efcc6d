"""Forwards of ragged samples through a Transformers model: the heads that compute a role's outputs, and the loops over
micro-batches that the training engines share.

The samples of a micro-batch are packed into one row without padding if `packed_attention` allows it, and right-padded
otherwise. Logits are computed only for response tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...algorithms.algorithm import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts, on_device, places, prefix_tree
from ...plan.batching import PrefixTree, micro_batches
from ..base import SamplingMask
from ..dropout import has_dropout
from ..mesh_group import MeshGroup
from ..model_changes import forward_changes
from .cached_graphs import CachedGraphs
from .nonfinite_guard import guarded
from .packed_attention import backbone_of, base_of, packed_arguments, packed_rows, packs, shares_rows
from .packed_row import PackedRow
from .sliced_head import EntropyUse, Unstacked, logits_are_of_head, sliced, works_in_slices
from .token_logprobs import TokenLogprobs


class RoleHead(nn.Module):
    """A role's model and the computation of the role's outputs. The forward takes one micro-batch on the device.

    Engines call the model only through this module, so that hooks on it (DeepSpeed's gathering, `CPUOffload`) see every
    forward.

    Attributes:
        context: function that makes the context of forwards; by default without effect.
        shared_tokens: number of tokens that were not computed again because samples shared them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.packed = packs(model)
        self.context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.shared_tokens = 0
        self._received: Tensor | None = None

    def forward(
        self,
        samples: Rollouts,
        row: PackedRow | None = None,
        *,
        received: Tensor | None = None,
        returns_hidden: bool = False,
    ) -> Any:
        """The role's outputs (`outputs`), or hidden states (1, tokens, width) if a pipeline stage is not the last.

        Args:
            row: row of the samples if they share tokens.
            received: hidden states of the previous stage, which replace the token ids; `None` in the first stage.
            returns_hidden: whether to return this stage's hidden states for the next stage.
        """
        with self.context(), self.continuing(received):
            if returns_hidden:
                return self._run(backbone_of(self.model), self._inputs(samples, row)[0]).last_hidden_state
            return self.outputs(samples, row)

    def outputs(self, samples: Rollouts, packed_row: PackedRow | None = None) -> dict[str, Ragged]:
        """The role's outputs for the samples, by name."""
        raise NotImplementedError

    @property
    def shares(self) -> bool:
        """True if tokens that samples share at their beginnings are computed once for all of them. Not with dropout,
        which would use one mask for all."""
        return self.packed and shares_rows(self.model) and not has_dropout(self.model)

    def tree(self, samples: Rollouts) -> PrefixTree | None:
        """The samples with the beginnings that they share; `None` if each is computed alone.

        Args:
            samples: samples in host memory, with `prompts` and `responses`.
        """
        tree = prefix_tree(samples) if self.shares and len(samples) > 1 else None
        return tree if tree is not None and any(tree.shared) else None

    @contextlib.contextmanager
    def continuing(self, received: Tensor | None) -> Iterator[None]:
        """Makes the model compute from these hidden states instead of token ids inside the context, unless `None`."""
        self._received = received
        try:
            yield
        finally:
            self._received = None

    def _inputs(self, samples: Rollouts, row: PackedRow | None) -> tuple[dict[str, Any], Tensor, Tensor]:
        """The model's arguments, and row and column of every token in its inputs, both (tokens,) int64 in host memory.
        Indices are computed there from the lengths, so that the host does not wait for the device."""
        tokens = _prompts_and_responses(samples)
        position = places(tokens.lengths)
        if self.packed:
            row, ids = row or PackedRow.plain(tokens.lengths.tolist()), tokens.values
            self.shared_tokens += row.saved
            if row.saved:
                ids = ids[on_device(row.taken, ids.device)]
            arguments: dict[str, Any] = {
                "input_ids": ids[None],
                "position_ids": on_device(row.positions, ids.device)[None],
                **packed_arguments(self.model, row, ids),
            }
            return arguments, torch.zeros_like(position), row.columns
        assert row is None, "padded samples share no tokens"
        mask = tokens.like(torch.ones_like(tokens.values)).pad()
        of_sample = torch.repeat_interleave(torch.arange(len(tokens)), tokens.lengths)
        return {"input_ids": tokens.pad(), "attention_mask": mask}, of_sample, position

    def _run(self, model: nn.Module, arguments: Mapping[str, object]) -> Any:
        if self._received is not None:
            arguments = {**arguments, "input_ids": None, "inputs_embeds": self._received}
        with packed_rows() if self.packed else contextlib.nullcontext():
            return model(**arguments, use_cache=False)


class PolicyHead(RoleHead):
    """Computes `logprobs` and `entropy` of every response token under softmax(logits / temperature): ragged float32,
    both differentiable. A loss that does not depend on the entropies does not compute their gradient.

    Args:
        sampling_mask: tokens of the distribution, see `TokenLogprobs`.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, sampling_mask: SamplingMask | None = None) -> None:
        super().__init__(model)
        self.temperature, self.sampling_mask = temperature, sampling_mask
        # (logits, targets, temperature, support) -> logprobs, entropy; `vocab_parallel` for tensor parallelism
        self.token_logprobs: Callable[..., tuple[Tensor, Tensor]] = TokenLogprobs.apply
        self.vocabulary_group: MeshGroup | None = None  # group over which the language head is split
        changes = forward_changes(model)
        self.may_slice = not changes and logits_are_of_head(base_of(model))
        # a user's changes of the model get the logits of all tokens, in their places
        self.takes_logits_to_keep = (
            not changes and "logits_to_keep" in inspect.signature(base_of(model).forward).parameters
        )

    def outputs(self, samples: Rollouts, packed_row: PackedRow | None = None) -> dict[str, Ragged]:
        arguments, row, column = self._inputs(samples, packed_row)
        responses = samples.ragged("responses")
        before = _response_positions(samples) - 1  # a token is predicted at the position before it
        row, column = row[before], column[before]
        device = responses.values.device
        if self.takes_logits_to_keep:
            logit_columns = column
            if not self.packed:
                logit_columns, column = torch.unique(column, return_inverse=True)
            arguments["logits_to_keep"] = on_device(logit_columns, device)

        def pick(full: Tensor) -> Tensor:
            """The rows of logits or of the head's input that predict a response token."""
            if not self.packed:
                return full[on_device(row, device), on_device(column, device)]
            # squeeze, because the gradient of `full[0]` would be a second copy of it
            return full.squeeze(0) if self.takes_logits_to_keep else full.squeeze(0)[on_device(column, device)]

        columns = self._in_slices(arguments, pick, responses.values)
        if columns is None:
            logits = pick(self._run(self.model, arguments).logits)
            columns = self.token_logprobs(logits, responses.values, self.temperature, self.sampling_mask)
        return {"logprobs": responses.like(columns[0]), "entropy": responses.like(columns[1])}

    def _in_slices(
        self, arguments: Mapping[str, object], pick: Callable[[Tensor], Tensor], targets: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Log-probabilities and entropies without the logits in memory; `None` if the logits are few, or if they are
        not the head's output alone."""
        base = base_of(self.model)
        if not self.may_slice or not works_in_slices(base, len(targets), self.vocabulary_group):
            return None
        head, group = base.get_output_embeddings(), self.vocabulary_group
        use = EntropyUse()
        with sliced(head, pick, targets, self.temperature, use, group, self.sampling_mask) as results:
            logits = self._run(self.model, arguments).logits
        # compared by memory, because DeepSpeed's hooks return the same memory as another tensor
        if [logits.data_ptr()] != [result.data_ptr() for result in results]:
            raise RuntimeError(
                f"{type(base).__name__} changes its logits after its head, although the check before training found "
                f"that it does not."
            )
        columns: tuple[Tensor, Tensor] = Unstacked.apply(logits, use)
        return columns


class ValueHead(RoleHead):
    """Computes `values` of the states of a response, from before its first token to after its last: ragged float32,
    length + 1 per response. The model is a sequence classifier with a `score` layer, like TRL's critics."""

    def outputs(self, samples: Rollouts, packed_row: PackedRow | None = None) -> dict[str, Ragged]:
        arguments, row, column = self._inputs(samples, packed_row)
        lengths = samples.ragged("responses").lengths + 1
        last = torch.cumsum(samples.lengths, 0) - 1
        index = places(lengths) + torch.repeat_interleave(last - lengths + 1, lengths)
        hidden = self._run(backbone_of(self.model), arguments).last_hidden_state
        values = base_of(self.model).score(
            hidden[on_device(row[index], hidden.device), on_device(column[index], hidden.device)]
        )
        return {"values": Ragged(values.squeeze(-1).float(), lengths)}


class ScoreHead(RoleHead):
    """Computes `scores`, one float32 per sample: the classifier's logit at the sample's last token."""

    def outputs(self, samples: Rollouts, packed_row: PackedRow | None = None) -> dict[str, Ragged]:
        arguments, row, column = self._inputs(samples, packed_row)
        ones = torch.ones(len(samples), dtype=torch.long)
        if not hasattr(base_of(self.model), "score"):  # an encoder's classifier has pooling layers
            logits = self._run(self.model, arguments).logits[:, 0]
            return {"scores": Ragged(logits.float(), ones)}
        last = torch.cumsum(samples.lengths, 0) - 1
        hidden = self._run(backbone_of(self.model), arguments).last_hidden_state
        scores = base_of(self.model).score(
            hidden[on_device(row[last], hidden.device), on_device(column[last], hidden.device)]
        )
        return {"scores": Ragged(scores[:, 0].float(), ones)}


def tied_weight(model: PreTrainedModel) -> nn.Parameter | None:
    """The parameter that the input embedding and the language head share; `None` if they share none."""
    base = base_of(model)
    weight = getattr(base.get_input_embeddings(), "weight", None)
    return weight if weight is not None and getattr(base.get_output_embeddings(), "weight", None) is weight else None


def _prompts_and_responses(samples: Rollouts) -> Ragged:
    pairs = zip(samples.ragged("prompts").rows(), samples.ragged("responses").rows(), strict=True)
    return Ragged(torch.cat([part for pair in pairs for part in pair]), samples.lengths)


def _response_positions(samples: Rollouts) -> Tensor:
    """(response tokens,) int64: the index of each response token among the tokens of `_prompts_and_responses`."""
    responses = samples.ragged("responses").lengths
    start = torch.cumsum(samples.lengths, 0) - responses
    return places(responses) + torch.repeat_interleave(start, responses)


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
    inputs = samples.only(("index", "prompts", "responses"))
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
