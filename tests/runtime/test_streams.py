"""Streamed calls by the executors of all ranks of a job, in threads, with engines whose times are known."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from fake_engines import FakeEngine, FakePlacement
from mailboxes import Mailboxes
from virtual_clock import REAL, Clock, VirtualClock

from trl_realloc.algorithms.ppo import PPO
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.prompt_batches import PromptBatch
from trl_realloc.algorithms.rewards import FunctionReward
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.requests import Sampling
from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.dataflow import Call
from trl_realloc.plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
from trl_realloc.plan.presets import flatten, interleave, separate
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.iteration.stream import stream_of
from trl_realloc.planner.iteration.stream_dispatcher import Score, Withdraw
from trl_realloc.runtime.calls.call_runner import CallRunner
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step
from trl_realloc.runtime.calls.results import Iteration
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.failures.alarm import Alarm, JobFailed
from trl_realloc.runtime.messages import Channels
from trl_realloc.runtime.overlap import leader_link, stream_forwards, stream_worker
from trl_realloc.runtime.samples.routes import Share


LIMIT = 60
SCORING = ("actor.generate", "reference.forward", "reward.forward", "critic.forward")


class TimedRunner(CallRunner):
    """Runs calls, with training that takes a time, and no model.

    Attributes:
        generates_early: whether the critic's training lasts until the next update's generation has begun.
        started: of each generation engine of the job, when its generations were started.
        updates: of the run.
    """

    generates_early = False
    started: Sequence[Sequence[float]] = ()
    updates = 1

    def compute(self, call: Call, share: Share, step: Step) -> Rollouts:
        if not call.trains:
            return super().compute(call, share, step)
        self.placement.clock.sleep(0.05)
        following = step.number + 1
        if call.name == "critic.train" and self.generates_early and following < self.updates:
            end = time.monotonic() + 10
            while any(len(started) <= following for started in self.started):
                assert time.monotonic() < end, "the next generation does not begin while the critic trains"
                time.sleep(1e-3)
        policy = ("policy_loss", "clipped", "approxkl", "excess_ratio", "entropy")
        names = policy if call.name == "actor.train" else ("value_loss", "value_clipped")
        parts = [part.tensor("index") for part in share.mini_batches()]
        update = [torch.full_like(index, number) for number, index in enumerate(parts)]
        index = torch.cat(parts)
        return Rollouts(index=index, update=torch.cat(update), **{name: torch.zeros(len(index)) for name in names})


class Tokens:
    """A tokenizer as far as reward functions need one."""

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: object) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]

    def decode(self, row: Sequence[int], **options: object) -> str:
        return " ".join(map(str, row))


@dataclass
class Outcome:
    updates: list[Iteration]
    engines: list[FakeEngine]
    executors: list[Executor]
    seconds: float
    errors: list[Exception] = field(default_factory=list)

    @property
    def results(self) -> Iteration:
        return self.updates[0]


def batch_of(prompts: int, seed: int = 0) -> PromptBatch:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (prompts,), generator=draw).tolist()
    rows = [torch.randint(2, 90, (size,), generator=draw) for size in sizes]
    index = torch.arange(prompts)
    return PromptBatch(Rollouts(index=index, prompts=Ragged.of(rows, torch.long)), [{} for _ in rows])


def run(
    plan: ExecutionPlan,
    lengths: Sequence[int],
    *,
    step_s: float = 3e-4,
    token_s: float = 1e-5,
    dies: int | None = None,
    reward: object = None,
    updates: int = 1,
    trains: bool = False,
    then: ExecutionPlan | None = None,
    clock: Clock = REAL,
    delay_s: float = 0.0,
    forward_s: Callable[[str, Sequence[int]], float] | None = None,
) -> Outcome:
    """Run iterations on all ranks.

    Args:
        trains: run the training calls too. The next generation may begin early, and the critic's training waits for it
            unless the plan has a barrier.
        then: the plan of the iterations after the first.
        delay_s: how much later than the one before each engine begins its first step.
        forward_s: seconds of a forward, from the call and the tokens of its samples; by default `token_s` for each.
    """
    batches = [batch_of(len(lengths), seed) for seed in range(updates)]
    boxes, ranks = Mailboxes(30.0, clock.queue), range(plan.cluster.size)
    inner = plan["actor.generate"].strategy.tp
    firsts = tuple(plan.mesh("actor.generate").devices)[::inner]
    engines = {
        rank: FakeEngine(lengths, LIMIT, step_s, 5 if rank == dies else None, clock, number * delay_s)
        for number, rank in enumerate(firsts)
    }
    forward_s = forward_s or (lambda call, of_samples: token_s * sum(of_samples))
    budgets = {name: plan[name].strategy.micro_batch_tokens or 100 for name in plan.order}
    whole = replace(plan, streams=Streams()) if plan.streams is None else plan
    teams = {s.name: s.teams for s in stream_of(whole, [1] * len(lengths), LIMIT, budgets).scorings}
    barriers = {
        (call, number): clock.barrier(sum(map(len, team)))
        for call, of_call in teams.items()
        for number, team in enumerate(of_call)
        if sum(map(len, team)) > 1
    }
    reward = reward or (lambda prompts, completions, **_: [float(len(c)) for c in completions])
    algorithm = PPO(PPOSettings(LIMIT), 0, None)
    outcomes: dict[tuple[int, int], Iteration] = {}
    errors: dict[int, Exception] = {}
    executors = []
    for rank in ranks:
        placement = FakePlacement(plan, rank, engines.get(rank), forward_s, barriers, teams, clock)
        functions = [FunctionReward(reward, "length")]  # of each rank its own, as in processes: it keeps its times
        settings = CallSettings(Sampling(LIMIT, 1.0), 0, None, Tokens(), functions, {"length": 1.0})
        runner = TimedRunner(placement, algorithm, settings, Alarm(None))
        runner.generates_early, runner.updates = trains and not plan.barrier, updates
        runner.started = [engine.started for engine in engines.values()]
        channels = Channels(boxes.of(rank), plan.order, rank, plan.cluster.size)
        executors.append(Executor(placement, channels, algorithm, settings, runner.alarm, runner))

    def play(rank: int) -> None:
        try:
            for step, batch in enumerate(batches):
                early = batches[step + 1 : step + 2] if trains else ()
                if step == 1 and then is not None:
                    executors[rank].follow(then)
                done = executors[rank].run(batch, step, {}, only=None if trains else SCORING, following=early)
                outcomes[rank, step] = done
        except Exception as error:
            errors[rank] = error

    start = clock.monotonic()
    threads = [clock.thread(target=play, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
    results = [outcomes[0, step] for step in range(updates) if (0, step) in outcomes]
    return Outcome(results, list(engines.values()), executors, clock.monotonic() - start, list(errors.values()))


def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The time of everything that the executor does in a streamed phase."""
    clock = VirtualClock()
    monkeypatch.setattr(leader_link, "threading", SimpleNamespace(Thread=clock.thread, Lock=threading.Lock))
    monkeypatch.setattr(leader_link, "queue", SimpleNamespace(SimpleQueue=clock.queue, Empty=queue.Empty))
    monkeypatch.setattr(stream_worker, "time", clock)
    monkeypatch.setattr(stream_forwards, "time", clock)
    return clock


