"""`BatchesAhead`: generates batches ahead of their training on one rank, and updates the engine's parameters between
batches.

`ahead_runs` runs whole iterations with it, `ahead_server` serves another library's loop. The state of one batch is in
`in_flight`.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Collection, Sequence

from ...algorithms.prompt_batches import PromptBatch
from ...engines.base import BackgroundEngine, EngineError, Generation, Updates
from ...engines.requests import GenerationRequest, Sampling, Unfinished
from ...plan.spans import Span
from ...plan.staleness import calls_ahead
from ..calls.batch import CallOutput
from ..calls.call_runner import CallRunner
from ..calls.generate_and_score import Step
from ..failures.alarm import Alarm, JobFailed
from ..messages import PARTIAL, Channels
from ..placement.placement import Placement
from ..samples.partial_rollouts import PartialRollouts, checksum
from ..samples.routes import RESULTS, replica, rows_of, shares_of_samples, sources
from .in_flight import BatchInFlight, by_iteration, in_words, request_number, sample_of
from .turns_in_flight import TurnsInFlight


POLL_S = 0.002  # time between two checks for orders during generation; short, because other ranks wait for the results


class BatchesAhead:
    """The batches under way on one rank of a run with a staleness.

    Args:
        runner: provides the settings of the calls.
        channels: the executor's; the batches use another series, and a new one after each restart, because messages of
            dropped batches are never received.
        running: the calls whose outputs are sent to their readers. Other calls' outputs are sent only to rank 0.
        published: called with (iteration, failed) when this rank's part of a batch has been sent.

    Attributes:
        in_flight: batches by iteration number.
        channels: those of the batches.
        restarts: number of times that all batches were dropped.
    """

    def __init__(
        self,
        placement: Placement,
        alarm: Alarm,
        runner: CallRunner,
        channels: Channels,
        running: Collection[str],
        published: Callable[[int, bool], None] = lambda number, failed: None,
    ) -> None:
        self.placement, self.alarm, self.runner = placement, alarm, runner
        self.running, self.published = running, published
        self.plan, self.rank = placement.plan, placement.rank
        self.versions = self.plan.staleness.versions
        self.generate = self.plan.graph.call(calls_ahead(self.plan.graph)[0])
        self.in_flight: dict[int, BatchInFlight] = {}
        self._latest: int | None = None  # the latest opened iteration
        self.channels, self.restarts = channels.twin(apart=True), 0
        self._restored = PartialRollouts()
        self._generation: Generation | None = None
        self._sampling: Sampling | None = None
        self._is_begun = False  # whether the engines generate; the same on all ranks
        self._updates = 0  # optimizer updates behind the generating policy
        self._update_of: dict[int, int] = {}  # optimizer updates by version of the engine's parameters
        self._moved: list[Span] = []  # parameter transfers that no output has reported yet
        self._error: BaseException | None = None  # the engine's failure, or that of a batch's thread
        # the threads of batches whose samples take turns use the engine too
        self._changed = threading.Condition()

    def open(self, step: Step, batches: Sequence[PromptBatch], sampling: Sampling) -> BatchInFlight:
        """Create a `BatchInFlight` for each batch that may be under way during this iteration. All ranks together.

        Args:
            batches: the prompts of this iteration and of the next ones.

        Returns:
            This iteration's batch.
        """
        if sampling != self._sampling:
            self.stop()
            self._sampling = sampling
        number = step.number
        if self._latest is not None and number not in (self._latest, self._latest + 1):
            self.give_up()  # another training in the same process has begun
        self._latest = number
        for earlier in [n for n in self.in_flight if n < number]:
            self.in_flight.pop(earlier).batch.channels.flush()
        expected = {number + offset: batch for offset, batch in enumerate(batches)}
        if any(n not in expected or entry.prompts is not expected[n] for n, entry in self.in_flight.items()):
            self.give_up()
        for later, prompts in expected.items():
            if later not in self.in_flight:
                self.in_flight[later] = self._new(Step(later, prompts.rows), prompts)
        current = self.in_flight[number]
        current.batch.step = step  # now the learning rates are known, and the present settings apply
        current.batch.algorithm, current.batch.settings = self.runner.algorithm, self.runner.settings
        return current

    def _new(self, step: Step, prompts: PromptBatch) -> BatchInFlight:
        channels = self.channels.twin()
        samples = prompts.prompts.select([])
        if self.generate.name in self.placement.generators:
            replica_index = replica(self.plan, self.generate.name, self.rank)
            (share,) = shares_of_samples(self.plan, self.generate, prompts.prompts, [replica_index])
            samples = share.samples
        batch = self.runner.batch(step, channels, prompts.prompts, running=self.running)
        in_flight = BatchInFlight(batch, prompts, samples)
        if self.runner.settings.in_turns is not None:
            place = (self.generate, step, _EngineOf(self, step.number), self._changed)
            whole = rows_of(prompts.prompts, samples.tensor("index"))  # with the texts, which are no input of the call
            in_flight.turns = TurnsInFlight(whole, len(prompts), self.runner.settings, *place)
        if self.generate.name in self.placement.generators:
            in_flight.restore(self._restored.for_batch(step.number, prompts, self.versions, self._sampling))
        self._restored.samples.pop(step.number, None)
        return in_flight

    # --- the engine ---------------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = POLL_S) -> bool:
        """Collect the engine's finished samples. Returns whether it generates."""
        if self.runner.settings.in_turns is not None and timeout_s:
            time.sleep(timeout_s)  # without the lock, which the batches' threads need
            timeout_s = 0.0
        with self._changed:
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
            batch = self.in_flight.get(iteration)
            if batch is not None:  # a user's rollout function may end before all responses that it asked for
                batch.end(sample, completion, completion.ended_at or generation.ended_at)

    def raise_failure(self) -> None:
        """Raise the failure of this rank's engine or of a batch's thread, if there is one."""
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        """Record a failure. Finished batches are still published, the others as failures."""
        self._error = error
        self._generation = None

    def admit(self) -> None:
        """Begin to generate for the batches that can be trained within the staleness."""
        for number in sorted(self.in_flight):
            batch = self.in_flight[number]
            if batch.is_admitted or number > self._updates + self.versions or not len(batch.samples):
                continue
            with self._changed:
                requests = batch.admit(self.runner.settings, self.generate)
                try:
                    self.add(requests)
                except JobFailed:
                    raise
                except Exception as error:
                    self._fail(error)
            if batch.turns is not None:
                assert self.runner.settings.in_turns is not None
                batch.turns.begin(self.runner.settings.in_turns, self._fail)
        self.publish()

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin these requests; does nothing while the engine is stopped."""
        try:
            if self._generation is not None and requests:
                self._generation.add(requests)
        except Exception as error:
            raise in_words(error, [request.index for request in requests]) from error

    def publish(self) -> None:
        """Publish the responses of the batches that have been generated, in their order."""
        if self.generate.name not in self.placement.generators:
            return
        for number in sorted(self.in_flight):
            in_flight = self.in_flight[number]
            if in_flight.is_published:
                continue
            if number > self._updates + self.versions or not (in_flight.is_generated or self._error is not None):
                return
            in_flight.is_published = True
            if in_flight.is_generated:
                outputs = in_flight.outputs(self.runner.settings, self.generate, self._update_of)
                spans, self._moved = (*self._moved, *in_flight.all_spans()), []
                in_flight.batch.put(self.generate.name, CallOutput(outputs, spans))
            else:
                assert self._error is not None
                if not isinstance(self._error, Exception):
                    raise self._error
                in_flight.batch.put_failure([self.generate.name], self._error, is_collective=False)
            self.published(number, not in_flight.is_generated)

    # --- parameters of the generation ---------------------------------------------------------------------------------

    def begin(self, updates: int) -> bool:
        """Update the generation's parameters and start the engines, unless they are running. Returns whether they were
        started. All ranks together."""
        if self._is_begun:
            return False
        self.take_update(updates)
        self._is_begun = True
        engine = self.placement.generators.get(self.generate.name)
        if engine is None or self._error is not None:
            return True
        assert isinstance(engine, BackgroundEngine), "the plan has been checked"
        try:
            assert self._sampling is not None, "a batch has been opened"
            self._generation = engine.start([], self._sampling, Updates.KEEP)
        except EngineError as error:
            self._fail(error)
        return True

    def take_update(self, updates: int) -> None:
        """Update the generation's parameters. On the ranks that train the role and the ranks that generate."""
        name = self.generate.name
        self._updates = updates
        if not self.placement.takes_part(name):
            return
        self.alarm.set_activity(f"{name} (its parameters after {updates} updates)")
        try:
            with self._changed:
                moved = self.placement.refresh(name)
        except EngineError as error:  # raised on every rank of the update, after its last collective
            self._fail(error)
            return
        engine = self.placement.generators.get(name)
        if moved is not None and engine is not None:  # reported with the engine's next outputs
            step = max(0, updates - 1)
            self._moved.append(Span(moved.name, self.rank, moved.start, moved.end, step, bytes=moved.bytes))
        if engine is not None:
            # no token in flight is older than the staleness
            recent = {version: count for version, count in self._update_of.items() if count >= updates - self.versions}
            self._update_of = {**recent, engine.version: updates}

    # --- between iterations -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the engine, so that it can be used for something else. The next iteration resumes its samples. All ranks
        together."""
        with self._changed:
            self._stop()

    def _stop(self) -> None:
        self._is_begun = False
        generation, self._generation = self._generation, None
        if generation is None:
            return
        unfinished = [
            request_number(batch.number, sample) for batch in self.in_flight.values() for sample in batch.unfinished
        ]
        try:
            stopped, now = generation.withdraw(unfinished), time.time()
            self._take_finished(generation, 0.0)
            for iteration, states in by_iteration(stopped).items():
                for sample, state in states.items():
                    self.in_flight[iteration].stop(sample, state, now)
            generation.close()
        except EngineError as error:  # raised where the samples are needed
            self._fail(error)
        for batch in self.in_flight.values():
            batch.is_admitted = False

    def end(self) -> None:
        """Stop the engine and the batches' threads. What has been drawn stays for `drawn`. All ranks together."""
        with self._changed:
            self._stop()
            for batch in self.in_flight.values():
                if batch.turns is not None:
                    batch.turns.drop()

    def give_up(self) -> None:
        """Drop the samples that are under way. All ranks together."""
        with self._changed:
            self.end()
            self.in_flight.clear()
        self._restored = PartialRollouts()
        self.restarts += 1
        self.channels = self.channels.twin(apart=True)

    def drawn(self, first: int) -> PartialRollouts | None:
        """Finished and partial samples of the iterations from `first` on, on rank 0; `None` on the others. All ranks
        together.

        Rank 0 receives one message from each rank that generates, so that none is in transit at the next barrier.
        Published outputs that no iteration reads any more are never received. They are dropped with the process group
        at a change of plan, and the next plan has a new group.
        """
        peeked: dict[int, dict[int, Unfinished]] = {}
        with self._changed:
            try:
                if self._generation is not None:
                    peeked = by_iteration(self._generation.peek())
                    self._take_finished(self._generation, 0.0)  # samples that have ended since the last iteration
            except EngineError as error:  # rank 0 waits for this rank's message
                self._fail(error)
            partial_rollouts = PartialRollouts(
                {n: entry.drawn(peeked.get(n, {})) for n, entry in self.in_flight.items() if n >= first},
                {n: checksum(entry.prompts) for n, entry in self.in_flight.items() if n >= first},
                dict(self._update_of),
                self._sampling,
            )
        generating = sources(self.plan, self.generate.name)
        if self.rank != RESULTS:
            if self.rank in generating:
                self.channels.about(PARTIAL).send(pickle.dumps(partial_rollouts), RESULTS)
            return None
        for rank in generating:
            if rank != RESULTS:
                # safe: from a rank of this job
                partial_rollouts.add(pickle.loads(self.channels.about(PARTIAL).receive(rank)))
        return partial_rollouts

    def restore(self, partial_samples: PartialRollouts) -> None:
        """Resume the samples of a checkpoint or of the previous plan. Before the first iteration; all ranks together,
        with the same values."""
        self.give_up()
        self._restored, self._latest = partial_samples, None
        self._update_of = dict(partial_samples.update_of)


class _EngineOf:
    """The engine of a batch's turns (`turns_in_flight.Engine`)."""

    def __init__(self, batches: BatchesAhead, number: int) -> None:
        self._batches, self._number = batches, number

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        self._batches.add(self._batches.in_flight[self._number].numbered(requests))

    def collect(self) -> bool:
        return self._batches.poll(0.0)
