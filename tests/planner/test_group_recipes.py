"""Recipes of GRPO and RLOO, as TRL writes them, are known as such and planned without torch."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from llamas import SMALL

from trl_realloc.cli.main import main
from trl_realloc.cli.recipe_planning import choose_for_recipe
from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.planner.recipe.defaults import DEFAULTS_OF
from trl_realloc.planner.recipe.recipe import Recipe, read_recipe
from trl_realloc.planner.search.space import TrainingSplits


EIGHT = Cluster(1, 8)


def recipe(folder: Path, **settings: Any) -> Path:
    for name in ("policy", "reward"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(SMALL))
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "policy", **settings}))
    return path


def read(folder: Path, **settings: Any) -> Recipe:
    return read_recipe(recipe(folder, **settings), 100)


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ({"num_generations": 8}, "grpo"),
        ({"max_completion_length": 256}, "grpo"),
        ({"loss_type": "dr_grpo"}, "grpo"),
        ({"normalize_advantages": True, "num_generations": 2}, "rloo"),
        ({"algorithm": "rloo", "num_generations": 4}, "rloo"),
        ({"algorithm": "grpo"}, "grpo"),
        ({"reward_model_path": "reward"}, "ppo"),
        ({"reward_model_path": "reward", "beta": 0.1}, "ppo"),
        ({"algorithm": "ppo", "value_model_path": "reward", "num_generations": 2}, "ppo"),
    ],
)
def test_a_recipe_is_for_the_algorithm_whose_settings_it_has(
    tmp_path: Path, settings: dict[str, Any], algorithm: str
) -> None:
    assert read(tmp_path, **settings).algorithm == algorithm


def test_an_unknown_algorithm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no algorithm 'gpro'; did you mean 'grpo'\?"):
        read(tmp_path, algorithm="gpro")


@pytest.mark.parametrize(
    ("named", "instead"), [("dpo", "DPOTrainer"), ("remax", "the executor"), ("reinforce++", "scale_rewards: batch")]
)
def test_an_algorithm_without_a_trainer_is_refused_with_what_there_is(tmp_path: Path, named: str, instead: str) -> None:
    with pytest.raises(PlanError, match=rf"{re.escape(named)} has no trainer here.*{instead}.*ppo, grpo, rloo"):
        read(tmp_path, algorithm=named)


@pytest.mark.parametrize(
    ("settings", "reference", "reward_models"),
    [
        ({"num_generations": 8}, False, False),
        ({"num_generations": 8, "beta": 0.04}, True, False),
        ({"num_generations": 8, "reward_model_name_or_path": "reward"}, False, True),
        ({"algorithm": "rloo"}, True, False),
        ({"algorithm": "rloo", "beta": 0, "reward_funcs": ["think_format_reward"]}, False, False),
    ],
)
def test_a_recipe_has_the_calls_of_its_run(
    tmp_path: Path, settings: dict[str, Any], reference: bool, reward_models: bool
) -> None:
    made = read(tmp_path, **settings)
    assert made.graph == made.stale_graph == grpo_graph(reference=reference, reward_models=reward_models)
    assert set(made.specs()) == set(made.graph.order)
    assert (Role.REWARD in made.folders) == reward_models and Role.CRITIC not in made.folders


@pytest.mark.parametrize(
    ("settings", "episodes", "updates"),
    [
        ({}, 64, 1.0),
        ({"gradient_accumulation_steps": 4}, 256, 1.0),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 8}, 512, 2.0),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2}, 128, 1.0),
        ({"generation_batch_size": 128, "gradient_accumulation_steps": 4}, 128, 0.5),
    ],
)
def test_the_batch_is_what_trl_generates_at_a_time(
    tmp_path: Path, settings: dict[str, Any], episodes: int, updates: float
) -> None:
    work = read(tmp_path, num_generations=8, max_completion_length=32, **settings).workload(EIGHT)
    assert (work.episodes, work.updates, work.response_tokens) == (episodes, updates, (32,))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"generation_batch_size": 64, "steps_per_generation": 1}, "are both set; keep one of them"),
        ({"generation_batch_size": 100}, "100 does not divide into micro-batches of 64 responses"),
        ({"num_generations": 7}, "the 64 responses of a generation .* are not groups of num_generations 7"),
    ],
)
def test_batches_that_trl_refuses_are_refused(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        read(tmp_path, **{"num_generations": 8, **settings}).workload(EIGHT)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_generations": 1}, "num_generations must be a whole number from 2, not 1"),
        ({"num_generatons": 8}, "no setting 'num_generatons'; did you mean 'num_generations'"),
        ({"num_generations": 8, "max_completion_length": 10**9}, "is more than the 10,000,000 that are planned for"),
        ({"num_generations": 8, "model_name_or_path": 3}, "model_name_or_path is a model's name or path, not 3"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        read(tmp_path, **settings)


def test_a_recipe_without_a_model_says_which_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text("num_generations: 8\n")
    with pytest.raises(PlanError, match=r"names no models; it needs model_name_or_path\."):
        read_recipe(path)


def test_generation_by_the_training_models_is_planned_where_the_recipe_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, num_generations=8, use_vllm=False).engine == "transformers"
    assert read(tmp_path, num_generations=8).engine == read(tmp_path, num_generations=8, use_vllm=True).engine == "vllm"


def test_a_recipe_is_planned_for_a_cluster_by_grpos_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = recipe(tmp_path, num_generations=8, beta=0.04), tmp_path / "plan.yaml"
    assert main(["plan", str(path), "--cluster", "h100:8", "--time-limit", "1", "-o", str(output)]) == 0
    assert ExecutionPlan.load(output).graph == grpo_graph(reward_models=False)
    assert main(["show", str(output), "--devices", "8"]) == 0
    assert "actor.forward" in capsys.readouterr().out


def test_a_recipe_is_planned_as_its_optimizer_and_its_longest_request_allow(tmp_path: Path) -> None:
    given = read(tmp_path, num_generations=8, optim="adafactor", vllm_max_model_length=4096)
    best = choose_for_recipe(given, "h100:8", None, None, None, 0.5).best
    assert best.space.pricing.context_length == 4096
    assert best.space.splits == TrainingSplits(elements=False)
    trained = best.plan["actor.train"]
    assert trained.strategy.tp == 1 and not (trained.engine == "zero" and trained.strategy.zero_stage)


def test_the_defaults_are_those_of_the_configurations() -> None:
    from trl_realloc import PPOConfig
    from trl_realloc.trainer.grpo_config import GRPOConfig, RLOOConfig

    kinds: dict[str, Any] = {"ppo": PPOConfig, "grpo": GRPOConfig, "rloo": RLOOConfig}
    resolved = {"bf16": True, "generation_engine": "vllm"}  # None in the class, filled in later
    for name, kind in kinds.items():
        fields: dict[str, Any] = dict.fromkeys(DEFAULTS_OF[name])  # a setting that the release does not know has none
        fields |= {field.name: field.default for field in dataclasses.fields(kind)}
        for key, default in DEFAULTS_OF[name].items():
            assert fields[key] == default or (fields[key] is None and resolved[key] == default), (name, key)
