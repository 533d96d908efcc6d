"""A recipe as the planner sees it: which dtype each call's model has in the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset
from llamas import SMALL, llama, pricing, work

from trl_realloc.algorithms.prompt_batches import collate_prompts
from trl_realloc.algorithms.prompts import DataError, check_prompts
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Role
from trl_realloc.planner.cost.activation_memory import layer_activations
from trl_realloc.planner.recipe.defaults import DEFAULTS
from trl_realloc.planner.recipe.recipe import Recipe, read_recipe


def task(folder: Path, **settings: object) -> Recipe:
    """Checkpoints in bfloat16."""
    for role in Role:
        (folder / role).mkdir()
        (folder / role / "config.json").write_text(json.dumps({**SMALL, "dtype": "bfloat16"}))
    return Recipe(folder / "recipe.yaml", {role: folder / role for role in Role}, {**DEFAULTS, **settings}, 64.0)


@pytest.mark.parametrize(
    ("settings", "trains", "generates", "scores"),
    [
        ({}, (4, 2), (2, 2), (2, 2)),
        ({"bf16": None}, (4, 2), (2, 2), (2, 2)),
        ({"bf16": False}, (4, 4), (4, 4), (2, 2)),
        ({"generation_engine": "transformers"}, (4, 2), (4, 2), (2, 2)),
    ],
)
def test_what_is_trained_is_priced_in_float32_and_what_is_frozen_as_its_checkpoint_has_it(
    tmp_path: Path,
    settings: dict[str, object],
    trains: tuple[int, int],
    generates: tuple[int, int],
    scores: tuple[int, int],
) -> None:
    """(bytes of a parameter, bytes of an activation)."""
    specs = task(tmp_path, **settings).specs()
    found = {name: (spec.bytes_per_element, spec.activation_bytes) for name, (spec,) in specs.items()}
    assert found["actor.train"] == found["critic.train"] == found["critic.forward"] == trains
    assert found["actor.generate"] == generates
    assert found["reference.forward"] == found["reward.forward"] == scores


def test_what_training_holds_of_a_parameter_in_both_dtypes() -> None:
    """float32: weight, gradient, two moments, the weights of a layer cast to 16 bits, the layers' inputs in float32,
    and what a layer keeps in float32 or casts; bfloat16: weight, and in float32 gradient, master and two moments.
    Gradients are reduced in float32 in both."""
    low = llama(7)
    wide = replace(low, bytes_per_element=4, activation_bytes=2)
    call, mesh = ppo_graph().call("actor.train"), Cluster(1, 8).mesh
    costs = [pricing().price(call, [s], Assignment(mesh, ParallelStrategy(8), "zero")) for s in (wide, low)]
    assert [(cost.static + cost.gradients) / low.elements for cost in costs] == [16.0, 18.0]
    assert [cost.gradients / low.elements for cost in costs] == [4.0, 4.0]
    inputs = 2 * work().tokens / 8 * low.hidden * low.layers
    wider = (layer_activations(wide).of(1) - layer_activations(low).of(1)) * work().tokens / 8
    more = costs[0].transient - costs[1].transient
    assert wider > 0 and more == pytest.approx(2 * low.layer_elements + inputs + wider)
    assert costs[0].parts["data"] == costs[1].parts["data"]


def test_a_critic_without_a_path_starts_from_the_reward_model(tmp_path: Path) -> None:
    for model in ("policy", "reward"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(SMALL))
    path = tmp_path / "ppo.yaml"
    path.write_text("sft_model_path: policy\nreward_model_path: reward\nvalue_model_path: null\n")
    assert read_recipe(path).folders[Role.CRITIC] == tmp_path / "reward"


@pytest.mark.parametrize(
    ("algorithm", "response", "is_refused"), [("ppo", 127, False), ("ppo", 128, True), ("grpo", 128, False)]
)
def test_responses_for_which_the_policy_has_too_few_positions_are_refused_as_by_a_run(
    tmp_path: Path, algorithm: str, response: int, is_refused: bool
) -> None:
    """In a run of GRPO a response is shorter after a long prompt."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**SMALL, "max_position_embeddings": 128}))
    models = "sft_model_path: model\nreward_model_path: model\nresponse_length:" if algorithm == "ppo" else None
    lines = models or "model_name_or_path: model\nmax_completion_length:"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"algorithm: {algorithm}\n{lines} {response}\n")
    recipe = read_recipe(path)
    if not is_refused:
        assert recipe.specs()
        return
    said = "response_length 128 leaves no room for a prompt in the model's context of 128; lower response_length"
    with pytest.raises(PlanError, match=said):
        recipe.specs()
    with pytest.raises(DataError, match=said):
        prompts = Dataset.from_dict({"input_ids": [[1, 2]]})
        check_prompts(prompts, "train_dataset", response, 128, 100, collate_prompts(0, None))


def test_what_a_run_refuses_is_no_candidate(tmp_path: Path) -> None:
    recipe = task(tmp_path, fp16=True, full_determinism=True)
    assert recipe.trainers == ("zero",)
    assert recipe.deterministic


@pytest.mark.parametrize(
    ("model", "is_hub_name"),
    [("meta-llama/Llama-3.1-8B", True), ("gpt2", True), ("/checkpoints/policy", False), ("../runs/a/policy", False)],
)
def test_a_hub_name_is_refused_with_where_its_config_belongs(tmp_path: Path, model: str, is_hub_name: bool) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"sft_model_path: {model}\nreward_model_path: {model}\n")
    with pytest.raises(PlanError, match="there is no config.json in .*; give a model's folder on disk") as refused:
        read_recipe(recipe)
    command = f"hf download {model} config.json --local-dir {tmp_path / Path(model).name})."
    assert str(refused.value).endswith(command) == is_hub_name
    assert ("Hub" in str(refused.value)) == is_hub_name


@pytest.mark.parametrize(
    ("lines", "recomputes"),
    [
        ("", True),
        ("gradient_checkpointing: false", False),
        ("activation_checkpointing: false", False),
        ("activation_checkpointing: 'yes'\ngradient_checkpointing: false", True),
    ],
)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_activations_are_recomputed_as_in_a_run(tmp_path: Path, algorithm: str, lines: str, recomputes: bool) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL))
    recipe = tmp_path / "recipe.yaml"
    models = "reward_model_path: model\nsft_model_path: model" if algorithm == "ppo" else "model_name_or_path: model"
    recipe.write_text(f"algorithm: {algorithm}\n{models}\n{lines}\n")
    assert read_recipe(recipe).workload(Cluster(1, 8)).recompute is recomputes
