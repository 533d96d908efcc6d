"""The order of calls on the devices that run ahead: complete, without a circle of ranks that wait for each other."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import separate
from trl_realloc.plan.staleness import Staleness, calls_ahead, devices_ahead
from trl_realloc.planner.iteration.ahead_order import AheadOrder, AheadTask, EndIteration, RunCall, TakeUpdate


UPDATES = 6


def shadow_critic(versions: int) -> ExecutionPlan:
    """The critic scores on a device that runs ahead."""
    return replace(separate(Cluster(1, 4)), staleness=Staleness(versions))


def critic_at_home(versions: int) -> ExecutionPlan:
    plan = separate(Cluster(1, 4))
    home = replace(plan["critic.forward"], mesh=plan.mesh("critic.train"))
    return replace(plan, assignments={**plan.assignments, "critic.forward": home}, staleness=Staleness(versions))


def apart(versions: int) -> ExecutionPlan:
    """Two devices that run ahead score for each other, a third one alone trains each role."""
    plan = separate(Cluster(1, 4))
    one = {n: Assignment(DeviceMesh(at, 1), ParallelStrategy(), plan[n].engine) for n, at in MESHES.items()}
    return replace(plan, assignments=one, staleness=Staleness(versions))


MESHES = {"actor.generate": 2, "reference.forward": 3, "reward.forward": 2, "critic.forward": 3, "actor.train": 0}
MESHES |= {"critic.train": 1}
PLANS = {"shadow critic": shadow_critic, "critic at home": critic_at_home, "apart": apart}


class Job:
    """The ranks of a job that do their orders at random moments. A call with parameters of its own trainer, and an
    update of the generation's, take all of their ranks at once, as the messages between them do."""

    def __init__(self, plan: ExecutionPlan, seed: int) -> None:
        self.plan, self.draw = plan, random.Random(seed)
        self.sources = {name: tuple(plan.mesh(name).devices) for name in plan.order}
        self.order = AheadOrder(plan, self.sources, 0)
        self.ahead = calls_ahead(plan.graph)
        self.devices = devices_ahead(plan.graph, plan.assignments)
        self.queues = {rank: deque[AheadTask]() for rank in self.devices}
        self.given: list[AheadTask] = []
        self.done = set[tuple[int, str, int]]()
        self.generated = dict.fromkeys(self.sources[self.ahead[0]], 0)  # by engine, the next batch
        self.updates = 0

    def give(self, orders: list[AheadTask]) -> None:
        self.given += orders
        for order in orders:
            ranks = self.plan.mesh(order.call).devices if isinstance(order, RunCall) else self.devices
            for rank in ranks:
                self.queues[rank].append(order)

    def report(self, iteration: int, call: str, rank: int, failed: bool = False) -> None:
        assert (iteration, call, rank) not in self.done
        for producer in filter(None, map(self.plan.graph.producer, self.plan.graph.call(call).inputs)):
            assert all((iteration, producer, source) in self.done for source in self.sources[producer])
        self.done.add((iteration, call, rank))
        self.give(self.order.done(iteration, call, rank, failed=failed))

    def trainers(self, number: int) -> dict[int, deque[tuple[str, str]]]:
        """What the ranks that train do in an iteration: calls, and their part of sending parameters."""
        queues: dict[int, deque[tuple[str, str]]] = {}
        for rank in set(range(self.plan.cluster.size)) - self.devices:
            queue = queues.setdefault(rank, deque())
            for name in self.plan.order:
                if name in self.ahead:
                    continue
                home = self.plan.graph.train_call(self.plan.graph.call(name).role)
                if rank in self.plan.mesh(name):
                    queue.append(("run", name))
                elif home is not None and rank in self.plan.mesh(home):
                    queue.append(("send", name))
                if name == "actor.train" and rank in self.plan.mesh(name):
                    queue.append(("update", ""))
        return queues

    def iteration(self, number: int) -> None:
        self.give(self.order.begin(number))
        trainers = self.trainers(number)
        ended = set[int]()
        for _ in range(10_000):
            if len(ended) == len(self.devices) and not any(trainers.values()):
                return
            moves = [*self._generations(number), *self._trainings(number, trainers), *self._orders(trainers, ended)]
            assert moves, f"all ranks wait: {self.queues}, {trainers}"
            self.draw.choice(moves)()
        raise AssertionError("no end")

    def _generations(self, number: int) -> list:
        moves = []
        for rank, batch in self.generated.items():
            if batch <= min(UPDATES - 1, self.updates + self.plan.staleness.versions):

                def end(rank: int = rank, batch: int = batch) -> None:
                    self.generated[rank] += 1
                    self.report(batch, self.ahead[0], rank)

                moves.append(end)
        return moves

    def _trainings(self, number: int, trainers: dict[int, deque[tuple[str, str]]]) -> list:
        moves = []
        for rank, queue in trainers.items():
            if not queue or queue[0][0] != "run":
                continue
            name = queue[0][1]
            producers = set(filter(None, map(self.plan.graph.producer, self.plan.graph.call(name).inputs)))
            if all((number, p, source) in self.done for p in producers for source in self.sources[p]):

                def run(rank: int = rank, name: str = name) -> None:
                    trainers[rank].popleft()
                    self.report(number, name, rank)

                moves.append(run)
        return moves

    def _orders(self, trainers: dict[int, deque[tuple[str, str]]], ended: set[int]) -> list:
        moves = []
        for rank, queue in self.queues.items():
            if not queue:
                continue
            task = queue[0]
            if isinstance(task, EndIteration):
                moves.append(lambda rank=rank: (self.queues[rank].popleft(), ended.add(rank)))
            elif isinstance(task, TakeUpdate):
                senders = [r for r, q in trainers.items() if r in self.plan.mesh("actor.train")]
                if all(q and q[0] == task for q in self.queues.values()) and all(
                    trainers[r] and trainers[r][0][0] == "update" for r in senders
                ):
                    moves.append(lambda senders=senders: self._update(trainers, senders))
            else:
                moves += self._together(task, trainers)
        return moves

    def _update(self, trainers: dict[int, deque[tuple[str, str]]], senders: list[int]) -> None:
        for queue in (*self.queues.values(), *(trainers[rank] for rank in senders)):
            queue.popleft()
        self.updates += 1

    def _together(self, task: RunCall, trainers: dict[int, deque[tuple[str, str]]]) -> list:
        """A call of all ranks of its mesh, with the ranks that send its parameters."""
        ranks = self.plan.mesh(task.call).devices
        home = self.plan.graph.train_call(self.plan.graph.call(task.call).role)
        senders = [] if home is None else [r for r in self.plan.mesh(home).devices if r in trainers]
        ready = all(self.queues[rank] and self.queues[rank][0] == task for rank in ranks)
        if not ready or not all(trainers[r] and trainers[r][0] == ("send", task.call) for r in senders):
            return []

        def run() -> None:
            for rank in ranks:
                self.queues[rank].popleft()
            for rank in senders:
                trainers[rank].popleft()
            for rank in ranks:
                self.report(task.iteration, task.call, rank)

        return [run]


