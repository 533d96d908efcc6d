"""Ragged samples through a Transformers model: what engines for scoring and training share.

Samples of a micro-batch lie one after the other in one row (no padding at all) wherever the model is seen to keep
them apart, and are right-padded per micro-batch where it is not. Logits are made only where a response token needs
them. Owns no parallelism and no optimizer.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...algorithms.base import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts, micro_batches
from ...common.notices import notice
from ..mesh_group import MeshGroup
from .nonfinite_guard import guarded


@dataclass
class _Locality:
    """What a model's masks restrict its attention to, and what its attention layers are told, as it is probed: packed
    attention has the layers' word alone, and a window of thousands of tokens does not show in a probe of five."""

    masks: set[int | str] = field(default_factory=set)
    windows: set[int | str] = field(default_factory=set)

    @property
    def told(self) -> bool:
        return self.masks <= self.windows


PACKED = "trl_realloc_packed"  # sdpa that never looks across the border of two samples
_packing: contextvars.ContextVar[bool] = contextvars.ContextVar("packing", default=False)
_probed: contextvars.ContextVar[_Locality | None] = contextvars.ContextVar("probed", default=None)


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of samples packed in one row: (1, heads, tokens, head_dim), their lengths in `sample_lengths`.

    One sdpa call per sample costs the sum of their squares, where a block mask over the row would cost the square of
    the sum: with 32 samples of 128 tokens 32 times less. Outside packing it is sdpa as Transformers has it.
    """
    lengths = kwargs.pop("sample_lengths", None)
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    window = kwargs.pop("sliding_window", None)
    if (locality := _probed.get()) is not None and window is not None:
        locality.windows.add(window)
    parts = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        mask = None
        if window is not None and q.shape[2] > window:
            at = torch.arange(q.shape[2], device=q.device)
            distance = at[:, None] - at[None, :]
            mask = ((distance >= 0) & (distance < window))[None, None]
        parts.append(sdpa_attention_forward(module, q, k, v, mask, is_causal=mask is None, **kwargs)[0])
    return torch.cat(parts, dim=1), None


def _packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if not _packing.get():
        return sdpa_mask(*args, **kwargs)
    if (locality := _probed.get()) is not None:
        if kwargs.get("local_size") is not None:  # of a sliding window or of chunks
            locality.masks.add(kwargs["local_size"])
        if kwargs.get("use_vmap"):  # Transformers sets it where a model brings a mask function of its own
            locality.masks.add("a function of the model's")
    return None


AttentionInterface.register(PACKED, _packed_attention)
AttentionMaskInterface.register(PACKED, _packed_mask)


class TokenLogprobs(torch.autograd.Function):
    """Log-probability of each target and entropy of each distribution, from logits (tokens, vocabulary).

    Works on slices of rows and writes the gradient over the logits themselves, so the peak is one copy of them and a
    slice, where `log_softmax` and autograd hold three. The logits are consumed: backward runs once.

    Returns: `logprobs`, `entropy`, both (tokens,) float32, natural logarithms, of softmax(logits / temperature). The
    entropy carries no gradient.
    """

    _SLICE = 1 << 22  # elements of the float32 working copy: 16 MiB

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows in TokenLogprobs._slices(logits):
            x = logits[rows].float() / temperature
            normalizer[rows] = torch.logsumexp(x, -1)
            logprobs[rows] = x.gather(-1, targets[rows, None]).squeeze(-1) - normalizer[rows]
            x -= normalizer[rows, None]
            p = torch.exp(x)
            entropy[rows] = -(p.mul_(x)).nan_to_num_(nan=0.0).sum(-1)  # a logit of -inf adds nothing: 0·-inf
        ctx.save_for_backward(logits, targets, normalizer)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalizer = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        for rows in TokenLogprobs._slices(logits):
            p = torch.exp(logits[rows].float() / ctx.temperature - normalizer[rows, None])
            p.neg_().scatter_add_(-1, targets[rows, None], torch.ones_like(p[:, :1])).mul_(scale[rows, None])
            logits[rows] = p.to(logits.dtype)
        return logits, None, None

    @staticmethod
    def _slices(logits: Tensor) -> Iterator[slice]:
        step = max(1, TokenLogprobs._SLICE // max(logits.shape[1], 1))
        for start in range(0, logits.shape[0], step):
            yield slice(start, start + step)


def packs(model: PreTrainedModel) -> bool:
    """Whether the model keeps samples that share a row apart: tried on five tokens, for no flag says it (a recurrent
    layer, an attention of its own or learned absolute positions would mix or misplace them), and by the masks that it
    asks for (windows and chunks that its attention layers do not know of would be lost).

    Where it does, its attention is set to the packed one, which is plain sdpa for every other caller. A model is asked
    once; one that is filled later has the answer of the model whose weights it gets (`packs_rows`).
    """
    known: bool | None = getattr(model, "packs_rows", None)
    if known is None:
        known = _packs(model)
        model.packs_rows = known
        if not known:
            base, attention = type(base_of(model)).__name__, getattr(model.config, "_attn_implementation", None)
            notice(
                f"{base} (attention {attention}): its samples are padded, for it does not keep those of one row apart."
            )
    elif known:
        backbone_of(model).set_attn_implementation(PACKED)
    return known


def _packs(model: PreTrainedModel) -> bool:
    backbone = backbone_of(model)
    implementation = getattr(backbone.config, "_attn_implementation", None)
    if implementation not in ("sdpa", PACKED) or getattr(backbone.config, "is_encoder_decoder", False):
        return False
    device = next(backbone.parameters()).device
    ids = torch.tensor([[1, 2, 3, 1, 2]], device=device) % backbone.config.get_text_config().vocab_size
    was_training = backbone.training
    backbone.eval()
    locality = _Locality()
    token = _probed.set(locality)
    try:
        backbone.set_attn_implementation(PACKED)
        with torch.no_grad():
            alone = [backbone(input_ids=part).last_hidden_state[0] for part in (ids[:, :3], ids[:, 3:])]
            with _packed_rows():
                together = backbone(
                    input_ids=ids,
                    position_ids=torch.tensor([[0, 1, 2, 0, 1]], device=device),
                    sample_lengths=[3, 2],
                    use_cache=False,
                ).last_hidden_state[0]
        same = torch.allclose(torch.cat(alone).float(), together.float(), rtol=1e-2, atol=1e-3)
        kept_apart = same and locality.told
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError):
        kept_apart = False
    finally:
        _probed.reset(token)
        backbone.train(was_training)
    if not kept_apart:
        backbone.set_attn_implementation(implementation)
    return kept_apart


@contextlib.contextmanager
def _packed_rows() -> Iterator[None]:
    token = _packing.set(True)
    try:
        yield
    finally:
        _packing.reset(token)


def backbone_of(model: Any) -> Any:
    """The model under a task's head; adapters stay in it."""
    base = base_of(model)
    return getattr(base, base.base_model_prefix, base)


