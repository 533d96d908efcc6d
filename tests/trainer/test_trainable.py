"""Which runs of TRL's trainers the training engines can train, and the sentence for each that they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import BartConfig, GPT2Config, LlamaConfig, LlavaConfig, PhimoeConfig, Qwen3Config, Qwen3MoeConfig
from trl import GRPOConfig, RLOOConfig

from trl_realloc import ReallocationPlugin
from trl_realloc.engines.model_configs import ModelError
from trl_realloc.trainer.checks.trainable import router_loss_coefficient, why_not_trained
from trl_realloc.trainer.grpo_config import GRPOConfig as ReallocGRPOConfig
from trl_realloc.trainer.grpo_config import RLOOConfig as ReallocRLOOConfig
from trl_realloc.trainer.policy.accelerate_fallback import checkpoint_of_trainer, config_or_model, follow_trl


def arguments(kind: Any = GRPOConfig, **changes: Any) -> Any:
    return kind(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **changes)


LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
DROPPING = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
EXPERTS = Qwen3MoeConfig(num_hidden_layers=1)


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
@pytest.mark.parametrize("peft_config", [None, LORA, IA3Config(task_type="CAUSAL_LM")])
def test_dense_text_models_are_trained_by_the_engines(kind: Any, peft_config: Any) -> None:
    assert why_not_trained(arguments(kind), tiny.policy(), peft_config, {}) is None
    assert why_not_trained(arguments(kind), tiny.config(), peft_config, {}) is None
    assert why_not_trained(arguments(kind), Qwen3Config(), peft_config, {}) is None


@pytest.mark.parametrize(
    ("settings", "model", "peft_config", "message"),
    [
        ({}, LlavaConfig(), None, "llava reads images"),
        ({}, BartConfig(dropout=0.0), None, "encoder-decoder"),
        ({}, PhimoeConfig(num_hidden_layers=1), None, "phimoe has an auxiliary loss, router_aux_loss_coef 0.001"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, EXPERTS, None, "use_reentrant"),
        ({"use_liger_kernel": True}, tiny.config(), None, "Liger"),
        ({"cast_lm_head_to_fp32": True}, tiny.config(), None, "cast_lm_head_to_fp32"),
        ({"sync_ref_model": True}, tiny.config(), None, "sync_ref_model"),
        ({"neftune_noise_alpha": 5.0}, tiny.config(), None, "neftune_noise_alpha 5 adds noise"),
        ({}, tiny.config(attention_dropout=0.25), None, "dropout 0.25"),
        ({}, GPT2Config(), None, "dropout 0.1"),
        ({}, tiny.config(), DROPPING, "lora_dropout is 0.1"),
        ({}, tiny.config(quantization_config={"load_in_4bit": True}), None, "quantized"),
        ({}, tiny.config(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "PROMPT_TUNING"),
    ],
)
def test_what_accelerate_must_train_is_named(settings: Any, model: Any, peft_config: Any, message: str) -> None:
    args = SimpleNamespace(**{"router_aux_loss_coef": 0.001, **settings})
    reason = why_not_trained(args, model, peft_config, {})
    assert reason is not None and message in reason
    assert reason.startswith("Accelerate trains, because ") and reason.endswith(".") and reason.count(".  ") == 0


@pytest.mark.parametrize("coefficient", [None, 0.0, 0.001])
def test_a_mixture_of_experts_is_trained_by_the_engines(coefficient: float | None) -> None:
    assert why_not_trained(SimpleNamespace(router_aux_loss_coef=coefficient), EXPERTS, None, {}) is None


@pytest.mark.parametrize("coefficient", [None, 0.001])
def test_the_coefficient_of_the_config_or_of_the_model_makes_an_auxiliary_loss(coefficient: float | None) -> None:
    """Newer releases of TRL take the model's own."""
    args: Any = SimpleNamespace(router_aux_loss_coef=coefficient)
    assert router_loss_coefficient(args, EXPERTS) == 0.001
    assert router_loss_coefficient(args, tiny.config()) == 0.0


@pytest.mark.parametrize("model", [tiny.config(attention_dropout=0.25), GPT2Config()])
def test_dropout_that_trl_turns_off_is_no_reason(model: Any) -> None:
    assert why_not_trained(SimpleNamespace(disable_dropout=True), model, DROPPING, {}) is None


