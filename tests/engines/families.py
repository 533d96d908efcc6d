"""Small models of many families, and which of them pack the samples of a micro-batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    DogeConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)


VOCABULARY = 96
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "initializer_range": 0.1}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED: dict[str, Any] = {**SHAPE, **SPECIAL, "intermediate_size": 48, "num_key_value_heads": 2}

# whether samples are packed, by family; where not, the model would mix them (Mamba) or has an attention of its own
FAMILIES: dict[str, tuple[PretrainedConfig, bool]] = {
    "llama": (LlamaConfig(**GROUPED), True),
    "qwen2": (Qwen2Config(**GROUPED), True),
    "qwen3": (Qwen3Config(**GROUPED, head_dim=8), True),
    "mistral, window 5": (MistralConfig(**GROUPED, sliding_window=5), True),
    "gemma": (GemmaConfig(**GROUPED, head_dim=8), True),
    # sdpa has no cap of the attention's logits, so Transformers 5.23 runs the model without it; 5.19 does not
    "gemma2": (
        Gemma2Config(**GROUPED, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
        Gemma2ForCausalLM._supports_sdpa,
    ),
    "gemma3, window 4": (Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4, layer_types=None), True),
    # its window is in the mask alone, and shows only in samples that are longer
    "qwen2-moe, window 7": (
        Qwen2MoeConfig(
            **{**GROUPED, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4},
            **{"num_experts_per_tok": 4, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
        ),
        False,
    ),
    "gpt-neox": (GPTNeoXConfig(**SHAPE, **SPECIAL, intermediate_size=48), True),
    "gpt2": (GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **SPECIAL), True),
    "opt": (OPTConfig(**SHAPE, **SPECIAL, ffn_dim=48, word_embed_proj_dim=32), True),
    # its attention bias is made by a parameter that begins at zero, and is then none
    "doge": (DogeConfig(**GROUPED, head_dim=8), False),
    "bloom": (BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **SPECIAL), False),
    "mamba": (MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **SPECIAL), False),
}
CLASSIFIERS = [name for name in FAMILIES if name != "mamba"]


def causal(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family][0])).eval()


def classifier(family: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family][0])
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config).eval()
