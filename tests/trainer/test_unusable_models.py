"""Models that no plan or engine can use: a table of the sentences that refuse them before any weight is read.

Those that are given by path and damaged, or of the wrong role, are in `test_bad_arguments`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoftQConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from trl_realloc.common.errors import PlanError
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.trainer.checks.model_checks import check_adapter_kind, why_not_this_model
from trl_realloc.trainer.checks.plan_checks import check_unsplit


def quantized(argument: str) -> dict[str, Any]:
    """A model as bitsandbytes leaves it, with an adapter over it or without."""
    model = tiny.policy() if argument == "model" else tiny.classifier()
    model.is_quantized = True
    return {argument: model}


def bits(model: Any, **settings: Any) -> Any:
    """A model with the config of one that bitsandbytes has quantized."""
    model.config.quantization_config = BitsAndBytesConfig(**settings)
    return model


def qlora(load_in_4bit: bool = False, load_in_8bit: bool = False, **settings: Any) -> dict[str, Any]:
    model = bits(tiny.policy(), load_in_4bit=load_in_4bit, load_in_8bit=load_in_8bit)
    return {"model": model, "peft_config": LoraConfig(task_type="CAUSAL_LM", **settings)}


def qlora_path(folder: Path) -> dict[str, Any]:
    """A policy by path."""
    tiny.policy().save_pretrained(folder)
    return {
        **qlora(load_in_4bit=True),
        "model": str(folder),
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True),
    }


def planned(**settings: object) -> dict[str, Any]:
    plan = flatten(Cluster(1, 1), generation_engine="transformers").to_dict()
    plan["calls"]["actor.train"] |= settings
    return plan


def quantized_path(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    tiny.policy().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return {"model": str(folder)}


def adapter_path(folder: Path, argument: str) -> dict[str, Any]:
    get_peft_model(tiny.policy(), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(folder)
    return {argument: str(folder)}


def spread() -> dict[str, Any]:
    model = tiny.policy()
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1, "lm_head": "cpu"}
    return {"model": model}


def split() -> dict[str, Any]:
    model = tiny.policy()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    finally:
        dist.destroy_process_group()
    return {"model": model}


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "a quantized policy without an adapter": (
        lambda at: {"model": bits(tiny.policy(), load_in_4bit=True)},
        "model is quantized, and quantized weights are not trained; give a peft_config, or load it without",
    ),
    "a quantized policy with IA3": (
        lambda at: {"model": bits(tiny.policy(), load_in_4bit=True), "peft_config": IA3Config(task_type="CAUSAL_LM")},
        "model is quantized, and the adapter 'default' is of the kind IA3; use LoRA",
    ),
    "a quantized policy with PiSSA": (
        lambda at: qlora(load_in_4bit=True, init_lora_weights="pissa"),
        "model is quantized, and init_lora_weights 'pissa' computes the adapter from the weights before quantization",
    ),
    "a quantized policy with LoRA on parameters": (
        lambda at: qlora(load_in_4bit=True, target_parameters=["q_proj.weight"]),
        "model is quantized, and the adapter 'default' has target_parameters",
    ),
    "a policy of 8 bits with DoRA": (
        lambda at: qlora(load_in_8bit=True, use_dora=True),
        "model is quantized, and the adapter 'default' has use_dora, .*; load in 4 bits",
    ),
    "LoftQ without CUDA": (
        lambda at: {"peft_config": LoraConfig(init_lora_weights="loftq", loftq_config=LoftQConfig())},
        "peft_config: PEFT computes init_lora_weights 'loftq' by CUDA, which is not available",
    ),
    "QLoRA in parts": (
        lambda at: {**qlora(load_in_4bit=True), "plan": planned(engine="megatron")},
        "actor.train has engine megatron, and the policy's quantized weights can be neither split nor sharded",
    ),
    "QLoRA by path under ZeRO": (
        lambda at: {**qlora_path(at), "plan": planned(zero_stage=3)},
        "actor.train has zero_stage: 3, and the policy's quantized weights can be neither split nor sharded",
    ),
    "a setting for loading a loaded policy": (
        lambda at: {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "peft_config": LoraConfig()},
        "quantization_config is for a policy passed by name, and model is loaded already",
    ),
    "a quantized critic": (lambda at: quantized("value_model"), "value_model is quantized"),
    "a quantized reference": (lambda at: {"ref_model": quantized("model")["model"]}, "ref_model is quantized"),
    "a quantized reward": (lambda at: {"reward_model": quantized("value_model")["value_model"]}, "reward_model is"),
    "GPTQ by path": (lambda at: quantized_path(at, {"quant_method": "gptq", "bits": 4}), "model is quantized"),
    "AWQ by path": (lambda at: quantized_path(at, {"quant_method": "awq", "bits": 4}), "model is quantized"),
    "FP8 by path": (lambda at: quantized_path(at, {"quant_method": "fp8"}), "model is quantized"),
    "MXFP4 by path": (lambda at: quantized_path(at, {"quant_method": "mxfp4"}), "model is quantized"),
    "GGUF": (lambda at: {"model": "llama.gguf"}, r"has packed weights \(GGUF\); give the original"),
    "an adapter's path": (lambda at: adapter_path(at, "model"), r"PeftModel.from_pretrained\(base, .*is_trainable"),
    "a reference adapter's path": (
        lambda at: adapter_path(at, "ref_model"),
        r"ref_model: .* has an adapter .*PeftModel.from_pretrained\(base, '[^']*'\)\.merge_and_unload\(\)\.$",
    ),
    "a reward adapter's path": (
        lambda at: adapter_path(at, "reward_model"),
        r"reward_model: .* has an adapter .*PeftModel.from_pretrained\(base, '[^']*'\)\.merge_and_unload\(\)\.$",
    ),
    "a device map": (lambda at: spread(), "model is spread over 0, 1, cpu .* load it without device_map"),
    "a tp_plan": (lambda at: split(), "model is split already .* the execution plan splits it"),
    "torch.compile": (lambda at: {"model": torch.compile(tiny.policy())}, r"model is compiled \(torch.compile\)"),
    "prompt tuning": (
        lambda at: {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)},
        "peft_config has an adapter of the kind PROMPT_TUNING, which adds tokens .*; use LoRA",
    ),
    "a model with prefix tuning": (
        lambda at: {
            "model": get_peft_model(tiny.policy(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
        },
        "model has an adapter of the kind PREFIX_TUNING",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_no_engine_can_use_is_refused_in_a_sentence(tmp_path: Path, case: str) -> None:
    make, told = CASES[case]
    given = make(tmp_path / "model")
    plan = {"plan": plan} if (plan := given.pop("plan", None)) else {}
    with pytest.raises(ValueError, match=told):
        tiny.trainer(tmp_path, given=given, **plan)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        *(({"dp": 2, "zero_stage": stage}, f"zero_stage: {stage}") for stage in (1, 2, 3)),
        ({"engine": "megatron", "dp": 2}, "engine megatron"),
        ({"engine": "megatron", "dp": 1, "tp": 2}, "tp: 2"),
        ({"engine": "megatron", "dp": 1, "pp": 2}, "pp: 2"),
        ({"dp": 2}, None),
        ({"engine": "vllm", "dp": 1, "tp": 2}, None),
    ],
)
def test_quantized_weights_are_neither_split_nor_sharded(settings: dict[str, Any], told: str | None) -> None:
    plan = flatten(Cluster(1, 2), generation_engine="vllm").to_dict()
    call = "actor.generate" if settings.get("engine") == "vllm" else "actor.train"
    plan["calls"][call] = {**plan["calls"][call], **settings}
    assignment = ExecutionPlan.from_dict(plan)[call]
    expected = pytest.raises(
        PlanError, match=f"^{call} has {told}, .* use engine zero with zero_stage: 0, as plan: flat"
    )
    with expected if told is not None else contextlib.nullcontext():
        check_unsplit(call, assignment)


def test_adapters_that_can_be_merged_are_taken_and_others_are_not() -> None:
    for kind in (LoraConfig(use_dora=True), AdaLoraConfig(total_step=9), IA3Config()):
        check_adapter_kind(kind, "peft_config")
    with pytest.raises(ValueError, match="cannot be merged into the weights"):
        check_adapter_kind(LoraConfig(alora_invocation_tokens=[1]), "peft_config")


class Own(LlamaForCausalLM):
    """A user's subclass, whose forward vLLM does not know."""


@pytest.mark.skipif(not is_vllm_available(), reason="without vLLM there is no choice")
def test_a_class_of_the_users_own_does_not_generate_in_vllm(tmp_path: Path) -> None:
    given = {"model": Own(tiny.config())}
    with pytest.raises(ValueError, match=r"own implementation of 'llama', not by the class Own .*: transformers"):
        tiny.trainer(tmp_path, given=given, generation_engine="vllm")
    assert why_not_this_model(tiny.policy()) is None
    assert why_not_this_model(get_peft_model(tiny.policy(), LoraConfig(task_type="CAUSAL_LM"))) is None
