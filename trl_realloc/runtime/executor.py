"""`Executor`: runs an iteration on one rank: the streamed calls first, if the plan has any, then the other calls one
after the other. For each call it waits for the inputs, runs the call and publishes the outputs.

Every rank runs the loop. A rank runs the calls whose mesh contains it, in plan order, so calls on disjoint meshes
overlap. The samples are in `calls.batch`, the calls themselves in `calls.generate_and_score`, the streamed calls in
`overlap.stream_worker`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

from ..algorithms.algorithm import Algorithm
from ..algorithms.nonfinite import NonFiniteError
from ..algorithms.prompt_batches import PromptBatch
from ..algorithms.rollout import Rollouts
from ..engines.base import Rate
from ..engines.requests import Sampling
from ..plan.algorithm_graphs import has_host_loop
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.spans import Span
from ..plan.streams import early_call
from ..planner.iteration.stream_dispatcher import Dispatcher, Order
from .calls.batch import Batch
from .calls.call_runner import CallRunner
from .calls.generate_and_score import CallSettings, Step
from .calls.prefetched_generation import PrefetchedGeneration
from .calls.results import Iteration, iteration_results
from .failures.alarm import Alarm, JobFailed
from .failures.watchdog_client import current_watchdog
from .messages import Channels, GlooMessages
from .overlap.ahead_runs import AheadRuns
from .overlap.stream_forwards import stream_of_batch
from .overlap.stream_leader import StreamLeader, StreamLink
from .overlap.stream_messages import End
from .overlap.stream_worker import StreamWorker
from .placement.placement import Placement
from .samples.partial_rollouts import PartialRollouts
from .samples.routes import RESULTS


class Executor:
    """Runs whole iterations (`run`), or one call at a time in any order that the data allow (`perform`).

    Args:
        channels: this rank's messages about samples.
        algorithm: computes the columns between the calls, the losses and the metrics.
        alarm: reports this rank's failures to the other ranks, and raises theirs here.
        runner: runs this rank's calls; by default a `CallRunner`. Its settings and algorithm may be replaced between
            two iterations.

    Attributes:
        orders: orders of the latest iteration's streams, on rank 0.
        ahead: runs iterations of a plan with a staleness; `None` for another plan, and for another library's loop,
            which has an `AheadServer`.
    """

    def __init__(
        self,
        placement: Placement,
        channels: Channels,
        algorithm: Algorithm,
        settings: CallSettings,
        alarm: Alarm,
        runner: CallRunner | None = None,
    ) -> None:
        self.placement, self.channels, self.alarm = placement, channels, alarm
        self.plan, self.rank = placement.plan, placement.rank
        self.orders: Sequence[Order] = ()
        self._performed: list[Span] = []
        self.runner = runner or CallRunner(placement, algorithm, settings, alarm)
        runs_ahead = self.plan.staleness.versions and not has_host_loop(self.plan.graph)
        self.ahead = AheadRuns(placement, alarm, self.runner, channels) if runs_ahead else None

    def run(
        self,
        prompts: PromptBatch,
        step: int,
        learning_rates: Mapping[Role, Rate],
        *,
        known: Mapping[str, Rollouts] | None = None,
        only: Collection[str] | None = None,
        sampling: Sampling | None = None,
        first: int = 0,
        following: Sequence[PromptBatch] = (),
    ) -> Iteration:
        """Run one iteration.

        Args:
            prompts: those of the global batch, the same on every rank.
            step: number of the iteration, which seeds sampling and mini-batches.
            learning_rates: learning rate of each trained role in this iteration.
            known: outputs of calls that are not run (replayed rollouts), by call name.
            only: the calls to run; by default all. An evaluation leaves out the training.
            sampling: replaces the run's sampling. Such an iteration is synchronous.
            first: position of the batch's first prompt in the data set of an evaluation.
            following: the next iterations' batches, whose generation may begin during this iteration: `1 + staleness`
                batches. If another iteration is run next, their generated samples are dropped.

        Raises:
            JobFailed: a call failed here or on another rank. If it was a call before the training, nothing was trained
                on the batch.
        """
        known = known or {}
        names = [n for n in self.plan.order if n not in known and (only is None or n in only)]
        streamed = self.plan.streamed if set(self.plan.streamed) <= set(names) else ()
        whole = [name for name in names if name not in streamed]
        this_step = Step(step, prompts.rows, learning_rates, sampling, first=first)
        if self.ahead is not None and sampling is None and len(names) == len(self.plan.order):
            self.channels.flush()
            return self._finish(self.ahead.run(this_step, prompts, following).batch, self.plan.order, ())
        if self.ahead is not None:
            self.ahead.batches.stop()
        early = self.runner.early
        if early is not None and not (early.is_of(this_step, prompts) and early.call in names):
            self.cancel_early()
        batch = self._batch(this_step, prompts.prompts, running=whole)
        for name, samples in known.items():
            batch.know(name, samples)
        leader = self._run_streamed(batch, prompts) if streamed else None
        runs = self.plan.runs_of([name for name in whole if self.placement.takes_part(name)])
        for now, later in zip_longest(runs, runs[1:], fillvalue=()):
            self.runner.run_calls(batch, now, later)
        self.runner.early = None
        if following:
            self.begin_early(this_step, following[0])
        if leader is not None:
            leader.wait()
        return self._finish(batch, names, known)

    def _batch(
        self, step: Step, samples: Rollouts, *, sizes: Sequence[int] | None = None, running: Collection[str] = ()
    ) -> Batch:
        """A new batch, after all messages of the last one have been received."""
        self.channels.flush()
        return self.runner.batch(step, self.channels, samples, sizes=sizes, running=running)

    def _run_streamed(self, batch: Batch, prompts: PromptBatch) -> StreamLeader | None:
        """Run this rank's streamed calls and publish their outputs. Returns the leader, on rank 0."""
        stream = stream_of_batch(self.placement, self.runner.settings, batch.step, prompts)
        leader, streams = None, self.plan.streams
        assert streams is not None, "the plan has streamed calls"
        if self.rank == RESULTS:
            dispatcher = Dispatcher(stream, streams.migration, deterministic=streams.deterministic)
            leader = StreamLeader(batch.channels, stream, dispatcher)
            self.orders = leader.orders
        if any(self.placement.takes_part(name) for name in self.plan.streamed):
            link = StreamLink(batch.channels, leader, End) if self.rank in stream.ranks else None
            worker = StreamWorker(
                self.placement,
                self.runner.settings,
                self.alarm,
                batch.channels,
                link,
                stream,
                batch.step,
                prompts,
                self.runner.early,
            )
            for name, output in worker.run().items():
                batch.put(name, output)
            batch.failure = worker.error
        return leader

    def begin_early(self, step: Step, prompts: PromptBatch) -> None:
        """Begin the generation of the iteration after `step` on this rank, if it has an engine that waits for nothing
        else. `run` drops it if another iteration follows."""
        if self.plan.barrier or self.plan.cluster.size == 1:  # a single device has nothing else to do meanwhile
            return
        name = early_call(self.plan.graph, self.plan.assignments)
        if name is not None and self.placement.takes_part(name):
            step = Step(step.number + 1, prompts.rows, {})
            self.alarm.set_activity(f"{name} of {step.name} (its parameters)")
            self.runner.early = PrefetchedGeneration(self.placement, self.runner.settings, name, step, prompts)

    def cancel_early(self) -> None:
        """Stop the generation for later iterations. With a staleness the next iteration resumes it; otherwise it is
        dropped."""
        if self.runner.early is not None:
            self.runner.early.close()
            self.runner.early = None
        if self.ahead is not None:
            self.ahead.batches.stop()

    def follow(self, plan: ExecutionPlan) -> None:
        """Run the next iterations by another plan, which differs only in the overlap of calls. All ranks together."""
        self.cancel_early()
        self.channels.flush()
        self.plan = self.placement.plan = plan

    def samples_under_way(self, step: int) -> PartialRollouts | None:
        """Finished and partial samples of the iterations from `step` on, on rank 0; `None` on the others, and under a
        plan without a staleness. All ranks together, between two iterations."""
        return None if self.ahead is None else self.ahead.batches.drawn(step)

    def go_on_with(self, partial_samples: PartialRollouts | None) -> None:
        """Use samples that were under way in another run or plan. Before the first iteration, all ranks together. A
        plan without a staleness draws them anew.

        Args:
            partial_samples: the samples, on rank 0; `None` if there are none.
        """
        if self.ahead is not None and (partial_samples := self.channels.broadcast(partial_samples)) is not None:
            self.ahead.batches.restore(partial_samples)

    # --- one call at a time -----------------------------------------------------------------------------------------

    def perform(self, step: Step, name: str, samples: Rollouts, sizes: Sequence[int] | None = None) -> Rollouts:
        """Run one call on any samples, and wait for its outputs. All ranks call this together. A call may be performed
        several times in an iteration.

        Args:
            samples: every column that the call reads. Without `sizes` the samples of all ranks, on every rank, with
                `index`, each sample's number, which seeds its sampling; for a call that trains: the global batch.
            sizes: number of samples of each rank, not all 0, if `samples` are this rank's own.

        Returns:
            The call's outputs for these samples: in ascending order of `index`, or in the order of this rank's own. For
            a call that adds gradients (`Step.loss`): the loss's values for each response token. For a call that trains:
            the statistics of its steps, with the norm of each step's gradient before clipping; with `sizes` a row with
            the norm of each step, none for a step that was skipped.

        Raises:
            JobFailed: the call failed here or on another rank.
            NonFiniteError: the call trains, and a number of the samples is not finite.
        """
        self.cancel_early()
        batch = self._batch(step, samples, sizes=sizes)
        if sizes is not None:
            batch.send_samples(name)
        if self.placement.takes_part(name):
            self.runner.run_calls(batch, [name])
        return self._results(batch, name)

    def perform_streamed(self, step: Step, prompts: PromptBatch) -> Mapping[str, Rollouts]:
        """Run the streamed calls on any prompts, and wait for their outputs. All ranks call this together with the same
        prompts. They may be run several times in an iteration.

        Returns:
            Outputs by call, in ascending order of `index`.

        Raises:
            JobFailed: a call failed here or on another rank.
        """
        self.cancel_early()
        batch = self._batch(step, prompts.prompts)
        leader = self._run_streamed(batch, prompts)
        outputs = {name: self._results(batch, name) for name in self.plan.streamed}
        if leader is not None:
            leader.wait()
        return outputs

    def _results(self, batch: Batch, name: str) -> Rollouts:
        outputs, spans = batch.results(self.plan.graph.call(name))
        self._performed += spans
        return outputs

    def take_spans(self) -> tuple[Span, ...]:
        """Times of each performed call on each rank since the last call of this method; on rank 0, empty on the
        others."""
        taken, self._performed = tuple(self._performed), []
        return taken

    # --- the results of an iteration ----------------------------------------------------------------------------------

    def _finish(self, batch: Batch, names: Sequence[str], replayed: Collection[str]) -> Iteration:
        """Rank 0 computes the iteration's results and broadcasts them."""
        outcome: Iteration | JobFailed | NonFiniteError | None = None
        if self.rank == RESULTS:
            try:
                outcome = iteration_results(batch, names, replayed)
            except (JobFailed, NonFiniteError) as error:
                outcome = error
        sent = outcome.for_other_ranks() if isinstance(outcome, Iteration) else outcome
        received: Iteration = batch.from_first_rank(sent)
        return outcome if isinstance(outcome, Iteration) else received


def make_executor(placement: Placement, algorithm: Algorithm, settings: CallSettings) -> Executor:
    """The executor of a placement, with new channels and a new alarm. All ranks call this together."""
    plan = placement.plan
    channels = Channels(GlooMessages(placement.control), plan.order, placement.rank, plan.cluster.size)
    alarm = Alarm(current_watchdog() if plan.cluster.size > 1 else None)
    return Executor(placement, channels, algorithm, settings, alarm)
