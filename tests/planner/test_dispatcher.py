"""Whatever the order of events, each sample is generated once, and scored once by every call on ranks that are free."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import flatten, interleave, separate
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.iteration.stream import Stream, stream_of
from trl_realloc.planner.iteration.stream_dispatcher import Continue, Dispatcher, Release, Score, Withdraw


LIMIT = 40


@pytest.mark.parametrize(("samples", "replicas", "budget"), [(1024, 8, 4096), (512, 16, 700), (100, 3, 600)])
def test_replicas_that_run_in_step_get_one_micro_batch_each(samples: int, replicas: int, budget: int) -> None:
    """All of them would run as many as the one that has the most."""
    draw = random.Random(samples)
    whole = flatten(Cluster(1, replicas))
    sharded = Assignment(whole.cluster.mesh, ParallelStrategy(dp=replicas, zero_stage=3), "zero")
    plan = replace(whole, assignments={**whole.assignments, "reference.forward": sharded}, streams=Streams())
    prompts = [draw.randint(1, 60) for _ in range(samples)]
    stream = stream_of(plan, prompts, 600, dict.fromkeys(plan.order, budget))
    stream = replace(stream, scorings=tuple(s for s in stream.scorings if s.name == "reference.forward"))
    dispatcher, lengths = Dispatcher(stream), [draw.randint(1, 600 - prompt) for prompt in prompts]
    orders = [order for rank in stream.ranks for order in dispatcher.join(rank)]
    for engine, own in enumerate(stream.generation.samples):
        orders += dispatcher.finish(engine, [(index, lengths[index]) for index in own])
    scored = Counter[int]()
    while orders:
        order = orders.pop(0)
        if isinstance(order, Score):
            for part in order.parts:
                tokens = [prompts[index] + lengths[index] for index in part]
                assert sum(tokens) <= budget or len(part) == 1
                scored.update(part)
            orders += dispatcher.scored(order.number)
    assert dispatcher.is_finished and scored == Counter(range(samples))


class Job:
    """Plays engines and ranks: runs orders in the order of each rank, and reports events in a random order."""

    def __init__(self, stream: Stream, dispatcher: Dispatcher, draw: random.Random) -> None:
        self.stream, self.dispatcher, self.draw = stream, dispatcher, draw
        self.lengths = [draw.randint(1, LIMIT) for _ in stream.prompts]
        self.engines = [set(samples) for samples in stream.generation.samples]
        self.withdrawing: list[int] = []
        self.queues: dict[int, list[Score]] = {rank: [] for rank in stream.ranks}
        self.waiting_to_join = sorted(stream.ranks)
        self.generating = {rank for ranks in stream.generation.engines for rank in ranks}
        self.generated = Counter[int]()
        self.scored: Counter[tuple[str, int]] = Counter()
        self.moved, self.forwards, self.parts = 0, 0, list[tuple[str, tuple[tuple[int, ...], ...]]]()

    def take(self, orders: list) -> None:
        for order in orders:
            match order:
                case Score():
                    self.parts.append((order.call, order.parts))
                    for rank in self.team(order):
                        assert rank not in self.generating, "the rank generates"
                        assert rank not in self.waiting_to_join
                        self.queues[rank].append(order)
                case Withdraw():
                    assert self.engines[order.engine]
                    self.withdrawing.append(order.engine)
                case Continue():
                    self.moved += len(order.samples)
                    self.engines[order.engine] |= set(order.samples)
                case Release():
                    assert not self.engines[order.engine]
                    self.generating.difference_update(self.stream.generation.engines[order.engine])

    def team(self, order: Score) -> list[int]:
        scoring = next(s for s in self.stream.scorings if s.name == order.call)
        return [rank for replica in scoring.teams[order.team] for rank in replica]

    def runnable(self) -> list[Score]:
        """The orders that are next on all ranks of their team."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        return [order for order in heads if all(self.queues[rank][:1] == [order] for rank in self.team(order))]

    def join_all(self) -> None:
        for rank in self.waiting_to_join[:]:
            self.waiting_to_join.remove(rank)
            self.take(self.dispatcher.join(rank))

    def step(self) -> None:
        active = [
            engine
            for engine, samples in enumerate(self.engines)
            if samples and self.stream.generation.engines[engine][0] not in self.waiting_to_join
        ]
        events = ["join"] * bool(self.waiting_to_join) + ["finish"] * 3 * bool(active)
        events += ["withdraw"] * bool(self.withdrawing) + ["scored"] * 2 * bool(self.runnable())
        match self.draw.choice(events):  # an IndexError: every rank waits, and nothing will ever happen
            case "join":
                rank = self.waiting_to_join.pop(self.draw.randrange(len(self.waiting_to_join)))
                self.take(self.dispatcher.join(rank))
            case "finish":
                engine = self.draw.choice(active)
                left = self.engines[engine]
                chosen = self.draw.sample(sorted(left), self.draw.randint(1, len(left)))
                left -= set(chosen)
                self.generated.update(chosen)
                self.take(self.dispatcher.finish(engine, [(index, self.lengths[index]) for index in chosen]))
            case "withdraw":
                engine = self.withdrawing.pop()
                chosen = [index for index in sorted(self.engines[engine]) if self.draw.random() < 0.8]
                self.engines[engine] -= set(chosen)
                self.take(self.dispatcher.withdraw(engine, chosen))
            case "scored":
                order = self.draw.choice(self.runnable())
                for rank in self.team(order):
                    assert self.queues[rank].pop(0) == order
                self.forwards += 1
                self.scored.update((order.call, index) for part in order.parts for index in part)
                self.take(self.dispatcher.scored(order.number))


