"""The reference of a policy with adapters is the base as it was given, whatever the adapters train, though it computes
in the policy's own module. Where they train parameters of the base itself, it is a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from trl_realloc.runtime.placement import shared_parameters


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


def held_bytes(made: Any) -> int:
    """Bytes of this rank's parameters, each memory once."""
    models = [engine.head.model for engines in made.placement.engines.values() for engine in engines]
    storages = [p.untyped_storage() for model in models for p in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_adapters_of_actor_and_critic_share_the_memory_of_their_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.policy(hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "base")
    logs, held = [], []
    for least_bytes in (shared_parameters.LEAST_BYTES, 1 << 40):
        monkeypatch.setattr(shared_parameters, "LEAST_BYTES", least_bytes)
        torch.manual_seed(0)  # of the critic's head and adapters
        critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        base = sum(p.nbytes for p in critic.parameters() if p.nbytes >= 1 << 16)
        lora = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
        value_model = get_peft_model(critic, LoraConfig(task_type="SEQ_CLS", **lora))
        given = {"model": str(tmp_path / "base"), "peft_config": LoraConfig(**lora), "value_model": value_model}
        made = tiny.trained(tmp_path, given=given, max_steps=2)
        logs.append([{k: v for k, v in row.items() if not k.startswith("time")} for row in tiny.updates(made)])
        held.append(held_bytes(made))
        made.close()
    assert logs[0] == logs[1] and logs[0]
    assert held[1] - held[0] == base > held[0] / 3
