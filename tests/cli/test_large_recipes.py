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


OF_GROUPS = [("llama-8b/grpo", "h100:8"), ("llama-8b/rloo-lora", "h100:1")]
OF_MIXTURES = [("grpo", "h100:8"), ("grpo-32", "h100:4x8"), ("grpo-lora", "h100:4")]
OF_GROUPS += [(f"qwen3-30b-a3b/{name}", cluster) for name, cluster in OF_MIXTURES]


@pytest.mark.parametrize(("name", "cluster"), [(f"{folder}/ppo", CLUSTERS[folder]) for folder in CLUSTERS] + OF_GROUPS)
def test_a_recipes_plan_fits_and_takes_what_its_page_says_and_no_longer_than_what_is_found_now(
    name: str, cluster: str
) -> None:
    recipe = read_recipe(RECIPES / f"{name}.yaml", PROMPT)
    folder, algorithm = name.split("/")
    named = f"recipes/{folder}/plan.yaml" if algorithm == "ppo" else f"recipes/{name}-plan.yaml"
    assert recipe.algorithm == algorithm.partition("-")[0]
    assert yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["plan"] == named
    pricing = pricing_of(recipe, cluster)
    plan = ExecutionPlan.from_yaml((RECIPES.parent / named).read_text())
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
def test_a_recipe_names_a_launch_of_as_many_processes_as_its_plan_has(name: str) -> None:
    text = (RECIPES / name / "ppo.yaml").read_text()
    size = parse_cluster(CLUSTERS[name])[0].size
    launch = next((RECIPES / name).glob("*.slurm"), None)
    if launch is not None:
        said = launch.read_text()
        nodes, gpus = (int(re.search(rf"{key}=(\d+)", said)[1]) for key in ("--nodes", "--gpus-per-node"))  # type: ignore[index]
        assert nodes * gpus == size and f"recipes/{name}/ppo.yaml" in said and launch.name in text
    else:
        config = re.search(r"recipes/accelerate_configs/\w+\.yaml", text)
        assert config is not None
        assert yaml.safe_load((RECIPES.parent / config[0]).read_text())["num_processes"] == size