def test_loaded_models_are_looked_at_themselves() -> None:
    args = SimpleNamespace()
    dropping: Any = tiny.policy(attention_dropout=0.25)
    assert "dropout 0.25" in str(why_not_trained(args, dropping, None, {}))
    adapted = get_peft_model(tiny.policy(), DROPPING)
    assert "lora_dropout is 0.1" in str(why_not_trained(args, adapted, None, {}))
    assert why_not_trained(args, get_peft_model(tiny.policy(), LORA), None, {}) is None

    class Own(type(tiny.policy())):  # type: ignore[misc]
        pass

    assert "not a class of Transformers" in str(why_not_trained(args, Own(tiny.config()), None, {}))
    quantized: Any = tiny.policy()
    quantized.is_quantized = True
    assert "quantized" in str(why_not_trained(args, quantized, None, {}))
    layer: Any = tiny.policy()
    layer.model.layers[0].extra = nn.Dropout(0.5)
    assert "dropout 0.5" in str(why_not_trained(args, layer, None, {}))
    adapted = get_peft_model(tiny.policy(), LORA)
    for compiled in (torch.compile(adapted), get_peft_model(torch.compile(tiny.policy()), LORA)):
        assert "is compiled" in str(why_not_trained(args, compiled, None, {}))
    spread: Any = tiny.policy()
    spread.hf_device_map = {"model.layers.0": torch.device("cpu"), "model.layers.1": "disk"}
    assert "several devices" in str(why_not_trained(args, spread, None, {}))


def test_an_fsdp_launch_is_accelerates() -> None:
    args = SimpleNamespace()
    assert "FSDP" in str(why_not_trained(args, tiny.config(), None, {"ACCELERATE_USE_FSDP": "true"}))
    assert "FSDP" in str(why_not_trained(SimpleNamespace(fsdp=["full_shard"]), tiny.config(), None, {}))


def test_a_model_with_code_of_its_own_is_trained_by_accelerate() -> None:
    class OwnConfig(LlamaConfig):
        """As transformers makes it of a repository's code."""

    config = OwnConfig(auto_map={"AutoConfig": "configuration.OwnConfig"})
    assert "custom code" in str(why_not_trained(SimpleNamespace(), config, None, {}))


def test_code_of_a_repository_runs_only_where_the_user_says_so(tmp_path: Path) -> None:
    tiny.config().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    with pytest.raises(ModelError, match="has custom code in its repository.* Accelerate then trains the model"):
        config_or_model(arguments(trust_remote_code=False), str(tmp_path))
    found = config_or_model(arguments(trust_remote_code=True), str(tmp_path))
    assert "custom code" in str(why_not_trained(SimpleNamespace(), found, None, {}))


@pytest.mark.parametrize(
    ("kind", "changes", "unused"),
    [
        (ReallocGRPOConfig, {"vllm_mode": "server"}, ""),
        (ReallocGRPOConfig, {"plan": "separate", "async_save": True}, "async_save, plan have"),
        (ReallocRLOOConfig, {"vllm_importance_sampling_correction": True}, "vllm_importance_sampling_correction has"),
        (ReallocGRPOConfig, {"vllm_importance_sampling_correction": False, "use_vllm": True}, ""),
    ],
)
def test_where_accelerate_trains_settings_are_trls_and_others_are_named(
    kind: Any, changes: dict[str, Any], unused: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(kind, **changes)
    follow_trl(args, ReallocationPlugin().under(args))
    assert caplog.messages == ([f"{unused} no effect where Accelerate trains."] if unused else [])
    of_trl = arguments(GRPOConfig)
    assert args.use_vllm is changes.get("use_vllm", of_trl.use_vllm)
    assert args.vllm_gpu_memory_utilization == of_trl.vllm_gpu_memory_utilization
    assert args.vllm_enable_sleep_mode is of_trl.vllm_enable_sleep_mode


def test_a_plan_of_the_environment_has_no_effect_either(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_REALLOC_PLAN", "separate")
    args = arguments(ReallocGRPOConfig)
    follow_trl(args, ReallocationPlugin().under(args))
    assert caplog.messages == ["plan has no effect where Accelerate trains."]


@pytest.mark.parametrize(
    ("setting", "found"),
    [("auto", "checkpoint-12"), (True, True), ("true", True), (None, None), ("false", None), ("runs/a", "runs/a")],
)
def test_trainer_gets_the_checkpoint_that_is_asked_for(tmp_path: Path, setting: Any, found: Any) -> None:
    assert checkpoint_of_trainer("auto", str(tmp_path)) is None
    for step in (4, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    expected = str(tmp_path / found) if found == "checkpoint-12" else found
    assert checkpoint_of_trainer(setting, str(tmp_path)) == expected
