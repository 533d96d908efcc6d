"""`DataflowGraph`: the model function calls of one iteration of an algorithm, and the edges between them.

Data edges are the sample columns that calls read and write. Parameter edges lead from a role's training to its other
calls in the next iteration.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from ..common.errors import PlanError, Problems, shown, suggest, unknown_keys


_LABEL = re.compile(r"[a-z0-9_]{1,40}")
MAX_COLUMNS = 100  # maximum number of columns of a call in a file


class Role(StrEnum):
    """The models of an algorithm."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"


class CallKind(StrEnum):
    """A call's use of its role's model."""

    GENERATE = "generate"
    FORWARD = "forward"
    TRAIN = "train"


@dataclass(frozen=True)
class Call:
    """One use of one role in one iteration.

    Args:
        inputs, outputs: names of the sample columns that it reads and writes.
        passes: number of responses per sample, such as 2 for ReMax (sampled and greedy).
        label: distinguishes several calls of one role and kind in an iteration: `actor.generate.greedy`.

    Raises:
        PlanError: `passes` is below 1, or the label has other characters than lower-case letters, digits and
            underscores.
    """

    role: Role
    kind: CallKind
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    passes: int = 1
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or (self.label and not _LABEL.fullmatch(self.label)):
            raise PlanError(
                f"{self.role}.{self.kind}: a label has lower-case letters, digits and underscores (40 at most), like "
                f"greedy, not {shown(self.label)}."
            )
        if not isinstance(self.passes, int) or isinstance(self.passes, bool) or self.passes < 1:
            raise PlanError(f"{self.name}: passes is a whole number from 1, not {shown(self.passes)}.")

    @property
    def name(self) -> str:
        return f"{self.role}.{self.kind}" + (f".{self.label}" if self.label else "")

    @property
    def trains(self) -> bool:
        return self.kind is CallKind.TRAIN


class DataEdge(NamedTuple):
    """Columns that one call writes and another reads in the same iteration."""

    producer: str
    consumer: str
    columns: tuple[str, ...]


class ParameterEdge(NamedTuple):
    """The call `source` in iteration t trains the parameters of the call `target` in iteration t + 1."""

    source: str
    target: str