class RoleHead(nn.Module):
    """A role's model with what its calls ask of it. Its forward takes one micro-batch, already on the device.

    The model is called through here alone, so that what wraps a module (ZeRO's gathering, residency hooks) sees every
    call.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.packed = packs(model)
        self._received: Tensor | None = None

    def forward(self, samples: Rollouts, *, received: Tensor | None = None, passes_on: bool = False) -> Any:
        """What the call asks for, or where it `passes_on` the hidden states (1, tokens, width) for the next stage of a
        pipeline.

        Args:
            received: what an earlier stage passed on, in the place of the samples' token ids.
        """
        with self.after(received):
            if passes_on:
                return self._run(backbone_of(self.model), self._inputs(samples)[0]).last_hidden_state
            return self.outputs(samples)

    def outputs(self, samples: Rollouts) -> dict[str, Ragged]:
        raise NotImplementedError

    @contextlib.contextmanager
    def after(self, received: Tensor | None) -> Iterator[None]:
        """Inside, the model goes on from the hidden states of an earlier part instead of from token ids."""
        self._received = received
        try:
            yield
        finally:
            self._received = None

    def _inputs(self, samples: Rollouts) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Model arguments, and where token (row, column) of every sample's row 0 of `tokens` lies."""
        tokens = _joined(samples)
        lengths = tokens.lengths
        place = _places(lengths.tolist(), tokens.values.device)
        if self.packed:
            arguments: dict[str, Any] = {
                "input_ids": tokens.values[None],
                "position_ids": place[None],
                "sample_lengths": lengths.tolist(),
            }
            return arguments, torch.zeros_like(place), torch.arange(len(place), device=place.device)
        mask = tokens.like(torch.ones_like(tokens.values)).pad()
        return {"input_ids": tokens.pad(), "attention_mask": mask}, tokens.row_of, place

    def _run(self, model: nn.Module, arguments: Mapping[str, Any]) -> Any:
        if self._received is not None:
            arguments = {**arguments, "input_ids": None, "inputs_embeds": self._received}
        with _packed_rows() if self.packed else contextlib.nullcontext():
            return model(**arguments, use_cache=False)


