"""QLoRA: LoRA over weights that bitsandbytes has quantized, in every trainer, with its files."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_groups
import torch
from huggingface_hub import HfApi, RepoUrl
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_realloc import Cluster, GRPOTrainer, RLOOTrainer
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.training.weight_export import source_digests
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.presets import flatten


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
INT8 = BitsAndBytesConfig(load_in_8bit=True)
TOKENS = torch.arange(2, 26).view(2, 12)


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("qlora") / "policy"
    tiny.policy(hidden_size=64, initializer_range=0.1).save_pretrained(at)
    return at


def quantized(folder: Path, settings: BitsAndBytesConfig | None = NF4) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.float32)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model.train()(TOKENS).logits
    return result


@pytest.mark.parametrize("settings", [NF4, INT8], ids=["nf4", "int8"])
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer, "PPO"])
def test_the_adapter_trains_over_weights_that_stay_and_is_saved_as_peft_saves_it(
    folder: Path, tmp_path: Path, kind: Any, settings: BitsAndBytesConfig
) -> None:
    given = {"model": quantized(folder, settings), "peft_config": lora()}
    if kind == "PPO":
        made = tiny.trained(tmp_path, given=given)
        assert abs(tiny.updates(made)[0]["objective/kl"]) < 1e-5, "the reference is the policy without its adapter"
        policy = made.policy_model
    else:
        made = tiny_groups.trained(tmp_path, kind, given=given, beta=0.1)
        assert made.run is not None, "the plan's engines train it"
        policy = made.model
    made.save_model(str(tmp_path / "saved"))
    again = PeftModel.from_pretrained(quantized(folder, settings), tmp_path / "saved")
    torch.testing.assert_close(logits(again), logits(policy), atol=1e-5, rtol=1e-5)
    of_new = source_digests(again)
    assert all(of_new[name] == digests for name, digests in source_digests(policy).items()), "the base has changed"
    with again.disable_adapter():
        assert not torch.allclose(logits(again), logits(policy), atol=1e-3), "the adapter has not learned"
    assert not list((tmp_path / "saved").glob("model*.safetensors"))


@pytest.mark.parametrize(("kind", "settings"), [("GRPO", None), ("GRPO", NF4), ("PPO", NF4)])
def test_what_is_saved_and_pushed_to_the_hub_is_what_peft_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: BitsAndBytesConfig | None
) -> None:
    """The Hub's answers are made up; each uploaded folder is kept as it was at its upload."""
    uploads: dict[str, Path] = {}

    def upload_folder(api: HfApi, *, folder_path: str, commit_message: str, **rest: Any) -> Future[str]:
        ignored = shutil.ignore_patterns(*rest.get("ignore_patterns") or ())
        uploads[commit_message] = tmp_path / "uploads" / str(len(uploads))
        shutil.copytree(folder_path, uploads[commit_message], ignore=ignored)
        (done := Future[str]()).set_result("")
        return done

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(HfApi, "create_repo", lambda *a, **rest: RepoUrl("https://huggingface.co/somebody/policy"))
    model = quantized(folder, settings)
    model.name_or_path = model.config._name_or_path = "somebody/base"
    hub = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "save_strategy": "steps", "save_steps": 1}
    of_kind = tiny if kind == "PPO" else tiny_groups
    made: Any = of_kind.trained(
        tmp_path / "run", given={"model": model, "peft_config": lora()}, max_steps=1, hub_token="made up", **hub
    )
    made.save_model(str(tmp_path / "saved"))
    assert list(uploads) == ["Training in progress, step 1", "Training in progress, step 1, checkpoint", "Model save"]
    policy = made.policy_model if kind == "PPO" else made.model
    policy.save_pretrained(tmp_path / "by PEFT")
    config = json.loads((tmp_path / "by PEFT" / "adapter_config.json").read_text())
    for at in (*uploads.values(), tmp_path / "saved", tmp_path / "run" / "checkpoint-1"):
        assert json.loads((at / "adapter_config.json").read_text()) == config
        assert "base_model: somebody/base" in (at / "README.md").read_text()
        assert [path.name for path in at.glob("*.safetensors")] == ["adapter_model.safetensors"]
        assert not [path for path in at.glob("*.bin") if path.name != "training_args.bin"]
        again = PeftModel.from_pretrained(quantized(folder, settings), at)
        torch.testing.assert_close(logits(again), logits(policy), atol=1e-5, rtol=1e-5)
    at = uploads["Model save"]
    folders = {str(path.parent.relative_to(at)) for path in at.rglob("*.safetensors")}
    assert folders == ({".", "value_model"} if kind == "PPO" else {"."})


