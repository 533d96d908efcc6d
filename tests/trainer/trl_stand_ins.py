"""The models and tokenizers that TRL's tests name, made here, tiny and random, in a folder as the Hub's cache has it.

With `HF_HUB_CACHE` at that folder the names resolve without the Hub and without patches. The data sets are in
`trl_data.py`, TRL's test files in `trl_sources.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any


ORGANIZATION = "trl-internal-testing"
COMMIT = "0" * 40  # code in a repository is only imported from a folder with the name of a commit
SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2}
LARGER = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32, the least of vLLM's
# Qwen's control tokens from id 151,643 on, in the order of their ids: TRL's tests have ids of them in their code.
QWEN_CONTROL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
]
QWEN_RANKS = 151_643
MERGES = 20_000
QWEN_ORDINARY = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
QWEN_ORDINARY |= {token for token in QWEN_CONTROL_TOKENS if token.startswith(("<|fim", "<|repo", "<|file"))}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# name without "tiny-": model type, class of head, chat template of the trl package, changes to SMALL
TEXT_MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "Qwen2ForCausalLM-2.5": ("qwen2", "CausalLM", "qwen2_5", {}),
    "Qwen2ForSequenceClassification-2.5": ("qwen2", "SequenceClassification", "qwen2_5", {}),
    "Qwen3ForCausalLM": ("qwen3", "CausalLM", "qwen3", {}),
    "Qwen3ForSequenceClassification": ("qwen3", "SequenceClassification", "qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "CausalLM", "qwen3", {"num_experts": 4, "head_dim": 128, **EXPERTS}),
    "LlamaForCausalLM-3.2": ("llama", "CausalLM", "llama3_2", {}),
    "LlamaForSequenceClassification-3.2": ("llama", "SequenceClassification", "llama3_2", {}),
    "MistralForCausalLM-0.2": ("mistral", "CausalLM", "qwen2_5", {}),
    "Gemma2ForCausalLM": ("gemma2", "CausalLM", "gemma", {"head_dim": 2}),
    "Cohere2ForCausalLM": ("cohere2", "CausalLM", "cohere2", {"logit_scale": 1.0}),
    "GptOssForCausalLM": (
        "gpt_oss",
        "CausalLM",
        "gptoss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        "CausalLM",
        "glm4moe",
        {"n_routed_experts": 4, "head_dim": 2, "use_qk_norm": True, **EXPERTS},
    ),
    "NemotronHForCausalLM-nano": (
        "nemotron_h",
        "CausalLM",
        "nemotron_3_nano",
        {
            "hidden_size": 16,
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "mamba_n_groups": 1,
            "n_groups": 1,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            **EXPERTS,
        },
    ),
}
# A model whose code is in its repository: `trust_remote_code` is asked for
REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def write_repository(hub: Path, name: str, *parts: Any, organization: str = ORGANIZATION) -> Path:
    """Saves models, tokenizers and processors as one repository of the Hub's cache; returns its snapshot."""
    repository = hub / f"models--{organization}--{name}"
    snapshot = repository / "snapshots" / COMMIT
    for part in parts:
        part.save_pretrained(snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The two parts that each token of more than one byte is merged from, in the order of the ranks."""
    for token, rank in ranks.items():
        parts = [token[at : at + 1] for at in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(parts[at] + parts[at + 1], rank) for at in range(len(parts) - 1)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def qwen_tokenizer(ranks: dict[bytes, int]) -> Any:
    """Qwen's tokenizer, without a chat template, from the ranks of its tokens.

    Every id is decoded as Qwen's. Of the merges it has the first `MERGES`: with all of them each load takes 1.0 s in
    place of 0.4 s, and a test loads two tokenizers. A rare word is encoded as more tokens.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if len(ranks) != QWEN_RANKS:
        raise ValueError(f"Qwen has {QWEN_RANKS:,} ranks, not {len(ranks):,}")
    letters = bytes_to_unicode()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # The control tokens are in the vocabulary too: an added token that is found there keeps its id.
    control = {token: QWEN_RANKS + at for at, token in enumerate(QWEN_CONTROL_TOKENS)}
    made = Qwen2Tokenizer(
        vocab={spelled(token): rank for token, rank in ranks.items()} | control,
        merges=[(spelled(left), spelled(right)) for left, right in islice(_merges(ranks), MERGES)],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
    )
    made.add_tokens(
        [AddedToken(token, special=token not in QWEN_ORDINARY, normalized=False) for token in QWEN_CONTROL_TOKENS]
    )
    return made


def causal_or_scoring(kind: str, head: str, **changes: Any) -> Any:
    """A model of a family, random, with weights large enough that a step of TRL's tests changes each parameter."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(kind, **changes)
    if head == "SequenceClassification":
        config.num_labels = 1
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    return model


def chat_template(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def write_text_models(hub: Path, tokenizer: Any) -> None:
    """Writes `TEXT_MODELS`, each with Qwen's tokenizer."""
    for name, (kind, head, template, changes) in TEXT_MODELS.items():
        write_text_model(hub, tokenizer, f"tiny-{name}", kind, head, template, **changes)


def write_vllm_model(hub: Path, tokenizer: Any) -> None:
    """Writes the model of the tests of vLLM, whose attention has no heads as small as those of the others."""
    name, organization = "Qwen2.5-0.5B-Instruct", "Qwen"
    write_text_model(hub, tokenizer, name, "qwen2", "CausalLM", "qwen2_5", organization=organization, **LARGER)


def write_text_model(
    hub: Path,
    tokenizer: Any,
    name: str,
    kind: str,
    head: str,
    template: str,
    *,
    organization: str = ORGANIZATION,
    **changes: Any,
) -> None:
    """Writes a model of the sizes `SMALL`, with changes, in bfloat16. Sizes that are None are left out."""
    import torch

    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, **ids, **SMALL, **changes}
    model = causal_or_scoring(kind, head, **{key: value for key, value in sizes.items() if value is not None})
    tokenizer.chat_template = chat_template(template)
    write_repository(hub, name, model.to(torch.bfloat16), tokenizer, organization=organization)


def write_remote_model(hub: Path, tokenizer: Any) -> None:
    """Writes the model whose code is in its repository."""
    model = causal_or_scoring("llama", "CausalLM", **{"vocab_size": len(tokenizer), **SMALL})
    tokenizer.chat_template = chat_template("llama3_2")
    snapshot = write_repository(hub, "tiny-RemoteForCausalLM", model, tokenizer)
    (snapshot / "remote.py").write_text(REMOTE_CODE)
    config = json.loads((snapshot / "config.json").read_text())
    homes = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": homes}
    (snapshot / "config.json").write_text(json.dumps(config))
