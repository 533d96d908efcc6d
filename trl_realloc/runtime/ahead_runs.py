"""`AheadRuns`: iterations of a plan with a staleness, on one rank. Ranks that train run their calls one after another.
The other ranks generate for later iterations all the time, score, and take new parameters while they generate.

Which call a rank runs next is decided by `planner.ahead_order` on rank 0 (`ahead_leader`). What is known of a batch on
its way is in `in_flight`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from itertools import pairwise

from ..algorithms.prompt_batches import PromptBatch
from ..engines.base import BackgroundEngine, EngineError, Generation, Sampling, Unfinished, Updates
from ..plan.staleness import calls_ahead, devices_ahead
from ..plan.timeline import Span
from ..planner.ahead_order import AheadOrder, EndIteration, RunCall, TakeUpdate
from . import calls
from .ahead_leader import AheadLeader, AheadLink, Done, Left
from .call_runner import CallRunner
from .calls import Step
from .drawn_samples import DrawnSamples, checksum
from .exchange import CallOutput, CallsFailed, Exchange, failure_of
from .failures.alarm import Alarm, JobFailed
from .in_flight import BatchInFlight, by_iteration, in_words, request_number, sample_of
from .placement import Placement
from .routes import RESULTS, replica, sources
from .shares import Share, shares_of_samples


POLL_S = 0.01  # time between two looks for orders while the engine generates
WAIT_S = 1.0  # time between two looks for another rank's failure
RESTARTS = 1 << 16  # after so many, tags are used again


class AheadRuns:
    """One rank of a run with a staleness.

    Args:
        runner: runs the calls of this rank.
        exchange: of the executor; its messages' tags are not used.
    """

    def __init__(self, placement: Placement, alarm: Alarm, runner: CallRunner, exchange: Exchange) -> None:
        self.placement, self.alarm = placement, alarm
        self.runner, self.exchange = runner, exchange
        self.plan, self.rank = placement.plan, placement.rank
        self.versions = self.plan.staleness.versions
        graph = self.plan.graph
        ahead = calls_ahead(graph)
        self.generate, self.ahead = graph.call(ahead[0]), frozenset(ahead)
        self.train = graph.train_call(self.generate.role)
        self._ranks_ahead = devices_ahead(graph, self.plan.assignments)
        self._messages = exchange.messages.twin()  # events and orders
        self._restarts = 0
        self._order: AheadOrder | None = None
        self._in_flight: dict[int, BatchInFlight] = {}
        self._restored = DrawnSamples()
        self._generation: Generation | None = None
        self._sampling: Sampling | None = None
        self._is_begun = False  # whether the engines generate; the same on all ranks
        self._updates = 0  # that made the policy which generates
        self._update_of: dict[int, int] = {}  # by version of the engine's parameters
        self._moved: list[Span] = []  # updates of parameters that no output has told of yet
        self._error: Exception | None = None  # of the engine
        self._link: AheadLink | None = None

    # --- one iteration ------------------------------------------------------------------------------------------------

    def run(self, step: Step, batch: PromptBatch, following: Sequence[PromptBatch]) -> BatchInFlight:
        """Run one iteration.

        Args:
            following: the batches of the next iterations, `versions + 1` of them unless the run ends before.

        Returns:
            The batch of the iteration. The outputs of its calls have been published.

        Raises:
            JobFailed: another rank failed outside a call.
        """
        self._messages.flush()
        sampling = calls.sampling_of(self.runner.settings, self.generate, step)
        if sampling != self._sampling:
            self.stop()
            self._sampling = sampling
        self._open(step, [batch, *following[: self.versions + 1]])
        leader = self._leader(step.number) if self.rank == RESULTS else None
        is_ahead = self.rank in self._ranks_ahead
        self._link = AheadLink(self._messages, self._first_tag, leader, takes_orders=is_ahead)
        if not self._is_begun:
            self._begin(step.number)
        if is_ahead:
            self._admit()
            self._work(step.number)
        else:
            self._train(step.number)
        self._link.report(Left())
        if leader is not None:
            leader.wait()
        return self._in_flight[step.number]

    @property
    def _first_tag(self) -> int:
        """Of events and orders. The messages of batches that were given up are never received, so their tags are not
        used again soon."""
        size = self.exchange.free_tag - self.exchange.first_tag + 2
        return self.exchange.free_tag + size * (self._restarts % RESTARTS)

    def _leader(self, number: int) -> AheadLeader:
        if self._order is None:
            self._order = AheadOrder(self.plan, {n: sources(self.plan, n) for n in self.plan.order}, number)
        world = self.plan.cluster.size
        return AheadLeader(self._messages, self._first_tag, self._order, self._ranks_ahead, world, number)

    def _open(self, step: Step, batches: Sequence[PromptBatch]) -> None:
        """Have a `BatchInFlight` for each batch that may be under way during this iteration."""
        number = step.number
        for earlier in [n for n in self._in_flight if n < number]:
            self._in_flight.pop(earlier).running.exchange.flush()
        expected = {number + at: batch for at, batch in enumerate(batches)}
        if any(n not in expected or of_n.batch is not expected[n] for n, of_n in self._in_flight.items()):
            self.give_up()
        for later, batch in expected.items():
            if later not in self._in_flight:
                self._in_flight[later] = self._new(Step(later, batch.rows), batch)
        opened = self._in_flight[number].running
        current = self.runner.begin(step, opened.exchange)  # with the settings and the algorithm that hold now
        current.failure = opened.failure
        self._in_flight[number].running = current

    def _new(self, step: Step, batch: PromptBatch) -> BatchInFlight:
        exchange = self.exchange.of_iteration(self.plan.order, self._first_tag + 2)
        samples = batch.prompts.select([])
        if self.generate.name in self.placement.generators:
            own = replica(self.plan, self.generate.name, self.rank)
            (share,) = shares_of_samples(self.plan, self.generate, batch.prompts, [own])
            samples = share.samples
        made = BatchInFlight(self.runner.begin(step, exchange), batch, samples)
        if self.generate.name in self.placement.generators:
            made.restore(self._restored.of_batch(step.number, batch, self.versions, self._sampling))
        self._restored.samples.pop(step.number, None)
        return made

    # --- ranks that train ---------------------------------------------------------------------------------------------

    def _train(self, number: int) -> None:
        """Run this rank's calls of the iteration, in the plan's order."""
        of_rank = [n for n in self.plan.order if n not in self.ahead and self.placement.takes_part(n)]
        for names, following in pairwise([*self.plan.runs_of(of_rank), ()]):
            shares = [self._share(number, name) for name in names]
            for name in following:
                self.placement.prefetch(name)  # while these run
            is_done = self._run_calls(number, names, shares)
            if self.train in names and is_done:
                self._take_update(number + 1)

    def _share(self, number: int, name: str) -> Share | CallsFailed | None:
        if not self.placement.has(name):
            return None
        of_batch = self._in_flight[number]
        return of_batch.running.inputs.share(self.plan.graph.call(name), of_batch.batch.prompts)

    def _run_calls(self, number: int, names: Sequence[str], shares: Sequence[Share | CallsFailed | None]) -> bool:
        running = [self.plan.graph.call(name) for name in names]
        is_done = self.runner.run_calls(self._in_flight[number].running, running, shares)
        for name in names:
            self._report(number, name, failed=not is_done)
        return is_done

    def _report(self, number: int, name: str, *, failed: bool = False) -> None:
        assert self._link is not None, "an iteration runs"
        if self.rank in sources(self.plan, name):
            self._link.report(Done(number, name, self.rank, failed))

    # --- ranks that run ahead -----------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        """Do what rank 0 orders until it ends the iteration, and publish what the engine has finished."""
        assert self._link is not None
        while True:
            self.alarm.at(f"running ahead of update {number + 1}")
            self.alarm.check()
            is_generating = self._poll()
            self._publish_generated()
            task = self._link.next_task(0.0 if is_generating else WAIT_S)
            match task:
                case RunCall(iteration, call):
                    self._run_calls(iteration, [call], [self._share(iteration, call)])
                case TakeUpdate(iteration):
                    self._take_update(iteration + 1)
                    self._admit()
                case EndIteration():
                    return

    def _poll(self) -> bool:
        """Take what the engine has finished. Returns whether it generates."""
        if self._generation is None or not self._generation.unfinished:
            return False
        try:
            self._take_finished(self._generation, POLL_S)
        except JobFailed:
            raise
        except Exception as error:
            self._fail(error)
        return True

    def _take_finished(self, generation: Generation, timeout_s: float) -> None:
        for completion in generation.poll(timeout_s):
            iteration, sample = sample_of(completion.index)
            self._in_flight[iteration].end(sample, completion, generation.ended_at)

    def _fail(self, error: Exception) -> None:
        """The engine has failed. What was generated is published, what is missing are failures."""
        self._error = error
        self._generation = None

    def _admit(self) -> None:
        """Begin to generate for the batches that can be trained within the staleness."""
        for number in sorted(self._in_flight):
            of_batch = self._in_flight[number]
            if of_batch.is_admitted or number > self._updates + self.versions or not len(of_batch.samples):
                continue
            requests = of_batch.admit(self.runner.settings, self.generate)
            try:
                if self._generation is not None and requests:
                    self._generation.add(requests)
            except JobFailed:
                raise
            except Exception as error:
                self._fail(in_words(error, [request.index for request in requests]))
        self._publish_generated()

    def _publish_generated(self) -> None:
        """Publish the responses of the batches that have been generated, in their order."""
        if self.generate.name not in self.placement.generators:
            return
        for number in sorted(self._in_flight):
            of_batch = self._in_flight[number]
            if of_batch.is_published:
                continue
            if number > self._updates + self.versions or not (of_batch.is_generated or self._error is not None):
                return
            of_batch.is_published = True
            if of_batch.is_generated:
                outputs = of_batch.outputs(self.runner.settings, self.generate, self._update_of)
                spans, self._moved = (*self._moved, *of_batch.all_spans()), []
                of_batch.running.exchange.publish(self.generate.name, CallOutput(outputs, spans))
            else:
                assert self._error is not None
                of_batch.running.failure = self._error
                failure = failure_of(self._error, self.rank, self.generate.name, is_collective=False)
                of_batch.running.exchange.publish(self.generate.name, (failure,))
            self._report(number, self.generate.name, failed=not of_batch.is_generated)

    # --- parameters of the generation ---------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Bring the generation's parameters up to date and start the engines. All ranks together."""
        self._take_update(number)
        self._is_begun = True
        engine = self.placement.generators.get(self.generate.name)
        if engine is None or self._error is not None:
            return
        assert isinstance(engine, BackgroundEngine), "the plan has been checked"
        updates = Updates(self.plan.staleness.kv_cache)
        try:
            assert self._sampling is not None, "an iteration runs"
            self._generation = engine.start([], self._sampling, updates)
        except EngineError as error:
            self._fail(error)

    def _take_update(self, updates: int) -> None:
        """Bring the generation's parameters up to date. On the ranks that train the role and those that generate."""
        name = self.generate.name
        self._updates = updates
        if not self.placement.takes_part(name):
            return
        self.alarm.at(f"{name} (its parameters after {updates} updates)")
        try:
            moved = self.placement.refresh(name)
        except EngineError as error:  # every rank of the update knows it, and the collectives are complete
            self._fail(error)
            return
        engine = self.placement.generators.get(name)
        if moved is not None and engine is not None:  # whose outputs tell of it
            step = max(0, updates - 1)
            self._moved.append(Span(moved.name, self.rank, moved.start, moved.end, step, bytes=moved.bytes))
        if engine is not None:
            # no token that is under way was drawn by a policy that is older than the staleness
            kept = {version: of for version, of in self._update_of.items() if of >= updates - self.versions}
            self._update_of = {**kept, engine.version: updates}

    # --- between iterations -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the engine, so that it can be used for something else. The next iteration goes on with its samples. All
        ranks together."""
        self._is_begun = False
        generation, self._generation = self._generation, None
        if generation is None:
            return
        unfinished = [
            request_number(of_batch.number, sample)
            for of_batch in self._in_flight.values()
            for sample in of_batch.unfinished
        ]
        try:
            stopped, now = generation.withdraw(unfinished), time.time()
            self._take_finished(generation, 0.0)
            for iteration, of_batch in by_iteration(stopped).items():
                for sample, state in of_batch.items():
                    self._in_flight[iteration].stop(sample, state, now)
            generation.close()
        except EngineError as error:  # told of where its samples are needed
            self._fail(error)
        for of_batch_ in self._in_flight.values():
            of_batch_.is_admitted = False

    def give_up(self) -> None:
        """Forget the samples that are under way. All ranks together."""
        self.stop()
        self._in_flight.clear()
        self._restored = DrawnSamples()
        self._restarts += 1
        self._order = None

    def drawn(self, first: int) -> DrawnSamples | None:
        """What has been drawn for the iterations from `first`, on rank 0; `None` on the others. All ranks together."""
        peeked: dict[int, dict[int, Unfinished]] = {}
        try:
            if self._generation is not None:
                peeked = by_iteration(self._generation.peek())
                self._take_finished(self._generation, 0.0)  # those that have ended since the last iteration
        except EngineError as error:  # rank 0 waits for this rank's message
            self._fail(error)
        own = DrawnSamples(
            {n: of_n.drawn(peeked.get(n, {})) for n, of_n in self._in_flight.items() if n >= first},
            {n: checksum(of_n.batch) for n, of_n in self._in_flight.items() if n >= first},
            dict(self._update_of),
            self._sampling,
        )
        generating = sources(self.plan, self.generate.name)
        if self.rank != RESULTS:
            if self.rank in generating:
                self._messages.send(pickle.dumps(own), RESULTS, self._first_tag)
            return None
        for rank in generating:
            if rank != RESULTS:
                own.add(pickle.loads(self._messages.receive(rank, self._first_tag)))  # safe: from a rank of this job
        return own

    def restore(self, drawn: DrawnSamples) -> None:
        """Go on with samples that were under way when a checkpoint was saved, or the plan changed. Before the first
        iteration; all ranks together, with the same values."""
        self.give_up()
        self._restored = drawn
        self._update_of = dict(drawn.update_of)
