"""The planner's simulation of streams gives the forwards that the executor runs, in the same order, and moves the same
samples after the same tokens.

The executor's ranks run in virtual time. Every duration is the same in both. None of them makes two unrelated events
fall on the same time, because which of those is handled first means nothing, and is not the same in both: the engines'
steps are shifted against each other, no two samples have the same number of tokens, and a forward's seconds are not
proportional to its tokens.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from fake_engines import BUDGET
from test_streams import LIMIT, PLANS, batch_of, run, virtual_time
from virtual_clock import VirtualClock

from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.streams import Migration, Streams
from trl_realloc.planner.cost.analytic_rates import AnalyticRates
from trl_realloc.planner.cost.hardware import DEVICES
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.iteration import stream_simulation
from trl_realloc.planner.iteration.stream import Stream, stream_of
from trl_realloc.planner.iteration.stream_cost import StreamPrices
from trl_realloc.planner.iteration.stream_dispatcher import Score
from trl_realloc.runtime.overlap import stream_worker


STEP_S = 10e-3
SHIFT_S = STEP_S / 4  # between the steps of two engines, of four
POLL_S = 0.9 * SHIFT_S  # a rank sees every order before the step ends in which it was given
TOKEN_S = {"reference.forward": 1.1e-3, "reward.forward": 0.7e-3, "critic.forward": 1.3e-3}
MESSAGE_S = 1e-7  # next to nothing, as the executor's; but an engine begins its next step before the orders come
SEEDS = {"plain": 3, "deterministic": 3, "migrated": 6}


@dataclass
class Found:
    """What was scored, in its order, and the tokens of each sample that was moved."""

    forwards: list[tuple[str, int, tuple[tuple[int, ...], ...]]]
    moved: dict[int, int]


def forward_s(call: str, lengths: Sequence[int]) -> float:
    return TOKEN_S[call] * sum(length**0.9 for length in lengths)


@dataclass(frozen=True)
class KnownTimes(StreamPrices):
    """The times and samples of the fake engines."""

    known: Sequence[int] = ()
    engines: Iterator[int] = field(default_factory=itertools.count)

    @property
    def stream(self) -> Stream:  # type: ignore[override]
        prompts = batch_of(len(self.known)).prompts.ragged("prompts").lengths.tolist()
        budgets = dict.fromkeys(self.plan.order, BUDGET)
        return stream_of(self.plan, prompts, LIMIT, budgets)

    def lengths(self, generation: str) -> list[int]:
        return list(self.known)

    def slots(self, generation: str) -> int:
        return len(self.known)

    def room(self, generation: str) -> float:
        return math.inf

    def start(self, generation: str) -> float:
        return SHIFT_S * next(self.engines)  # once for each, in their order

    def end(self, generation: str) -> float:
        return 0.0

    def step(self, generation: str, batch: int, cached: float) -> float:
        return STEP_S

    def prefill(self, generation: str, lengths: Sequence[int], shared: float = 0.0) -> float:
        return 0.0

    def again(self, name: str, seconds: float) -> float:
        return 0.0

    def score(self, scoring: str, parts: Sequence[Sequence[int]], *, loads: bool) -> float:
        return max(forward_s(scoring, part) for part in parts)


def simulated(plan: ExecutionPlan, lengths: Sequence[int]) -> Found:
    work = Workload(len(lengths), 5.0, tuple(lengths))
    prices = KnownTimes(plan, {}, Pricing(plan.cluster, work, AnalyticRates(DEVICES["h100"])), known=tuple(lengths))
    seconds = {name: 0.0 for name in plan.order if name not in plan.streamed}
    simulation = stream_simulation._Simulation(prices, seconds, {})
    simulation.run()
    forwards = [(order.call, order.team, order.parts) for order in simulation.result().forwards]
    return Found(forwards, dict(simulation.has))


def executed(plan: ExecutionPlan, lengths: Sequence[int], clock: VirtualClock) -> Found:
    def reward(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
        sizes = [len(f"{p} {c}".split()) for p, c in zip(prompts, completions, strict=True)]
        clock.sleep(forward_s("reward.forward", sizes))
        return [0.0] * len(completions)

    times = {"step_s": STEP_S, "delay_s": SHIFT_S, "forward_s": forward_s}
    out = run(plan, lengths, reward=reward, clock=clock, **times)
    assert not out.errors
    orders = [(o.call, o.team, o.parts) for o in out.executors[0].orders if isinstance(o, Score)]
    return Found(orders, {index: tokens for engine in out.engines for index, tokens in engine.moved.items()})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = virtual_time(monkeypatch)
    monkeypatch.setattr(stream_worker, "TASKS_POLL_S", POLL_S)
    monkeypatch.setattr(stream_simulation, "MESSAGE", MESSAGE_S)
    return clock


def drawn_lengths(draw: random.Random) -> list[int]:
    """Tokens of responses; no two samples have as many with their prompts."""
    samples, longest = draw.randint(1, 24), draw.choice([26, 40, LIMIT])
    prompts = batch_of(samples).prompts.ragged("prompts").lengths.tolist()
    lengths, taken = list[int](), set[int]()
    for prompt in prompts:
        free = [length for length in range(1, longest + 1) if prompt + length not in taken]
        lengths.append(draw.choice(free))
        taken.add(prompt + lengths[-1])
    return lengths


def drawn_streams(draw: random.Random, kind: str, engines: int) -> Streams:
    if kind != "migrated":
        return Streams(deterministic=kind == "deterministic")
    migration = Migration(draw.uniform(0.05, 0.95), draw.randint(1, engines - 1), draw.choice([1, 1, 20, 45]))
    return Streams(migration=migration)


CASES = [
    (name, kind, seed)
    for name, plan in PLANS.items()
    for kind, seeds in SEEDS.items()
    for seed in range(seeds)
    if kind != "migrated" or plan["actor.generate"].strategy.dp > 1
]
CASES += [("flat", "migrated", 10)]  # the last sample of an engine ends in the step after which it is withdrawn


@pytest.mark.parametrize(("name", "kind", "seed"), CASES)
def test_the_executor_runs_the_forwards_of_simulation(name: str, kind: str, seed: int, clock: VirtualClock) -> None:
    draw = random.Random(f"{name} {kind} {seed}")
    engines, lengths = PLANS[name]["actor.generate"].strategy.dp, drawn_lengths(draw)
    plan = replace(PLANS[name], streams=drawn_streams(draw, kind, engines))
    expected, found = simulated(plan, lengths), executed(plan, lengths, clock)
    assert found.moved == expected.moved, (plan.streams, lengths)
    assert found.forwards == expected.forwards, (plan.streams, lengths)
