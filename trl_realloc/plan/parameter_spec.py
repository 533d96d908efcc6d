"""`ParameterSpec`: the parameters of each model family, computed from its Transformers config: names, shapes and cuts.

Pure: imports neither Transformers nor torch. Sums over a model's parameters are in `model_spec`, placements on devices
in `realloc/layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..common.errors import Problems, shown


Head = Literal["lm", "score"]
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

    @property
    def is_of_experts(self) -> bool:
        """True if the parameter has all experts of a layer, (experts, outputs, inputs), of which a token uses a few."""
        return len(self.shape) == 3 and ".experts." in self.name

    @property
    def is_router(self) -> bool:
        """True if the parameter is the matrix of a mixture's router."""
        return self.name.endswith((".gate.weight", ".router.weight"))


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, with `ModelSpec`'s names."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int
    tied: bool
    experts_per_token: int = 0

    @staticmethod
    def of(values: Mapping[str, Any], head: Head) -> ModelSizes:
        """The sizes in the config of a family of `model_spec.FAMILIES`.

        Raises:
            PlanError: a number of the config is out of range.
        """
        _check_sizes(values)
        family, hidden, heads = (
            str(values["model_type"]),
            int(values["hidden_size"]),
            int(values["num_attention_heads"]),
        )
        mixture = family in MIXTURES
        return ModelSizes(
            family=family,
            layers=int(values["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            hidden=hidden,
            inner=math.gcd(*_channels(values)) if mixture else int(values["intermediate_size"]),
            vocabulary=int(values["vocab_size"]),
            tied=head == "lm" and bool(values.get("tie_word_embeddings", family in TIED)),
            experts_per_token=int(values["num_experts_per_tok"]) if mixture else 0,
        )


def parameters_of(sizes: ModelSizes, values: Mapping[str, Any], head: Head) -> tuple[ParameterSpec, ...]:
    """A model's parameters in the order of `named_parameters`.

    Args:
        values: the checked config.
    """
    return tuple((_gpt_neox if sizes.family == "gpt_neox" else _llama_like)(sizes, values, head))


def _weights(name: str, rows: int, columns: int, layer: int, cut: Cut | None, bias: bool) -> Iterator[ParameterSpec]:
    """The parameters of a linear layer. A cut by rows also cuts the bias. With a cut by columns, the bias is whole and
    is added once after the sum."""
    yield ParameterSpec(f"{name}.weight", (rows, columns), layer, cut)
    if bias:
        yield ParameterSpec(f"{name}.bias", (rows,), layer, cut if cut is not None and cut.dim == 0 else None)


def _llama_like(sizes: ModelSizes, values: Mapping[str, Any], head: Head) -> Iterator[ParameterSpec]:
    hidden, family = sizes.hidden, sizes.family
    yield ParameterSpec("model.embed_tokens.weight", (sizes.vocabulary, hidden), FIRST, Cut(0))
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn", sizes, values, layer)
        norms = [
            ParameterSpec(f"{prefix}.{name}.weight", (hidden,), layer)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        if family == "granitemoe":  # the only family whose norms come first
            yield from norms
            yield from _mixture(f"{prefix}.block_sparse_moe", sizes, values, layer)
        else:
            sparse = family in MIXTURES and is_sparse(values, layer)
            yield from (_mixture if sparse else _mlp)(f"{prefix}.mlp", sizes, values, layer)
            yield from norms
    yield ParameterSpec("model.norm.weight", (hidden,), sizes.layers)
    yield from _head(sizes, head)


def _attention(prefix: str, sizes: ModelSizes, values: Mapping[str, Any], layer: int) -> Iterator[ParameterSpec]:
    hidden, family = sizes.hidden, sizes.family
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    of_queries, of_keys = queries // sizes.kv_heads, sizes.head_dim  # channels of a key/value head
    biased = bool(values.get("attention_bias", False)) and family not in ("mistral", "mixtral", "qwen2", "qwen2_moe")
    qkv_bias = biased or family == "qwen2" or (family == "qwen2_moe" and bool(values.get("qkv_bias", True)))
    yield from _weights(f"{prefix}.q_proj", queries, hidden, layer, Cut(0, of_queries), qkv_bias)
    for name in ("k_proj", "v_proj"):
        yield from _weights(f"{prefix}.{name}", keys, hidden, layer, Cut(0, of_keys), qkv_bias)
    yield from _weights(f"{prefix}.o_proj", hidden, queries, layer, Cut(1, of_queries), biased and family != "glm4_moe")
    if family == "olmoe":  # its norms are over the channels of all heads
        yield ParameterSpec(f"{prefix}.q_norm.weight", (queries,), layer, Cut(0, of_queries))
        yield ParameterSpec(f"{prefix}.k_norm.weight", (keys,), layer, Cut(0, of_keys))
    elif family in ("qwen3", "qwen3_moe") or (family == "glm4_moe" and values.get("use_qk_norm", False)):
        for name in ("q_norm", "k_norm"):
            yield ParameterSpec(f"{prefix}.{name}.weight", (sizes.head_dim,), layer)


def _mlp(
    prefix: str, sizes: ModelSizes, values: Mapping[str, Any], layer: int, inner: int | None = None
) -> Iterator[ParameterSpec]:
    inner, bias = inner or int(values["intermediate_size"]), sizes.family == "llama" and bool(values.get("mlp_bias"))
    for name in ("gate_proj", "up_proj"):
        yield from _weights(f"{prefix}.{name}", inner, sizes.hidden, layer, Cut(0), bias)
    yield from _weights(f"{prefix}.down_proj", sizes.hidden, inner, layer, Cut(1), bias)


# --- mixtures of experts ----------------------------------------------------------------------------------------------

# families of mixtures -> setting of the config with the channels of an expert
MIXTURES: Mapping[str, str] = {
    "glm4_moe": "moe_intermediate_size",
    "granitemoe": "intermediate_size",
    "mixtral": "intermediate_size",
    "olmoe": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}
# The names of settings in Transformers' families: the number of experts (the first: Aria, DBRX, ERNIE 4.5), and that of
# a token (the second: Gemma 4; the third: Aria, HunYuan, LongCat; the last: DBRX).
EXPERT_COUNTS = ("moe_num_experts", "num_local_experts", "n_routed_experts", "num_experts")
CHOSEN_COUNTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
TOO_MANY_CHOSEN = "the config's num_experts_per_tok {chosen} is more than its {count} experts."
TIED = frozenset({"gemma"})  # families whose config.json leaves out a true tie_word_embeddings


def expert_count(values: Mapping[str, Any]) -> Any:
    """The setting of a mixture's config with the number of experts of a layer; `None` if it is missing."""
    return next((values[name] for name in EXPERT_COUNTS if name in values), None)


def is_sparse(values: Mapping[str, Any], layer: int) -> bool:
    """True if a layer of a mixture has experts. The others have an ordinary MLP."""
    if values["model_type"] == "glm4_moe":
        return layer >= int(values.get("first_k_dense_replace", 1))
    chosen = (layer + 1) % int(values.get("decoder_sparse_step") or 1) == 0
    return chosen and layer not in (values.get("mlp_only_layers") or ())


def _shared_channels(values: Mapping[str, Any]) -> int:
    """Channels of the expert that every token uses; 0 if there is none."""
    match values["model_type"]:
        case "qwen2_moe":
            return int(values["shared_expert_intermediate_size"])
        case "glm4_moe":
            return int(values["moe_intermediate_size"]) * int(values.get("n_shared_experts", 1))
    return 0


def _channels(values: Mapping[str, Any]) -> set[int]:
    """The channels of a mixture's experts and MLPs."""
    sparse = [is_sparse(values, layer) for layer in range(int(values["num_hidden_layers"]))]
    of_experts = {int(values[MIXTURES[values["model_type"]]]), _shared_channels(values)} if any(sparse) else set()
    return (of_experts | ({int(values["intermediate_size"])} if not all(sparse) else set())) - {0}


def _mixture(prefix: str, sizes: ModelSizes, values: Mapping[str, Any], layer: int) -> Iterator[ParameterSpec]:
    """Router and experts of a layer. Whole experts are divided; each rank has the router and the shared one's gate."""
    hidden, family = sizes.hidden, sizes.family
    count, inner, shared = int(expert_count(values)), int(values[MIXTURES[family]]), _shared_channels(values)
    router = ParameterSpec(f"{prefix}.{'router' if family == 'granitemoe' else 'gate'}.weight", (count, hidden), layer)
    experts = (
        ParameterSpec(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, hidden), layer, Cut(0)),
        ParameterSpec(f"{prefix}.experts.down_proj", (count, hidden, inner), layer, Cut(0)),
    )
    yield from (*experts, router) if family in ("glm4_moe", "qwen3_moe") else (router, *experts)
    if shared:
        name = "shared_experts" if family == "glm4_moe" else "shared_expert"
        yield from _mlp(f"{prefix}.{name}", sizes, values, layer, shared)
        if family == "qwen2_moe":
            yield ParameterSpec(f"{prefix}.shared_expert_gate.weight", (1, hidden), layer)


# --- other families ---------------------------------------------------------------------------------------------------


def _gpt_neox(sizes: ModelSizes, values: Mapping[str, Any], head: Head) -> Iterator[ParameterSpec]:
    hidden, inner = sizes.hidden, int(values["intermediate_size"])
    bias = bool(values.get("attention_bias", True))
    yield ParameterSpec("gpt_neox.embed_in.weight", (sizes.vocabulary, hidden), FIRST, Cut(0))
    for layer in range(sizes.layers):
        prefix = f"gpt_neox.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            for kind in ("weight", "bias"):
                yield ParameterSpec(f"{prefix}.{name}.{kind}", (hidden,), layer)
        heads = Cut(0, 3 * sizes.head_dim)  # query, key and value of a head are adjacent
        yield from _weights(f"{prefix}.attention.query_key_value", 3 * hidden, hidden, layer, heads, bias)
        yield from _weights(f"{prefix}.attention.dense", hidden, hidden, layer, Cut(1, sizes.head_dim), bias)
        yield from _weights(f"{prefix}.mlp.dense_h_to_4h", inner, hidden, layer, Cut(0), True)
        yield from _weights(f"{prefix}.mlp.dense_4h_to_h", hidden, inner, layer, Cut(1), True)
    for kind in ("weight", "bias"):
        yield ParameterSpec(f"gpt_neox.final_layer_norm.{kind}", (hidden,), sizes.layers)
    yield from _head(sizes, head)


def _head(sizes: ModelSizes, head: Head) -> Iterator[ParameterSpec]:
    if head == "score":
        yield ParameterSpec("score.weight", (1, sizes.hidden), sizes.layers)
    elif not sizes.tied:
        yield ParameterSpec("lm_head.weight", (sizes.vocabulary, sizes.hidden), sizes.layers, Cut(0))


# --- the numbers of a config ------------------------------------------------------------------------------------------

# The sizes of a config, with upper bounds far above the largest known model's.
_SIZES: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 1_000_000,
    "hidden_size": 10_000_000,
    "intermediate_size": 100_000_000,
    "vocab_size": 100_000_000,
}
_OF_MIXTURES: Mapping[str, int] = {
    **dict.fromkeys(("num_experts_per_tok", *EXPERT_COUNTS), 100_000),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 100_000_000),
    **dict.fromkeys(("decoder_sparse_step", "first_k_dense_replace", "n_shared_experts"), 10_000),
}
_OPTIONAL = frozenset({"num_key_value_heads", "head_dim", *EXPERT_COUNTS, "decoder_sparse_step"})
_MAY_BE_0 = frozenset({"first_k_dense_replace", "n_shared_experts"})
# the sizes that only some mixtures need
_REQUIRED_OF: Mapping[str, frozenset[str]] = {
    "glm4_moe": frozenset({"moe_intermediate_size"}),
    "qwen2_moe": frozenset({"moe_intermediate_size", "shared_expert_intermediate_size"}),
    "qwen3_moe": frozenset({"moe_intermediate_size"}),
}


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Raise `PlanError` with a sentence for each size that is missing, not an integer, or out of its range."""
    problems = Problems()
    family = str(values["model_type"])
    sizes = {**_SIZES, **(_OF_MIXTURES if family in MIXTURES else {})}
    required = {*_SIZES, "num_experts_per_tok", *_REQUIRED_OF.get(family, ())} - _OPTIONAL
    for name, most in sizes.items():
        value, least = values.get(name), 0 if name in _MAY_BE_0 else 1
        if value is None and name not in required:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            actual = "it is missing" if name not in values else f"it is {shown(value)}"
            problems.append(f"the config's {name} must be a whole number from {least} to {most:,}; {actual}.")
    problems.refuse()
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    shared = values.get("num_key_value_heads") or heads
    if heads % shared:
        problems.append(f"the config's {heads} attention heads cannot share {shared} key/value heads evenly.")
    if not values.get("head_dim") and hidden < heads:
        problems.append(f"the config's hidden_size {hidden} is less than one channel for each of {heads} heads.")
    if family in MIXTURES:
        count, chosen, dense = expert_count(values), values["num_experts_per_tok"], values.get("mlp_only_layers")
        if count is None:
            problems.append(f"the config of a {family} model must have its number of experts as {EXPERT_COUNTS[-1]}.")
        elif chosen > count:
            problems.append(TOO_MANY_CHOSEN.format(chosen=chosen, count=count))
        if not (dense is None or (isinstance(dense, list) and all(isinstance(layer, int) for layer in dense))):
            problems.append(f"the config's mlp_only_layers must be a list of layers; it is {shown(dense)}.")
    problems.refuse()
