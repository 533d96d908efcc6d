"""`BatchesAhead`: the batches that are generated ahead of their training, on one rank: which of them the engine
generates, when it takes new parameters, and what has been drawn when it is stopped.

`ahead_runs` runs whole iterations with them, `host_ahead` serves another library's loop. What is known of one batch is
in `in_flight`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Sequence

from ...algorithms.prompt_batches import PromptBatch
from ...engines.base import BackgroundEngine, EngineError, Generation, Sampling, Unfinished, Updates
from ...plan.staleness import calls_ahead
from ...plan.timeline import Span
from ..calls.call_runner import CallRunner
from ..calls.generate_and_score import Step
from ..failures.alarm import Alarm, JobFailed
from ..placement.placement import Placement
from ..samples.drawn_samples import DrawnSamples, checksum
from ..samples.exchange import CallOutput, Exchange, failure_of
from ..samples.routes import RESULTS, replica, sources
from ..samples.shares import shares_of_samples
from .in_flight import BatchInFlight, by_iteration, in_words, request_number, sample_of


POLL_S = 0.002  # time between two looks for orders while the engine generates; other ranks wait for what is ordered
RESTARTS = 1 << 16  # after so many, tags are used again


class BatchesAhead:
    """The batches under way on one rank of a run with a staleness.

    Args:
        runner: has the settings of the calls.
        exchange: of the executor; its messages' tags are not used.
        running: the calls whose outputs are sent to their readers. Those of others are sent to rank 0 alone.
        published: called when this rank's part of a batch has been sent, with the iteration's number and whether it
            failed.

    Attributes:
        in_flight: by the number of the iteration.
        restarts: how often all batches were given up.
    """

    def __init__(
        self,
        placement: Placement,
        alarm: Alarm,
        runner: CallRunner,
        exchange: Exchange,
        running: Collection[str],
        published: Callable[[int, bool], None] = lambda number, failed: None,
    ) -> None:
        self.placement, self.alarm, self.runner, self.exchange = placement, alarm, runner, exchange
        self.running, self.published = running, published
        self.plan, self.rank = placement.plan, placement.rank
        self.versions = self.plan.staleness.versions
        self.generate = self.plan.graph.call(calls_ahead(self.plan.graph)[0])
        self.in_flight: dict[int, BatchInFlight] = {}
        self._latest: int | None = None  # the iteration that was opened last
        self.restarts = 0
        self.messages = exchange.messages.twin()
        self._restored = DrawnSamples()
        self._generation: Generation | None = None
        self._sampling: Sampling | None = None
        self._is_begun = False  # whether the engines generate; the same on all ranks
        self._updates = 0  # that made the policy which generates
        self._update_of: dict[int, int] = {}  # by version of the engine's parameters
        self._moved: list[Span] = []  # updates of parameters that no output has told of yet
        self._error: Exception | None = None  # of the engine

    @property
    def first_tag(self) -> int:
        """The first of two tags for other messages about these batches. The messages of batches that were given up
        are never received, so their tags are not used again soon."""
        size = self.exchange.free_tag - self.exchange.first_tag + 2
        return self.exchange.free_tag + size * (self.restarts % RESTARTS)

    def open(self, step: Step, batches: Sequence[PromptBatch], sampling: Sampling) -> BatchInFlight:
        """Have a `BatchInFlight` for each batch that may be under way during this iteration. All ranks together.

        Args:
            batches: of this iteration and of the next ones.
            sampling: of the iteration.

        Returns:
            That of this iteration.
        """
        if sampling != self._sampling:
            self.stop()
            self._sampling = sampling
        number = step.number
        if self._latest is not None and number not in (self._latest, self._latest + 1):
            self.give_up()  # another training of this process begins elsewhere
        self._latest = number
        for earlier in [n for n in self.in_flight if n < number]:
            self.in_flight.pop(earlier).running.exchange.flush()
        expected = {number + at: batch for at, batch in enumerate(batches)}
        if any(n not in expected or of_n.batch is not expected[n] for n, of_n in self.in_flight.items()):
            self.give_up()
        for later, batch in expected.items():
            if later not in self.in_flight:
                self.in_flight[later] = self._new(Step(later, batch.rows), batch)
        opened = self.in_flight[number].running
        current = self.runner.begin(step, opened.exchange)  # with the settings and the algorithm that hold now
        current.failure = opened.failure
        self.in_flight[number].running = current
        return self.in_flight[number]

    def _new(self, step: Step, batch: PromptBatch) -> BatchInFlight:
        exchange = self.exchange.of_iteration(self.running, self.first_tag + 2)
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

    # --- the engine ---------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = POLL_S) -> bool:
        """Take what the engine has finished. Returns whether it generates."""
        if self._generation is None or not self._generation.unfinished:
            return False
        try:
            self._take_finished(self._generation, timeout_s)
        except JobFailed:
            raise
        except Exception as error:
            self._fail(error)
        return True

    def _take_finished(self, generation: Generation, timeout_s: float) -> None:
        for completion in generation.poll(timeout_s):
            iteration, sample = sample_of(completion.index)
            self.in_flight[iteration].end(sample, completion, completion.ended_at or generation.ended_at)

    def raise_failure(self) -> None:
        """Raise why this rank's engine has failed, if it has."""
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        """The engine has failed. What was generated is published, what is missing are failures."""
        self._error = error
        self._generation = None

    def admit(self) -> None:
        """Begin to generate for the batches that can be trained within the staleness."""
        for number in sorted(self.in_flight):
            of_batch = self.in_flight[number]
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
        self.publish()

    def publish(self) -> None:
        """Publish the responses of the batches that have been generated, in their order."""
        if self.generate.name not in self.placement.generators:
            return
        for number in sorted(self.in_flight):
            of_batch = self.in_flight[number]
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
            self.published(number, not of_batch.is_generated)

    # --- parameters of the generation ---------------------------------------------------------------------------------

    def begin(self, updates: int) -> bool:
        """Bring the generation's parameters up to date and start the engines, unless they generate. All ranks
        together. Returns whether that was done."""
        if self._is_begun:
            return False
        self.take_update(updates)
        self._is_begun = True
        engine = self.placement.generators.get(self.generate.name)
        if engine is None or self._error is not None:
            return True
        assert isinstance(engine, BackgroundEngine), "the plan has been checked"
        updates_as = Updates(self.plan.staleness.kv_cache)
        try:
            assert self._sampling is not None, "a batch has been opened"
            self._generation = engine.start([], self._sampling, updates_as)
        except EngineError as error:
            self._fail(error)
        return True

    def take_update(self, updates: int) -> None:
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
            for of_batch in self.in_flight.values()
            for sample in of_batch.unfinished
        ]
        try:
            stopped, now = generation.withdraw(unfinished), time.time()
            self._take_finished(generation, 0.0)
            for iteration, of_batch in by_iteration(stopped).items():
                for sample, state in of_batch.items():
                    self.in_flight[iteration].stop(sample, state, now)
            generation.close()
        except EngineError as error:  # told of where its samples are needed
            self._fail(error)
        for of_batch_ in self.in_flight.values():
            of_batch_.is_admitted = False

    def give_up(self) -> None:
        """Forget the samples that are under way. All ranks together."""
        self.stop()
        self.in_flight.clear()
        self._restored = DrawnSamples()
        self.restarts += 1

    def drawn(self, first: int) -> DrawnSamples | None:
        """The samples that have been drawn, in whole or in part, for the iterations from `first` on, on rank 0; `None`
        on the others. All ranks together.

        Rank 0 receives one message from each rank that generates, so that none of them is in transit when the ranks
        meet next. Outputs that a batch has published and that no iteration reads any more are never received. They end
        with the process group at a change of plan, and the next plan has a group of its own.
        """
        peeked: dict[int, dict[int, Unfinished]] = {}
        try:
            if self._generation is not None:
                peeked = by_iteration(self._generation.peek())
                self._take_finished(self._generation, 0.0)  # those that have ended since the last iteration
        except EngineError as error:  # rank 0 waits for this rank's message
            self._fail(error)
        own = DrawnSamples(
            {n: of_n.drawn(peeked.get(n, {})) for n, of_n in self.in_flight.items() if n >= first},
            {n: checksum(of_n.batch) for n, of_n in self.in_flight.items() if n >= first},
            dict(self._update_of),
            self._sampling,
        )
        generating = sources(self.plan, self.generate.name)
        if self.rank != RESULTS:
            if self.rank in generating:
                self.messages.send(pickle.dumps(own), RESULTS, self.first_tag)
            return None
        for rank in generating:
            if rank != RESULTS:
                own.add(pickle.loads(self.messages.receive(rank, self.first_tag)))  # safe: from a rank of this job
        return own

    def restore(self, drawn: DrawnSamples) -> None:
        """Go on with samples that were under way when a checkpoint was saved, or the plan changed. Before the first
        iteration; all ranks together, with the same values."""
        self.give_up()
        self._restored, self._latest = drawn, None
        self._update_of = dict(drawn.update_of)