def split_plan(devices: int) -> ExecutionPlan:
    """Scoring in teams of two ranks, one sharded over all, next to generation by single ranks."""
    plan = flatten(Cluster(1, devices))
    assignments = dict(plan.assignments)
    mesh = plan.mesh("actor.generate")
    assignments["reference.forward"] = Assignment(mesh, ParallelStrategy(dp=devices // 2, tp=2), "megatron")
    assignments["critic.forward"] = Assignment(mesh, ParallelStrategy(dp=devices, zero_stage=3), "zero")
    return replace(plan, assignments=assignments)


PLANS = [maker(Cluster(1, size)) for maker in (flatten, interleave, separate) for size in (1, 2, 4, 8)]
PLANS += [split_plan(size) for size in (2, 4, 8)]


def job_of(plan: ExecutionPlan, prompts: int, seed: int, streams: Streams, budget: int) -> Job:
    plan = replace(plan, streams=streams)
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(prompts)]
    stream = stream_of(plan, lengths, LIMIT, dict.fromkeys(plan.order, budget))
    dispatcher = Dispatcher(stream, streams.migration, deterministic=streams.deterministic)
    return Job(stream, dispatcher, draw)


def run(job: Job) -> None:
    while not job.dispatcher.is_finished:
        job.step()


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PLANS),
    st.integers(1, 40),
    st.integers(0, 2**32),
    st.integers(10, 500),
    st.one_of(st.none(), st.tuples(st.floats(0.01, 0.99), st.integers(1, 3))),
    st.booleans(),
)
def test_every_sample_is_generated_and_scored_once(plan, prompts, seed, budget, migration, deterministic) -> None:
    engines = plan["actor.generate"].strategy.dp
    moves = None
    if migration is not None and migration[1] < engines and not deterministic:
        moves = Migration(*migration)
    job = job_of(plan, prompts, seed, Streams(migration=moves, deterministic=deterministic), budget)
    run(job)
    assert job.generated == dict.fromkeys(range(prompts), 1)
    calls = ("reference.forward", "reward.forward", "critic.forward")
    assert job.scored == {(call, index): 1 for call in calls for index in range(prompts)}
    assert not job.generating, "every engine was released"
    if deterministic:
        again = job_of(plan, prompts, seed, Streams(deterministic=True), budget)
        again.draw.seed(seed + 1)  # other lengths than planned do not matter, other orders of events do
        again.lengths = job.lengths
        run(again)
        assert sorted(again.parts) == sorted(job.parts), "the same samples are scored together"


