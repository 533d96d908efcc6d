"""Simulates an iteration whose scoring begins while samples are being generated, sample by sample.

The simulated events are reported to the `Dispatcher` of the runtime, which decides what is scored where. The calls that
do not stream run as in `simulate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...plan.generation_spans import GenerationSpans
from ...plan.spans import Span
from .activities import Activities, Event, devices_by_node
from .device_queues import DeviceQueues, Work
from .simulate import IterationTask, Overlap, tasks_of
from .stream_cost import StreamPrices
from .stream_dispatcher import Continue, Dispatcher, Order, Release, Score, Withdraw
from .stream_engine import EngineWork, SimulatedEngine


MESSAGE = 1e-3  # seconds of a report to the dispatcher, or of an order to a rank; assumed, not measured


@dataclass(frozen=True)
class StreamedIteration:
    """An iteration with streams in the steady state.

    Args:
        seconds: seconds from the end of an iteration's streams to the end of the next iteration's streams.
        streaming: the part of `seconds` from the start of the first engine to the end of the streams.
        moved: number of samples that another engine continued.
        decoded: number of tokens that all engines decoded.
        forwards: scoring forwards of all teams in the order in which they were assigned, of simulated samples.
        spans: spans of the calls and reallocations; scoring calls and generation have several on a device.
    """

    seconds: float
    streaming: float
    moved: int
    decoded: int
    forwards: tuple[Score, ...]
    spans: tuple[Span, ...]


def simulate_streams(
    prices: StreamPrices, seconds: Mapping[str, float], moves: Mapping[str, float]
) -> StreamedIteration:
    """An iteration of a plan that has streams.

    Args:
        seconds: seconds of each call that does not stream.
        moves: seconds of each reallocation, by the call that receives the parameters.

    Raises:
        KeyError: a call that does not stream has no seconds.
    """
    simulation = _Simulation(prices, seconds, moves)
    simulation.run()
    return simulation.result()


class _Simulation:
    """Simulates from the end of one iteration's streams to the end of the next: first the calls that do not stream,
    then the streams, which begin as soon as the plan allows. In the steady state all iterations are alike."""

    def __init__(self, prices: StreamPrices, seconds: Mapping[str, float], moves: Mapping[str, float]) -> None:
        plan, stream = prices.plan, prices.stream
        self.plan, self.prices, self.stream = plan, prices, stream
        self.activities = Activities(prices.pricing.rates.sharing)
        self.works = DeviceQueues(self.activities, self._nodes)
        streams = plan.streams
        assert streams is not None, "a plan with streams"
        self.dispatcher = Dispatcher(stream, streams.migration, deterministic=streams.deterministic)
        self.spans: list[Span] = []
        self.rest_spans: list[Span] = []
        self.forwards: list[Score] = []
        self.moved = 0
        self.heard: set[int] = set()  # ranks that have joined, as the dispatcher knows
        self.held: dict[int, list[Event]] = {}  # rank -> reports of its engine before the rank joined
        self.replicas = {scoring.name: scoring.teams for scoring in stream.scorings}
        self.teams = {  # (call, number of the team) -> its ranks
            (name, number): [rank for replica in team for rank in replica]
            for name, teams in self.replicas.items()
            for number, team in enumerate(teams)
        }
        self.queues: dict[int, deque[Score]] = {rank: deque() for rank in stream.ranks}
        self.occupied: set[int] = set()  # ranks that run a forward, or whose engine frees its memory
        self.latest: dict[int, str] = {}  # rank -> call of its latest forward
        self.has: dict[int, int] = {}  # sample -> generated tokens, for samples that move
        self.generation = stream.generation
        self.generated: list[list[GenerationSpans]] = []  # per engine and device; empty before the start
        self.lengths = prices.lengths(self.generation.name)
        self.engines = [self._engine(number) for number in range(len(self.generation.engines))]
        self._give_works(seconds, moves)

    # --- the calls that do not stream, reallocations, and joining ----------------------------------------------------

    def run(self) -> None:
        self.works.advance()
        while not self.dispatcher.is_finished:
            self.activities.next()

    def _give_works(self, seconds: Mapping[str, float], moves: Mapping[str, float]) -> None:
        """Queues the calls that do not stream, and then the reallocations to the streamed calls.

        An early generation waits only for the calls on its devices and for the training of its parameters. Otherwise it
        waits for all calls, as scoring does. A rank joins when it has nothing else to do.
        """
        plan, streamed = self.plan, set(self.plan.streamed)
        tasks = tasks_of(plan, {**seconds, **dict.fromkeys(streamed, 0.0)}, moves)
        rest: dict[int, Work] = {}  # task index -> work
        for index, task in enumerate(tasks):
            if not task.calls & streamed:
                needs = [rest[other] for other in task.after if other in rest]
                rest[index] = self._give(task, task.seconds, needs, self.rest_spans)
        start = Work("", (), 0.0, begins=self._start_engines)
        for task in tasks:
            if not task.calls & streamed:
                continue
            trained: Iterable[Work] = rest.values()
            if task.early and Overlap.of(plan) is not Overlap.NONE:
                trained = () if task.previous is None else (rest[task.previous],)
            if task.moves:
                self._give(task, task.seconds, trained, self.spans)
            elif task.name == self.generation.name:
                start.waits_for = {*trained, *self.works.latest(task.devices)}
        self.works.give(start)
        generating = {rank for engine in self.generation.engines for rank in engine}
        for rank in sorted(self.stream.ranks):
            needs = [*rest.values(), *self.works.latest([rank]), *([start] if rank in generating else [])]
            self.works.give(Work("", (), 0.0, needs=needs, begins=partial(self._join, rank)))

    def _give(self, task: IterationTask, seconds: float, needs: Iterable[Work], spans: list[Span]) -> Work:
        def end(work: Work) -> None:
            spans.extend(Span(task.name, device, work.start, work.end, 0) for device in task.devices)

        work = Work(task.name, task.devices, seconds, needs=needs, ends=end)
        self.works.give(work)
        return work

    def _start_engines(self, _: Work) -> None:
        name, now = self.generation.name, self.activities.now
        self.generated = [
            [GenerationSpans(name, device, 0, now) for device in devices] for devices in self.generation.engines
        ]
        for engine in self.engines:
            engine.start()

    def _join(self, rank: int, _: Work) -> None:
        self._report(partial(self._joined, rank))

    def _joined(self, rank: int) -> None:
        self.heard.add(rank)
        self._take(self.dispatcher.join(rank))
        for event in self.held.pop(rank, []):
            event()

    # --- engines -----------------------------------------------------------------------------------------------------

    def _engine(self, number: int) -> SimulatedEngine:
        name = self.generation.name
        work = EngineWork(
            name,
            self._nodes(self.generation.engines[number]),
            self.stream.prompts,
            self.lengths,
            whole_batches=self.plan[name].engine == "transformers",
        )
        return SimulatedEngine(
            work,
            self.generation.samples[number],
            self.prices,
            self.activities,
            finished=partial(self._finished, number),
            withdrawn=partial(self._withdrawn, number),
        )

    def _finished(self, number: int, samples: Sequence[int]) -> None:
        ended = [(index, self.lengths[index]) for index in samples]
        for spans in self.generated[number]:
            tokens = self._weighted(sum(tokens for _, tokens in ended))
            spans.finished(self.activities.now, self._weighted(len(samples)), tokens)
        self._report_of(number, lambda: self.dispatcher.finish(number, ended))

    def _withdrawn(self, number: int, samples: Mapping[int, int]) -> None:
        self.moved += self._weighted(len(samples))
        self.has |= samples
        self._report_of(number, lambda: self.dispatcher.withdraw(number, list(samples)))

    def _report_of(self, number: int, report: Callable[[], list[Order]]) -> None:
        """Reports an engine's event as soon as its rank has joined."""
        rank = self.generation.engines[number][0]

        def tell() -> None:
            self._take(report())

        def arrive() -> None:
            self.held.setdefault(rank, []).append(tell) if rank not in self.heard else tell()

        self._report(arrive)

    def _report(self, event: Event) -> None:
        self.activities.start(MESSAGE, {}, event)

    def _nodes(self, devices: Iterable[int]) -> Mapping[int, int]:
        return devices_by_node(devices, self.plan.cluster.devices_per_node)

    # --- orders ------------------------------------------------------------------------------------------------------

    def _take(self, orders: Sequence[Order]) -> None:
        if orders:
            self._report(partial(self._arrive, orders))

    def _arrive(self, orders: Sequence[Order]) -> None:
        streams = self.plan.streams
        for order in orders:
            match order:
                case Score():
                    self.forwards.append(order)
                    team = self.teams[order.call, order.team]
                    for rank in team:
                        self.queues[rank].append(order)
                    self._score(order)
                case Withdraw():
                    assert streams is not None and streams.migration is not None
                    engine = self.engines[order.engine]
                    engine.withdraw(self.stream.limit, streams.migration.least_tokens)
                case Continue():
                    self.engines[order.engine].give({s: self.has[s] for s in order.samples})
                case Release():
                    self._release(order)

    def _release(self, order: Release) -> None:
        ranks, now = self.generation.engines[order.engine], self.activities.now
        for spans in self.generated[order.engine]:
            self.spans += spans.end(now)
        if seconds := self.prices.end(self.generation.name):
            self.occupied.update(ranks)
            self.activities.start(seconds, {}, partial(self._free, ranks))

    def _free(self, ranks: Sequence[int]) -> None:
        self.occupied.difference_update(ranks)
        for rank in ranks:
            if self.queues[rank]:
                self._score(self.queues[rank][0])

    def _score(self, order: Score) -> None:
        """Runs a forward if it is the next one of all its ranks."""
        team = self.teams[order.call, order.team]
        if any(rank in self.occupied or self.queues[rank][0] is not order for rank in team):
            return
        self.occupied.update(team)
        lengths = [[self.stream.prompts[index] + self.lengths[index] for index in part] for part in order.parts]
        loads = self.latest.get(team[0]) != order.call
        self.latest |= dict.fromkeys(team, order.call)
        seconds, start = self.prices.score(order.call, lengths, loads=loads), self.activities.now
        self.activities.start(seconds, self._nodes(team), partial(self._scored, order, team, start))

    def _scored(self, order: Score, team: Sequence[int], start: float) -> None:
        for replica, part in zip(self.replicas[order.call][order.team], order.parts, strict=True):
            ended = partial(
                Span, order.call, start=start, end=self.activities.now, step=0, samples=self._weighted(len(part))
            )
            self.spans += [ended(device=rank) for rank in replica]
        for rank in team:
            self.queues[rank].popleft()
        self._report(lambda: self._take(self.dispatcher.scored(order.number)))
        self._free(team)

    def _weighted(self, count: int) -> int:
        """Number of samples of the batch that `count` simulated samples stand for."""
        return round(self.prices.weight * count)

    def result(self) -> StreamedIteration:
        seconds = self.activities.now + MESSAGE  # the last message says that the streams have ended
        shifted = [replace(span, start=span.start + seconds, end=span.end + seconds) for span in self.rest_spans]
        return StreamedIteration(
            seconds,
            seconds - min(spans.start for of_engine in self.generated for spans in of_engine),
            self.moved,
            self._weighted(sum(engine.decoded for engine in self.engines)),
            tuple(self.forwards),
            (*self.spans, *shifted),
        )