class PolicyHead(RoleHead):
    """`logprobs` and `entropy` of every response token under softmax(logits / temperature); float32, ragged."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__(model)
        self.temperature = temperature
        # (logits, targets, temperature) -> logprobs, entropy; another where the vocabulary is split
        self.token_logprobs: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = TokenLogprobs.apply
        self.keeps = "logits_to_keep" in inspect.signature(base_of(model).forward).parameters

    def outputs(self, samples: Rollouts) -> dict[str, Ragged]:
        arguments, row, column = self._inputs(samples)
        responses = samples.ragged("responses")
        before = _response_places(samples) - 1  # the token before predicts it
        row, column = row[before], column[before]
        if self.keeps:
            kept, column = torch.unique(column, return_inverse=True)
            arguments["logits_to_keep"] = kept
        logits = self._run(self.model, arguments).logits
        # squeeze, because the gradient of `logits[0]` would be a second copy of the logits
        picked = logits.squeeze(0) if self.packed else logits[row, column]
        if self.packed and not self.keeps:
            picked = picked[column]
        logprobs, entropy = self.token_logprobs(picked, responses.values, self.temperature)
        return {"logprobs": responses.like(logprobs), "entropy": responses.like(entropy)}


class ValueHead(RoleHead):
    """`values` in every state of a response: before its first token, …, after its last: a response's length + 1 each;
    float32, ragged. The model is a sequence classifier with a `score` layer, as TRL's critics are."""

    def outputs(self, samples: Rollouts) -> dict[str, Ragged]:
        arguments, row, column = self._inputs(samples)
        lengths = samples.ragged("responses").lengths + 1
        last = torch.cumsum(samples.lengths, 0) - 1
        at = _places(lengths.tolist(), last.device) + torch.repeat_interleave(last - lengths + 1, lengths)
        hidden = self._run(backbone_of(self.model), arguments).last_hidden_state
        values = base_of(self.model).score(hidden[row[at], column[at]])
        return {"values": Ragged(values.squeeze(-1).float(), lengths)}


class ScoreHead(RoleHead):
    """`scores` (n,) float32: the classifier's one logit for each whole sample, read at its last token."""

    def outputs(self, samples: Rollouts) -> dict[str, Ragged]:
        arguments, row, column = self._inputs(samples)
        one_each = torch.ones(len(samples), dtype=torch.long, device=samples.lengths.device)
        if not hasattr(base_of(self.model), "score"):  # an encoder's classifier pools in its own way
            logits = self._run(self.model, arguments).logits[:, 0]
            return {"scores": Ragged(logits.float(), one_each)}
        last = torch.cumsum(samples.lengths, 0) - 1
        hidden = self._run(backbone_of(self.model), arguments).last_hidden_state
        scores = base_of(self.model).score(hidden[row[last], column[last]])
        return {"scores": Ragged(scores[:, 0].float(), one_each)}


