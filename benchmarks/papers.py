"""Published iterations against this planner's estimates of them, row by row.

    python benchmarks/papers.py [--json FILE] [--settings FILE ...] [--time-limit SECONDS]

For each row of a settings file's table it estimates the Megatron heuristic (tp 8, pp over the nodes, every call on all
devices), where its time goes, the plan that the search finds in the authors' space, and the rule of thumb that the
authors distilled from their searches. The constants of the authors' system in a settings file are calibrated on the
heuristic's published times, so the heuristic's deviation is in-sample; no constant differs between rows. Needs no GPU
and no torch.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import CallKind, Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.device_memory import DeviceMemory
from trl_realloc.planner.cost.hardware import DEVICES, Device, Link
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration.simulate import Overlap
from trl_realloc.planner.search.fastest import search
from trl_realloc.planner.search.priced_plan import PricedPlan
from trl_realloc.planner.search.problem import Problem
from trl_realloc.planner.search.space import Space


SETTINGS = Path(__file__).parent / "papers"
GRAPH = ppo_graph()
COMMUNICATION = ("tensor", "pipeline", "data", "bubble")  # a stage that waits, waits inside a receive
COMPUTATION = ("compute", "memory", "optimizer")


@dataclass(frozen=True)
class Row:
    """One row of a table, ready to be planned."""

    label: str
    problem: Problem
    published: Mapping[str, float]
    nodes: int


def device_of(values: Mapping[str, Any]) -> Device:
    known = DEVICES[values["name"]]
    latency = {"collective_latency": values["collective_latency"], "efficiency": values["collective_efficiency"]}
    names = ("efficiency", "memory_efficiency", "launch", "decode_launch", "step")
    numbers = {name: float(values.get(name, getattr(known, name))) for name in names}
    inside, between = (Link(float(values[key]), 5e-6, **latency) for key in ("inside_bandwidth", "between_bandwidth"))
    # the settings' efficiencies are of all that a layer does
    return replace(known, inside=inside, between=between, passes=0.0, logit_bytes=0.0, **numbers)


def spec_of(settings: Mapping[str, Any], billions: int, head: Any) -> ModelSpec:
    layers, hidden, inner, heads, kv_heads = settings["models"][billions]
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": settings["vocabulary"],
    }
    return ModelSpec.from_config(config, head, bytes_per_element=2)


def rows_of(path: Path) -> Iterator[tuple[dict[str, Any], Row]]:
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    device = device_of(settings["device"])
    sizes = settings["models"]
    specs = {(size, head): spec_of(settings, size, head) for size in sizes for head in ("lm", "score")}
    for line in csv.DictReader((path.parent / settings["table"]).read_text(encoding="utf-8").splitlines()):
        actor, critic, gpus = (int(line[key]) for key in ("actor_b", "critic_b", "gpus"))
        cluster = Cluster(gpus // settings["devices_per_node"], settings["devices_per_node"], device.memory / 1e9)
        workload = Workload(
            int(line["batch"]),
            int(line["prompt"]),
            (int(line["gen"]),),
            mini_batches=settings["mini_batches"],
            epochs=settings["epochs"],
            recompute=settings["recompute"],
        )
        of = {Role.ACTOR: (actor, "lm"), Role.REFERENCE: (actor, "lm")}
        models = {call.name: [specs[of.get(call.role, (critic, "score"))]] for call in GRAPH.calls}
        share = settings["gpu_memory_share"]
        moments = settings.get("optimizer_bytes", 12) - 4  # beside the float32 master
        memory = DeviceMemory(device.memory)
        pricing = Pricing(cluster, workload, AnalyticRates(device), memory, vllm_share=share, moments=moments)
        engines, deepest = ("vllm", "megatron"), max(cluster.nodes, 8)
        limits = {"deep_generation": True, "deepest": deepest, **settings["space"]}
        space = Space(cluster, GRAPH, models, pricing, engines, **limits)
        label = f"{actor}+{critic}@{gpus} gen {line['gen']}"
        published = {key: float(line[f"{key}_s"]) for key in ("heuristic", "real") if line[f"{key}_s"]}
        yield settings, Row(label, Problem(space, space.candidates(), Overlap.ALL), published, cluster.nodes)


def uniform(row: Row, mesh_of: Mapping[str, DeviceMesh], strategy_of: Mapping[str, ParallelStrategy]) -> dict[str, Any]:
    """With as many micro-batches in a training pipeline as the authors' system has."""
    space, found = row.problem.space, {}
    for name in GRAPH.order:
        strategy, engine = strategy_of[name], "vllm" if name == "actor.generate" else "megatron"
        tokens = space.fixed_micro_batch(GRAPH.call(name), strategy.dp, strategy.pp)
        strategy = replace(strategy, micro_batch_tokens=tokens)
        found[name] = Assignment(mesh_of[name], strategy, engine)
    return found


def heuristic(row: Row) -> PricedPlan:
    """Megatron's habit."""
    mesh = row.problem.space.cluster.mesh
    per_node = row.problem.space.cluster.devices_per_node
    strategy = ParallelStrategy(1, per_node, row.nodes)
    every = uniform(row, dict.fromkeys(GRAPH.order, mesh), dict.fromkeys(GRAPH.order, strategy))
    return row.problem.priced_plan(row.problem.state_of(every), "heuristic")


