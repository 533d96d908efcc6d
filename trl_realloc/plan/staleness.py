"""`Staleness`: the number of updates that generation and scoring run ahead of the training, and the rules for the calls
that can.

With a staleness of k, the samples of the next k iterations are generated and scored while this one trains, on separate
devices (the separation of the adaptive placement framework, arXiv 2312.11819, section 3, with a bound that the user
sets). `planner.iteration.ahead_order` decides when each call runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..common.errors import Problems, shown
from .algorithm_graphs import has_host_loop
from .assignment import Assignment, sleeps
from .dataflow import CallKind, DataflowGraph
from .streams import Streams


MAX_VERSIONS = 64


@dataclass(frozen=True)
class Staleness:
    """Number of updates that generation may run ahead of the training.

    Args:
        versions: maximum number of updates between the policy that sampled a token and the training on it; 0 for a
            synchronous run.

    Raises:
        PlanError: the number has the wrong type or is out of its range.
    """

    versions: int = 0

    def __post_init__(self) -> None:
        problems = Problems()
        if not isinstance(self.versions, int) or isinstance(self.versions, bool):
            problems.append(f"staleness is a number of updates, like 1, not {shown(self.versions)}.")
        elif not 0 <= self.versions <= MAX_VERSIONS:
            problems.append(f"staleness is from 0 to {MAX_VERSIONS} updates, not {self.versions}.")
        problems.refuse()

    def in_words(self, graph: DataflowGraph) -> str:
        """A phrase for the calls that run ahead of the training, and how far."""
        in_turn = has_host_loop(graph)
        unit, what = ("generation", "generation runs") if in_turn else ("update", "generation and scoring run")
        far = f"1 {unit}" if self.versions == 1 else f"{self.versions} {unit}s"
        return f"{what} up to {far} ahead of the training"


def uncorrected(versions: int, corrects: bool) -> str:
    """The reason why GRPO or RLOO cannot have this staleness, as a sentence; an empty text if they can.

    Args:
        corrects: `vllm_importance_sampling_correction`.
    """
    if not versions or corrects:
        return ""
    return (
        f"max_staleness is {versions}, so older policies generate some completions, and without a correction the loss "
        f"treats them as the current policy's; set vllm_importance_sampling_correction to true, or max_staleness to 0."
    )


def calls_ahead(graph: DataflowGraph) -> tuple[str, ...]:
    """The calls that can run ahead of the training, in the graph's order: the call that generates from the data set
    alone, and the scoring calls of frozen roles, if they read only columns of the data set and of calls that run ahead.
    Calls of trained roles use the parameters of the iteration that trains on the samples, so that advantages come from
    the current critic and the proximal policy is the current one. With another library's loop, only generation runs
    ahead."""
    ahead: list[str] = []
    in_turn = has_host_loop(graph)
    for name in graph.order:
        call = graph.call(name)
        producers = {producer for producer in map(graph.producer, call.inputs) if producer is not None}
        if call.kind is CallKind.GENERATE:
            can = not producers and not ahead
        else:
            frozen = not call.trains and not in_turn
            can = frozen and graph.train_call(call.role) is None and producers <= set(ahead) and bool(ahead)
        if can:
            ahead.append(name)
    return tuple(ahead)


def devices_ahead(graph: DataflowGraph, assignments: Mapping[str, Assignment]) -> frozenset[int]:
    """The devices of the calls that run ahead."""
    return frozenset(device for name in calls_ahead(graph) for device in assignments[name].mesh.devices)


def staleness_problems(
    graph: DataflowGraph,
    assignments: Mapping[str, Assignment],
    staleness: Staleness,
    streams: Streams | None,
    barrier: bool,
) -> Iterator[str]:
    """Sentences about problems with a plan's staleness."""
    if not staleness.versions:
        return
    ahead = calls_ahead(graph)
    if not ahead or any(name not in assignments for name in ahead):
        if not ahead:
            yield "staleness: no call of this plan generates from the data set alone; leave it out."
        return
    if streams is not None:
        yield (
            "staleness: samples do not stream where generation runs ahead of the training; leave out streams, or the "
            "staleness."
        )
    if barrier:
        yield "staleness: barrier requires iterations one after the other; leave out one of them."
    generations = graph.calls_of(CallKind.GENERATE)
    if len(generations) > 1:
        yield f"staleness: {' and '.join(generations)} generate, and only a graph with one such call can run ahead."
    generate = assignments[ahead[0]]
    if generate.engine != "vllm":
        yield f"staleness: only a vLLM engine generates while others train, and {ahead[0]} runs on {generate.engine}."
    elif sleeps(generate):
        yield f"staleness: {ahead[0]} generates all the time, so its engine cannot sleep; leave out offload and drop."
    devices = devices_ahead(graph, assignments)
    for name, assignment in assignments.items():
        if name not in graph.order or name in ahead:
            continue
        shared = sorted(devices.intersection(assignment.mesh.devices))
        if shared and graph.call(name).trains:
            yield (
                f"staleness: {name} trains on device {shared[0]}, on which {_first_on(shared[0], ahead, assignments)} "
                f"runs ahead; give training separate devices (the preset separate does)."
            )
        elif shared and not devices.issuperset(assignment.mesh.devices):
            yield (
                f"staleness: {name} runs on devices that run ahead and on others; give it devices of one kind "
                f"({', '.join(map(str, sorted(devices)))} run ahead)."
            )


def _first_on(device: int, ahead: tuple[str, ...], assignments: Mapping[str, Assignment]) -> str:
    return next(name for name in ahead if device in assignments[name].mesh)
