"""The heads that compute a role's outputs from ragged samples through a Transformers model, and the autocast in which
engines run them. The loops over micro-batches are in `micro_batches`.

The samples of a micro-batch are packed into one row without padding if `probe_model` allows it, and right-padded
otherwise. Logits are computed only for response tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...algorithms.rollout import Ragged, Rollouts, on_device, places, prefix_tree
from ...algorithms.router_loss import router_sums
from ...plan.algorithm_graphs import ROUTES
from ...plan.assignment import MAX_LOGITS
from ...plan.batching import PrefixTree
from ..dropout import has_dropout
from ..mesh_group import MeshGroup
from ..model_changes import forward_changes
from ..requests import SamplingMask
from .expert_routing import experts_per_token, number_of_experts, recorded
from .packed_attention import backbone_of, base_of, packed_arguments, packed_rows, shares_rows
from .packed_row import PackedRow
from .probe_model import packs
from .router_replay import ARGUMENT, RECORD, ForwardRoutes, replays, routes_of
from .sliced_head import EntropyUse, Unstacked, logits_are_of_head, sliced
from .tensor_parallel import is_split
from .token_logprobs import TokenLogprobs


MAX_WHOLE_ON_CPU = 1 << 26  # `MAX_LOGITS` on a CPU: 256 MiB in float32


def autocast(
    device: torch.device, dtype: torch.dtype | None, *, keeps_weights: bool = False
) -> AbstractContextManager[object]:
    """A context that computes products in `dtype`; without effect for `None`.

    Args:
        keeps_weights: whether to keep the cast weights until the context ends, for repeated forwards, as in generation.
            A forward and its backward use a weight once: there the casts would take the memory of all weights in 16
            bits, even with activation checkpointing and, under ZeRO-3, those of all ranks.
    """
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=keeps_weights)


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
        """The role's outputs (`outputs`), or `hidden` if a pipeline stage is not the last.

        Args:
            row: row of the samples if they share tokens.
            received: hidden states of the previous stage, which replace the token ids; `None` in the first stage.
            returns_hidden: whether to return this stage's hidden states for the next stage.
        """
        with self.context(), self.continuing(received):
            return self.hidden(samples, row) if returns_hidden else self.outputs(samples, row)

    def hidden(self, samples: Rollouts, packed_row: PackedRow | None = None) -> tuple[Tensor, dict[str, Ragged]]:
        """This stage's hidden states, (1, tokens, width), and its parts of outputs that are sums over layers."""
        return self._run(backbone_of(self.model), self._inputs(samples, packed_row)[0]).last_hidden_state, {}

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
        router_sums: whether to compute also what the auxiliary loss of a mixture of experts needs (`router_loss`).
        replays_routes: whether to compute with the experts of the column `routes`, if the samples have it.
        records_routes: whether to compute also that column: the experts of every token. Needs `replays_routes`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        sampling_mask: SamplingMask | None = None,
        *,
        router_sums: bool = False,
        replays_routes: bool = False,
        records_routes: bool = False,
    ) -> None:
        super().__init__(model)
        self._routers = replays(model) if replays_routes else 0
        self._experts = number_of_experts(model) if records_routes or router_sums else 0
        self._records = records_routes
        self.temperature, self.sampling_mask, self.router_sums = temperature, sampling_mask, router_sums
        # (logits, targets, temperature, support) -> logprobs, entropy; `vocab_parallel` for tensor parallelism
        self.token_logprobs: Callable[..., tuple[Tensor, Tensor]] = TokenLogprobs.apply
        self.vocabulary_group: MeshGroup | None = None  # group over which the language head is split
        changes = forward_changes(model)
        self.may_slice = not changes and logits_are_of_head(base_of(model))
        # a user's changes of the model get the logits of all tokens, in their places
        self.takes_logits_to_keep = (
            not changes and "logits_to_keep" in inspect.signature(base_of(model).forward).parameters
        )

    @property
    def has_router_outputs(self) -> bool:
        """True if some outputs are sums over the routers of all pipeline stages."""
        return self.router_sums or self._records

    def outputs(self, samples: Rollouts, packed_row: PackedRow | None = None) -> dict[str, Ragged]:
        arguments, row, column = self._inputs(samples, packed_row)
        with self._routed(arguments, samples, row, column, packed_row, records=self._records) as of_routers:
            outputs = self._of_responses(samples, dict(arguments), row, column)
        return outputs | of_routers

    def hidden(self, samples: Rollouts, packed_row: PackedRow | None = None) -> tuple[Tensor, dict[str, Ragged]]:
        arguments, row, column = self._inputs(samples, packed_row)
        records = self._records and not torch.is_grad_enabled()  # a stage that trains returns parts of the loss alone
        with self._routed(arguments, samples, row, column, packed_row, records=records) as of_routers:
            hidden = self._run(backbone_of(self.model), arguments).last_hidden_state
        return hidden, of_routers

    @contextlib.contextmanager
    def _routed(
        self,
        arguments: dict[str, Any],
        samples: Rollouts,
        row: Tensor,
        column: Tensor,
        packed_row: PackedRow | None,
        *,
        records: bool,
    ) -> Iterator[dict[str, Ragged]]:
        """Context of a forward of a mixture of experts, which computes with the samples' routes. Yields a dictionary
        that has, after the forward, the outputs of the routers of this rank's layers: the columns of
        `algorithms.router_loss`, and `ROUTES` if `records`.

        Args:
            arguments, row, column: those of `_inputs`; the routes are added to `arguments`.
        """
        outputs: dict[str, Ragged] = {}
        if not (self._routers or self.router_sums):
            yield outputs
            return
        width, device = arguments["input_ids"].shape[1], arguments["input_ids"].device
        top_k, token_places = experts_per_token(base_of(self.model).config), on_device(row * width + column, device)
        record = ForwardRoutes(self._experts, self._routers, top_k) if records else None
        if records or (self._routers and ROUTES in samples):
            arguments[ARGUMENT] = routes_of(samples, row, column, width, packed_row, self._routers, top_k)
        if record is not None:
            arguments[RECORD] = record
        with recorded(self.model if self.router_sums else None) as logits:
            yield outputs
        if record is not None:
            outputs[ROUTES] = record.of_samples(token_places, samples.lengths)
        if self.router_sums:
            of_sample = on_device(torch.repeat_interleave(torch.arange(len(samples)), samples.lengths), device)
            outputs |= router_sums(logits, token_places, of_sample, len(samples), top_k, self._experts)

    def _of_responses(
        self, samples: Rollouts, arguments: dict[str, Any], row: Tensor, column: Tensor
    ) -> dict[str, Ragged]:
        """Log-probabilities and entropies. `arguments`, `row` and `column` are those of `_inputs`."""
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


def works_in_slices(model: PreTrainedModel, tokens: int, group: MeshGroup | None = None) -> bool:
    """True if the model's head is computed in slices for this number of tokens: their logits are more than
    `MAX_LOGITS`, and the head is a plain linear layer. A head that an adapter changes or that has Accelerate's hooks is
    computed whole.

    Args:
        group: group over which the head is split, if it is. All its ranks get the same answer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or hasattr(head, "_hf_hook"):
        return False
    most = MAX_WHOLE_ON_CPU if head.weight.device.type == "cpu" else MAX_LOGITS
    ranks = group.size if group is not None and is_split(head.weight) else 1
    return tokens * -(-head.out_features // ranks) > most  # a weight that ZeRO-3 has partitioned has no rows here


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
