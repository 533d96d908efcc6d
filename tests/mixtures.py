"""Tiny mixtures of experts with random weights, of the families whose routers are followed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 100, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
SIZES |= {"max_position_embeddings": 128, "num_experts_per_tok": 2, "initializer_range": 0.1}
INNER: dict[str, Any] = {"moe_intermediate_size": 16, "head_dim": 32}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {**INNER, "num_experts": 8, "norm_topk_prob": True}),
    "qwen2_moe": (Qwen2MoeConfig, {**INNER, "num_experts": 8, "shared_expert_intermediate_size": 16}),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "head_dim": 32}),
    "olmoe": (OlmoeConfig, {"num_experts": 8, "hidden_size": 64}),
    # TRL 1.16 reads `num_experts` of any family
    "granitemoe": (GraniteMoeConfig, {"num_local_experts": 8, "num_experts": 8, "hidden_size": 64}),
    "glm4_moe": (Glm4MoeConfig, {**INNER, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}),
}


def config(family: str, **changes: Any) -> PretrainedConfig:
    """A config of a family; `changes` replace its settings."""
    kind, settings = FAMILIES[family]
    return kind(**{**SIZES, **settings, **changes})


def mixture(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of a family, with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(family, **changes))
