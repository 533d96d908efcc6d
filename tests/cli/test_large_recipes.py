"""The recipes for large models: each is read, launched for its cluster, and planned as its page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import gpu_memory
from trl_realloc.planner.cost.hardware import parse_cluster
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.recipe.recipe import Recipe, read_recipe
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import Space


RECIPES = Path(__file__).parents[2] / "recipes"
CLUSTERS = {"llama-8b": "h100:8", "qwen-32b": "h100:4x8", "llama-70b": "h100:16x8"}
PROMPT = 400.0


def pricing_of(recipe: Recipe, cluster: str) -> Pricing:
    machine, device = parse_cluster(cluster)
    share, headroom = (recipe.settings[key] for key in ("vllm_gpu_memory_utilization", "memory_headroom"))
    memory = gpu_memory(device.memory, headroom)
    return Pricing(machine, recipe.workload(machine), AnalyticRates(device), memory=memory, vllm_share=share)


def priced(recipe: Recipe, pricing: Pricing, plan: ExecutionPlan) -> PricedPlan:
    problem = Problem(Space(pricing.cluster, plan.graph, recipe.specs(), pricing), {})
    return problem.priced_plan(problem.state_of(plan.assignments), plan.name)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_recipes_plan_fits_and_takes_what_its_page_says_and_no_longer_than_what_is_found_now(name: str) -> None:
    check_figures(f"{name}/ppo", RECIPES / name / "ppo.yaml", RECIPES / name / "plan.yaml", CLUSTERS[name])


def test_the_recipe_of_grpo_has_the_figures_of_its_page_and_names_its_plan() -> None:
    recipe, plan = RECIPES / "llama-8b" / "grpo.yaml", RECIPES / "llama-8b" / "grpo-plan.yaml"
    check_figures("llama-8b/grpo", recipe, plan, "h100:8")
    assert yaml.safe_load(recipe.read_text())["plan"] == "recipes/llama-8b/grpo-plan.yaml"


def test_the_recipe_of_adapters_has_the_figures_of_its_page_and_names_its_plan() -> None:
    recipe, plan = RECIPES / "llama-8b" / "rloo-lora.yaml", RECIPES / "llama-8b" / "rloo-lora-plan.yaml"
    assert read_recipe(recipe, PROMPT).algorithm == "rloo"
    check_figures("llama-8b/rloo-lora", recipe, plan, "h100:1")
    assert yaml.safe_load(recipe.read_text())["plan"] == "recipes/llama-8b/rloo-lora-plan.yaml"


def check_figures(name: str, path: Path, plan_path: Path, cluster: str) -> None:
    recipe = read_recipe(path, PROMPT)
    pricing = pricing_of(recipe, cluster)
    plan = ExecutionPlan.from_yaml(plan_path.read_text())
    plan.check_world(pricing.cluster.size)
    assert plan.graph == recipe.graph
    shipped = priced(recipe, pricing, plan)
    assert shipped.fits
    lines = (RECIPES / "README.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| `{name}` | {cluster} |"))
    assert row.endswith(f"| {shipped.seconds:.1f} s | {shipped.estimate.memory / 1e9:.1f} GB |")
    found = choose(Space.of_run(recipe.specs(), pricing, graph=recipe.graph), time_limit_s=2.0).best
    assert shipped.seconds <= 1.05 * found.seconds


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_recipe_names_its_plan_and_a_launch_of_as_many_processes(name: str) -> None:
    text = (RECIPES / name / "ppo.yaml").read_text()
    size = parse_cluster(CLUSTERS[name])[0].size
    assert yaml.safe_load(text)["plan"] == f"recipes/{name}/plan.yaml"
    launch = next((RECIPES / name).glob("*.slurm"), None)
    if launch is not None:
        said = launch.read_text()
        nodes, gpus = (int(re.search(rf"{key}=(\d+)", said)[1]) for key in ("--nodes", "--gpus-per-node"))  # type: ignore[index]
        assert nodes * gpus == size and f"recipes/{name}/ppo.yaml" in said and launch.name in text
    else:
        config = re.search(r"recipes/accelerate_configs/\w+\.yaml", text)
        assert config is not None
        assert yaml.safe_load((RECIPES.parent / config[0]).read_text())["num_processes"] == size
