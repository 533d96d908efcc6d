"""A job whose plan has a staleness: the executors of all its ranks in threads, with engines whose times are known, in
virtual time. What is tested with it is in `test_ahead`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engines import FakeEngine, FakePlacement, FakeScoring, logprob, token
from mailboxes import Mailboxes
from test_streams import TimedRunner, Tokens
from virtual_clock import VirtualClock

from trl_realloc.algorithms.ppo import PPO
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.prompt_batches import PromptBatch
from trl_realloc.algorithms.rewards import FunctionReward
from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.engines.requests import Sampling
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import separate
from trl_realloc.plan.staleness import Staleness
from trl_realloc.runtime.calls import call_runner, results
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step
from trl_realloc.runtime.calls.results import Iteration
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.failures.alarm import Alarm
from trl_realloc.runtime.messages import Channels
from trl_realloc.runtime.overlap import batches_ahead, in_flight, leader_link
from trl_realloc.runtime.overlap.in_flight import request_number, sample_of
from trl_realloc.runtime.samples.routes import Share


LIMIT, SAMPLES, STEPS_PER_UPDATE = 60, 12, 3
SCORING = ("actor.generate", "reference.forward", "reward.forward", "critic.forward")


class Lengths:
    """The length of each sample's response, by the number of its request."""

    def __init__(self, of_batches: Sequence[Sequence[int]]) -> None:
        self.of_batches = of_batches

    def __getitem__(self, number: int) -> int:
        iteration, sample = sample_of(number)
        return self.of_batches[iteration % len(self.of_batches)][sample]


class SlowRunner(TimedRunner):
    """Training takes a time that a test sets."""

    train_s = 0.01

    def compute(self, call: Call, share: Share, step: Step) -> Rollouts:
        made = super().compute(call, share, step)
        if call.trains:
            self.placement.clock.sleep(self.train_s)
        if call.name == "actor.train":
            self.placement.trainings += 1
        return made


class Meetings:
    """An update of parameters takes all ranks that send or take them."""

    def __init__(self, plan: ExecutionPlan, clock: VirtualClock) -> None:
        self.ranks = {}
        for source, target in plan.graph.parameter_edges:
            self.ranks[target] = {*plan.mesh(source).devices, *plan.mesh(target).devices}
        self.barriers = {name: clock.barrier(len(ranks)) for name, ranks in self.ranks.items()}
        self.versions: dict[int, int] = {}  # by rank that trains


class MeetingPlacement(FakePlacement):
    """A placement whose parameters are updated by all ranks at once."""

    trainings = 0
    meetings: Meetings

    def takes_part(self, call: str) -> bool:
        return self.rank in self.meetings.ranks.get(call, self.plan.mesh(call).devices)

    def refresh(self, call: str) -> None:
        self.refreshed.append(call)
        if call not in self.meetings.barriers:
            return
        trained = self.plan.graph.train_call(self.plan.graph.call(call).role)
        assert trained is not None
        if call == "actor.generate" and self.rank in self.plan.mesh(trained):
            self.meetings.versions[self.rank] = STEPS_PER_UPDATE * self.trainings
        self.meetings.barriers[call].wait(20)
        if call == "actor.generate" and self.rank in self.plan.mesh(call):
            (version,) = set(self.meetings.versions.values())
            engine = self.generators.get(call)
            if engine is not None and engine.version != version:
                engine.load((), version)
        self.meetings.barriers[call].wait(20)


