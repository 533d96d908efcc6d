"""The adapters that a recipe asks for are priced as those that PEFT makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from llamas import pricing

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.assignment import ParallelStrategy
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.presets import flatten, separate
from trl_realloc.planner.cost.device_memory import gpu_memory
from trl_realloc.planner.iteration.simulate import Overlap
from trl_realloc.planner.recipe.recipe import ADAPTER_DEFAULTS, read_recipe, trained_share
from trl_realloc.planner.search.plan_memory import PlanMemory
from trl_realloc.planner.search.problem import Problem, estimate_plan
from trl_realloc.planner.search.space import Space
from trl_realloc.profiling import job_models


SPEC = ModelSpec.from_config(tiny.config(), bytes_per_element=4)


def settings(**changes: Any) -> dict[str, Any]:
    return {**ADAPTER_DEFAULTS, "use_peft": True, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora_r": 3, "lora_target_modules": ["q_proj", "o_proj", "down_proj"]},
        {"lora_target_modules": "all-linear"},
        {"lora_modules_to_save": ["lm_head"]},
    ],
)
def test_the_share_is_that_of_the_adapters_that_peft_makes(changes: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    given = settings(**changes)
    targets = given["lora_target_modules"]
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=given["lora_r"], target_modules=targets, modules_to_save=given["lora_modules_to_save"]
    )
    expected = job_models.trained_share("a name", tiny.config(), lora)
    assert trained_share(given, SPEC) == pytest.approx(expected)


def test_without_use_peft_all_is_trained() -> None:
    assert trained_share(settings(use_peft=False), SPEC) == 1.0


def recipe(folder: Path, lines: str, **changes: Any) -> Path:
    (folder / "model").mkdir(parents=True)
    config = {**tiny.config(**changes).to_dict(), "model_type": "llama"}
    (folder / "model" / "config.json").write_text(json.dumps(config, default=str))
    path = folder / "grpo.yaml"
    path.write_text(f"algorithm: grpo\nmodel_name_or_path: model\n{lines}")
    return path


def test_a_recipe_with_adapters_is_priced_by_them(tmp_path: Path) -> None:
    specs = read_recipe(recipe(tmp_path, "use_peft: 'yes'\nlora_r: 2\n")).specs()
    assert specs["actor.train"][0].trained_share < 0.1
    assert specs["actor.forward"][0].trained_share == specs["actor.generate"][0].trained_share == 1.0


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("lora_r: 0\n", "lora_r must be a whole number from 1 to 65536, not 0"),
        ("lora_target_modules: 3\n", "a list of names of modules"),
        ("dtype: bf16\n", "dtype must be 'auto' or 'bfloat16'"),
        ("model_init_kwargs: {dtype: bf16}\n", "there is no dtype 'bf16'"),
        ("model_init_kwargs: 3\n", "is a mapping"),
        ("temperature: 0\n", "below the 0.01 that vLLM samples with"),
    ],
)
def test_settings_that_no_run_could_have_are_refused(tmp_path: Path, lines: str, complaint: str) -> None:
    path = recipe(tmp_path, lines)
    with pytest.raises(PlanError, match=f"grpo.yaml: .*{complaint}"):
        read_recipe(path)


@pytest.mark.parametrize("ends", ["[lm_head]", "[norm]"])
def test_an_engine_has_its_own_head_where_an_adapter_changes_one_of_two_tied_ends(tmp_path: Path, ends: str) -> None:
    path = recipe(tmp_path, f"use_peft: true\nlora_modules_to_save: {ends}\n", tie_word_embeddings=True)
    specs = read_recipe(path).specs()
    config = tiny.config(tie_word_embeddings=True)
    lora = pytest.importorskip("peft").LoraConfig(modules_to_save=ends.strip("[]").split())
    how = {"peft_config": lora, "processing_class": None, "mixed": None, "generation_engine": "vllm"}
    job = job_models.JobModels.of_run({Role.ACTOR: [config]}, grpo_graph(), "a name", **how)
    for found in (specs, job.specs, job.shallow(1).specs):
        (generates,), (trains,) = found["actor.generate"], found["actor.train"]
        head = generates.elements - trains.elements
        assert trains.tied and head == (ends == "[lm_head]") * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("in_place", [True, False])
def test_the_reference_of_a_policy_with_adapters_has_no_parameters_of_its_own_where_the_policy_trains(
    tmp_path: Path, in_place: bool
) -> None:
    plan = flatten(Cluster(1, 2), graph=grpo_graph(reference=True))
    if not in_place:
        split = replace(plan["reference.forward"], engine="megatron", strategy=ParallelStrategy(1, 2))
        plan = replace(plan, assignments={**plan.assignments, "reference.forward": split})
    held = {}
    for adapters in (True, False):
        specs = read_recipe(recipe(tmp_path / str(adapters), f"beta: 0.1\nuse_peft: {adapters}\n")).specs()
        held[adapters] = estimate_plan(plan, specs, replace(pricing(1, 2), memory=gpu_memory(80e9))).estimate.holds
    assert "reference.forward" in held[False]
    assert ("reference.forward" in held[True]) != in_place


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        ("", 4),
        ("dtype: bfloat16\n", 2),
        ("dtype: auto\n", 4),
        ("model_init_kwargs: {dtype: bfloat16}\n", 2),
        ('model_init_kwargs: \'{"torch_dtype": "float16"}\'\ndtype: float32\n', 2),
    ],
)
def test_the_policy_is_priced_in_the_dtype_that_the_recipe_loads_it_in(tmp_path: Path, lines: str, size: int) -> None:
    specs = read_recipe(recipe(tmp_path, lines)).specs()
    assert specs["actor.train"][0].bytes_per_element == size


@pytest.mark.parametrize("tp", [1, 2])
def test_the_base_that_adapters_are_merged_in_for_an_engine_is_counted_and_is_the_references_too(
    tmp_path: Path, tp: int
) -> None:
    """Under `separate` on two of four devices: the engine's weights, of 8 bytes a tensor group, beside one whole base.
    Where an engine has two devices, the second has no base, and the reference needs its own."""
    plan = separate(Cluster(1, 4), graph=grpo_graph(reference=True))
    generate = replace(plan["actor.generate"], strategy=ParallelStrategy(2 // tp, tp))
    plan = replace(plan, assignments={**plan.assignments, "actor.generate": generate})
    specs = read_recipe(recipe(tmp_path, "beta: 0.1\nuse_peft: true\nbf16: false\n", num_key_value_heads=2)).specs()
    problem = Problem(Space(plan.cluster, plan.graph, specs, pricing(1, 4)), {}, Overlap.of(plan))
    memory, state = PlanMemory(problem.space), problem.state_of(plan.assignments)
    (spec,) = specs["actor.train"]
    for device in (2, 3):
        holds = memory.holds(state, memory.stays(state), device)
        base = spec.bytes if tp == 1 or device == 2 else 0
        assert holds["actor.generate"] - problem.priced("actor.generate", generate).cost.static == base
        assert ("reference.forward" in holds) == (tp == 2)
