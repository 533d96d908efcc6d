"""When the engine of a call sleeps, with a double in its place: a CPU has no memory that it would give back."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_realloc.engines.base import EngineDied, EngineError
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten, with_sleeping_engines
from trl_realloc.runtime.placement import engine_builder
from trl_realloc.runtime.placement.engine_builder import EngineBuilder
from trl_realloc.runtime.placement.placement import Placement


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


def test_nothing_is_prefetched_into_the_memory_that_an_engine_takes_when_it_wakes() -> None:
    for plan, moved in ((flatten(Cluster(1, 1)), 1), (with_sleeping_engines(flatten(Cluster(1, 1))), 0)):
        hook, made = Hook(), placement(plan)
        made.reallocations, made.residents = {}, {"reference.forward": [hook]}
        made.prefetch("reference.forward", beside=["actor.generate"])
        assert hook.prefetched == moved
        made.prefetch("reference.forward", beside=["critic.train"])
        assert hook.prefetched == moved + 1


class Hook:
    def __init__(self) -> None:
        self.prefetched = 0

    def prefetch(self) -> None:
        self.prefetched += 1


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
    for call, slept in (("actor.generate", 0), ("actor.generate/greedy", 1)):
        with made.resident(call):
            pass
        assert engine.slept == slept


@pytest.mark.parametrize("problem", [None, "no answer"])
def test_no_tensor_rank_goes_on_before_its_engine_sleeps(problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_sleeping_engines(flatten(Cluster(1, 2), generation_engine="vllm")).to_dict()
    made["calls"]["actor.generate"] |= {"dp": 1, "tp": 2}
    plan = ExecutionPlan.from_dict(made)
    meeting, values, slept = threading.Barrier(2), [None, None], threading.Event()

    class Slow:
        def wait_ready(self) -> None:
            pass

        def sleep(self) -> None:
            time.sleep(0.2)
            if problem is not None:
                raise EngineError(problem)
            slept.set()

    def all_gather_object(value: Any, rank: int) -> list[Any]:
        """Of two ranks that are threads; `rank` is in place of the process group."""
        values[rank] = value
        meeting.wait(30)
        found = list(values)
        meeting.wait(30)
        return found

    def start(rank: int) -> tuple[bool, str | None]:
        parts = {"plan": plan, "rank": rank, "control": rank, "generators": {}, "engines": {}, "engine_processes": None}
        roles: Any = defaultdict(lambda: SimpleNamespace(config=None))
        options = SimpleNamespace(device=torch.device("cuda"))
        placement = SimpleNamespace(
            **parts, roles=roles, options=options, has=lambda _: True, role_of=lambda _: "actor"
        )
        try:
            EngineBuilder(placement).start_vllm()  # type: ignore[arg-type]
        except EngineError as error:
            return slept.is_set(), str(error)
        return slept.is_set(), None

    monkeypatch.setattr(engine_builder, "all_gather_object", all_gather_object)
    monkeypatch.setattr(engine_builder, "release_cached_memory", lambda _: None)
    monkeypatch.setattr(engine_builder, "start_vllm", lambda _plan, _call, rank, *_: Slow() if rank == 0 else None)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, range(2))) == [(problem is None, problem)] * 2
