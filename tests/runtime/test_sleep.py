"""When the engine of a call sleeps, with a double in its place: a CPU has no memory that it would give back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_realloc.engines.base import EngineDied
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import flatten, with_sleeping_engines
from trl_realloc.runtime.placement import Placement


class Engine:
    def __init__(self) -> None:
        self.slept = 0

    def sleep(self) -> None:
        self.slept += 1


def placement(plan: Any, **generators: Engine) -> Any:
    """A placement's plan and generators alone."""
    made: Any = object.__new__(Placement)
    made.plan, made.generators, made.residents, made.dropped = plan, generators, {}, {}
    return made


def test_an_engine_sleeps_after_its_call_where_the_plan_says_so() -> None:
    for plan, times in ((flatten(Cluster(1, 1)), 0), (with_sleeping_engines(flatten(Cluster(1, 1))), 1)):
        engine = Engine()
        made = placement(plan, **{"actor.generate": engine})
        with made.resident("actor.generate"):
            assert engine.slept == 0
        with made.resident("critic.train"):
            pass
        assert engine.slept == times


def test_an_engine_that_failed_is_not_asked_to_sleep() -> None:
    engine = Engine()
    made = placement(with_sleeping_engines(flatten(Cluster(1, 1))), **{"actor.generate": engine})
    with pytest.raises(EngineDied), made.resident("actor.generate"):
        raise EngineDied("killed")
    assert engine.slept == 0


def test_an_engine_stays_awake_for_the_next_call_that_it_runs() -> None:
    whole = with_sleeping_engines(flatten(Cluster(1, 1)))
    generate, mesh = whole["actor.generate"], whole.mesh("actor.generate")

    class Twice(SimpleNamespace):  # a graph of two generations by one engine, one after the other
        order = ("actor.generate", "actor.generate/greedy", "actor.train")

        def __getitem__(self, name: str) -> Any:
            return generate

        def mesh(self, name: str) -> Any:
            return mesh

    engine = Engine()
    made = placement(Twice(), **{"actor.generate": engine, "actor.generate/greedy": engine})
    assert not made._sleeps_after("actor.generate")
    assert made._sleeps_after("actor.generate/greedy")
