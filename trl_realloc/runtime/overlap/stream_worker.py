"""`StreamWorker`: a rank's part of a streamed phase. It starts its generation engine, updates the parameters of its
scoring calls, and then runs rank 0's tasks while its engine generates.

On rank 0, `planner.iteration.stream_dispatcher` decides which samples are scored where (`stream_leader`).
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Rollouts
from ...engines.base import BackgroundEngine, EngineError, Generation
from ...engines.requests import Completion
from ...plan.assignment import sleeps
from ...plan.generation_spans import GenerationSpans
from ...plan.spans import Span
from ...planner.iteration.stream import Stream
from ...planner.iteration.stream_dispatcher import Release, Withdraw
from ..calls import generate_and_score as calls
from ..calls.batch import CallFailure, CallOutput, Failures, failure_of
from ..calls.generate_and_score import CallSettings, Step
from ..calls.prefetched_generation import PrefetchedGeneration
from ..failures.alarm import Alarm, JobFailed
from ..messages import ROWS, Channels
from ..parameters.reallocation import Moved
from ..placement.placement import Placement
from ..samples.routes import replica, replica_ranks, rows_of, shares_of_samples, sources
from .leader_link import Left
from .stream_forwards import ForwardRunner
from .stream_leader import StreamLink
from .stream_messages import End, Failed, Finished, Forward, GoOn, Joined, Scored, Task, Withdrawn


TASKS_POLL_S = 0.01  # time between two checks for tasks during generation
WAIT_S = 1.0  # time between two checks for another rank's failure


class StreamWorker:
    """One rank in one streamed phase.

    Args:
        link: connection to rank 0; `None` on a rank that only sends parameters.
        early: the generation that was begun in the previous iteration.
    """

    def __init__(
        self,
        placement: Placement,
        settings: CallSettings,
        alarm: Alarm,
        channels: Channels,
        link: StreamLink | None,
        stream: Stream,
        step: Step,
        batch: PromptBatch,
        early: PrefetchedGeneration | None = None,
    ) -> None:
        self.placement, self.settings, self.alarm = placement, settings, alarm
        self._released, self.link = channels.about(ROWS), link
        self.stream, self.step, self.batch, self.early = stream, step, batch, early
        self.plan, self.rank = placement.plan, placement.rank
        self._outputs: dict[str, list[Rollouts]] = defaultdict(list)
        self._spans: dict[str, list[Span]] = defaultdict(list)
        self.generate = self.plan.graph.call(stream.generation.name)
        self._generation: Generation | None = None
        self._is_generating = False
        self._unfinished: set[int] = set()
        self._forwards = ForwardRunner(placement, alarm, channels)
        self._failures: Failures = ()  # failures of the phase, on any rank
        self._own_failures: Failures = ()
        self.error: Exception | None = None  # the latest failure of a call on this rank

    def run(self) -> dict[str, CallOutput | Failures]:
        """Run this rank's part, until rank 0 ends the phase.

        Returns:
            This rank's outputs of each of its streamed calls, or the failures, if any call of the phase has failed on
            any rank.

        Raises:
            JobFailed: another rank failed outside a call.
        """
        with contextlib.closing(self._forwards):
            self._update_parameters()
            if self.link is None:
                return {}
            self.link.report(Joined(self.rank) if not self._failures else Failed(self._failures))
            try:
                self._generate_in_place()
                self._work()
            finally:
                if self._generation is not None:
                    self._generation.close()
        self.link.report(Left())
        if self.error is not None and not self._failures:  # rank 0 had ended the phase when an engine failed to end
            self._failures = self._own_failures
        local_calls = [name for name in self.plan.streamed if self.placement.has(name)]
        if self._failures:
            return dict.fromkeys(local_calls, self._failures)
        return {name: self._output(name) for name in local_calls}

    def _output(self, name: str) -> CallOutput:
        parts = [part for part in self._outputs[name] if len(part)]
        return CallOutput(Rollouts.cat(parts) if parts else Rollouts(), tuple(self._spans[name]))

    # --- parameters and generation ------------------------------------------------------------------------------------

    def _update_parameters(self) -> None:
        """Update the parameters of this rank's calls, and start its engine after the update of its parameters. In the
        same order on all ranks, because an update is a collective."""
        self._refresh(self.generate.name)
        if not self._failures:
            self._start()
        for scoring in self.stream.scorings:
            self._refresh(scoring.name)

    def _refresh(self, name: str) -> None:
        if not self.placement.takes_part(name):
            return
        self.alarm.set_activity(f"{name} of {self.step.name} (its parameters)")
        try:
            is_early = self.early is not None and self.early.call == name
            moved = self.early.refreshed() if self.early is not None and is_early else self.placement.refresh(name)
            self._add_moved(name, moved)
        except EngineError as error:  # raised on every rank of the update, after its last collective
            self.error = error
            self._failures += (CallFailure(self.rank, name, str(error)),)

    def _add_moved(self, name: str, moved: Moved | None) -> None:
        if moved is not None:
            self._spans[name].append(
                Span(moved.name, self.rank, moved.start, moved.end, self.step.number, bytes=moved.bytes)
            )

    def _start(self) -> None:
        """Start the generation, if this rank's engine runs in the background."""
        name, call = self.generate.name, self.generate
        engine = self.placement.generators.get(name)
        if not isinstance(engine, BackgroundEngine):
            return
        requests = calls.requests_of(self.settings, call, self._share(), self.step)
        self._unfinished = {request.index for request in requests}
        with self._catching(name):
            if self.early is not None and self.early.generation is not None:
                self._generation, start = self.early.generation, self.early.start
            else:
                self._generation = engine.start(requests, calls.sampling_of(self.settings, call, self.step))
                start = time.time()
            self._is_generating = True
            self._generation_spans = GenerationSpans(name, self.rank, self.step.number, start)

    def _share(self) -> Rollouts:
        name = self.generate.name
        replica_index = replica(self.plan, name, self.rank)
        return shares_of_samples(self.plan, self.generate, self.batch.prompts, [replica_index])[0].samples

    def _generate_in_place(self) -> None:
        """Generate with an engine in this process, and report each sample."""
        name, engine = self.generate.name, self.placement.generators.get(self.generate.name)
        if engine is None or isinstance(engine, BackgroundEngine) or self._failures:
            return
        start = time.time()
        with self._catching(name, is_collective=self.placement.has_collectives(name)):
            self.placement.check_fresh(name)
            self._is_generating = True
            self._generation_spans = GenerationSpans(name, self.rank, self.step.number, start)
            requests = calls.requests_of(self.settings, self.generate, self._share(), self.step)
            for completion in engine.generate(requests, calls.sampling_of(self.settings, self.generate, self.step)):
                self.alarm.check()
                self._report_finished([completion])
            self._spans[name] += self._generation_spans.end(time.time())

    def _report_finished(self, completions: Sequence[Completion]) -> None:
        if not completions or self.link is None:
            return
        name = self.generate.name
        self._unfinished.difference_update(completion.index for completion in completions)
        outputs = calls.completed(completions, self.settings.eos_token_id, self.generate.outputs)
        self._outputs[name].append(outputs)
        rows = self._forwards.rows(name, outputs)
        tokens = {completion.index: len(completion.token_ids) for completion in completions}
        self._generation_spans.finished(time.time(), len(tokens), sum(tokens.values()))
        self.link.report(Finished(replica(self.plan, name, self.rank), tokens, rows))

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Run rank 0's tasks until it ends the phase, and report the engine's finished samples."""
        assert self.link is not None
        while True:
            doing = self.generate.name if self._is_generating else "waiting for samples"
            self.alarm.set_activity(f"{doing} of {self.step.name}")
            if self._unfinished and self._generation is not None:
                with self._catching(self.generate.name):
                    self._report_finished(self._generation.poll(TASKS_POLL_S))
                task = self.link.next_task(0.0)
            else:
                task = self.link.next_task(WAIT_S)
            self.alarm.check()
            if isinstance(task, End):
                self._failures = task.failures
                return
            if task is not None:
                self._do(task)

    def _do(self, task: Task) -> None:
        match task:
            case Forward():
                self._forward(task)
            case GoOn():
                with self._catching(self.generate.name):
                    self._go_on(task)
            case Withdraw():
                with self._catching(self.generate.name):
                    self._withdraw()
            case Release():
                self._release()

    def _go_on(self, task: GoOn) -> None:
        assert self._generation is not None
        begun = {sample.index: sample for sample in task.samples}
        samples = rows_of(self.batch.prompts, sorted(begun))
        requests = calls.requests_of(self.settings, self.generate, samples, self.step, begun)
        self._unfinished |= set(begun)
        self._generation.add(requests)

    def _withdraw(self) -> None:
        assert self._generation is not None and self.link is not None
        streams = self.plan.streams
        assert streams is not None and streams.migration is not None
        stopped = self._generation.withdraw(sorted(self._unfinished), streams.migration.least_tokens)
        self._unfinished.difference_update(sample.index for sample in stopped)
        self.link.report(Withdrawn(replica(self.plan, self.generate.name, self.rank), tuple(stopped)))

    def _release(self) -> None:
        """End the generation. The engine may sleep, so that scoring can use its device's memory."""
        name = self.generate.name
        first, *others = replica_ranks(self.plan, name, self.rank)
        if self.rank == first and self._generation is not None:
            with self._catching(name), self.placement.resident(name):
                end = self._generation.ended_at
                self._generation.close()
                self._generation = None
                self._spans[name] += self._generation_spans.end(end)
        if others and sleeps(self.plan[name]):  # their memory is free when the engine sleeps
            if self.rank == first:
                for rank in others:
                    self._released.send(b"", rank)
            else:
                self._released.receive(first)
        self._is_generating = False

    def _forward(self, task: Forward) -> None:
        assert self.link is not None
        name = task.call
        with self._catching(name, is_collective=self.placement.has_collectives(name)):
            result = self._forwards.run(task, self.settings, self.step, self.batch)
            self._outputs[name].append(result.outputs)
            self._spans[name] += [result.span, *calls.function_spans(self.settings, self.rank, self.step)]
            if self.rank in sources(self.plan, name):
                self.link.report(Scored(task.number, result.rows))

    @contextlib.contextmanager
    def _catching(self, name: str, *, is_collective: bool = False) -> Iterator[None]:
        """Report a failure in the block to rank 0, which ends the phase on all ranks. Until then this rank continues,
        because others may wait for it in a collective."""
        try:
            yield
        except JobFailed:
            raise
        except Exception as error:
            failure = failure_of(error, self.rank, name, is_collective=is_collective)
            self.error = error
            self._own_failures += (failure,)
            self._unfinished.clear()
            assert self.link is not None
            self.link.report(Failed((failure,)))
