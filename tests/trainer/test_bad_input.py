"""What a person can get wrong: one sentence with the value and the remedy, before anything heavy starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
)

from trl_realloc import PPOConfig
from trl_realloc.cli.recipe_parser import parse_recipe, run
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan, PlanError
from trl_realloc.plan.presets import flatten
from trl_realloc.profiling.job_models import spec_of
from trl_realloc.trainer.checks.plan_checks import check_layouts


def _long() -> Dataset:
    rows = tiny.prompts(64)["prompt"]
    return Dataset.from_dict({"prompt": [*rows[:10], " ".join(["w5"] * 120), *rows[10:]]})


def _megatron_on_one() -> dict[str, Any]:
    made = flatten(Cluster(1, 1), generation_engine="transformers").to_dict()
    made["calls"]["actor.train"]["engine"] = "megatron"
    return made


def _staged_on_one() -> dict[str, Any]:
    return flatten(Cluster(1, 1), generation_engine="transformers", zero_stage=2).to_dict()


def _grpo() -> dict[str, Any]:
    graph, one = grpo_graph(), {"mesh": 0, "engine": "zero"}
    calls = {name: {"mesh": 0, "engine": "transformers"} if "generate" in name else one for name in graph.order}
    return {"cluster": {"nodes": 1, "devices_per_node": 1}, "graph": graph.to_dict(), "calls": calls}


def short(kind: type, load: Any, positions: int = 16) -> Any:
    """A model with learned positions."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    special = {"pad_token_id": tiny.PAD, "bos_token_id": None, "eos_token_id": tiny.EOS, "num_labels": 1}
    return load.from_config(kind(vocab_size=100, max_position_embeddings=positions, **sizes, **special))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 8.0}
LONGROPE |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}

