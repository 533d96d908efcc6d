"""Plans a recipe for the devices in the options of `trl-realloc plan`.

The commands and their output are in `main`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..common.errors import PlanError, Problems, shown
from ..plan.algorithm_graphs import ppo_graph
from ..plan.assignment import CACHED_TOKENS
from ..plan.cluster import MAX_DEVICES, Cluster
from ..plan.execution_plan import ExecutionPlan
from ..planner.cost.analytic_rates import AnalyticRates
from ..planner.cost.device_memory import gpu_memory
from ..planner.cost.hardware import Rates, parse_cluster
from ..planner.cost.measured_rates import MeasuredRates
from ..planner.cost.pricing import Pricing
from ..planner.cost.profile import Profile, model_key
from ..planner.cost.workload import Workload
from ..planner.recipe.recipe import MAX_TOKENS, Recipe
from ..planner.search.choose import choose
from ..planner.search.clusters import ClusterAnswer, colocated
from ..planner.search.decision import Decision
from ..planner.search.fused_choice import may_fuse
from ..planner.search.ladder import AllowedOptions
from ..planner.search.overlap_worth import OverlapWorth
from ..planner.search.problem import estimate_plan
from ..planner.search.space import Space
from .measuring_job import check_processes, measured_profile, processes_of


LONGEST_SEARCH = 86_400  # seconds


def check_request(
    cluster: str | None,
    measured: Path | None,
    devices: int | None,
    nodes: int | None,
    time_limit: float,
    calls: Sequence[str],
) -> None:
    """Refuse options that exclude each other, and values that are out of range."""
    problems = Problems()
    if cluster is not None:
        with problems.of("--cluster"):
            parse_cluster(cluster)
    if cluster is not None and measured is not None:
        problems.append(
            "--cluster plans for devices by their specification and --profile for a measured machine; keep one."
        )
    if cluster is not None and devices is not None:
        problems.append("--cluster sets the number of devices; leave --devices out.")
    if cluster is not None and nodes is not None:
        problems.append("--cluster sets the number of nodes; leave --nodes out.")
    if cluster is None and measured is None and nodes is not None and nodes > 1:
        problems.append(
            f"--nodes {nodes}: a recipe is planned for this machine, which is one node; name the devices of several "
            f"nodes with --cluster h100:16x8, or a profile that was measured on them with --profile."
        )
    if not 0 < time_limit <= LONGEST_SEARCH:
        problems.append(
            f"--time-limit is a number of seconds above 0 and up to {LONGEST_SEARCH:,}, not {time_limit:g}."
        )
    for option, number in (("--devices", devices), ("--nodes", nodes)):
        if number is not None and number < 1:
            problems.append(f"{option} is 1 or more, not {number}.")
    for call in calls:
        with problems.of("--explain"):
            ppo_graph(proximal=True).call(call)
    problems.refuse()


@dataclass(frozen=True)
class IterationSize:
    """The size of an iteration, if set on the command line.

    Args:
        episodes: number of episodes on any number of devices; `None` for the recipe's number per device.
        response_tokens: mean and 99th percentile of response lengths; `None` if all have the maximum length.
    """

    episodes: int | None = None
    response_tokens: tuple[float, float] | None = None

    @staticmethod
    def parse(episodes: int | None, response_tokens: str | None) -> IterationSize:
        """The size from --episodes and --response-tokens. Raises `PlanError` if one of them has another form."""
        if episodes is not None and not 1 <= episodes <= MAX_TOKENS:
            raise PlanError(f"--episodes is a number from 1 to {MAX_TOKENS:,}, not {episodes}.")
        if response_tokens is None:
            return IterationSize(episodes)
        match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)(?:/(\d{1,9}(?:\.\d+)?))?", response_tokens.strip())
        if match is None:
            raise PlanError(
                f"--response-tokens is a mean like 400, or a mean and a 99th percentile like 400/1024, not "
                f"{shown(response_tokens)}."
            )
        mean, p99 = match.groups()
        return IterationSize(episodes, (float(mean), float(p99 or mean)))

    def of(self, recipe: Recipe, machine: Cluster) -> Workload:
        work = recipe.workload(machine, self.episodes)
        if self.response_tokens is None:
            return work
        return replace(work, response_tokens=work.tail(*self.response_tokens, recipe.longest_response))


def choose_for_recipe(
    recipe: Recipe,
    cluster: str | None,
    measured: Path | None,
    devices: int | None,
    nodes: int | None,
    time_limit: float,
    work: IterationSize = IterationSize(),
) -> Decision:
    """The plan for a recipe on the devices of --cluster, on the machine of --profile, or on this machine, which is then
    measured.

    Raises:
        PlanError: there are no such devices, the profile is for others, or no plan fits.
    """
    if cluster is not None:
        space = cluster_space(recipe, cluster, work)
        return choose(space, _ways(recipe), time_limit_s=time_limit)
    if measured is None:
        check_processes(devices)
    recipe.specs()  # refuses models without a plan before measuring them
    profile = Profile.load(measured) if measured else measured_profile(recipe, devices or processes_of(recipe.path))
    if devices is not None and devices != profile.devices:
        raise PlanError(f"{measured} was measured on {profile.devices} devices, but --devices is {devices}.")
    if nodes is not None and nodes != profile.nodes:
        raise PlanError(
            f"{measured or 'the profile'} is a measurement of {profile.nodes} node(s), but --nodes is {nodes}; "
            f"leave --nodes out, or measure on as many nodes."
        )
    on_gpus = profile.is_accelerator
    machine = job_cluster(recipe.path.name, profile.devices, profile.nodes)
    _check_measured(profile, recipe, measured)
    pricing = _pricing(recipe, machine, MeasuredRates(profile), profile.memory if on_gpus else None, work)
    cap = None if on_gpus else CACHED_TOKENS
    pricing = replace(pricing, default_cap=cap, calibration=profile.calibration)
    return choose(_space(recipe, pricing), _ways(recipe, on_gpus=on_gpus), time_limit_s=time_limit)


def cluster_space(recipe: Recipe, cluster: str, work: IterationSize) -> Space:
    """The possible plans of a recipe on devices written like `h100:16x8`, with rates from their data sheets. Raises
    `PlanError` if there are no such devices, or the workload is not possible on them."""
    machine, device = parse_cluster(cluster)
    return _space(recipe, _pricing(recipe, machine, AnalyticRates(device), device.memory, work))


def answer_for(
    recipe: Recipe,
    cluster: str,
    work: IterationSize,
    price: float | None,
    plan: ExecutionPlan | None,
    time_limit: float,
) -> ClusterAnswer:
    """The plans of a recipe on one cluster of --clusters.

    Args:
        price: price of an hour of a device.
        plan: plan of the user; estimated if it has the cluster's number of devices.

    Raises:
        PlanError: there are no such devices, or the workload is not possible on them.
    """
    space = cluster_space(recipe, cluster, work)
    answer = ClusterAnswer(cluster, space.pricing.rates.name, price=price)
    try:
        best = choose(space, _ways(recipe), time_limit_s=time_limit).best
    except PlanError as error:
        return replace(answer, refusal=error.problems[0])
    fits = plan is not None and plan.cluster.size == space.cluster.size
    estimate = estimate_plan(plan, recipe.specs(plan.graph), space.pricing) if plan is not None and fits else None
    return replace(answer, best=best, colocated=colocated(space, time_limit), own=estimate)


def _space(recipe: Recipe, pricing: Pricing) -> Space:
    return Space.of_run(
        recipe.specs(),
        pricing,
        graph=recipe.graph,
        generation_engine=recipe.engine,
        engines=recipe.trainers,
        splits=recipe.splits,
    )


def _ways(recipe: Recipe, *, on_gpus: bool = True) -> AllowedOptions:
    return AllowedOptions(
        deterministic=recipe.deterministic,
        max_staleness=recipe.max_staleness,
        fused_training=may_fuse(recipe.fused_training, on_gpus=on_gpus),
    )


def overlap_worth(recipe: Recipe, chosen: Decision, time_limit: float) -> OverlapWorth:
    """The estimated savings of each overlap option."""
    graph = recipe.stale_graph
    corrects = recipe.algorithm == "ppo" or bool(recipe.settings["vllm_importance_sampling_correction"])
    return OverlapWorth(chosen, _ways(recipe), graph, recipe.specs(graph), corrects, time_limit)


def _pricing(recipe: Recipe, machine: Cluster, rates: Rates, memory: float | None, work: IterationSize) -> Pricing:
    """The cost model of a recipe. `memory` is the bytes of a device; `None` if unknown."""
    names = ("vllm_gpu_memory_utilization", "memory_headroom", "vllm_enable_sleep_mode")
    share, headroom, sleeps = (recipe.settings[key] for key in names)
    of_device = None if memory is None else gpu_memory(memory, headroom)
    return Pricing(
        machine,
        work.of(recipe, machine),
        rates,
        memory=of_device,
        vllm_share=share,
        vllm_sleeps=sleeps,
        context_length=recipe.context_length,
    )


def _check_measured(profile: Profile, recipe: Recipe, path: Path | None) -> None:
    rates = MeasuredRates(profile)
    unknown = {
        model_key(spec)
        for call, specs in recipe.specs().items()
        for spec in specs
        if not rates.measured(spec, 1, 1, generates=call.endswith(".generate"))
    }
    if unknown:
        raise PlanError(
            f"{path or 'the profile'} has no measurements of {' or of '.join(sorted(unknown))}; make one with "
            f"trl-realloc profile {recipe.path}."
        )


def job_cluster(plan: str, devices: int | None, nodes: int | None) -> Cluster:
    """The job's cluster from the options of the command; by default one node. Raises `PlanError` if there is no such
    cluster."""
    nodes = 1 if nodes is None else nodes
    if devices is None:
        raise PlanError(f"the size of the job is missing: set --devices N, for instance {plan} --devices 8.")
    if devices > MAX_DEVICES:
        raise PlanError(f"--devices {devices}: a plan can be for {MAX_DEVICES:,} devices at most.")
    if nodes < 1 or devices < 1 or devices % nodes:
        raise PlanError(
            f"--devices {devices} on --nodes {nodes}: both are 1 or more, and each node has equally many devices."
        )
    return Cluster(nodes, devices // nodes)