def rule(row: Row) -> PricedPlan | None:
    """The authors' rule of thumb, on two nodes or more: generate on all with tp 1 and pp over the nodes, train side by
    side on nodes split by model size with dp 2, tp 4 and pp across, score with the reference on all and with critic
    and reward on halves."""
    if row.nodes < 2:
        return None
    space = row.problem.space
    per_node = space.cluster.devices_per_node
    actor, critic = (space.specs[name][0].elements for name in ("actor.train", "critic.train"))
    first = min(row.nodes - 1, max(1, round(row.nodes * actor / (actor + critic))))
    whole = space.cluster.mesh
    left, right = DeviceMesh(0, first * per_node), DeviceMesh(first * per_node, (row.nodes - first) * per_node)
    half = row.nodes // 2 * per_node
    halves = DeviceMesh(0, half), DeviceMesh(half, whole.size - half)
    meshes = dict(zip(GRAPH.order, (whole, whole, halves[1], halves[0], left, right), strict=True))

    def split(name: str) -> ParallelStrategy:
        nodes = meshes[name].size // per_node
        if GRAPH.call(name).kind is CallKind.GENERATE:
            pp = max(2, row.nodes)
            return ParallelStrategy(whole.size // pp, 1, pp)
        return ParallelStrategy(2, per_node // 2, nodes)

    every = uniform(row, meshes, {name: split(name) for name in GRAPH.order})
    return row.problem.priced_plan(row.problem.state_of(every), "rule")


def shares(found: PricedPlan, parts: tuple[str, ...]) -> float:
    """Of an iteration's seconds on the devices of all meshes."""
    spent = found.device_seconds
    return sum(spent.get(part, 0.0) for part in parts) / (found.space.cluster.size * found.seconds)


def compare(settings: Mapping[str, Any], row: Row, time_limit_s: float) -> Iterator[dict[str, Any]]:
    base = heuristic(row)
    gain = row.published["heuristic"] / row.published["real"]

    def out(plan: str, published: float | None, estimated: float, unit: str) -> dict[str, Any]:
        setting = {"paper": settings["paper"], "setting": row.label, "plan": plan}
        return {**setting, "published": published, "estimated": round(float(estimated), 4), "unit": unit}

    yield out("heuristic", row.published["heuristic"], base.seconds, "s")
    pair = row.label.partition(" ")[0]
    if pair in (published_shares := settings.get("heuristic_shares", {})) and row.label.endswith(" 896"):
        compute, communication = published_shares[pair]
        yield out("heuristic, compute", compute, shares(base, COMPUTATION), "share")
        yield out("heuristic, communication", communication, shares(base, COMMUNICATION), "share")
    outcome = search(row.problem, time_limit_s=time_limit_s)
    best = min((row.problem.priced_plan(state, "searched") for state in outcome.states), key=lambda each: each.seconds)
    yield out("searched", row.published["real"], best.seconds, "s")
    yield out("gain", gain, base.seconds / best.seconds, "x")
    moved = sum(best.estimate.moves.values()) / best.seconds
    if "reallocation_share" in settings:
        yield out("reallocation, at most", settings["reallocation_share"], moved, "share")
    if (by_rule := rule(row)) is not None:
        yield out("rule of thumb", row.published["real"], by_rule.seconds, "s")
        yield out("gain by rule of thumb", gain, base.seconds / by_rule.seconds, "x")


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("setting", "plan", "published", "estimated", "", title="published against estimated")
    for row in rows:
        ratio = f"{row['estimated'] / row['published'] - 1:+.0%}" if row["unit"] in ("s", "x") else ""
        number = "{:.0%}" if row["unit"] == "share" else "{:.2f} " + row["unit"]
        values = [number.format(row[key]) for key in ("published", "estimated")]
        shown.add_row(row["setting"], row["plan"], *values, ratio)
    return shown


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean absolute deviations of seconds, and mean gains, of what the rows have."""
    found = {}
    for plan in ("heuristic", "searched", "rule of thumb"):
        if errors := [abs(r["estimated"] / r["published"] - 1) for r in rows if r["plan"] == plan]:
            found[f"{plan}: mean deviation"] = round(fmean(errors), 4)
    for plan in ("gain", "gain by rule of thumb"):
        for key in ("published", "estimated"):
            if gains := [r[key] for r in rows if r["plan"] == plan]:
                found[f"{plan}, {key}"] = round(geometric_mean(gains), 3)
    if moved := [r["estimated"] for r in rows if r["plan"].startswith("reallocation")]:
        found["reallocation: mean share"], found["reallocation: largest share"] = round(fmean(moved), 4), max(moved)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--settings", type=Path, nargs="*", default=sorted(SETTINGS.glob("*.yaml")))
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds of each search")
    given = parser.parse_args()
    planned = (each for path in given.settings for each in rows_of(path))
    rows = [line for settings, row in planned for line in compare(settings, row, given.time_limit)]
    console = Console()
    console.print(table(rows))
    for name, value in summary(rows).items():
        console.print(f"{name}: {value:.1%}" if "gain" not in name else f"{name}: {value:.2f}x")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "summary": summary(rows)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