@contextlib.contextmanager
def time_of(clock: VirtualClock) -> Iterator[None]:
    """Everything that an executor does ahead of its training takes the time of this clock."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (batches_ahead, call_runner, in_flight, results):
            patch.setattr(module, "time", clock)
        patch.setattr(leader_link, "threading", SimpleNamespace(Thread=clock.thread, Lock=threading.Lock))
        patch.setattr(leader_link, "queue", SimpleNamespace(SimpleQueue=clock.queue, Empty=queue.Empty))
        yield


@dataclass
class Job:
    """All ranks of a job."""

    plan: ExecutionPlan
    lengths: Sequence[Sequence[int]]
    step_s: float = 2e-4
    train_s: float = 0.01
    reward: Any = None
    dies: int | None = None
    executors: list[Executor] = field(default_factory=list)
    engines: dict[int, FakeEngine] = field(default_factory=dict)
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        plan, algorithm, boxes = self.plan, PPO(PPOSettings(LIMIT), 0, None), Mailboxes(20.0, self.clock.queue)
        meetings, inner = Meetings(plan, self.clock), plan["actor.generate"].strategy.tp
        reward = self.reward or (lambda prompts, completions, **_: [float(len(c)) for c in completions])
        call_settings = CallSettings(
            Sampling(LIMIT, 1.0), 0, None, Tokens(), [FunctionReward(reward, "length")], {"length": 1.0}
        )
        firsts = tuple(plan.mesh("actor.generate").devices)[::inner]
        teams = {name: [[[rank]] for rank in plan.mesh(name).devices] for name in SCORING[1:] if name in plan.order}
        if "actor.forward" in plan.order:
            teams["actor.forward"] = [[[rank]] for rank in plan.mesh("actor.forward").devices]
        for rank in range(plan.cluster.size):
            engine = None
            if rank in firsts:
                at = 5 if rank == self.dies else None
                engine = self.engines[rank] = FakeEngine(Lengths(self.lengths), LIMIT, self.step_s, at, self.clock)
            placement = MeetingPlacement(
                plan, rank, engine, lambda call, tokens: 1e-5 * sum(tokens), {}, teams, self.clock
            )
            placement.meetings = meetings
            if "actor.forward" in plan.order and placement.has("actor.forward"):
                placement.engines["actor.forward"] = [FakeScoring("logprobs", lambda t: 0.0, None, placement.clock)]
            runner = SlowRunner(placement, algorithm, call_settings, Alarm(None))
            runner.train_s = self.train_s
            channels = Channels(boxes.of(rank), plan.order, rank, plan.cluster.size)
            self.executors.append(Executor(placement, channels, algorithm, call_settings, runner.alarm, runner))

    def together(self, work: Any) -> tuple[list[Any], list[Exception]]:
        """What `work(executor)` returns on every rank, and what it raises."""
        results: dict[int, Any] = {}
        errors: list[Exception] = []

        def play(rank: int) -> None:
            try:
                results[rank] = work(self.executors[rank])
            except Exception as error:
                errors.append(error)

        threads = [self.clock.thread(target=play, args=(rank,)) for rank in range(len(self.executors))]
        with time_of(self.clock):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(40)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        return [results[rank] for rank in sorted(results)], errors

    def train(
        self, batches: Sequence[PromptBatch], first: int = 0, last: int | None = None
    ) -> tuple[list[Iteration], list[Exception]]:
        """The results of updates on rank 0, and the errors of all ranks."""
        made: list[Iteration] = []
        ahead = self.plan.staleness.versions + 1

        def work(executor: Executor) -> None:
            for step in range(first, len(batches) if last is None else last):
                done = executor.run(batches[step], step, {}, following=batches[step + 1 : step + 1 + ahead])
                if executor.rank == 0:
                    made.append(done)

        _, errors = self.together(work)
        return made, errors


def stale(plan: ExecutionPlan, versions: int) -> ExecutionPlan:
    return replace(plan, staleness=Staleness(versions))


def apart() -> ExecutionPlan:
    """Two devices that run ahead score for each other, rank 0 among them; two others train a role each."""
    meshes = {"actor.generate": 0, "reference.forward": 1, "reward.forward": 0, "critic.forward": 1}
    meshes |= {"actor.train": 2, "critic.train": 3}
    plan = separate(Cluster(1, 4))
    assignments = {n: Assignment(DeviceMesh(at, 1), ParallelStrategy(), plan[n].engine) for n, at in meshes.items()}
    return replace(plan, assignments=assignments)


def critic_at_home() -> ExecutionPlan:
    plan = separate(Cluster(1, 4))
    home = replace(plan["critic.forward"], mesh=plan.mesh("critic.train"))
    return replace(plan, assignments={**plan.assignments, "critic.forward": home})


PLANS = {
    "halves": separate(Cluster(1, 4)),
    "two": separate(Cluster(1, 2)),
    "critic at home": critic_at_home(),
    "apart": apart(),
}


def check(step: int, samples: Rollouts, lengths: Sequence[int]) -> None:
    """Every sample of an update is there, with its own tokens and what the calls made of them."""
    responses = samples.ragged("responses")
    assert responses.lengths.tolist() == list(lengths)
    places = [(request_number(step, index), at) for index, length in enumerate(lengths) for at in range(length)]
    assert responses.values.tolist() == [token(*place) for place in places]
    assert samples.ragged("logprobs").values.tolist() == pytest.approx([logprob(*place) for place in places])
    assert samples.ragged("ref_logprobs").values.tolist() == pytest.approx([token(*place) / 100 for place in places])
    assert samples.ragged("values").lengths.tolist() == [length + 1 for length in lengths]


def lengths_of(draw: Any, batches: int) -> list[list[int]]:
    return [[draw.choice([2, 3, 5, 8, 13, 50]) for _ in range(SAMPLES)] for _ in range(batches)]
