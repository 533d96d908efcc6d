"""A run of one process on a GPU begins under the plan that `trl-realloc plan` of its recipe says for that card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file

from trl_realloc import Cluster, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_realloc.cli.recipe_planning import choose_for_recipe
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.recipe.recipe import read_recipe
from trl_realloc.profiling import job, profile_cache
from trl_realloc.runtime.launch.hosts import Process
from trl_realloc.trainer import ppo_trainer
from trl_realloc.trainer.policy import policy_setup
from trl_realloc.trainer.run import run_setup
from trl_realloc.trainer.run.plan_request import PlanRequest


WORDS = 4  # of a prompt
LORA = {"lora_r": 16, "lora_alpha": 32}
GROUPS = {"num_generations": 8, "per_device_train_batch_size": 8, "max_completion_length": 512}
# layers, hidden size, intermediate size, heads, key/value heads
SIZES = {1: (16, 2048, 8192, 32, 8), 3: (36, 2048, 11008, 16, 2), 8: (32, 4096, 14336, 32, 8)}

PPO = {"per_device_train_batch_size": 32, "response_length": 512, "num_ppo_epochs": 1}
# recipes: the policy's billions of parameters, and the settings
RECIPES: dict[str, tuple[int, dict[str, Any]]] = {
    "ppo": (1, PPO),
    "ppo, recomputed": (1, {**PPO, "per_device_train_batch_size": 64, "gradient_checkpointing": True}),
    "grpo": (3, {**GROUPS, "gradient_accumulation_steps": 8, "beta": 0.0}),
    "grpo, an engine that stays awake": (1, {**GROUPS, "beta": 0.0, "vllm_enable_sleep_mode": False}),
    "grpo, a given share": (3, {**GROUPS, "beta": 0.0, "vllm_gpu_memory_utilization": 0.25}),
    "rloo with adapters": (8, {**GROUPS, "gradient_accumulation_steps": 4, "beta": 0.05, "use_peft": True, **LORA}),
}


class Chosen(Exception):
    pass


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the process plan as on a card by its name: a GPU of such a memory that was never measured."""

    def announce(_: Any, plan: ExecutionPlan, rank: int) -> None:
        raise Chosen(plan)

    def use(card: str) -> None:
        monkeypatch.setattr(job, "memory_bytes", lambda _: int(DEVICES[card].memory))
        monkeypatch.setattr(profile_cache, "hardware", lambda _: f"NVIDIA {card.upper()}")
        monkeypatch.setattr(profile_cache, "is_accelerator", lambda _: True)
        monkeypatch.setattr(profile_cache, "shared_cores", lambda *_: None)
        monkeypatch.setattr(run_setup, "announce", announce)
        for module in (ppo_trainer, policy_setup):
            monkeypatch.setattr(module, "read_plan_request", request)

    def request(*given: Any) -> PlanRequest:
        config = None
        if isinstance(given[3], str):
            config = policy_setup.read_config(given[3], "model")
        return PlanRequest(None, Cluster(1, 1), "vllm", [Process("a", "a", 0, 0, 1)], config)

    return use


def checkpoint(folder: Path, billions: int) -> str:
    """A folder with the config of a model of about so many parameters, and a tokenizer."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    shape = dict(zip(names, SIZES[billions], strict=True))
    config = tiny.config(**shape, head_dim=128, vocab_size=128_256, max_position_embeddings=4096, num_labels=1)
    config.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")  # no weights are read before the plan is chosen
    return str(folder)


def planned_by_a_run(folder: Path, name: str, policy: str, settings: dict[str, Any]) -> ExecutionPlan:
    """The plan of the run's own start, which ends before a model is loaded."""
    data = Dataset.from_dict({"prompt": [" ".join(f"w{w + 2}" for w in range(WORDS))] * 64})
    given = {key: value for key, value in settings.items() if key != "use_peft" and key not in LORA}
    common = {**tiny.BARE, "bf16": True, **given}
    with pytest.raises(Chosen) as chosen:
        if name.startswith("ppo"):
            models = {"model": policy, "reward_model": policy, "value_model": policy, "train_dataset": data}
            tiny.trainer(folder, given=models, **{**common, "generation_engine": "vllm"})
        else:
            kind, trainer = (RLOOConfig, RLOOTrainer) if name.startswith("rloo") else (GRPOConfig, GRPOTrainer)
            args = kind(output_dir=str(folder), use_vllm=True, model_init_kwargs={"dtype": "float32"}, **common)
            lora = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM") if settings.get("use_peft") else None
            reward = tiny.always_one
            trainer(policy, reward_funcs=reward, args=args, train_dataset=data, peft_config=lora)
    plan: ExecutionPlan = chosen.value.args[0]
    return plan


def recipe_of(folder: Path, name: str, policy: str, settings: dict[str, Any]) -> Any:
    keys = ("sft_model_path", "reward_model_path") if name.startswith("ppo") else ("model_name_or_path",)
    algorithm = {"algorithm": name.replace(",", "").split()[0]}
    recipe = {**dict.fromkeys(keys, policy), **tiny.BARE, "bf16": True, **algorithm, **settings}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    return read_recipe(path, float(WORDS))


@pytest.mark.parametrize("card", ["h100", "h200"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_run_begins_under_the_plan_that_the_command_says(
    name: str, card: str, tmp_path: Path, on_card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_REALLOC_CACHE", str(tmp_path / "cache"))
    on_card(card)
    billions, settings = RECIPES[name]
    policy = checkpoint(tmp_path / "policy", billions)
    by_command = choose_for_recipe(recipe_of(tmp_path, name, policy, settings), f"{card}:1", None, None, None, 5.0)
    by_run = planned_by_a_run(tmp_path / "run", name, policy, settings)
    assert by_run.assignments == by_command.best.plan.assignments
    assert by_run.name == f"auto ({by_command.best.name})" and by_run.streams is None and not by_run.fused