# the constructor's arguments; all others are settings
CONSTRUCTORS = (
    "model",
    "ref_model",
    "reward_model",
    "value_model",
    "processing_class",
    "train_dataset",
    "eval_dataset",
)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a tokenizer without pad token": ({"processing_class": tiny.tokenizer(pad=None)}, "no pad token; set one"),
    "a prompt beyond the context": ({"train_dataset": _long()}, "row 10 has a prompt longer than the 116 tokens"),
    "a response longer than the context": (
        {"response_length": 200},
        r"response_length 200 leaves no room for a prompt in the model's context of 128; lower response_length \(the",
    ),
    "an empty dataset": ({"train_dataset": tiny.prompts(64).select([])}, "train_dataset is empty"),
    "no dataset": ({"train_dataset": None}, "`train_dataset` is required"),
    "no prompt column": (
        {"train_dataset": tiny.prompts().rename_column("prompt", "query")},
        "neither a `prompt` column .* it has 'query'. Rename",
    ),
    "an empty prompt": ({"train_dataset": Dataset.from_dict({"input_ids": [[5], []] * 8})}, "rows 1, 3, 5, 7, 9 and 3"),
    "ids of another vocabulary": (
        {"train_dataset": Dataset.from_dict({"input_ids": [[5, 100]] * 16})},
        "outside the model's vocabulary of 100",
    ),
    "samples beyond the length up to which longrope is one embedding": (
        {"model": tiny.policy(rope_parameters=LONGROPE)},
        r"actor: its rotary embedding \(longrope\) has other factors .* more than 16 tokens, .* up to 20",
    ),
    "a critic with fewer positions than a sample has tokens": (
        {"value_model": short(GPT2Config, AutoModelForSequenceClassification)},
        "train_dataset: rows .* have a prompt longer than the 4 tokens that the critic model's context of 16 leaves",
    ),
    "a reference with fewer positions": (
        {"ref_model": short(GPT2Config, AutoModelForCausalLM)},
        "4 tokens that the reference model's context of 16 leaves",
    ),
    "a reward model with fewer positions": (
        {"reward_model": [tiny.short, short(BertConfig, AutoModelForSequenceClassification)]},
        "4 tokens that the reward model's context of 16 leaves",
    ),
    "an evaluation prompt beyond the critic's positions": (
        {
            "value_model": short(GPT2Config, AutoModelForSequenceClassification, 24),
            "eval_dataset": Dataset.from_dict({"prompt": ["w5", " ".join(["w5"] * 13)]}),
        },
        "eval_dataset: row 1 has a prompt longer than the 12 tokens that the critic model's context of 24 leaves",
    ),
    "a frozen policy": (
        {"model": tiny.policy().requires_grad_(False)},
        "every parameter of model is frozen .*call requires_grad_",
    ),
    "a critic that is frozen": (
        {"value_model": tiny.classifier().requires_grad_(False)},
        "every parameter of value_model is frozen",
    ),
    "an adapter loaded for inference": (
        {"model": get_peft_model(tiny.policy(), LoraConfig(inference_mode=True, target_modules=["q_proj"]))},
        "every parameter of model is frozen .*is_trainable=True",
    ),
    "a plan for another world": (
        {"plan": {"cluster": {"nodes": 1, "devices_per_node": 2}, "calls": {}}},
        "actor.generate is missing",
    ),
    "fp16 where losses are not scaled": (
        {"fp16": True, "use_cpu": False, "plan": _megatron_on_one()},
        "actor.train. does not scale losses",
    ),
    "fp16 under a stage of DeepSpeed that does not scale losses": (
        {"fp16": True, "use_cpu": False, "plan": _staged_on_one()},
        "actor.train has zero_stage 2, and DeepSpeed scales losses, .* set bf16 or zero_stage: 0",
    ),
    "a plan for another algorithm": ({"plan": _grpo()}, "but this trainer runs PPO, with the calls actor.generate"),
    "a preset's typo": ({"plan": "flaten"}, "flatten"),
    "a plan file that is not there": ({"plan": "plans/none.yaml"}, "no plan file 'plans/none.yaml'"),
    "a batch that does not divide": ({"num_mini_batches": 3}, "= 8 episodes do not divide into num_mini_batches 3"),
    "a batch larger than the dataset": ({"train_dataset": tiny.prompts(4)}, "4 rows, fewer than the 8 of one batch"),
    "a path with no model": ({"model": "./no/such/model"}, "model: cannot read a model from './no/such/model'"),
    "a reward path with no model": ({"reward_model": "./no/such/model"}, "reward_model: cannot read"),
    "model and reference the same": ({}, "are the same object"),
    "no critic": ({"value_model": None}, "value_model is missing"),
    "a critic with two outputs": ({"value_model": tiny.classifier(num_labels=2)}, "value_model has 2 outputs"),
    "two stop tokens": ({"stop_token_id": 0}, "stop_token and stop_token_id are both set"),
    "an unknown estimator": ({"kl_estimator": "k2"}, "kl_estimator must be 'k1' or 'k3', not 'k2'"),
    "an unknown engine": ({"generation_engine": "sglang"}, r"'vllm' or 'transformers' \(or None\), not 'sglang'"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_in_a_sentence_before_anything_starts(tmp_path: Path, case: str) -> None:
    values, sentence = CASES[case]
    given = {name: value for name, value in values.items() if name in CONSTRUCTORS}
    changes = {name: value for name, value in values.items() if name not in CONSTRUCTORS}
    if case == "model and reference the same":
        model = tiny.policy()
        given = {"model": model, "ref_model": model}
    with pytest.raises(ValueError, match=sentence):
        tiny.trainer(tmp_path, given=given, **changes)


@pytest.mark.parametrize("argument", ["model", "value_model"])
def test_a_trained_model_in_float16_is_refused_and_a_frozen_one_is_not(tmp_path: Path, argument: str) -> None:
    own = {"model": tiny.policy(), "value_model": tiny.classifier(), "reward_model": tiny.classifier().half()}
    own[argument] = own[argument].half()
    with pytest.raises(ValueError, match=f"^{argument} is to be trained in float16 .*dtype=torch.float32"):
        tiny.trainer(tmp_path, given=own)


def _on_four(memory_gb: float | None = None, **changes: dict[str, Any]) -> ExecutionPlan:
    made = flatten(Cluster(1, 4, memory_gb)).to_dict()
    for name, change in changes.items():
        made["calls"][name.replace("__", ".")] = {"mesh": "0-3", "engine": "megatron", **change}
    return ExecutionPlan.from_dict(made)


@pytest.mark.parametrize(
    ("plan", "model_type", "sentence"),
    [
        (
            _on_four(actor__train={"tp": 4}),
            "llama",
            "actor.train: tp 4 cannot share the 2 key/value heads of a llama model evenly; use tp 1 or 2",
        ),
        (
            _on_four(actor__train={"tp": 2, "dp": 2}),
            "nine",
            "actor.train: tp 2 cannot share the 3 key/value heads of a llama model evenly; use tp 1 or 3",
        ),
        (
            _on_four(actor__generate={"tp": 2, "dp": 2, "engine": "vllm"}),
            "nine",
            "actor.generate: tp 2 cannot share the 9 heads, 3 key/value heads of a llama model evenly, as vLLM does; "
            r"use tp 1 or 3\.",
        ),
        (
            _on_four(actor__generate={"tp": 4, "engine": "vllm"}),
            "seven",
            "actor.generate: .* the 7 heads of a opt model",
        ),
        (_on_four(critic__forward={"pp": 4}), "llama", "critic.forward: pp 4 is more than the model's 2 layers"),
        (_on_four(reference__forward={"tp": 2, "dp": 2}), "opt", "the family 'opt' cannot be split"),
        (
            _on_four(actor__train={"dp": 4}),
            "mixture",
            "actor.train: the family 'deepseek_v3' cannot be split by tensor or pipeline; use engine zero",
        ),
        (_on_four(80.0), "mixture", "actor.train: the config's num_experts_per_tok 9 is more than its 8 experts"),
        (_on_four(0.0001), "llama", "device 0 would hold .* but cluster.memory_gb is 0.0001; split"),
    ],
)
def test_a_plan_unfit_for_the_models_is_refused_by_configs(plan: ExecutionPlan, model_type: str, sentence: str) -> None:
    sizes = {"hidden_size": 36, "intermediate_size": 48, "vocab_size": 190}
    nine = tiny.config(num_attention_heads=9, num_key_value_heads=3, **sizes)
    seven = OPTConfig(hidden_size=56, num_attention_heads=7)
    mixture = DeepseekV3Config(num_hidden_layers=4, n_routed_experts=8, num_experts_per_tok=9)
    others = {"seven": seven, "opt": OPTConfig(), "mixture": mixture}
    config = {"llama": tiny.config(), "nine": nine, **others}[model_type]
    configs = {role: [config] for role in Role}
    with pytest.raises(PlanError, match=sentence):
        check_layouts(plan, configs, [])


def test_the_policy_without_its_adapters_as_reference_needs_no_memory_of_its_own() -> None:
    config = tiny.config()
    configs = {role: [config] for role in Role}
    policy = spec_of(config, True).bytes / 1e9

    def fits(gigabytes: float, *, own_reference: bool) -> bool:
        try:
            check_layouts(flatten(Cluster(1, 1, gigabytes)), configs, [Role.ACTOR], own_reference=own_reference)
        except PlanError:
            return False
        return True

    sizes = [policy * tenths / 10 for tenths in range(1, 200)]
    least = next(size for size in sizes if fits(size, own_reference=False))
    assert not fits(least + 0.8 * policy, own_reference=True)
    assert fits(least + policy, own_reference=True)


def test_an_attention_that_mixes_the_samples_of_a_row_has_no_pipeline() -> None:
    plan = flatten(Cluster(1, 2), generation_engine="transformers").to_dict()
    plan["calls"]["actor.train"] = {"mesh": "0-1", "engine": "megatron", "dp": 1, "pp": 2}
    deep = ExecutionPlan.from_dict(plan)
    for attention in (None, "sdpa", "flash_attention_2"):
        config = LlamaConfig(**tiny.config().to_dict(), attn_implementation=attention)
        check_layouts(deep, {role: [config] for role in Role}, [])
    config = LlamaConfig(**tiny.config().to_dict(), attn_implementation="eager")
    with pytest.raises(PlanError, match="actor.train: its attention is eager, .* use pp: 1"):
        check_layouts(deep, {role: [config] for role in Role}, [])


def test_a_plan_for_two_processes_is_refused_by_one(tmp_path: Path) -> None:
    plan = Path(__file__).parents[2] / "recipes" / "plans" / "flatten-2.yaml"
    with pytest.raises(ValueError, match=r"plans/flatten-2\.yaml: the plan 'flatten' is for 2 devices .* is 1; launch"):
        tiny.trainer(tmp_path, plan=str(plan))


@pytest.mark.skipif(is_vllm_available(), reason="vLLM is installed here; see the test below for a machine without it")
def test_vllm_asked_for_but_not_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vLLM is not installed; pip install"):
        tiny.trainer(tmp_path, generation_engine="vllm")


def script(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a script that makes a trainer, in a process that cannot see vLLM."""
    text = f"""
import importlib.util, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else found(name, *rest)
import pathlib, tiny
from trl_realloc.cli.recipe_parser import run
folder = pathlib.Path({str(folder)!r})
def main():
{body}
run(main)
"""
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)


def test_a_script_ends_with_one_sentence_and_a_code(tmp_path: Path) -> None:
    ended = script(tmp_path, "    tiny.trainer(folder, generation_engine='vllm')")
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("error: generation by vLLM is asked for, but vLLM is not installed; pip install")
    assert "Traceback" not in ended.stderr


def test_a_recipes_unknown_key_is_refused_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output_dir: x\nlearning_rat: 1.0e-5\n")
    with pytest.raises(SystemExit) as ended:
        run(lambda: parse_recipe([PPOConfig], ["--config", str(recipe)]))
    assert ended.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no setting 'learning_rat'" in last and "'learning_rate'" in last and str(recipe) in last


@pytest.mark.skipif(not is_vllm_available(), reason="without vLLM there is no choice")
def test_a_model_that_vllm_cannot_serve_generates_by_transformers_or_is_refused(tmp_path: Path) -> None:
    given = {"model": tiny.policy(head_dim=8)}
    with pytest.raises(ValueError, match="heads of 32, .* not for this model's 8; set generation_engine: transformers"):
        tiny.trainer(tmp_path, given=given, generation_engine="vllm")
    made = tiny.trainer(tmp_path, given=given, generation_engine=None)
    assert made.plan["actor.generate"].engine == "transformers"