def test_samples_move_once_and_to_the_fullest_engines() -> None:
    plan = flatten(Cluster(1, 4))
    job = job_of(plan, 40, 0, Streams(migration=Migration(0.3, engines=1)), 1000)
    job.join_all()
    for engine, left in enumerate((2, 5, 1, 4)):  # 12 of 40 are left at the end, which is not fewer than 0.3
        ended = sorted(job.engines[engine])[left:]
        job.engines[engine] -= set(ended)
        job.take(job.dispatcher.finish(engine, [(index, 3) for index in ended]))
    assert not job.withdrawing
    last = job.engines[1].pop()
    job.take(job.dispatcher.finish(1, [(last, 3)]))
    assert sorted(job.withdrawing) == [0, 2, 3]
    for engine in list(job.withdrawing):
        moved, job.engines[engine] = sorted(job.engines[engine]), set()
        job.take(job.dispatcher.withdraw(engine, moved))
    assert job.moved == 7
    assert len(job.engines[1]) == 11


def test_scoring_begins_while_another_engine_generates() -> None:
    job = job_of(flatten(Cluster(1, 2)), 8, 0, Streams(), 30)
    job.join_all()
    first = sorted(job.engines[0])
    job.engines[0] = set()
    job.take(job.dispatcher.finish(0, [(index, 20) for index in first]))
    assert job.queues[0] and not job.queues[1]


def test_the_last_samples_are_divided_among_the_free_ranks() -> None:
    job = job_of(flatten(Cluster(1, 4)), 8, 0, Streams(calls=("reference.forward",)), 10_000)
    job.join_all()
    for engine in range(4):
        ended, job.engines[engine] = sorted(job.engines[engine]), set()
        job.take(job.dispatcher.finish(engine, [(index, 20) for index in ended]))
    assert all(job.queues[rank] for rank in range(4))


def test_the_only_free_rank_does_not_get_all_of_the_last_samples() -> None:
    """Three ranks have forwards to run when the fourth ends its generation, and with it the last samples are there."""
    job = job_of(flatten(Cluster(1, 4)), 40, 0, Streams(calls=("reference.forward",)), 10_000)
    job.join_all()
    for engine in range(4):
        ended, job.engines[engine] = sorted(job.engines[engine]), set()
        job.take(job.dispatcher.finish(engine, [(index, 20) for index in ended]))
    forwards = [len(index) for _, parts in job.parts for index in parts]
    assert sum(forwards) > 15, "the three ranks had two forwards each before"
    assert max(forwards) <= 40 / 4


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_deterministic_plan_divides_the_batch_among_all_ranks_whatever_fits_into_a_forward(zero_stage: int) -> None:
    plan = flatten(Cluster(1, 4))
    sharded = replace(plan["reference.forward"], strategy=ParallelStrategy(dp=4, zero_stage=zero_stage))
    plan = replace(plan, assignments={**plan.assignments, "reference.forward": sharded})
    job = job_of(plan, 40, 0, Streams(calls=("reference.forward",), deterministic=True), 10_000)
    job.join_all()
    run(job)
    forwards = [sum(map(len, parts)) for _, parts in job.parts]
    assert max(forwards) == (12 if zero_stage else 3), "four forwards of each team; one team has four ranks"
    assert sum(forwards) == 40


def test_a_rank_with_nothing_to_do_does_not_wait_for_samples_that_do_not_fill_a_forward() -> None:
    job = job_of(flatten(Cluster(1, 2)), 20, 0, Streams(calls=("reference.forward",)), 10_000)
    job.join_all()

    def scored_after(engine: int, finished: list[int]) -> set[int]:
        job.engines[engine] -= set(finished)
        job.take(job.dispatcher.finish(engine, [(index, 20) for index in finished]))
        while job.queues[0]:
            job.take(job.dispatcher.scored(job.queues[0].pop(0).number))
        return {index for _, parts in job.parts for part in parts for index in part}

    of_first, (*others, last) = (sorted(job.engines[engine]) for engine in range(2))
    assert scored_after(0, of_first) < set(of_first), "the rest waits, because many samples are to come"
    assert scored_after(1, others) == {*of_first, *others}, f"nothing but sample {last} is to come"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_orders_are_the_same_for_the_same_events(size: int) -> None:
    jobs = [job_of(split_plan(size), 20, 7, Streams(migration=Migration(0.3)), 60) for _ in range(2)]
    for job in jobs:
        run(job)
    assert jobs[0].parts == jobs[1].parts
