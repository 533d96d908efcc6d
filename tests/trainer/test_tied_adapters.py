"""vLLM engines generate by the policy that is trained where adapters change the head or the embedding of a policy that
ties the two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_groups
import torch
from peft import LoraConfig, get_peft_model
from transformers import GemmaConfig, LlamaConfig

from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.checks.model_checks import check_generated
from trl_realloc.trainer.run.role_models import keep_adapter


DIFFERENCE = "sampling/sampling_logp_difference/max"
ON_AN_END = {
    "a head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [2, 3, 4, 5]},
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


def lora(kind: str) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **ON_AN_END[kind]})


def tied_policy(folder: Path) -> str:
    tiny.policy(tie_word_embeddings=True).save_pretrained(folder)
    return str(folder)


def assert_engines_follow(made: Any) -> None:
    made.train()
    changed = {n for n, p in made.model.named_parameters() if p.requires_grad}
    assert any("lm_head" in name or "embed_tokens" in name for name in changed)
    differences = [row[DIFFERENCE] for row in made.state.log_history if DIFFERENCE in row]
    assert len(differences) == 2 and max(differences) < 1e-4, "before and after an update"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("kind", ["a head", "tokens"])
def test_grpo_of_a_policy_by_path(tmp_path: Path, kind: str) -> None:
    given = {"model": tied_policy(tmp_path / "policy"), "reward_funcs": tiny.short, "peft_config": lora(kind)}
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_completion_length": 12}
    assert_engines_follow(tiny_groups.trainer(tmp_path, given=given, **tiny.BARE, **sizes, beta=0.04, use_vllm=True))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
@pytest.mark.usefixtures("forked_engines")
def test_ppo_of_a_loaded_policy_with_adapters(tmp_path: Path) -> None:
    policy = get_peft_model(tiny.policy(tie_word_embeddings=True), lora("the embedding"))
    on = {"generation_engine": "vllm", "vllm_importance_sampling_correction": True}
    assert_engines_follow(tiny.trainer(tmp_path, given={"model": policy}, **on))


def test_a_family_whose_head_is_its_embedding_in_vllm_is_refused_with_another_head(tmp_path: Path) -> None:
    for kind, config in (("gemma", GemmaConfig), ("llama", LlamaConfig)):
        tied = config(**tiny.config(tie_word_embeddings=True).to_diff_dict() | {"model_type": kind})
        for adapters in ("a head", "tokens"):
            given = "a name", tied, lora(adapters)
            if (kind, adapters) == ("gemma", "a head"):
                with pytest.raises(ConfigError, match="in vLLM the head of gemma is its embedding.*transformers"):
                    check_generated(tiny.arguments(tmp_path), *given)
            else:
                check_generated(tiny.arguments(tmp_path), *given)


@pytest.mark.skipif(not is_vllm_available(), reason="nothing is merged for Transformers' generation")
def test_adapters_that_cannot_be_merged_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    biased = {"peft_config": LoraConfig(target_modules=["q_proj"], lora_bias=True)}
    with pytest.raises(ConfigError, match="q_proj has no bias into which .*; set generation_engine"):
        tiny.trainer(tmp_path, given=biased, generation_engine="vllm")
    tiny.trainer(tmp_path, given=biased, max_steps=1).train()


@pytest.mark.parametrize("kind", ON_AN_END)
def test_the_reference_of_a_trained_adapter_is_that_adapter(kind: str) -> None:
    model = get_peft_model(tiny.policy(tie_word_embeddings=True), lora(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1 * parameter.requires_grad)
    tokens = torch.arange(2, 12)[None]
    expected = copy.deepcopy(model)(tokens).logits
    model.set_adapter(keep_adapter(model))
    torch.testing.assert_close(model(tokens).logits, expected)
