"""Mixtures of experts with random weights, of the families whose routers are followed. Tests and benchmarks say their
sizes; what a family calls them is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from trl_realloc.engines.training.expert_routing import experts_per_token, recorded
from trl_realloc.engines.transformers_compat import routers


@dataclass(frozen=True)
class Sizes:
    """Sizes of a mixture, by default tiny. vLLM on a CPU takes heads and experts of a multiple of 32 channels.

    Args:
        chosen: experts of a token.
        width: channels of an expert, a shared expert and a layer without experts.
        scale: standard deviation of the weights.
    """

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    experts: int = 8
    chosen: int = 2
    width: int = 32
    vocabulary: int = 100
    positions: int = 128
    scale: float = 0.1


class _Family(NamedTuple):
    """What a family's config calls the number and the width of its experts, and settings of this family alone."""

    experts: str
    width: str
    others: dict[str, Any] = {}


FAMILIES = {
    "glm4_moe": _Family(
        "n_routed_experts", "moe_intermediate_size", {"first_k_dense_replace": 1, "n_shared_experts": 1}
    ),
    "granitemoe": _Family("num_local_experts", "intermediate_size"),
    "mixtral": _Family("num_local_experts", "intermediate_size"),
    "olmoe": _Family("num_experts", "intermediate_size"),
    "qwen2_moe": _Family("num_experts", "moe_intermediate_size"),
    "qwen3_moe": _Family("num_experts", "moe_intermediate_size", {"norm_topk_prob": True}),
}


def settings(family: str, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """The settings of a family's config with these sizes."""
    of_family, head = FAMILIES[family], sizes.hidden // sizes.heads
    common = {"hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "vocab_size": sizes.vocabulary}
    common |= {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "head_dim": head}
    common |= {"num_experts_per_tok": sizes.chosen, "intermediate_size": sizes.width, of_family.width: sizes.width}
    common |= {"max_position_embeddings": sizes.positions, of_family.experts: sizes.experts}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "initializer_range": sizes.scale}
    if family == "qwen2_moe":
        special["shared_expert_intermediate_size"] = sizes.width
    if family == "granitemoe":  # whose attention has this factor; and TRL 1.16 reads `num_experts` of any family
        special |= {"attention_multiplier": head**-0.5, "num_experts": sizes.experts}
    return {**common, **special, **of_family.others}


def config(family: str, sizes: Sizes = Sizes(), **changes: Any) -> PretrainedConfig:
    """A config of a family; `changes` replace its settings."""
    made: PretrainedConfig = AutoConfig.for_model(family, **{**settings(family, sizes), **changes})
    return made


def mixture(family: str, seed: int = 0, sizes: Sizes = Sizes(), **changes: Any) -> Any:
    """A model of a family, with random weights, and random corrections of its routers' scores."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family, sizes, **changes))
    for router, _ in routers(model):
        for bias in router.buffers():
            torch.nn.init.normal_(bias, std=sizes.scale)
    return model


def chosen(model: Any, ids: Tensor) -> Tensor:
    """(tokens, layers, k): the experts that the routers choose for the tokens of a sample."""
    with torch.no_grad(), recorded(model) as logits:
        model(input_ids=ids[None], use_cache=False)
    pairs = zip(routers(model), logits, strict=True)
    return torch.stack([choice(router, layer, experts_per_token(model.config)) for (router, _), layer in pairs], dim=1)


def choice(router: Any, logits: Tensor, top_k: int) -> Tensor:
    """(tokens, k): the experts that a router chooses by its logits."""
    scores = logits.float()
    for bias in router.buffers():
        scores = scores.sigmoid() + bias
    return scores.topk(top_k).indices
