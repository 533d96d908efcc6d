"""Contract 1 for tensor, pipeline and data groups: every split of a model learns and says what the whole model does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(500)]

BOTH = {"heads": ["policy", "value"]}
DEEP = ("dp2 pp2", "tp2 pp2")  # two layers on each stage


def shallow(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Two layers in place of four, where two stages need no more: each layer takes a test's time again."""
    return {
        name: case if name in DEEP or case.get("pp", 1) > 2 else {**case, "config": {**TWO, **case.get("config", {})}}
        for name, case in cases.items()
    }


TWO = {"num_hidden_layers": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXPERTS |= {"shared_expert_intermediate_size": 56}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe, 6 experts on 4 ranks": {"tp": 4, "config": {"num_key_value_heads": 4, "mlp_only_layers": [0]}, **BOTH},
    "qwen2_moe, dp2 tp2": {"tp": 2, "shard": True, "auxiliary": 0.5, **BOTH},
    "mixtral, tp2 pp2": {"tp": 2, "pp": 2, "auxiliary": 0.5, "config": {"num_local_experts": 5}},
    "qwen3_moe, no router in the first stage": {
        "pp": 2,
        "shard": True,
        "auxiliary": 0.5,
        "config": {"mlp_only_layers": [0]},
    },
    "olmoe, dp2 tp2": {"tp": 2, "config": {"clip_qkv": 0.5}},
    # more experts than a byte can number
    "granitemoe, tp2 pp2": {"tp": 2, "pp": 2, "config": {"num_local_experts": 260, **GRANITE}},
    "glm4_moe, tp2 pp2": {"tp": 2, "pp": 2, "config": {"n_routed_experts": 6, "use_qk_norm": True}},
    "qwen3_moe, adapters": {"tp": 2, "lora": {"target_modules": ["q_proj", "o_proj"]}},
    # most micro-batches have no token for some rank's experts
    "qwen3_moe, recomputed activations": {
        "tp": 2,
        "checkpointing": True,
        "auxiliary": 0.5,
        "tokens": 8,
        "config": {"num_experts": 8, "num_experts_per_tok": 1},
    },
}
FOUR: dict[str, dict[str, Any]] = {
    "dp4": {**BOTH},
    "dp4, optimizer sharded": {"shard": True},
    "dp2 tp2": {"tp": 2, **BOTH},
    "dp2 tp2, optimizer sharded": {"tp": 2, "shard": True, **BOTH},
    "dp2 pp2": {"pp": 2, "shard": True, **BOTH},
    "tp2 pp2": {"tp": 2, "pp": 2, **BOTH},
    "pp4": {"pp": 4, **BOTH},
    "tp4": {"tp": 4, "config": {"num_key_value_heads": 4}, **BOTH},
    "pp2 of 5 layers": {"pp": 2, "config": {"num_hidden_layers": 5}},
    "one replica without samples": {"tp": 2, "idle": True, "shard": True},
    "one pipeline without samples": {"pp": 2, "idle": True},
    "nothing clipped": {"tp": 2, "pp": 2, "max_grad_norm": 0.0},
    "one large micro-batch": {"tp": 2, "pp": 2, "tokens": 1000, "support": (0.8, 0, 0.0)},
    "recomputed activations": {"tp": 2, "pp": 2, "checkpointing": True},
    "tied embeddings": {"tp": 2, "pp": 2, "config": {"tie_word_embeddings": True}},
    "tied embeddings, optimizer sharded": {"pp": 2, "shard": True, "config": {"tie_word_embeddings": True}},
    "adapters": {"tp": 2, "pp": 2, "lora": {}},
    "adapters, optimizer sharded": {"tp": 2, "lora": {}, "shard": True},
    "an adapted head": {"tp": 2, "pp": 2, "lora": {"target_modules": ["q_proj", "lm_head"]}},
    "an adapted head that is the embedding": {
        "tp": 2,
        "lora": {"target_modules": ["embed_tokens", "lm_head"]},
        "config": {"tie_word_embeddings": True},
    },
    "a head that is trained beside adapters": {
        "tp": 2,
        "lora": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
        "config": {"tie_word_embeddings": True},
    },
    "a trained embedding beside a tied head": {
        "tp": 2,
        "pp": 2,
        "lora": {"modules_to_save": ["embed_tokens"]},
        "config": {"tie_word_embeddings": True},
    },
    "adapters in the first stage alone": {"tp": 2, "pp": 2, "lora": {"layers_to_transform": [0]}},
    "adapters in the last stage alone": {"pp": 2, "shard": True, "lora": {"layers_to_transform": [1]}},
    "a first stage that is frozen": {
        "pp": 4,
        "frozen": ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2"],
    },
    "an optimizer that makes its state with itself": {"tp": 2, "shard": True, "optimizer": "adagrad"},
    "an optimizer over the parameters as they were given": {"tp": 2, "pp": 2, "optimizer": "given"},
    "biases": {"tp": 2, "pp": 2, "config": {"attention_bias": True, "mlp_bias": True}},
    "more ranks than pieces of the vocabulary": {
        "tp": 4,
        "support": (0.9, 30, 0.01),
        "config": {"num_key_value_heads": 4, "intermediate_size": 6, "vocab_size": 101},
    },
    "the head in slices": {"tp": 2, "pp": 2, "slices": True, "config": {"tie_word_embeddings": True}},
    "an uneven head in slices": {
        "tp": 4,
        "slices": True,
        "support": (0.7, 0, 0.0),
        "config": {"num_key_value_heads": 4, "vocab_size": 101},
    },
    **{
        f"{family}, {split}": {"family": family, "config": config, **degrees}
        for family, config in {
            "qwen2": {},
            "qwen3": {},
            "mistral": {"sliding_window": 6},
            "gemma": {"tie_word_embeddings": True},
            "gpt_neox": {},
        }.items()
        for split, degrees in {"dp2 tp2": {"tp": 2, **BOTH}, "dp2 pp2": {"pp": 2}}.items()
    },
    # `save_pretrained` counts the experts' tensors, which share memory, as one when it divides them among files
    **{
        name: {
            "family": name.partition(",")[0],
            "shard_size": "1GB",
            "memory": "lora" not in case,
            "routes": True,
            **case,
            "config": {**EXPERTS, **case.get("config", {})},
        }
        for name, case in MIXTURES.items()
    },
}
# the heads of SmolLM2-135M; three does not divide 131 tokens and 52 channels
NINE = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
THREE: dict[str, dict[str, Any]] = {
    "tp3 of 9 heads": {"tp": 3, "config": NINE, **BOTH},
    "tp3 of 9 heads, tied embeddings": {"tp": 3, "shard": True, "config": {**NINE, "tie_word_embeddings": True}},
}
EIGHT: dict[str, dict[str, Any]] = {
    "dp4 tp2": {"tp": 2, "shard": True},
    "tp8": {"tp": 8, "config": {"num_attention_heads": 8, "num_key_value_heads": 8}},
    "pp8": {"pp": 8, "config": {"num_hidden_layers": 8}},
    "dp2 tp2 pp2": {"tp": 2, "pp": 2, "shard": True},
    "tp2 pp4": {"tp": 2, "pp": 4},
}


LIMITS = {"memory": 0.1, "auxiliary loss": 1e-6}


@pytest.mark.parametrize(("processes", "cases"), [(3, shallow(THREE)), (4, shallow(FOUR)), (8, shallow(EIGHT))])
def test_every_split_trains_scores_and_resumes_as_the_whole_model_does(
    processes: int, cases: dict[str, Any], run: Callable[..., Path]
) -> None:
    folder = run("split.py", processes, {"cases": cases}, "ranks", limit_s=400)
    for name in cases:
        for head, gaps in json.loads((folder / f"{name}.json").read_text()).items():
            for what, gap in gaps.items():
                assert gap < LIMITS.get(what, 2e-5), (name, head, what, gap)


def test_a_family_that_cannot_be_split_is_refused_by_name() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    from trl_realloc.engines.base import EngineError
    from trl_realloc.engines.training.megatron import check_model

    sizes = {"hidden_size": 8, "ffn_dim": 8, "num_attention_heads": 2, "word_embed_proj_dim": 8}
    model = OPTForCausalLM(OPTConfig(vocab_size=10, num_hidden_layers=1, **sizes))
    with pytest.raises(EngineError, match="cannot split the family 'opt'"):
        check_model(model, 2, 1)
