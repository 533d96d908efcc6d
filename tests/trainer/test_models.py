"""The four models: by path or loaded, with and without adapters and a reference."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BloomConfig,
    DebertaV2Config,
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    RobertaConfig,
    SeedOssConfig,
    Starcoder2Config,
)

from trl_realloc.engines import model_configs
from trl_realloc.engines.dropout import without_dropout
from trl_realloc.engines.model_configs import read_config, table_positions, trained_config
from trl_realloc.engines.models import frozen_copy
from trl_realloc.engines.training.replica_sync import base_names, copy_tensors, model_tensors


SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=32)


LIMIT = 12  # positions
SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "num_labels": 1}
# the tokens that a model of 12 positions can read
READABLE = [
    (GPT2Config(**SMALL, **SPECIAL, n_positions=LIMIT), LIMIT),
    (OPTConfig(**SMALL, **SPECIAL, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=LIMIT), LIMIT),
    (GPTJConfig(**SMALL, **SPECIAL, n_positions=LIMIT, rotary_dim=4), LIMIT),
    (BertConfig(**SMALL, **SPECIAL, intermediate_size=16, max_position_embeddings=LIMIT), LIMIT),
    (RobertaConfig(**SMALL, **SPECIAL, intermediate_size=16, max_position_embeddings=LIMIT), LIMIT - 2),
    (DebertaV2Config(**SMALL, **SPECIAL, intermediate_size=16, max_position_embeddings=LIMIT), LIMIT),
    (
        DebertaV2Config(
            **SMALL,
            **SPECIAL,
            intermediate_size=16,
            max_position_embeddings=LIMIT,
            relative_attention=True,
            position_biased_input=False,
        ),
        None,
    ),
    (LlamaConfig(**SMALL, **SPECIAL, intermediate_size=16, max_position_embeddings=LIMIT), None),
    (FalconConfig(**SMALL, **SPECIAL, alibi=True, max_position_embeddings=LIMIT), None),
    (BloomConfig(**SMALL, **SPECIAL), None),
]


@pytest.mark.parametrize(("config", "readable"), READABLE, ids=[config.model_type for config, _ in READABLE])
def test_a_model_with_a_table_of_positions_reads_as_many_tokens_and_no_more(config: Any, readable: int | None) -> None:
    assert table_positions(config) == readable
    model = AutoModelForSequenceClassification.from_config(config).eval()

    def read(tokens: int) -> None:
        ids = torch.full((1, tokens), 5)
        model(input_ids=ids, attention_mask=torch.ones_like(ids))

    read(readable or 2 * LIMIT)
    if readable is not None:
        with pytest.raises((IndexError, RuntimeError)):
            read(readable + 1)


def test_models_by_path_give_the_run_of_the_loaded_ones(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "policy")
    tiny.classifier().save_pretrained(tmp_path / "critic")
    runs = []
    for given in ({}, {"model": str(tmp_path / "policy"), "value_model": str(tmp_path / "critic")}):
        made = tiny.trained(tmp_path / "out", given=given)
        runs.append(tiny.updates(made))
    assert runs[0] == runs[1]


def test_a_given_reference_is_the_one_the_kl_is_measured_against(tmp_path: Path) -> None:
    made = tiny.trained(tmp_path, given={"ref_model": tiny.policy(seed=9)}, learning_rate=0.0, max_steps=1)
    assert abs(tiny.updates(made)[0]["objective/kl"]) > 1e-3
    own = tiny.trained(tmp_path, learning_rate=0.0, max_steps=1)
    assert abs(tiny.updates(own)[0]["objective/kl"]) < 1e-4


def test_the_reference_of_a_trained_adapter_is_the_policy_without_it() -> None:
    """Where the reference is in a layout of its own it is a copy: the adapter must not be in it."""
    model = tiny.policy()
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    assert not torch.allclose(adapted(ids).logits, expected, atol=1e-3)
    copied = frozen_copy(adapted)
    assert torch.allclose(copied(ids).logits, expected, atol=1e-6)
    assert not any(p.requires_grad for p in copied.parameters()) and "lora" not in str(copied)
    assert any(p.requires_grad for p in adapted.parameters()), "the policy trains on"


def test_with_lora_only_the_adapter_trains_and_the_base_is_the_reference(tmp_path: Path) -> None:
    base = tiny.policy()
    made = tiny.trained(tmp_path, given={"model": tiny.policy(), "peft_config": LORA}, max_steps=3)
    first, *_, last = tiny.updates(made)
    assert abs(first["objective/kl"]) < 1e-4 < abs(last["objective/kl"])
    after = made.policy_model.unload().state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in base.state_dict().items())
    assert made.placement.engine("reference.forward") is None, "no second copy of the model"


def test_an_adapter_can_be_loaded_on_its_base(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "base")
    made = tiny.trained(tmp_path / "out", given={"model": str(tmp_path / "base"), "peft_config": LORA})
    made.save_model()
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(saved(ids).logits, made.policy_model.eval()(ids).logits, atol=1e-5)


def test_of_two_adapters_one_trains_and_one_is_the_reference(tmp_path: Path) -> None:
    model = get_peft_model(tiny.policy(), LORA, adapter_name="learns")
    model.add_adapter("ref", LORA)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.ref" in name:
                parameter.normal_()
    made = tiny.trainer(
        tmp_path, given={"model": model}, model_adapter_name="learns", ref_adapter_name="ref", max_steps=1
    )
    before = {n: p.clone() for n, p in model.named_parameters()}
    made.train()
    assert abs(tiny.updates(made)[0]["objective/kl"]) > 1e-3
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".learns." in name for name in changed)


@pytest.mark.parametrize(
    "config",
    [
        SeedOssConfig(**SMALL, intermediate_size=24, num_key_value_heads=1, head_dim=8),
        Starcoder2Config(**SMALL, intermediate_size=24, num_key_value_heads=1, residual_dropout=0.1),
        FalconConfig(**SMALL, hidden_dropout=0.1, attention_dropout=0.1),
        BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.1, attention_dropout=0.1),
        GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2),
    ],
    ids=lambda config: config.model_type,
)
def test_dropout_is_off_whatever_a_family_calls_it(config: Any) -> None:
    model, ids = AutoModelForCausalLM.from_config(config).train(), torch.arange(10)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits), "it has dropout"
    without_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_dropout_is_off_in_all_models(tmp_path: Path) -> None:
    made = tiny.trained(tmp_path, given={"model": tiny.policy(attention_dropout=0.5)}, learning_rate=0.0, max_steps=1)
    assert tiny.updates(made)[0]["val/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_adapters_and_heads_that_a_checkpoint_lacks_are_drawn_from_the_runs_seed(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "policy")
    drawn = []
    for before, seed in ((1, 42), (2, 42), (2, 43)):
        given = {"model": tiny.policy(), "peft_config": LORA, "value_model": str(tmp_path / "policy")}
        torch.manual_seed(before)
        made = tiny.trainer(tmp_path, given=given, seed=seed)
        torch.rand(before)
        made.placement.start()
        adapter = made.policy_model.state_dict()[
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
        ]
        drawn.append((adapter, made.placement.engine("critic.train").head.model.score.weight.detach()))
    (adapter, head), (same_adapter, same_head), (other_adapter, other_head) = drawn
    assert torch.equal(adapter, same_adapter) and torch.equal(head, same_head)
    assert not torch.equal(adapter, other_adapter) and not torch.equal(head, other_head)


def test_a_copy_of_an_adapted_policy_takes_its_base() -> None:
    policy, reference = tiny.policy(seed=0), tiny.policy(seed=1)
    expected = {name: t.clone() for name, t in model_tensors(policy).items()}
    adapted = get_peft_model(policy, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    assert expected.keys() <= base_names(adapted).keys()
    copy_tensors(adapted, reference, adapted=True)
    assert all(torch.equal(t, expected[name]) for name, t in model_tensors(reference).items())


@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_in_bfloat16_the_ratio_of_the_first_pass_is_1_to_rounding(tmp_path: Path, loaded: torch.dtype) -> None:
    """The generation engine's products round otherwise than the training's; docs/mismatch.md says by how much."""
    size = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "initializer_range": 0.1}
    given = {"model": tiny.policy(**size).to(loaded), "value_model": tiny.classifier().to(loaded)}
    of_run = {"learning_rate": 0.0, "max_steps": 1, "num_ppo_epochs": 1, "response_length": 32}
    many = 64  # a ratio is 2 % off, and the mean of a thousand is 0.05 %
    made = tiny.trained(tmp_path, given=given, bf16=True, per_device_train_batch_size=many, **of_run)
    (row,) = tiny.updates(made)
    assert row["val/ratio"] == pytest.approx(1.0, abs=2e-3)
    assert row["policy/approxkl_avg"] < 1e-3 and abs(row["objective/kl"]) < 0.1


def test_after_the_start_only_the_engines_have_the_models_that_were_given(tmp_path: Path) -> None:
    """A rank of many that has no part of a model would otherwise keep the whole of it."""
    given = {"model": tiny.policy(), "ref_model": tiny.policy(seed=2), "value_model": tiny.classifier()}
    parameters = {name: weakref.ref(model.get_parameter("model.norm.weight")) for name, model in given.items()}
    made = tiny.trainer(tmp_path, given=given)
    del given
    made.train()
    made.close()
    made.placement.engines.clear()
    made.placement.trainers.clear()
    made.placement.generators.clear()
    made.model.hold(torch.nn.Module(), torch.nn.Module())
    made.run.placed.setup = replace(made.setup, models_before_start={})
    gc.collect()
    assert [name for name, parameter in parameters.items() if parameter() is not None] == []


def test_the_config_of_a_policy_by_path_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.policy().save_pretrained(tmp_path / "policy")
    names: list[str] = []

    class Counting(model_configs.AutoConfig):
        @classmethod
        def from_pretrained(cls, name: str, **how: Any) -> Any:
            names.append(name)
            return super().from_pretrained(name, **how)

    monkeypatch.setattr(model_configs, "AutoConfig", Counting)
    made = tiny.trainer(tmp_path, given={"model": str(tmp_path / "policy")})
    assert names == [str(tmp_path / "policy")]
    assert made.model.policy.dtype is torch.float32


def test_a_config_has_the_dtype_of_the_parameters_in_the_run(tmp_path: Path) -> None:
    """By it models are measured, and vLLM is started."""
    tiny.policy().bfloat16().save_pretrained(tmp_path)
    assert trained_config(read_config(str(tmp_path), "model"), str(tmp_path)).dtype is torch.float32
    assert read_config(str(tmp_path), "ref_model").dtype is torch.bfloat16
    loaded = tiny.policy()
    before = loaded.config.dtype
    assert trained_config(read_config(loaded.bfloat16(), "model"), loaded).dtype is torch.bfloat16
    assert loaded.config.dtype is before  # the user's is left as it was