@pytest.mark.parametrize("name", PLANS)
@given(seed=st.integers(0, 10**6), versions=st.integers(1, 4))
def test_a_run_ends_whatever_its_ranks_do_first(name: str, seed: int, versions: int) -> None:
    job = Job(PLANS[name](versions), seed)
    for number in range(UPDATES):
        job.iteration(number)
    for call in job.plan.order:
        for number in range(UPDATES):
            assert all((number, call, rank) in job.done for rank in job.sources[call])
    assert [order for order in job.given if isinstance(order, TakeUpdate)] == [TakeUpdate(n) for n in range(UPDATES)]
    for call in ("reference.forward", "reward.forward"):
        assert [o.iteration for o in job.given if isinstance(o, RunCall) and o.call == call] == [*range(UPDATES)]


def test_samples_are_scored_as_soon_as_all_engines_have_ended() -> None:
    plan = shadow_critic(2)
    order = AheadOrder(plan, {name: tuple(plan.mesh(name).devices) for name in plan.order}, 0)
    assert order.begin(0) == []
    assert order.done(0, "actor.generate", 2) == []
    assert order.done(0, "actor.generate", 3) == [
        RunCall(0, "critic.forward"),
        RunCall(0, "reference.forward"),
        RunCall(0, "reward.forward"),
    ]
    order.done(1, "actor.generate", 2)
    assert order.done(1, "actor.generate", 3) == [RunCall(1, "reference.forward"), RunCall(1, "reward.forward")]


def test_no_update_is_taken_after_a_training_that_failed() -> None:
    plan = shadow_critic(1)
    sources = {name: tuple(plan.mesh(name).devices) for name in plan.order}
    order, given = AheadOrder(plan, sources, 0), []
    order.begin(0)
    for name in plan.order:
        for rank in sources[name]:
            given += order.done(0, name, rank, failed="train" in name)
    assert not any(isinstance(task, TakeUpdate) for task in given)
    assert given[-1] == EndIteration(0)


def test_an_iteration_ends_after_calls_that_only_metrics_read() -> None:
    graph = ppo_graph()
    quality = Call(Role.REWARD, CallKind.FORWARD, ("prompts", "responses"), ("quality",), label="quality")
    again = Call(Role.REWARD, CallKind.FORWARD, ("prompts", "quality"), ("summary",), label="summary")
    plan = separate(Cluster(1, 2))
    calls = {**plan.assignments, quality.name: plan["reward.forward"], again.name: plan["reward.forward"]}
    plan = ExecutionPlan(plan.cluster, calls, DataflowGraph((*graph.calls, quality, again)), staleness=Staleness(1))
    order = AheadOrder(plan, {name: tuple(plan.mesh(name).devices) for name in plan.order}, 0)
    given = order.begin(0)
    for name in (name for name in plan.order if "quality" not in name and "summary" not in name):
        given += order.done(0, name, *plan.mesh(name).devices)
    assert RunCall(0, quality.name) in given and EndIteration(0) not in given
    assert RunCall(0, again.name) in order.done(0, quality.name, 1)
    assert EndIteration(0) in order.done(0, again.name, 1)
