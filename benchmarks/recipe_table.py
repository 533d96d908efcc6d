"""The table of recipes/README.md: the plan of each recipe for large models on a few clusters, its seconds and memory.

    python benchmarks/recipe_table.py --write

All by the devices' data sheets. Where the recipe's own plan.yaml is for the cluster, the row is of that plan, which
`tests/cli/test_large_recipes.py` prices again; the others are searched for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trl_realloc.cli.recipe_planning import IterationSize, answer_for
from trl_realloc.plan.assignment import Assignment
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.planner.cost.hardware import parse_cluster
from trl_realloc.planner.recipe.recipe import read_recipe


RECIPES = Path(__file__).parents[1] / "recipes"
PROMPT_TOKENS = 400.0
CLUSTERS = {  # the first is that of the recipe's plan
    "llama-8b/rloo-lora": ("h100:1", "h100:4"),
    "llama-8b/grpo": ("h100:8", "h100:4", "h200:8"),
    "llama-8b/ppo": ("h100:8", "h100:2x8", "h200:8"),
    "qwen3-30b-a3b/grpo-lora": ("h100:4",),
    "qwen3-30b-a3b/grpo": ("h100:8",),
    "qwen3-30b-a3b/grpo-32": ("h100:4x8",),
    "qwen-32b/ppo": ("h100:4x8", "h100:8x8", "h200:4x8"),
    "llama-70b/ppo": ("h100:16x8", "h100:8x8", "h200:8x8"),
}
HEAD = ["recipe", "devices", "samples", "generation", "training of the policy", "of the critic", "update", "fullest"]


def rows(time_limit: float) -> Iterator[list[str]]:
    """The cells of each row."""
    for name, clusters in CLUSTERS.items():
        recipe = read_recipe(RECIPES / f"{name}.yaml", PROMPT_TOKENS)
        own = ExecutionPlan.load(
            RECIPES / (f"{Path(name).parent}/plan.yaml" if name.endswith("/ppo") else f"{name}-plan.yaml")
        )
        episodes = recipe.workload(parse_cluster(clusters[0])[0]).episodes
        for cluster in clusters:
            shipped = own if cluster == clusters[0] else None
            answer = answer_for(recipe, cluster, IterationSize(episodes), None, shipped, time_limit)
            plan = answer.own or answer.best
            cells = [f"`{name}`", cluster, str(episodes)]
            if plan is None:
                yield [*cells, "does not fit", "", "", "", ""]
                continue
            calls = ("actor.generate", "actor.train", "critic.train")
            layouts = (plan.plan.assignments.get(call) for call in calls)
            cells += ["" if each is None else f"{_layout(each)} on {each.mesh}" for each in layouts]
            yield [*cells, f"{plan.seconds:.1f} s", f"{plan.estimate.memory / 1e9:.1f} GB"]


def _layout(assignment: Assignment) -> str:
    return str(replace(assignment.strategy, micro_batch_tokens=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of each search")
    parser.add_argument("--write", action="store_true", help="replace the table in recipes/README.md")
    arguments = parser.parse_args()
    lines = [f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *rows(arguments.time_limit))]
    print("\n".join(lines))
    if arguments.write:
        page = RECIPES / "README.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(f"| {' | '.join(HEAD)} |")
        after = rest.partition("\n\n")[2]
        page.write_text(before + "\n".join(lines) + "\n\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
