"""`Streams`: settings for scoring samples before the whole batch has been generated.

These are a plan's fields and the rules for the calls that can take part. During the iteration,
`planner.iteration.stream_dispatcher` decides which sample is scored where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from ..common.errors import PlanError, Problems, shown, suggest, unknown_keys
from .assignment import Assignment, sleeps
from .dataflow import CallKind, DataflowGraph


@dataclass(frozen=True)
class Migration:
    """Moves unfinished samples to a few generation engines, so that the devices of the other engines can score
    (RLHFuse, arXiv 2409.13221, section 4).

    Args:
        threshold: samples move when fewer than this share of the batch's samples are unfinished; between 0 and 1.
        engines: number of engines that continue generating: the ones with the most unfinished samples.
        least_tokens: a sample moves only if at least this many tokens are left until its limit.

    Raises:
        PlanError: a value has the wrong type or is out of its range.
    """

    threshold: float
    engines: int = 1
    least_tokens: int = 1

    def __post_init__(self) -> None:
        problems = Problems()
        is_number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not is_number or not 0 < self.threshold < 1:
            problems.append(
                f"threshold is a share of the batch between 0 and 1, like 0.2, not {shown(self.threshold)}."
            )
        for name in ("engines", "least_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name} is a whole number from 1, not {shown(value)}.")
        problems.refuse()

    def to_dict(self) -> dict[str, object]:
        return {
            part.name: getattr(self, part.name) for part in fields(self) if getattr(self, part.name) != part.default
        }

    @staticmethod
    def from_dict(value: object) -> Migration:
        """The inverse of `to_dict`. Raises `PlanError`."""
        if not isinstance(value, Mapping) or "threshold" not in value:
            raise PlanError(f"migration reads like {{threshold: 0.2, engines: 1}}, not {shown(value)}.")
        Problems(unknown_keys(value, [part.name for part in fields(Migration)], "migration has no key")).refuse()
        return Migration(**value)


@dataclass(frozen=True)
class Streams:
    """Scoring begins while other samples are still being generated, on devices that do not generate.

    Args:
        calls: the streamed scoring calls; `None` for all possible ones (`streamed_calls`).
        migration: rules for moving samples between engines; `None` if samples stay in their first engine.
        deterministic: the samples of a forward do not depend on the times at which they were finished, so that two runs
            give the same bits. Forwards are then smaller.

    Raises:
        PlanError: a value has the wrong type, or a deterministic plan has a migration.
    """

    calls: tuple[str, ...] | None = None
    migration: Migration | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        if not isinstance(self.deterministic, bool):
            problems.append(f"deterministic is true or false, not {shown(self.deterministic)}.")
        if self.deterministic is True and self.migration is not None:
            problems.append(
                "when a sample moves depends on the clock, and its log-probabilities differ in rounding by where it is "
                "computed, so a plan with migration is not deterministic; leave out one of them."
            )
        problems.refuse()

    def to_dict(self) -> dict[str, object]:
        flat: dict[str, object] = {} if self.calls is None else {"calls": list(self.calls)}
        if self.migration is not None:
            flat["migration"] = self.migration.to_dict()
        return {**flat, **({"deterministic": True} if self.deterministic else {})}

    def __str__(self) -> str:
        which = "scoring" if self.calls is None else ", ".join(self.calls)
        text = f"{which} begins while samples are generated"
        if self.migration is not None:
            engines = f"{self.migration.engines} engine{'s' if self.migration.engines > 1 else ''}"
            text += f"; when less than {self.migration.threshold:.0%} are unfinished, these move to {engines}"
        return text + ("; deterministic" if self.deterministic else "")

    @staticmethod
    def from_dict(value: object) -> Streams | None:
        """The inverse of `to_dict`; `true` for the defaults, `false` for no streams. Raises `PlanError`."""
        if value is None or isinstance(value, bool):
            return Streams() if value else None
        if not isinstance(value, Mapping):
            raise PlanError(f"streams is true, false or a table like {{deterministic: true}}, not {shown(value)}.")
        problems = Problems(unknown_keys(value, [part.name for part in fields(Streams)], "streams has no key"))
        calls, migration = value.get("calls"), None
        if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(c, str) for c in calls)):
            problems.append(f"streams: calls is a list like [reference.forward], not {shown(calls)}.")
            calls = None
        elif calls is not None and not calls:
            problems.append(
                "streams: calls is empty; name scoring calls, or leave it out for all that can be streamed."
            )
        if value.get("migration") is not None:
            with problems.of("streams"):
                migration = Migration.from_dict(value["migration"])
        with problems.of("streams"):
            chosen = None if calls is None else tuple(calls)
            streams = Streams(chosen, migration, value.get("deterministic", False))
        problems.refuse()
        return streams


def streamed_calls(
    graph: DataflowGraph, assignments: Mapping[str, Assignment], streams: Streams | None
) -> tuple[str, ...]:
    """The streamed calls, in the graph's order; empty without streams. These are the first call that generates, if it
    reads only columns of the data set, and the scoring calls that read its outputs or other streamed calls' outputs,
    and no others. A second call that generates waits for the engines, so it runs after the streams, as a whole batch.
    So does training, because mini-batches are drawn from all samples.
    """
    if streams is None:
        return ()
    streamed: list[str] = []
    for name in graph.order:
        producers = {producer for producer in map(graph.producer, graph.call(name).inputs) if producer is not None}
        if graph.call(name).kind is CallKind.GENERATE:
            takes_part = not producers and not streamed
        else:
            takes_part = (
                bool(producers) and producers <= set(streamed) and not why_not_streamed(graph, assignments, name)
            )
            takes_part = takes_part and (streams.calls is None or name in streams.calls)
        if takes_part:
            streamed.append(name)
    scored = [name for name in streamed if graph.call(name).kind is CallKind.FORWARD]
    return tuple(streamed) if scored else ()


def why_not_streamed(graph: DataflowGraph, assignments: Mapping[str, Assignment], name: str) -> str:
    """The reason why a call can never be streamed, as a phrase; an empty text if it can be."""
    if graph.call(name).kind is not CallKind.FORWARD:
        return "it does not score"
    if name in assignments and assignments[name].drop:
        return "drop frees its parameters while samples are generated"
    return ""


def stream_problems(
    graph: DataflowGraph, assignments: Mapping[str, Assignment], streams: Streams | None
) -> Iterator[str]:
    """Sentences about problems with a plan's streams."""
    if streams is None:
        return
    streamed = streamed_calls(graph, assignments, streams)
    for name in streams.calls or ():
        if name not in graph.order:
            yield f"streams: there is no call {shown(name)}; {suggest(name, _scoring(graph))}"
        elif reason := why_not_streamed(graph, assignments, name):
            yield f"streams: {name} cannot be streamed, because {reason}; leave it out of calls, or change that."
        elif name not in streamed:
            yield f"streams: {name} reads the output of a call outside the streams; add that call, or leave {name} out."
    if not streamed and streams.calls is None:
        yield "streams: no scoring call of this plan reads generated samples; leave streams out."
    if streams.migration is None:
        return
    generations = [name for name in streamed if graph.call(name).kind is CallKind.GENERATE and name in assignments]
    for name in generations:
        assignment = assignments[name]
        if assignment.engine != "vllm":
            yield f"streams: only samples in vLLM engines can migrate, and {name} runs on {assignment.engine}."
        elif assignment.strategy.dp <= streams.migration.engines:
            yield (
                f"streams: {name} has {assignment.strategy.dp} engines (dp), and migration leaves "
                f"{streams.migration.engines} of them generating; give fewer, or leave migration out."
            )


def early_call(graph: DataflowGraph, assignments: Mapping[str, Assignment]) -> str | None:
    """The call that may begin before the previous iteration has ended: the first one that generates, if it runs in a
    vLLM engine and reads only the data set. `None` otherwise, and if its engine sleeps between its uses, because its
    memory may be needed at the end of an iteration, such as for saving."""
    name = next(iter(graph.calls_of(CallKind.GENERATE)), None)
    if name is None or assignments[name].engine != "vllm" or sleeps(assignments[name]):
        return None
    return None if any(map(graph.producer, graph.call(name).inputs)) else name


def _scoring(graph: DataflowGraph) -> Sequence[str]:
    return graph.calls_of(CallKind.FORWARD)
