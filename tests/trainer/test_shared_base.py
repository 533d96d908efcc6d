"""The reference of a policy with adapters is the base as it was given, whatever the adapters train, though it computes
in the policy's own module. Where they train parameters of the base itself, it is a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import IA3Config, LoraConfig, VeraConfig


KINDS: dict[str, Any] = {
    "LoRA": LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
    "rank-stabilized": LoraConfig(r=2, target_modules=["q_proj"], use_rslora=True, init_lora_weights=False),
    "DoRA": LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True, init_lora_weights=False),
    "modules to save": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
    "tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    "a parameter": LoraConfig(r=2, target_modules=[], target_parameters=["down_proj.weight"]),
    "IA3": IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": VeraConfig(r=2, target_modules=["q_proj"]),
    "biases of the adapted layers": LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only"),
    "all biases": LoraConfig(r=2, target_modules=["q_proj"], bias="all"),
}


@pytest.mark.parametrize("by_path", [False, True], ids=["loaded", "by path"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_base_that_was_given(tmp_path: Path, kind: str, by_path: bool) -> None:
    given = tiny.policy(attention_bias=True, initializer_range=0.3)
    with torch.no_grad():
        for name, parameter in given.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    tokens = torch.arange(2, 12)[None]
    expected = given(tokens).logits.detach()
    given.save_pretrained(tmp_path / "base")
    model = str(tmp_path / "base") if by_path else given
    made = tiny.trainer(tmp_path, given={"model": model, "peft_config": KINDS[kind]})
    made.placement.start()
    trained = made.placement.engine("actor.train")
    with torch.no_grad():
        for parts in trained.parts().values():
            for _, part in parts:
                part.add_(torch.randn_like(part))
        with made.placement.scoring("reference.forward") as (engine,):
            assert torch.allclose(engine.head.model(tokens).logits, expected, atol=1e-5)
        assert not torch.allclose(trained.head.model(tokens).logits, expected, atol=1e-2)
        assert (engine is trained) == ("biases" not in kind)
    made.close()