def in_small_micro_batches() -> dict[str, Any]:
    graph = grpo_graph(reference=False, reward_models=False)
    plan = flatten(Cluster(1, 1), generation_engine="transformers", graph=graph).to_dict()
    plan["calls"]["actor.train"]["micro_batch_tokens"] = 24
    return {"plan": plan}


@pytest.mark.parametrize("resumed_with", [{}, in_small_micro_batches()], ids=["same plan", "another plan"])
def test_a_resumed_run_is_a_straight_one_also_under_another_plan(
    folder: Path, tmp_path: Path, resumed_with: dict[str, Any]
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}

    def run(at: Path, **changes: Any) -> Any:
        tiny.forget_accelerate()
        given = {"model": str(folder), "quantization_config": NF4, "peft_config": lora()}
        return tiny_groups.trainer(at, given=given, max_steps=4, **saves, **changes)

    straight = run(tmp_path / "straight")
    straight.train()
    checkpoint = tmp_path / "straight" / "checkpoint-2"
    again = run(tmp_path / "again", **resumed_with)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == 4
    torch.testing.assert_close(logits(again.model), logits(straight.model), atol=1e-5, rtol=1e-5)
    on_base = PeftModel.from_pretrained(quantized(folder), tmp_path / "again" / "checkpoint-4")
    torch.testing.assert_close(logits(on_base), logits(again.model), atol=1e-5, rtol=1e-5)


def test_quantization_in_two_places_is_refused(folder: Path, tmp_path: Path) -> None:
    given = {"model": str(folder), "quantization_config": NF4, "peft_config": lora()}
    with pytest.raises(ValueError, match="is both an argument of the trainer and in model_init_kwargs"):
        tiny_groups.trainer(tmp_path, given=given, model_init_kwargs={"quantization_config": NF4})


@pytest.mark.parametrize("kind", ["pissa", "olora"])
@pytest.mark.parametrize("of", ["GRPO", "PPO"])
def test_the_reference_of_an_adapter_that_changes_the_base_is_the_model_before_it(
    tmp_path: Path, kind: str, of: str
) -> None:
    given = {"model": tiny.policy(initializer_range=0.1), "peft_config": lora(init_lora_weights=kind)}
    if of == "GRPO":
        made = tiny_groups.trained(tmp_path, given=given, beta=0.1, max_steps=1)
        assert made.state.log_history[0]["kl"] < 1e-6
    else:
        made = tiny.trained(tmp_path, given=given, max_steps=1, learning_rate=0.0)
        assert abs(tiny.updates(made)[0]["objective/kl"]) < 1e-5


@pytest.mark.vllm
@pytest.mark.multiprocess
@pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
@pytest.mark.usefixtures("forked_engines")
def test_the_engine_has_the_trainers_probabilities_in_every_update(folder: Path, tmp_path: Path) -> None:
    """vLLM gets whole weights once, and of later updates only the layers with adapters."""
    given = {"model": str(folder), "quantization_config": NF4, "peft_config": lora()}
    made = tiny_groups.trainer(tmp_path, given=given, use_vllm=True, max_steps=3, bf16=False)
    made.train()
    engine = made.placement.generators["actor.generate"]
    sizes = {name: p.numel() * 4 for name, p in tiny.policy(hidden_size=64).named_parameters()}
    fused = ("q_proj.weight", "k_proj.weight", "v_proj.weight")  # vLLM's layer of three
    assert engine.sent_bytes == sum(size for name, size in sizes.items() if name.endswith(fused))
    made.close()
    rows = [row for row in made.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
