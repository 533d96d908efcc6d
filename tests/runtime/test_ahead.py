"""Plans with a staleness, by the executors of all ranks of a job, in threads, with engines whose times are known.

Everything here happens in virtual time, so that no test depends on how busy the machine is.
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
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mailboxes import Mailboxes
from test_streams import TimedRunner, Tokens, batch_of
from virtual_clock import VirtualClock

from trl_realloc.algorithms.ppo import PPO, PPOSettings
from trl_realloc.algorithms.prompt_batches import PromptBatch
from trl_realloc.algorithms.rewards import FunctionReward
from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.engines.base import Sampling
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import separate
from trl_realloc.plan.staleness import Staleness
from trl_realloc.runtime import ahead_leader, batches_ahead, call_runner, in_flight, results
from trl_realloc.runtime.calls import EVALUATION_STEP, CallSettings, Step
from trl_realloc.runtime.drawn_samples import DrawnSamples
from trl_realloc.runtime.exchange import Exchange
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.failures.alarm import Alarm, JobFailed
from trl_realloc.runtime.in_flight import request_number, sample_of
from trl_realloc.runtime.results import IN_FLIGHT_S, POLICY_VERSIONS, Iteration
from trl_realloc.runtime.shares import Share


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
        patch.setattr(ahead_leader, "threading", SimpleNamespace(Thread=clock.thread, Lock=threading.Lock))
        patch.setattr(ahead_leader, "queue", SimpleNamespace(SimpleQueue=clock.queue, Empty=queue.Empty))
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
            exchange = Exchange(plan, rank, messages=boxes.of(rank))
            self.executors.append(Executor(placement, exchange, algorithm, call_settings, runner.alarm, runner))

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


@pytest.mark.parametrize("name", PLANS)
@given(draw=st.randoms(use_true_random=False), versions=st.integers(1, 3), train_s=st.sampled_from([0.0, 0.004]))
@settings(max_examples=6, deadline=None, phases=[Phase.generate])
def test_every_sample_is_trained_once_and_none_is_too_old(name: str, draw: Any, versions: int, train_s: float) -> None:
    lengths = lengths_of(draw, 5)
    batches = [batch_of(SAMPLES, seed) for seed in range(5)]
    job = Job(stale(PLANS[name], versions), lengths, train_s=train_s)
    made, errors = job.train(batches)
    assert not errors
    assert len(made) == len(batches)
    for step, other in enumerate(made):
        check(step, other.samples, lengths[step])
        drawn_by = other.samples.ragged(POLICY_VERSIONS)
        assert drawn_by.lengths.tolist() == lengths[step]
        assert step - versions <= int(drawn_by.values.min()) and int(drawn_by.values.max()) <= step
        assert other.observed["staleness/oldest"] <= versions
        assert float(other.samples.tensor(IN_FLIGHT_S).min()) >= 0
    assert not job.executors[-1].ahead.batches.in_flight.keys() - {4}, "nothing is under way at the end"


def test_samples_of_later_batches_are_generated_while_one_trains() -> None:
    lengths = [[20] * SAMPLES] * 6
    batches = [batch_of(SAMPLES, seed) for seed in range(6)]
    made, errors = Job(stale(PLANS["halves"], 1), lengths, step_s=1e-3, train_s=0.1).train(batches)
    assert not errors
    ages = [one.observed["staleness/mean"] for one in made]
    assert ages[0] == 0 and all(0 < age <= 1 for age in ages[1:])
    for one, following in zip(made, made[1:], strict=False):
        trained = min(span.start for span in one.spans if span.call == "critic.train")
        generated = max(span.end for span in following.spans if span.call == "actor.generate")
        assert generated < trained + 0.2, "the next batch is there when this one has been trained"


def test_a_straggler_makes_the_trainer_wait_and_breaks_no_bound() -> None:
    lengths = [[3] * SAMPLES, [3] * (SAMPLES - 1) + [60], [3] * SAMPLES, [3] * SAMPLES]
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    made, errors = Job(stale(PLANS["halves"], 2), lengths, step_s=3e-3, train_s=0.0).train(batches)
    assert not errors
    assert [len(one.samples) for one in made] == [SAMPLES] * 4
    assert all(one.observed["staleness/oldest"] <= 2 for one in made)
    for step, one in enumerate(made):
        check(step, one.samples, lengths[step])


def test_an_evaluation_stops_the_engines_and_the_samples_go_on() -> None:
    lengths = [[40] * SAMPLES] * 4
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    job = Job(stale(PLANS["halves"], 1), lengths, step_s=1e-2, train_s=0.0)
    first, errors = job.train(batches, last=2)
    evaluated, more = job.together(lambda e: e.run(batch_of(5, 9), EVALUATION_STEP, {}, only=SCORING))
    assert not errors and not more
    assert POLICY_VERSIONS not in evaluated[0].samples
    stopped = {number for engine in job.engines.values() for number in engine.moved}
    assert stopped, "nothing was under way"
    rest, errors = job.train(batches, first=2)
    assert not errors
    for step, one in enumerate([*first, *rest]):
        check(step, one.samples, lengths[step])


@pytest.mark.parametrize("other", PLANS)
def test_a_resumed_run_draws_no_token_again(other: str) -> None:
    lengths = [[7, 45, 9, 3, 50, 2, 8, 30, 5, 5, 41, 6]] * 5
    batches = [batch_of(SAMPLES, seed) for seed in range(5)]
    job = Job(stale(PLANS["halves"], 2), lengths, step_s=1e-2, train_s=0.0)
    job.train(batches, last=2)
    saved, _ = job.together(lambda e: e.samples_under_way(2))
    assert saved[1:] == [None] * 3
    drawn = DrawnSamples.from_tensors(saved[0].to_tensors())
    assert drawn == saved[0]
    unfinished = [d for of_batch in drawn.samples.values() for d in of_batch.values() if d.stopped is None]
    assert len(drawn) > len(unfinished) > 0

    resumed = Job(stale(PLANS[other], 2), lengths, step_s=1e-3, train_s=0.0)
    for executor in resumed.executors:
        executor.placement.trainings = 2
    resumed.together(lambda e: e.go_on_with(drawn if e.rank == 0 else None))
    rest, errors = resumed.train(batches, first=2)
    assert not errors
    for step, again in enumerate(rest, 2):
        check(step, again.samples, lengths[step])
        versions = again.samples.ragged(POLICY_VERSIONS).rows()
        for index, of_sample in drawn.samples.get(step, {}).items():
            before = [drawn.update_of[version] for version in of_sample.versions]
            assert versions[index].tolist()[: len(before)] == before, "a token was drawn again"


def test_samples_that_another_plan_would_train_too_late_are_drawn_anew() -> None:
    batch = batch_of(2, 0)
    made = Job(stale(PLANS["two"], 2), [[40, 40]] * 4, step_s=1e-3, train_s=0.0)
    batches = [batch_of(2, seed) for seed in range(4)]
    made.train(batches, last=1)
    drawn = made.together(lambda e: e.samples_under_way(1))[0][0]
    oldest = {n: {drawn.update_of[v] for d in of.values() for v in d.versions} for n, of in drawn.samples.items()}
    assert oldest[2] == {0}
    sampling = Sampling(LIMIT, 1.0)
    assert set(drawn.of_batch(2, batches[2], 2, sampling)) == {0, 1}
    assert not drawn.of_batch(2, batches[2], 1, sampling)
    assert not drawn.of_batch(2, batch, 2, sampling), "the prompts are others"
    assert not drawn.of_batch(2, batches[2], 2, Sampling(LIMIT // 2, 1.0)), "the limit is another"


def test_samples_that_end_between_two_iterations_are_kept() -> None:
    lengths = [[30, 40, 50, 58] * 3] * 4
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    job = Job(stale(PLANS["halves"], 2), lengths, step_s=1e-2, train_s=0.0)
    job.train(batches, last=1)
    at_once = job.together(lambda e: e.samples_under_way(1))[0][0]
    job.clock.sleep(0.3)  # the engines go on while a checkpoint is written
    later = job.together(lambda e: e.samples_under_way(1))[0][0]
    for number, drawn in at_once.samples.items():
        assert drawn.keys() <= later.samples[number].keys()
        for index, of_sample in drawn.items():
            assert later.samples[number][index].token_ids[: len(of_sample.token_ids)] == of_sample.token_ids
    ended = [d for of_batch in later.samples.values() for d in of_batch.values() if d.stopped is not None]
    assert len(ended) > sum(d.stopped is not None for of in at_once.samples.values() for d in of.values())


def test_an_engine_that_dies_between_two_iterations_fails_where_its_samples_are_needed() -> None:
    lengths = [[40] * SAMPLES] * 4
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    job = Job(stale(PLANS["halves"], 1), lengths, step_s=1e-2, train_s=0.0)
    job.train(batches, last=1)
    for engine in job.engines.values():
        engine.dies_at = 0
    _, errors = job.together(lambda e: e.cancel_early())
    assert not errors
    made, errors = job.train(batches, first=1)
    assert len(made) < 3 and len(errors) == 4  # of what had been generated something may be trained
    assert all(isinstance(error, JobFailed) and "SIGKILL" in str(error) for error in errors)


@pytest.mark.parametrize("name", ["halves", "apart"])
def test_a_dead_engine_ends_the_job_on_every_rank(name: str) -> None:
    plan = stale(PLANS[name], 2)
    batches = [batch_of(SAMPLES, seed) for seed in range(4)]
    made, errors = Job(plan, [[40] * SAMPLES] * 4, dies=plan.mesh("actor.generate").leader).train(batches)
    assert not made
    assert len(errors) == 4
    assert all(isinstance(error, JobFailed) and "SIGKILL" in str(error) for error in errors)


def test_a_reward_that_fails_ends_the_iteration_that_would_train_on_it() -> None:
    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        if any(len(completion.split()) == 59 for completion in completions):
            raise ValueError("no such judge")
        return [0.0] * len(completions)

    lengths = [[3] * SAMPLES, [3] * SAMPLES, [59] + [3] * (SAMPLES - 1), [3] * SAMPLES]
    job = Job(stale(PLANS["halves"], 3), lengths, reward=reward)
    made, errors = job.train([batch_of(SAMPLES, seed) for seed in range(4)])
    assert len(made) == 2, "what was scored before is trained"
    assert len(errors) == 4
    assert all(isinstance(error, JobFailed) and error.is_unharmed for error in errors)
    assert "no such judge" in str(errors[0])
    causes = [error.__cause__ for error in errors if error.__cause__ is not None]
    assert causes and all("no such judge" in str(cause) for cause in causes)


def test_another_batch_than_expected_is_drawn_anew() -> None:
    lengths = [[20] * SAMPLES] * 3
    job = Job(stale(PLANS["halves"], 1), lengths)
    first = [batch_of(SAMPLES, seed) for seed in range(3)]
    second = [batch_of(SAMPLES, seed) for seed in range(5, 8)]
    job.train(first, last=1)
    made, errors = job.train(second)
    assert not errors
    for batch, one in zip(second, made, strict=True):
        assert one.samples.ragged("prompts").values.tolist() == batch.prompts.ragged("prompts").values.tolist()