def base_of(model: Any) -> Any:
    """The model without its adapters' wrapping."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def tied_weight(model: Any) -> nn.Parameter | None:
    """The parameter that is embedding and language head at once."""
    base = base_of(model)
    weight = getattr(base.get_input_embeddings(), "weight", None)
    return weight if weight is not None and getattr(base.get_output_embeddings(), "weight", None) is weight else None


def _joined(samples: Rollouts) -> Ragged:
    """Each sample's prompt and response as one row."""
    pairs = zip(samples.ragged("prompts").rows(), samples.ragged("responses").rows(), strict=True)
    return Ragged(torch.cat([part for pair in pairs for part in pair]), samples.lengths)


def _places(lengths: list[int], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(n, device=device) for n in lengths])


def _response_places(samples: Rollouts) -> Tensor:
    """(response tokens,) int64: where each lies among the tokens of `_joined`."""
    responses = samples.ragged("responses").lengths
    start = torch.cumsum(samples.lengths, 0) - responses
    return _places(responses.tolist(), start.device) + torch.repeat_interleave(start, responses)


def cut(samples: Rollouts, budget: int, group: MeshGroup, in_step: bool) -> list[list[int]]:
    """This rank's micro-batches. Where its forwards are collective (`in_step`, ZeRO) every rank of the mesh makes the
    same number, some of them empty."""
    batches = micro_batches(samples.lengths.tolist(), budget)
    return batches + [[] for _ in range(group.max(len(batches)) - len(batches))] if in_step else batches


def _nothing(samples: Rollouts) -> Rollouts:
    """A one-token sample that stands in where a rank has none left but its mesh still needs its forward."""
    one = Ragged(torch.ones(1, dtype=torch.long), torch.ones(1, dtype=torch.long))
    return Rollouts(index=torch.zeros(1, dtype=torch.long), prompts=one, responses=one)


def run_forward(
    head: Callable[[Rollouts], Mapping[str, Ragged]],
    samples: Rollouts,
    budget: int,
    group: MeshGroup,
    device: torch.device,
    *,
    in_step: bool = False,
) -> dict[str, Ragged]:
    """All of this rank's samples through a head without gradients; results on the CPU in the samples' order."""
    wanted = samples.only(("index", "prompts", "responses"))
    batches = cut(wanted, budget, group, in_step)
    parts: list[Mapping[str, Ragged]] = []
    with torch.no_grad():
        for batch in batches:
            micro = wanted.select(batch) if batch else _nothing(wanted)
            out = head(micro.to(device))
            if batch:
                parts.append({name: column.to("cpu") for name, column in out.items()})
    if not parts:
        return {}
    order = torch.argsort(torch.tensor([i for batch in batches for i in batch]))
    return {name: Ragged.cat([part[name] for part in parts]).select(order) for name in parts[0]}


def run_training(
    head: Callable[[Rollouts], Mapping[str, Ragged]],
    samples: Rollouts,
    loss: TokenLoss,
    budget: int,
    group: MeshGroup,
    device: torch.device,
    backward: Callable[[Tensor, bool], None],
    *,
    in_step: bool = False,
) -> dict[str, Tensor]:
    """This rank's share of one mini-batch, micro-batch by micro-batch: `backward(loss, is_last)` accumulates.

    Returns each statistic (n,) float32 per sample on the CPU, in the samples' order.
    """
    batches = cut(samples, budget, group, in_step)
    parts: list[dict[str, Tensor]] = []
    for at, batch in enumerate(batches):
        is_last = at == len(batches) - 1
        if batch:
            micro = samples.select(batch).to(device)
            value, statistics = loss(head(micro), micro)
            parts.append({name: sums.float().cpu() for name, sums in statistics.items()})
        else:  # the mesh's collectives need this rank's step; it adds nothing
            out = head(_nothing(samples).to(device))
            differentiable = [column.values.sum() for column in out.values() if column.values.requires_grad]
            value = 0.0 * torch.stack(differentiable).sum()
        backward(guarded(value), is_last)
    if not parts:
        return {}
    order = torch.argsort(torch.tensor([i for batch in batches for i in batch]))
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
