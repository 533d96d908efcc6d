"""`ModelSpec`: a model's parameters computed from its Transformers config: names, shapes, cuts, bytes and FLOPs.

Pure: imports neither Transformers nor torch. The families of `FAMILIES` can be split by tensor and pipeline. Any other
model can be described by its parameters' shapes, and held whole or in flat partitions. Placements on devices are in
`realloc/layout`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..common.errors import PlanError, Problems, shown
from .parameter_spec import FIRST, MIXTURES, TOO_MANY_CHOSEN, Head, ModelSizes, ParameterSpec, parameters_of
from .quantization import Quantization


VOCABULARY_PADDING = 64  # vLLM rounds a vocabulary up to a multiple of this before it cuts it
FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", *MIXTURES})


@dataclass(frozen=True)
class ModelSpec:
    """One model's parameters and sizes.

    Args:
        family: the config's `model_type`; empty for a model that is described by its shapes.
        parameters: parameters in the order of `named_parameters`; a tied parameter once.
        bytes_per_element: bytes of an element of every parameter.
        layers, heads, kv_heads, head_dim, hidden, inner, vocabulary: sizes; 0 if unknown. `inner` is the channels of an
            MLP; with experts the greatest common divisor of those of all experts and MLPs.
        tied: the embedding is also the language model head.
        activation_bytes: bytes of an element of activations, keys and values (the compute dtype); 0 for
            `bytes_per_element`.
        trained_share: share of the elements that a training call trains; below 1 with adapters.
        is_base: the model is the policy of the same run without its adapters. In the layout of the policy's training it
            needs no separate parameters.
        whole_logits: all logits of a forward are in memory together, because the model changes them after its head or
            an adapter changes the head. Other models compute many logits in slices.
        experts_per_token: experts of a layer that compute a token, without one that computes all tokens; 0 if no
            experts.
        quantization: format of the linear layers' weights; `None` if they have `bytes_per_element`. Such a model is
            whole on each device, and only adapters train.
    """

    family: str
    parameters: tuple[ParameterSpec, ...]
    bytes_per_element: int
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    inner: int = 0
    vocabulary: int = 0
    tied: bool = False
    activation_bytes: int = 0
    whole_logits: bool = False
    trained_share: float = 1.0
    is_base: bool = False
    quantization: Quantization | None = None
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        if not self.activation_bytes:
            object.__setattr__(self, "activation_bytes", self.bytes_per_element)

    @staticmethod
    def from_config(config: Any, head: Head = "lm", *, bytes_per_element: int) -> ModelSpec:
        """The spec of a model with a Transformers config, or with the config's dictionary.

        Args:
            head: `lm` for a causal language model, `score` for a sequence classifier with one output.

        Raises:
            PlanError: the family is not in `FAMILIES`, or a number of the config is out of range.
        """
        values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        family = str(values.get("model_type", ""))
        if family not in FAMILIES:
            raise PlanError(
                f"the family {shown(family)} cannot be split by tensor or pipeline; use engine zero for it, or one of "
                f"{', '.join(sorted(FAMILIES))}."
            )
        sizes = ModelSizes.of(values, head)
        return ModelSpec(
            parameters=parameters_of(sizes, values, head),
            bytes_per_element=bytes_per_element,
            whole_logits=head == "lm" and values.get("logits_scaling", 1) != 1,
            **vars(sizes),
        )

    @staticmethod
    def of_shapes(
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        *,
        bytes_per_element: int,
        vocabulary: int = 0,
        experts_per_token: int = 0,
    ) -> ModelSpec:
        """The spec of any model, from its parameters' names and shapes. It cannot be split by tensor or pipeline.

        Args:
            vocabulary: vocabulary size of a causal language model; 0 for a sequence classifier.
            experts_per_token: the field of `ModelSpec`.

        Raises:
            PlanError: a token has more experts than there are.
        """
        parameters = tuple(ParameterSpec(name, tuple(shape)) for name, shape in shapes)
        spec = ModelSpec("", parameters, bytes_per_element, vocabulary=vocabulary, experts_per_token=experts_per_token)
        if 0 < spec.experts < experts_per_token:
            raise PlanError(TOO_MANY_CHOSEN.format(chosen=experts_per_token, count=spec.experts))
        return spec

    @cached_property
    def elements(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        return max((parameter.elements for parameter in self.parameters), default=0)

    @cached_property
    def largest_module(self) -> int:
        """Elements of the module with the most parameters of its own: of a mixture, all experts of a layer."""
        sizes: dict[str, int] = {}
        for parameter in self.parameters:
            module = parameter.name.rpartition(".")[0]
            sizes[module] = sizes.get(module, 0) + parameter.elements
        return max(sizes.values(), default=0)

    @cached_property
    def layer_elements(self) -> float:
        """Mean elements of a decoder layer; elements of the whole model if its layers are unknown."""
        if not self.layers:
            return self.elements
        return sum(p.elements for p in self.parameters if 0 <= p.layer < self.layers) / self.layers

    @cached_property
    def expert_elements(self) -> float:
        """Mean elements of a layer's experts, of which a token uses a few; 0 for a model without a mixture."""
        if not self.experts_per_token:
            return 0.0
        return sum(p.elements for p in self.parameters if p.is_of_experts) / max(1, self.layers)

    @cached_property
    def experts(self) -> int:
        """Number of experts of a layer; 0 for a model without a mixture."""
        return max((p.shape[0] for p in self.parameters if p.is_of_experts), default=0) if self.expert_elements else 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of an element in which experts compute. Transformers computes them in their parameters' dtype, because
        torch's grouped products do not follow autocast."""
        return max(self.bytes_per_element, self.activation_bytes)

    @property
    def cast_layer_elements(self) -> float:
        """Mean elements of a layer that autocast casts."""
        return self.layer_elements - self.expert_elements - self.quantized_elements / max(1, self.layers)

    @cached_property
    def active_expert_elements(self) -> float:
        """Mean elements of a layer's experts that compute a token."""
        return self.expert_elements * self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def active_layer_elements(self) -> float:
        """Mean elements of a layer that compute a token."""
        return self.layer_elements - self.expert_elements + self.active_expert_elements

    @cached_property
    def mean_experts_per_token(self) -> float:
        """Mean over the layers, of which some may have no experts."""
        mixed = {p.layer for p in self.parameters if p.is_of_experts}
        return self.experts_per_token * len(mixed) / max(1, self.layers)

    @property
    def active_elements(self) -> float:
        """Elements of the whole model that compute a token, with the embedding."""
        return self.elements - max(1, self.layers) * (self.layer_elements - self.active_layer_elements)

    def read_layer_elements(self, tokens: float) -> float:
        """Expected elements of a layer that `tokens` tokens read. Each token has experts of its own, all of them
        equally likely, so an expert is unread with probability (1 - k / n)^tokens."""
        if not self.experts:
            return self.layer_elements
        unread: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.layer_elements - self.expert_elements * unread

    def unevenness(self, tp: int) -> float:
        """The largest share of a rank that whole experts are divided among, relative to an even share: 6 experts on 4
        ranks are 2, 2, 2 and 0, which is 1.33."""
        return -(-self.experts // tp) * tp / self.experts if self.experts else 1.0

    @cached_property
    def norms_heads(self) -> bool:
        """True if queries and keys have norms."""
        return any(p.name.endswith(".q_norm.weight") for p in self.parameters)

    @cached_property
    def sums(self) -> float:
        """Sums over a tensor-parallel group in the forward of a layer: of the attention, of the MLP or the experts, and
        of an expert that every token uses."""
        shared = {p.layer for p in self.parameters if ".shared_expert" in p.name}
        return 2 + len(shared) / max(1, self.layers)

    @cached_property
    def head_elements(self) -> int:
        """Elements of the matrix after the last layer, which may be the tied embedding; 0 if the layers are unknown."""
        if not self.layers:
            return 0
        last = [p for p in self.parameters if len(p.shape) == 2 and p.layer >= self.layers]
        return sum(p.elements for p in (last or self.parameters[:1] if self.tied else last))

    @cached_property
    def outputs(self) -> int:
        """Size of the head's output for a token: the vocabulary for a language model, 1 for a classifier."""
        return max(1, self.head_elements // self.hidden if self.layers else self.vocabulary)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.activation_bytes

    @cached_property
    def quantized(self) -> tuple[ParameterSpec, ...]:
        """The parameters that are stored quantized: the matrices of numbered layers."""
        if self.quantization is None:
            return ()
        numbered = [p for p in self.parameters if any(part.isdigit() for part in p.name.split("."))]
        return tuple(parameter for parameter in numbered if len(parameter.shape) == 2)

    @cached_property
    def quantized_elements(self) -> int:
        return sum(parameter.elements for parameter in self.quantized)

    @cached_property
    def quantized_bytes(self) -> int:
        """Bytes of `quantized`, as stored."""
        return sum(self.quantization.bytes(p.shape) for p in self.quantized) if self.quantization is not None else 0

    @property
    def bytes(self) -> int:
        return (self.elements - self.quantized_elements) * self.bytes_per_element + self.quantized_bytes

    @property
    def stored_bytes(self) -> float:
        """Mean bytes of an element as it is stored."""
        return self.bytes_per_element if self.quantization is None else self.bytes / self.elements

    def stages_of(self, parameter: ParameterSpec, pp: int) -> tuple[int, ...]:
        """The pipeline stages that hold a parameter: one, or the first and the last for a tied embedding."""
        if pp == 1:
            return (0,)
        if parameter.layer == FIRST:
            return (0, pp - 1) if self.tied else (0,)
        if parameter.layer >= self.layers:
            return (pp - 1,)
        return (stage_of_layer(self.layers, pp, parameter.layer),)

    def rank_elements(self, tp: int, pp: int, *, whole_experts: bool) -> float:
        """Elements of the fullest rank under tensor and pipeline parallelism: the first stage has the embedding, the
        last the head, and every rank of a tensor-parallel group the parameters without a cut.

        Args:
            whole_experts: whether whole experts are divided among the group, or the channels of each.
        """
        key = tp, pp, whole_experts
        if key not in self._rank_elements:
            stages = [0.0] * pp
            for parameter in self.parameters:
                share = 1 / tp if parameter.cut is not None else 1.0
                if whole_experts and parameter.is_of_experts:
                    share *= self.unevenness(tp)
                for stage in self.stages_of(parameter, pp):
                    stages[stage] += share * parameter.elements
            self._rank_elements[key] = max(stages)
        return self._rank_elements[key]

    @cached_property
    def _rank_elements(self) -> dict[tuple[int, int, bool], float]:
        return {}

    def check_strategy(self, tp: int, pp: int) -> None:
        """Raise `PlanError` if the model cannot be split by this tp and pp."""
        problems = Problems()
        if (tp > 1 or pp > 1) and self.quantization is not None:
            problems.append("a quantized model is not split by tensor or pipeline; use engine zero with zero_stage 0.")
        elif (tp > 1 or pp > 1) and not self.layers:
            problems.append("a model known by its shapes alone cannot be split by tensor or pipeline; use engine zero.")
        elif tp > 1 and self.kv_heads % tp:
            fits = [n for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0]
            what = "key/value heads" if self.kv_heads != self.heads else "heads"
            problems.append(
                f"tp {tp} cannot share the {self.kv_heads} {what} of a {self.family} model evenly; "
                f"use tp {' or '.join(map(str, fits))}."
            )
        if self.layers and pp > self.layers:
            problems.append(f"pp {pp} is more than the model's {self.layers} layers; use pp {self.layers} or less.")
        problems.refuse()

    def check_generation(self, tp: int) -> None:
        """Raise `PlanError` if vLLM cannot split the model over tp devices."""
        if uneven := self._uneven_in_vllm(tp):
            fits = [n for n in range(1, self.heads + 1) if self.generates_under(n)]
            raise PlanError(
                f"tp {tp} cannot share the {uneven} of a {self.family} model evenly, as vLLM does; "
                f"use tp {' or '.join(map(str, fits))}."
            )

    def generates_under(self, tp: int) -> bool:
        """True if vLLM can split the model over tp devices."""
        return not self._uneven_in_vllm(tp)

    def _uneven_in_vllm(self, tp: int) -> str:
        """A phrase for the parts of the model that vLLM cannot divide evenly over tp devices; empty if there are none.
        vLLM repeats key/value heads if there are fewer than tp, and pads the vocabulary."""
        channels = "experts and MLPs" if self.experts else "MLPs"
        padded = -(-self.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        rests = {
            f"{self.heads} heads": self.heads % tp,
            f"{self.kv_heads} key/value heads": min(self.kv_heads % tp, tp % (self.kv_heads or 1)),
            f"{self.inner} channels of the {channels}": self.inner % tp,
            f"{self.vocabulary} tokens (padded to {padded})": padded % tp,
        }
        return ", ".join(what for what, rest in rests.items() if rest)

    def forward_flops(self, tokens: int, squared_lengths: int = 0) -> int:
        """FLOPs of one forward: 2 per token and matrix element that computes it (the embedding is a lookup, and a
        token uses a few experts), and for attention 4 per layer, query channel and pair of positions. These are the
        terms 8sh² + 4s²h + 6shi and 2svh of ReaL, section 8.1, expressed in the parameters' sizes.

        Args:
            tokens: number of tokens of all samples.
            squared_lengths: sum of the samples' squared lengths.
        """
        matrices = [p for p in self.parameters if len(p.shape) == 2 and (p.layer != FIRST or self.tied)]
        experts = [p for p in self.parameters if p.is_of_experts and self.experts]
        used = sum(p.elements // p.shape[0] * min(self.experts_per_token, p.shape[0]) for p in experts)
        attention = 4 * self.layers * self.heads * self.head_dim * squared_lengths
        return 2 * tokens * (sum(p.elements for p in matrices) + used) + attention

    @property
    def attention_at(self) -> float:
        """The length of a sample, in tokens, at which its causal attention (half of the pairs of positions) has as many
        FLOPs as the rest of the model. Infinity if the layers are unknown. Ignores attention windows."""
        of_token, of_pair = self.forward_flops(1), self.forward_flops(0, 1)
        return 2 * of_token / of_pair if of_pair else math.inf


def stage_layers(layers: int, pp: int) -> tuple[range, ...]:
    """The consecutive layers of each pipeline stage. The counts differ by at most one; the first stages have more."""
    base, remainder = divmod(layers, pp)
    starts = [stage * base + min(stage, remainder) for stage in range(pp + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


def stage_of_layer(layers: int, pp: int, layer: int) -> int:
    """The pipeline stage of `stage_layers` that has a layer."""
    base, remainder = divmod(layers, pp)
    longer = remainder * (base + 1)  # layers of the first stages, which have one more
    return layer // (base + 1) if layer < longer else remainder + (layer - longer) // base