def assert_equal(one: Rollouts, other: Rollouts) -> None:
    assert set(one) == set(other)
    for name in one:
        if isinstance(one[name], Ragged):
            assert torch.equal(one.ragged(name).lengths, other.ragged(name).lengths), name
            assert torch.equal(one.ragged(name).values, other.ragged(name).values), name
        else:
            assert torch.equal(one.tensor(name), other.tensor(name)), name


def split_plan(devices: int) -> ExecutionPlan:
    plan = flatten(Cluster(1, devices))
    mesh, assignments = plan.mesh("actor.generate"), dict(plan.assignments)
    assignments["reference.forward"] = Assignment(mesh, ParallelStrategy(dp=devices // 2, tp=2), "megatron")
    assignments["critic.forward"] = Assignment(mesh, ParallelStrategy(dp=devices, zero_stage=3), "zero")
    return replace(plan, assignments=assignments)


PLANS = {
    "one": flatten(Cluster(1, 1)),
    "flat": flatten(Cluster(1, 4)),
    "halves": interleave(Cluster(1, 4)),
    "apart": separate(Cluster(1, 4)),
    "sharded": separate(Cluster(1, 4), zero_stage=2),
    "split": split_plan(4),
    "tensor": replace(
        flatten(Cluster(1, 4)),
        assignments={
            **flatten(Cluster(1, 4)).assignments,
            "actor.generate": Assignment(flatten(Cluster(1, 4)).cluster.mesh, ParallelStrategy(dp=2, tp=2), "vllm"),
        },
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("samples", [1, 3, 21])
def test_streamed_samples_are_those_of_whole_batches(name: str, samples: int) -> None:
    draw = random.Random(samples)
    lengths = [draw.randint(1, LIMIT) for _ in range(samples)]
    plan = PLANS[name]
    serial = run(plan, lengths)
    kinds = [Streams(), Streams(deterministic=True)]
    if plan["actor.generate"].strategy.dp > 1:
        kinds += [Streams(migration=Migration(share)) for share in (0.1, 0.5, 0.99)]
    for streams in kinds:
        streamed = run(replace(plan, streams=streams), lengths, updates=2)
        assert not streamed.errors
        assert_equal(serial.results.samples, streamed.results.samples)
        assert set(serial.results.observed) == set(streamed.results.observed)
        orders = streamed.executors[0].orders
        for call in SCORING[1:]:
            scored = [i for o in orders if isinstance(o, Score) and o.call == call for part in o.parts for i in part]
            assert sorted(scored) == list(range(samples))


def test_samples_that_move_are_neither_lost_nor_decoded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a moved sample is checked by the engine that takes it."""
    moved = 0
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.choice([3, 5, 8, 55]) for _ in range(16)]
        streams = Streams(migration=Migration(draw.uniform(0.2, 0.9), engines=draw.choice([1, 2])))
        clock = virtual_time(monkeypatch)
        out = run(replace(flatten(Cluster(1, 4)), streams=streams), lengths, step_s=5e-4, clock=clock)
        assert not out.errors
        responses = out.results.samples.ragged("responses").lengths.tolist()
        assert responses == lengths
        moved += sum(len(engine.moved) for engine in out.engines)
        withdrawn = [order for order in out.executors[0].orders if isinstance(order, Withdraw)]
        assert len(withdrawn) <= 3
    assert moved > 20


def test_a_rank_scores_while_another_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of two engines takes long; what else there is to score is scored meanwhile."""
    lengths = [LIMIT] + [2] * 15
    plan = flatten(Cluster(1, 2))
    step_s, token_s, clock = 5e-3, 1e-3, virtual_time(monkeypatch)
    serial = run(plan, lengths, step_s=step_s, token_s=token_s, clock=clock)
    streamed = run(replace(plan, streams=Streams()), lengths, step_s=step_s, token_s=token_s, clock=clock)
    # 300 ms of decoding; some 2 x 160 tokens to score, on both ranks after it or on one meanwhile
    assert streamed.seconds < serial.seconds - 0.03
    spans = [span for span in streamed.results.spans if span.call == "reference.forward"]
    long_end = max(span.end for span in streamed.results.spans if span.call == "actor.generate")
    assert min(span.start for span in spans) < long_end - 0.1


@pytest.mark.parametrize("rank", [0, 3])
def test_a_dead_engine_ends_the_iteration_on_every_rank(rank: int) -> None:
    out = run(replace(PLANS["flat"], streams=Streams(migration=Migration(0.5))), [40] * 12, dies=rank)
    assert len(out.errors) == 4
    assert all(isinstance(error, JobFailed) and "SIGKILL" in str(error) for error in out.errors)
    assert out.seconds < 20, "a rank has waited for a message until its time was over"


def test_a_failing_reward_function_ends_the_iteration_unharmed() -> None:
    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        raise ValueError("no such judge")

    out = run(replace(PLANS["split"], streams=Streams()), [5] * 12, reward=reward)
    assert len(out.errors) == 4
    assert all(isinstance(error, JobFailed) and error.is_recoverable for error in out.errors)
    assert "no such judge" in str(out.errors[0])


def test_a_deterministic_plan_scores_the_same_samples_together() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(1, LIMIT) for _ in range(20)]
    plan = replace(PLANS["flat"], streams=Streams(deterministic=True))
    runs = [run(plan, lengths, step_s=step_s) for step_s in (1e-3, 3e-3)]
    parts = [sorted((o.call, o.parts) for o in r.executors[0].orders if isinstance(o, Score)) for r in runs]
    assert parts[0] == parts[1]


def apart_plan() -> ExecutionPlan:
    """Generation and actor on two ranks, the critic on the other two."""
    low, high = DeviceMesh(0, 2), DeviceMesh(2, 2)
    low_two = Assignment(low, ParallelStrategy(dp=2), "zero")
    high_two = Assignment(high, ParallelStrategy(dp=2), "zero")
    calls = {"reference.forward": low_two, "reward.forward": high_two, "critic.forward": high_two}
    calls |= {"actor.train": low_two, "critic.train": high_two}
    return ExecutionPlan(Cluster(1, 4), {"actor.generate": Assignment(low, ParallelStrategy(dp=2), "vllm"), **calls})


@pytest.mark.parametrize("streams", [None, Streams()])
def test_generation_begins_while_the_critic_trains(streams: Streams | None) -> None:
    plan = replace(apart_plan(), streams=streams)
    lengths = [20] * 8
    early = run(plan, lengths, updates=3, trains=True)
    late = run(replace(plan, barrier=True), lengths, updates=3, trains=True)
    assert not early.errors and not late.errors
    for one, other in zip(early.updates, late.updates, strict=True):
        assert_equal(one.samples, other.samples)
        assert one.metrics == other.metrics

    def begins_before_the_end(out: Outcome) -> bool:
        training = [span for span in out.updates[0].spans if span.call == "critic.train"]
        generation = [span for span in out.updates[1].spans if span.call == "actor.generate"]
        return min(span.start for span in generation) < min(span.end for span in training)

    assert begins_before_the_end(early)
    assert not begins_before_the_end(late)


def test_an_iteration_that_was_not_expected_drops_what_was_begun() -> None:
    plan, lengths = apart_plan(), [20] * 8
    out = run(plan, lengths, updates=1, trains=True)
    executor = out.executors[0]
    executor.begin_early(Step(0), batch_of(8, 5))
    begun = executor.runner.early
    assert begun is not None and begun.generation is not None
    executor.cancel_early()
    assert begun.generation.closed and executor.runner.early is None


def test_a_run_goes_on_under_a_plan_that_overlaps_otherwise() -> None:
    lengths, plan = [5, 40, 7, 3, 22, 9, 4, 31], PLANS["flat"]
    streamed = replace(plan, streams=Streams(migration=Migration(0.5)))
    stayed = run(plan, lengths, updates=2)
    changed, back = run(plan, lengths, updates=2, then=streamed), run(streamed, lengths, updates=2, then=plan)
    assert not changed.errors and not back.errors
    for out in (changed, back):
        assert_equal(stayed.updates[1].samples, out.updates[1].samples)
    assert changed.executors[0].orders and changed.executors[0].plan is streamed