@dataclass(frozen=True)
class DataflowGraph:
    """The calls of one iteration.

    Args:
        sources: the columns that come from the data set.

    Raises:
        PlanError: a call or an output column occurs twice, two calls train a role, no call makes an input, or calls
            form a cycle. The message has a sentence for each problem.
    """

    calls: tuple[Call, ...]
    sources: tuple[str, ...] = ("prompts",)

    def __post_init__(self) -> None:
        problems = Problems([*self._duplicates(), *self._unknown_inputs()])
        if not self.calls:
            problems.append("a dataflow graph has one call or more; this one has none.")
        if not problems and (stuck := [c.name for c in self.calls if c.name not in self.order]):
            problems.append(f"the calls {', '.join(stuck)} wait for each other's outputs in a circle; break it.")
        problems.refuse()

    def _duplicates(self) -> list[str]:
        names = [call.name for call in self.calls]
        problems = [
            f"the call {name} appears {names.count(name)} times."
            for name in sorted(set(names))
            if names.count(name) > 1
        ]
        for role in Role:
            trainings = [call.name for call in self.calls if call.role is role and call.trains]
            if len(trainings) > 1:
                problems.append(f"{' and '.join(trainings)} both train the {role}; one call of an iteration does.")
        makers: dict[str, str] = dict.fromkeys(self.sources, "the data set")
        for call in self.calls:
            for column in call.outputs:
                if column in makers:
                    problems.append(
                        f"the column {shown(column)} is made twice, by {makers[column]} and by {call.name}."
                    )
                makers[column] = call.name
        return problems

    def _unknown_inputs(self) -> list[str]:
        columns = [*self.sources, *(column for call in self.calls for column in call.outputs)]
        return [
            f"{call.name} reads the column {shown(column)}, which no call makes; {suggest(column, columns)}"
            for call in self.calls
            for column in call.inputs
            if column not in columns
        ]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Call names in topological order; calls without dependencies between them in the order of `calls`."""
        available, order, waiting = set(self.sources), [], list(self.calls)
        while ready := next((call for call in waiting if available.issuperset(call.inputs)), None):
            order.append(ready.name)
            available.update(ready.outputs)
            waiting.remove(ready)
        return tuple(order)

    @cached_property
    def _by_name(self) -> Mapping[str, Call]:
        return {call.name: call for call in self.calls}

    def call(self, name: str) -> Call:
        """The call of that name. Raises `PlanError`, which suggests the nearest name."""
        if name not in self._by_name:
            raise PlanError(f"there is no call {shown(name)}; {suggest(name, self.order)}")
        return self._by_name[name]

    def producer(self, column: str) -> str | None:
        """The name of the call that writes `column`; `None` for a column of the data set. Raises `PlanError` if there
        is no such column."""
        if column in self.sources:
            return None
        makers = {output: call.name for call in self.calls for output in call.outputs}
        if column not in makers:
            raise PlanError(f"no call makes the column {shown(column)}; {suggest(column, [*self.sources, *makers])}")
        return makers[column]

    @cached_property
    def data_edges(self) -> tuple[DataEdge, ...]:
        """An edge for each pair of calls where one reads the other's columns, ordered by consumer and then producer."""
        edges = []
        for consumer in map(self.call, self.order):
            for producer in map(self.call, self.order):
                columns = tuple(column for column in consumer.inputs if column in producer.outputs)
                if columns:
                    edges.append(DataEdge(producer.name, consumer.name, columns))
        return tuple(edges)

    @cached_property
    def parameter_edges(self) -> tuple[ParameterEdge, ...]:
        """An edge from each training call to every other call of its role."""
        return tuple(
            ParameterEdge(source.name, target.name)
            for source in map(self.call, self.order)
            if source.trains
            for target in map(self.call, self.order)
            if target.role is source.role and not target.trains
        )

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The roles with calls, in order of first use."""
        return tuple(dict.fromkeys(self.call(name).role for name in self.order))

    @cached_property
    def trained_roles(self) -> tuple[Role, ...]:
        """The roles that a call trains, in order of first use."""
        return tuple(role for role in self.roles if self.train_call(role) is not None)

    def calls_of(self, kind: CallKind, role: Role | None = None) -> tuple[str, ...]:
        """The names of the calls of a kind, and of `role` if it is not `None`, in order."""
        calls = map(self.call, self.order)
        return tuple(call.name for call in calls if call.kind is kind and role in (None, call.role))

    def train_call(self, role: Role) -> str | None:
        """The name of the call that trains `role`; `None` for a frozen role."""
        return next((call.name for call in self.calls if call.role is role and call.trains), None)

    def uses_of(self, role: Role) -> tuple[str, ...]:
        """The names of the calls of `role` that do not train it, in order."""
        return tuple(call.name for call in map(self.call, self.order) if call.role is role and not call.trains)

    def without(self, names: Collection[str]) -> DataflowGraph:
        """The graph without these calls. Their outputs are removed from the other calls' inputs."""
        gone = {column for call in self.calls if call.name in names for column in call.outputs}
        left = [call for call in self.calls if call.name not in names]
        read = [replace(call, inputs=tuple(column for column in call.inputs if column not in gone)) for call in left]
        return replace(self, calls=tuple(read))

    def to_dict(self) -> dict[str, object]:
        return {
            "sources": list(self.sources),
            "calls": {
                call.name: {
                    "inputs": list(call.inputs),
                    "outputs": list(call.outputs),
                    **({"passes": call.passes} if call.passes != 1 else {}),
                }
                for call in self.calls
            },
        }

    @staticmethod
    def from_dict(value: object) -> DataflowGraph:
        """The inverse of `to_dict`. Raises `PlanError` for unknown calls and keys, and for values of the wrong type."""
        names = {f"{role}.{kind}": (role, kind) for role in Role for kind in CallKind}
        graph = _table("graph", value, ("sources", "calls"))
        calls_value = graph.get("calls", {})
        labelled = [
            name
            for name in (calls_value if isinstance(calls_value, Mapping) else ())
            if isinstance(name, str) and name.count(".") == 2 and name.rpartition(".")[0] in names
        ]
        written = _table("graph, calls", calls_value, [*names, *labelled])
        calls = []
        for name, columns in written.items():
            columns = _table(f"graph, {name}", columns, ("inputs", "outputs", "passes"))
            inputs, outputs = (_columns(name, columns.get(key, [])) for key in ("inputs", "outputs"))
            unlabelled, _, label = name.rpartition(".") if name in labelled else (name, "", "")
            calls.append(Call(*names[unlabelled], inputs, outputs, columns.get("passes", 1), label))
        return DataflowGraph(tuple(calls), _columns("sources", graph.get("sources", [])))


def _table(where: str, value: object, keys: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{where}: {shown(value)} is no table of {', '.join(keys)}.")
    Problems(unknown_keys(value, list(keys), f"{where}: there is no")).refuse()
    return value


def _columns(where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(column, str) for column in value):
        raise PlanError(f"graph, {where}: the columns are a list like [prompts, responses], not {shown(value)}.")
    if len(value) > MAX_COLUMNS:
        raise PlanError(f"graph, {where}: {len(value):,} columns, and {MAX_COLUMNS} are the most.")
    return tuple(value)
