"""`ModelSpec`: a model's parameters computed from its Transformers config: names, shapes, cuts, bytes and FLOPs.

Pure: imports neither Transformers nor torch. The families of `FAMILIES` can be split by tensor and pipeline. Any other
model can be described by its parameters' shapes, and held whole or in flat partitions. Placements on devices are in
`realloc/layout`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..common.errors import PlanError, Problems, shown
from .quantization import Quantization


Head = Literal["lm", "score"]
VOCABULARY_PADDING = 64  # vLLM rounds a vocabulary up to a multiple of this before it cuts it
FIRST = -1  # the layer number of parameters before the first layer


@dataclass(frozen=True)
class Cut:
    """Tensor parallelism cuts dimension `dim` at multiples of `unit` indices, so that a key/value head stays whole."""

    dim: int
    unit: int = 1


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter.

    Args:
        name: name in `named_parameters`.
        shape: shape of the whole parameter.
        layer: the decoder layer's number; `FIRST` for the embedding, the number of layers for parameters after them.
        cut: division among a tensor-parallel group; `None` if every rank of the group has the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    layer: int = FIRST
    cut: Cut | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """One model's parameters and sizes.

    Args:
        family: the config's `model_type`; empty for a model that is described by its shapes.
        parameters: parameters in the order of `named_parameters`; a tied parameter once.
        bytes_per_element: bytes of an element of every parameter.
        layers, heads, kv_heads, head_dim, hidden, inner, vocabulary: sizes; 0 if unknown. `inner` is the channels of an
            MLP.
        tied: the embedding is also the language model head.
        activation_bytes: bytes of an element of activations, keys and values (the compute dtype); 0 for
            `bytes_per_element`.
        trained_share: share of the elements that a training call trains; below 1 with adapters.
        is_base: the model is the policy of the same run without its adapters. In the layout of the policy's training it
            needs no separate parameters.
        whole_logits: all logits of a forward are in memory together, because the model changes them after its head or
            an adapter changes the head. Other models compute many logits in slices.
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
        _check_sizes(values)
        heads = int(values["num_attention_heads"])
        hidden = int(values["hidden_size"])
        spec = ModelSpec(
            family=family,
            parameters=(),
            bytes_per_element=bytes_per_element,
            layers=int(values["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            hidden=hidden,
            inner=int(values["intermediate_size"]),
            vocabulary=int(values["vocab_size"]),
            tied=head == "lm" and bool(values.get("tie_word_embeddings", family in TIED)),
        )
        make = _gpt_neox if family == "gpt_neox" else _llama_like
        return ModelSpec(**{**spec.__dict__, "parameters": tuple(make(spec, values, head))})

    @staticmethod
    def of_shapes(
        shapes: Sequence[tuple[str, tuple[int, ...]]], *, bytes_per_element: int, vocabulary: int = 0
    ) -> ModelSpec:
        """The spec of any model, from its parameters' names and shapes. It cannot be split by tensor or pipeline.

        Args:
            vocabulary: vocabulary size of a causal language model; 0 for a sequence classifier.
        """
        parameters = tuple(ParameterSpec(name, tuple(shape)) for name, shape in shapes)
        return ModelSpec("", parameters, bytes_per_element, vocabulary=vocabulary)

    @cached_property
    def elements(self) -> int:
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        return max((parameter.elements for parameter in self.parameters), default=0)

    @cached_property
    def layer_elements(self) -> float:
        """Mean elements of a decoder layer; elements of the whole model if its layers are unknown."""
        if not self.layers:
            return self.elements
        return sum(p.elements for p in self.parameters if 0 <= p.layer < self.layers) / self.layers

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

    def stage_elements(self, pp: int) -> int:
        """Elements of the largest of `pp` pipeline stages: the first has the embedding, the last the head."""
        if pp not in self._stage_elements:
            stages = [0] * pp
            for parameter in self.parameters:
                for stage in self.stages_of(parameter, pp):
                    stages[stage] += parameter.elements
            self._stage_elements[pp] = max(stages)
        return self._stage_elements[pp]

    @cached_property
    def _stage_elements(self) -> dict[int, int]:
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
        padded = -(-self.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        rests = {
            f"{self.heads} heads": self.heads % tp,
            f"{self.kv_heads} key/value heads": min(self.kv_heads % tp, tp % (self.kv_heads or 1)),
            f"{self.inner} channels of the MLPs": self.inner % tp,
            f"{self.vocabulary} tokens (padded to {padded})": padded % tp,
        }
        return ", ".join(what for what, rest in rests.items() if rest)

    def forward_flops(self, tokens: int, squared_lengths: int = 0) -> int:
        """FLOPs of one forward: 2 per matrix element and token (the embedding is a lookup), and for attention 4 per
        layer, query channel and pair of positions. These are the terms 8sh² + 4s²h + 6shi and 2svh of ReaL, section
        8.1, expressed in the parameters' sizes.

        Args:
            tokens: number of tokens of all samples.
            squared_lengths: sum of the samples' squared lengths.
        """
        matrices = [p for p in self.parameters if len(p.shape) == 2 and (p.layer != FIRST or self.tied)]
        attention = 4 * self.layers * self.heads * self.head_dim * squared_lengths
        return 2 * tokens * sum(p.elements for p in matrices) + attention

    @property
    def attention_at(self) -> float:
        """The length of a sample, in tokens, at which its causal attention (half of the pairs of positions) has as many
        FLOPs as the rest of the model. Infinity if the layers are unknown. Ignores attention windows."""
        of_token, of_pair = self.forward_flops(1), self.forward_flops(0, 1)
        return 2 * of_token / of_pair if of_pair else math.inf


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Raise `PlanError` with a sentence for each size that is missing, not an integer, or out of its range."""
    problems = Problems()
    for name, most in _SIZES.items():
        value = values.get(name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            actual = "it is missing" if name not in values else f"it is {shown(value)}"
            problems.append(f"the config's {name} must be a whole number from 1 to {most:,}; {actual}.")
    problems.refuse()
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    shared = values.get("num_key_value_heads") or heads
    if heads % shared:
        problems.append(f"the config's {heads} attention heads cannot share {shared} key/value heads evenly.")
    if not values.get("head_dim") and hidden < heads:
        problems.append(f"the config's hidden_size {hidden} is less than one channel for each of {heads} heads.")
    problems.refuse()


# The required sizes of a config, with upper bounds far above the largest known model's.
_SIZES: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 1_000_000,
    "hidden_size": 10_000_000,
    "intermediate_size": 100_000_000,
    "vocab_size": 100_000_000,
}
_OPTIONAL = frozenset({"num_key_value_heads", "head_dim"})


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


def _weights(name: str, rows: int, columns: int, layer: int, cut: Cut | None, bias: bool) -> Iterator[ParameterSpec]:
    """The parameters of a linear layer. A cut by rows also cuts the bias. With a cut by columns, the bias is whole and
    is added once after the sum."""
    yield ParameterSpec(f"{name}.weight", (rows, columns), layer, cut)
    if bias:
        yield ParameterSpec(f"{name}.bias", (rows,), layer, cut if cut is not None and cut.dim == 0 else None)


def _llama_like(spec: ModelSpec, values: Mapping[str, Any], head: Head) -> Iterator[ParameterSpec]:
    hidden, inner = spec.hidden, int(values["intermediate_size"])
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    group = Cut(0, queries // spec.kv_heads)
    biased = bool(values.get("attention_bias", False)) and spec.family not in ("mistral", "qwen2")
    qkv_bias = biased or spec.family == "qwen2"
    mlp_bias = spec.family == "llama" and bool(values.get("mlp_bias", False))
    yield ParameterSpec("model.embed_tokens.weight", (spec.vocabulary, hidden), FIRST, Cut(0))
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        yield from _weights(f"{prefix}.self_attn.q_proj", queries, hidden, layer, group, qkv_bias)
        for name in ("k_proj", "v_proj"):
            yield from _weights(f"{prefix}.self_attn.{name}", keys, hidden, layer, Cut(0, spec.head_dim), qkv_bias)
        across = Cut(1, queries // spec.kv_heads)
        yield from _weights(f"{prefix}.self_attn.o_proj", hidden, queries, layer, across, biased)
        if spec.family == "qwen3":
            for name in ("q_norm", "k_norm"):
                yield ParameterSpec(f"{prefix}.self_attn.{name}.weight", (spec.head_dim,), layer)
        for name in ("gate_proj", "up_proj"):
            yield from _weights(f"{prefix}.mlp.{name}", inner, hidden, layer, Cut(0), mlp_bias)
        yield from _weights(f"{prefix}.mlp.down_proj", hidden, inner, layer, Cut(1), mlp_bias)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield ParameterSpec(f"{prefix}.{name}.weight", (hidden,), layer)
    yield ParameterSpec("model.norm.weight", (hidden,), spec.layers)
    yield from _head(spec, head)


def _gpt_neox(spec: ModelSpec, values: Mapping[str, Any], head: Head) -> Iterator[ParameterSpec]:
    hidden, inner = spec.hidden, int(values["intermediate_size"])
    bias = bool(values.get("attention_bias", True))
    yield ParameterSpec("gpt_neox.embed_in.weight", (spec.vocabulary, hidden), FIRST, Cut(0))
    for layer in range(spec.layers):
        prefix = f"gpt_neox.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            for kind in ("weight", "bias"):
                yield ParameterSpec(f"{prefix}.{name}.{kind}", (hidden,), layer)
        heads = Cut(0, 3 * spec.head_dim)  # query, key and value of a head are adjacent
        yield from _weights(f"{prefix}.attention.query_key_value", 3 * hidden, hidden, layer, heads, bias)
        yield from _weights(f"{prefix}.attention.dense", hidden, hidden, layer, Cut(1, spec.head_dim), bias)
        yield from _weights(f"{prefix}.mlp.dense_h_to_4h", inner, hidden, layer, Cut(0), True)
        yield from _weights(f"{prefix}.mlp.dense_4h_to_h", hidden, inner, layer, Cut(1), True)
    for kind in ("weight", "bias"):
        yield ParameterSpec(f"gpt_neox.final_layer_norm.{kind}", (hidden,), spec.layers)
    yield from _head(spec, head)


def _head(spec: ModelSpec, head: Head) -> Iterator[ParameterSpec]:
    if head == "score":
        yield ParameterSpec("score.weight", (1, spec.hidden), spec.layers)
    elif not spec.tied:
        yield ParameterSpec("lm_head.weight", (spec.vocabulary, spec.hidden), spec.layers, Cut(0))


FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox"})
TIED = frozenset({"gemma"})  # families whose config.json leaves out a true tie_word_embeddings
