"""Fits a plan to the calls of a run: leaves out calls that the run does not have, and adds missing forwards of policies
in the layout of `actor.train`.

So one plan serves runs with and without a correction of old rollouts, a reference or a critic. Presets need no fitting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..common.errors import PlanError, nearest
from ..common.notices import notice
from .algorithm_graphs import PROXIMAL_CALL, grpo_graph, has_host_loop, ppo_graph
from .assignment import Assignment
from .dataflow import DataflowGraph, Role
from .execution_plan import ExecutionPlan
from .streams import Streams


# every form of the supported algorithms' graphs; the first has all calls
_FORMS = (
    ppo_graph(proximal=True),
    ppo_graph(),
    *(grpo_graph(reference=r, reward_models=m) for r in (True, False) for m in (True, False)),
)
_ALL_CALLS = _FORMS[0]
REFERENCE_CALL = "reference.forward"


def plan_of_run(plan: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    """The plan for a run with these calls. Notices report the changes.

    Raises:
        PlanError: the plan is for another algorithm; it lacks a call of the run that cannot take the layout of
            `actor.train`; or it streams only calls that the run does not have.
    """
    if plan.graph == graph:
        return plan
    missing = [name for name in graph.order if name not in plan.graph.order]
    if not _is_known(plan.graph) or any(name not in _placed_calls(graph) for name in missing):
        algorithm = "PPO" if Role.CRITIC in graph.roles else "GRPO or RLOO"
        lacks = f" It has no {' and no '.join(missing)}." if missing else ""
        raise PlanError(
            f"the plan's graph has the calls {', '.join(plan.graph.order)}, but this trainer runs {algorithm}, with "
            f"the calls {', '.join(graph.order)}; leave graph out of the plan, and give each of these calls a line."
            f"{lacks}"
        )
    surplus = [name for name in plan.order if name not in graph.order]
    streams = _streams_without(plan.streams, surplus)
    fused = () if set(plan.fused) & set(surplus) else plan.fused
    assignments = {name: assignment for name, assignment in plan.assignments.items() if name not in surplus}
    for name in missing:
        assignments[name] = in_place_of_training(plan["actor.train"])
        notice(
            f"the plan has no {name}, which {_setting(name, graph) or 'this run'} needs; it runs on the mesh of "
            f"actor.train and in its layout, {assignments[name].mesh} ({assignments[name].strategy})"
        )
    for name in surplus:
        setting = _setting(name, graph)
        notice(f"the plan's {name} is left out, because this run does not have it{f' ({setting})' if setting else ''}")
    if fused != plan.fused:
        notice(f"{' and '.join(plan.fused)} do not train together (fused), because this run does not have both")
    return replace(plan, assignments=assignments, graph=graph, streams=streams, fused=fused)


def read_plan(value: object, graph: DataflowGraph | None) -> ExecutionPlan:
    """The plan in a dictionary. A plan without a graph gets a graph of the run's calls that it has, so that
    `plan_of_run` can fit it.

    Args:
        graph: the run's calls; `None` for PPO's.

    Raises:
        PlanError: the plan is invalid. The message has all problems.
    """
    calls = value.get("calls") if isinstance(value, Mapping) else None
    if graph is None or not isinstance(calls, Mapping):
        return ExecutionPlan.from_dict(value, graph)
    return ExecutionPlan.from_dict(value, _graph_of_calls(calls, graph))


def in_place_of_training(training: Assignment) -> Assignment:
    """The assignment of a forward on the mesh and in the layout of a training, so that no parameters move."""
    # stages 1 and 2 shard optimizer state and gradients, which a forward does not have
    stage = training.strategy.zero_stage if training.strategy.zero_stage == 3 else 0
    return Assignment(training.mesh, replace(training.strategy, zero_stage=stage), training.engine)


def _graph_of_calls(calls: Mapping[str, object], graph: DataflowGraph) -> DataflowGraph:
    """The graph of a plan with these calls: the run's graph, or GRPO's or PPO's whole graph if the plan has further
    calls, without the calls that the plan leaves out and may leave out."""
    further = set(calls).intersection(_ALL_CALLS.order).difference(graph.order)
    of_groups = has_host_loop(graph) and further <= {*grpo_graph().order}
    whole = (grpo_graph() if of_groups else _ALL_CALLS) if further else graph
    # a misspelt call is not left out
    meant = {nearest(name, graph.order) for name in calls if name not in whole.order}
    may_lack = {*_placed_calls(graph), *(name for name in whole.order if name not in graph.order)}
    return whole.without([name for name in whole.order if name in may_lack and name not in {*calls, *meant}])


def _is_known(graph: DataflowGraph) -> bool:
    """True if a plan's graph is a form of PPO's or GRPO's graph, perhaps without some calls."""
    return any(graph == form.without([name for name in form.order if name not in graph.order]) for form in _FORMS)


def _placed_calls(graph: DataflowGraph) -> Collection[str]:
    """The calls that a plan may leave out, and that then run in the layout of `actor.train`. PPO always has a
    reference, so its plans must place it."""
    return (PROXIMAL_CALL,) if Role.CRITIC in graph.roles else (PROXIMAL_CALL, REFERENCE_CALL)


def _setting(name: str, graph: DataflowGraph) -> str:
    """The setting that decides whether a run of PPO or GRPO has a call; an empty text without one."""
    settings = (
        {PROXIMAL_CALL: "vllm_importance_sampling_correction"}
        if Role.CRITIC in graph.roles
        else {REFERENCE_CALL: "beta", "reward.forward": "reward_funcs"}
    )
    return settings.get(name, "")


def _streams_without(streams: Streams | None, names: Collection[str]) -> Streams | None:
    if streams is None or streams.calls is None or not names:
        return streams
    remaining = tuple(call for call in streams.calls if call not in names)
    if not remaining:
        raise PlanError(
            f"the plan streams {' and '.join(streams.calls)} alone, which this run does not have; leave streams out of "
            f"the plan."
        )
    return replace(streams, calls=remaining)
