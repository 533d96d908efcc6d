"""`Executor`: runs an iteration on one rank: the streamed calls first, if the plan has any, then the other calls one
after the other. For each call it waits for the inputs, runs the call and publishes the outputs.

Every rank runs the loop. A rank runs the calls whose mesh contains it, in plan order, so calls on disjoint meshes
overlap. The calls themselves are in `generate_and_score`, their inputs in `call_inputs`, the streamed calls in
`stream_worker`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..algorithms.algorithm import Algorithm
from ..algorithms.nonfinite import NonFiniteError
from ..algorithms.prompt_batches import PromptBatch
from ..algorithms.rollout import Rollouts
from ..engines.base import Rate, Sampling
from ..plan.algorithm_graphs import has_host_loop
from ..plan.dataflow import Call, Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.streams import early_call
from ..plan.timeline import Span
from ..planner.iteration.stream_dispatcher import Dispatcher, Order
from .calls.call_runner import CallRunner
from .calls.generate_and_score import CallSettings, Step
from .calls.iteration_results import iteration_results, of_steps, refusal
from .calls.prefetched_generation import PrefetchedGeneration
from .failures.alarm import Alarm, JobFailed
from .failures.watchdog_client import current_watchdog
from .overlap.ahead_runs import AheadRuns
from .overlap.stream_forwards import stream_of_batch
from .overlap.stream_leader import StreamLeader, StreamLink
from .overlap.stream_messages import End
from .overlap.stream_worker import StreamWorker
from .placement.placement import Placement
from .samples.exchange import CallsFailed, Exchange
from .samples.partial_rollouts import PartialRollouts
from .samples.results import Iteration
from .samples.routes import RESULTS, replica
from .samples.shares import Share


class Executor:
    """Runs whole iterations (`run`), or one call at a time in any order that the data allow (`begin`, `perform`).

    Args:
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
        exchange: Exchange,
        algorithm: Algorithm,
        settings: CallSettings,
        alarm: Alarm,
        runner: CallRunner | None = None,
    ) -> None:
        self.placement, self.exchange, self.alarm = placement, exchange, alarm
        self.plan, self.rank = placement.plan, placement.rank
        self.orders: Sequence[Order] = ()
        self._performed: list[Span] = []
        self.runner = runner or CallRunner(placement, algorithm, settings, alarm)
        runs_ahead = self.plan.staleness.versions and not has_host_loop(self.plan.graph)
        self.ahead = AheadRuns(placement, alarm, self.runner, exchange) if runs_ahead else None

    def run(
        self,
        batch: PromptBatch,
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
            batch: the global batch's prompts, the same on every rank.
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
        this_step = Step(step, batch.rows, learning_rates, sampling, first=first)
        if self.ahead is not None and sampling is None and len(names) == len(self.plan.order):
            return self._run_ahead(this_step, batch, following)
        if self.ahead is not None:
            self.ahead.batches.stop()
        early = self.runner.early
        if early is not None and not (early.is_of(this_step, batch) and early.call in names):
            self.cancel_early()
        self.begin(this_step, whole)
        for name, samples in known.items():
            self.exchange.know(name, samples)
        leader = self._run_streamed(batch) if streamed else None
        rank_runs = self.plan.runs_of([name for name in whole if self.placement.takes_part(name)])
        for now, later in zip_longest(rank_runs, rank_runs[1:], fillvalue=()):
            running = [self.plan.graph.call(name) for name in now]
            shares = [self._share(call, batch) for call in running]
            for name in later:
                self.placement.prefetch(name, beside=now)
            self.runner.run_calls(self._now, running, shares)
        self.runner.early = None
        if following:
            self._begin_early(following[0])
        if leader is not None:
            leader.wait()
        return self._finish(batch, names, known)

    def _share(self, call: Call, batch: PromptBatch) -> Share | CallsFailed | None:
        return self._now.inputs.share(call, batch.prompts) if self.placement.has(call.name) else None

    def _run_ahead(self, step: Step, batch: PromptBatch, following: Sequence[PromptBatch]) -> Iteration:
        assert self.ahead is not None, "the plan has a staleness"
        self.exchange.flush()
        self._now = self.ahead.run(step, batch, following).running
        return self._finish(batch, self.plan.order, ())

    def _run_streamed(self, batch: PromptBatch) -> StreamLeader | None:
        """Run this rank's streamed calls and publish their outputs. Returns the leader, on rank 0."""
        stream = stream_of_batch(self.placement, self.runner.settings, self._now.step, batch)
        tag, messages = self.exchange.stream_tag, self.exchange.messages
        leader, streams = None, self.plan.streams
        assert streams is not None, "the plan has streamed calls"
        if self.rank == RESULTS:
            dispatcher = Dispatcher(stream, streams.migration, deterministic=streams.deterministic)
            leader = StreamLeader(messages, tag, stream, dispatcher)
            self.orders = leader.orders
        if any(self.placement.takes_part(name) for name in self.plan.streamed):
            link = StreamLink(messages, tag, leader, End) if self.rank in stream.ranks else None
            worker = StreamWorker(
                self.placement,
                self.runner.settings,
                self.alarm,
                messages,
                self.exchange.stream_tag + 2,
                link,
                stream,
                self._now.step,
                batch,
                self.runner.early,
            )
            for name, output in worker.run().items():
                self.exchange.publish(name, output)
            self._now.failure = worker.error
        return leader

    def _begin_early(self, batch: PromptBatch) -> None:
        if self.plan.barrier or self.plan.cluster.size == 1:  # a single device has nothing else to do meanwhile
            return
        name = early_call(self.plan.graph, self.plan.assignments)
        if name is not None and self.placement.takes_part(name):
            step = Step(self._now.step.number + 1, batch.rows, {})
            self.alarm.set_activity(f"{name} of {step.name} (its parameters)")
            self.runner.early = PrefetchedGeneration(self.placement, self.runner.settings, name, step, batch)

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
        self.exchange.flush()
        self.plan = self.placement.plan = self.exchange.plan = plan

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
        if self.ahead is not None and (partial_samples := self.exchange.broadcast(partial_samples)) is not None:
            self.ahead.batches.restore(partial_samples)

    # --- one call at a time -----------------------------------------------------------------------------------------

    def begin(self, step: Step, running: Collection[str] = ()) -> None:
        """Begin an iteration. All ranks together, after the messages of the last iteration have been received.

        Args:
            running: the calls that read each other's outputs; empty if each call is run by `perform`.
        """
        self.exchange.begin(running)
        self._now = self.runner.begin(step, self.exchange)

    def perform(self, name: str, samples: Rollouts) -> Rollouts:
        """Run one call of the iteration that has begun, on any samples, and wait for its outputs. All ranks call this
        together with the same samples. A call may be performed several times.

        Args:
            samples: every column that the call reads, and `index`, each sample's number, which seeds its sampling. For
                a call that trains: the global batch.

        Returns:
            The call's outputs in ascending order of `index`. For a call that trains: the statistics of its steps, with
            the norm of each step's gradient before clipping (`training_calls.train`).

        Raises:
            JobFailed: the call failed here or on another rank.
            NonFiniteError: the call trains, and a number of the samples is not finite.
        """
        self.cancel_early()
        call = self.plan.graph.call(name)
        self.exchange.forget(name)
        self._now = self.runner.begin(self._now.step, self.exchange)
        replicas = [replica(self.plan, name, self.rank)] if self.placement.has(name) else []
        shares = self._now.inputs.divide(call, samples, replicas)
        if self.placement.takes_part(name):
            self.runner.run(self._now, call, shares[0] if shares else None)
        return self._of_calls([name])[name]

    def perform_own(self, name: str, local_samples: Rollouts, sizes: Sequence[int]) -> Rollouts:
        """Run one call of the iteration that has begun on all ranks' local samples. A sample goes to the leader of the
        call's mesh, which divides the samples among the mesh's replicas. Rank 0 returns the outputs to the rank that
        owns the sample. All ranks call this together. A call may be performed several times.

        Args:
            local_samples: this rank's samples, with every column that the call reads; may be empty.

        Returns:
            The call's outputs for this rank's samples, in their order. For a call that adds gradients (`Step.loss`):
            the loss's values for each response token. For a call that trains: a row with the norm of each step's
            gradient before clipping, on every rank; none for a step that was skipped.

        Raises:
            JobFailed: the call failed here or on another rank.
            NonFiniteError: the call trains, and a number of the samples is not finite.
        """
        self.cancel_early()
        call = self.plan.graph.call(name)
        trains = self._now.step.trains(call)
        self.exchange.forget(name)
        self._now = self.runner.begin(self._now.step, self.exchange)
        self._now.inputs.reports = self.rank == self.plan.mesh(name).leader
        samples = self.exchange.gather(name, local_samples, sizes)
        share = self._now.inputs.share_of_gathered(call, samples) if self.placement.has(name) else None
        if self.placement.takes_part(name):
            self.runner.run(self._now, call, share)
        outcome: Rollouts | Exception | None = None
        if self.rank == RESULTS:
            try:
                output = self._now.inputs.collect(name)
                self._performed += output.spans
                outcome = of_steps(output.samples) if trains else output.samples
            except CallsFailed as failed:
                outcome = refusal(failed) if trains else failed.of_job()
        if trains:
            row: Rollouts = self._from_results(outcome)
            return row
        self.alarm.set_activity(f"waiting for the results of {self._now.step.name}")
        return self._raised(self.exchange.scatter(name, outcome, sizes))

    def perform_streamed(self, batch: PromptBatch) -> Mapping[str, Rollouts]:
        """Run the streamed calls of the iteration that has begun, on any prompts, and wait for their outputs. All ranks
        call this together with the same prompts. They may be run several times.

        Returns:
            Outputs by call, in ascending order of `index`.

        Raises:
            JobFailed: a call failed here or on another rank.
        """
        self.cancel_early()
        for name in self.plan.streamed:
            self.exchange.forget(name)
        self._now = self.runner.begin(self._now.step, self.exchange)
        leader = self._run_streamed(batch)
        outputs = self._of_calls(self.plan.streamed)
        if leader is not None:
            leader.wait()
        return outputs

    def _of_calls(self, names: Sequence[str]) -> Mapping[str, Rollouts]:
        """Rank 0 collects the calls' outputs and broadcasts them."""
        outcome: dict[str, Rollouts] | JobFailed | None = None
        if self.rank == RESULTS:
            try:
                collected = {name: self._now.inputs.collect(name) for name in names}
                outcome = {name: output.samples for name, output in collected.items()}
                self._performed += [span for output in collected.values() for span in output.spans]
            except CallsFailed as failed:
                outcome = failed.of_job()
        outputs: Mapping[str, Rollouts] = self._from_results(outcome)
        return outputs

    def take_spans(self) -> tuple[Span, ...]:
        """Times of each performed call on each rank since the last call of this method; on rank 0, empty on the
        others."""
        taken, self._performed = tuple(self._performed), []
        return taken

    # --- the results of an iteration ----------------------------------------------------------------------------------

    def _finish(self, batch: PromptBatch, names: Sequence[str], replayed: Collection[str]) -> Iteration:
        """Rank 0 computes the iteration's results and broadcasts them."""
        outcome: Iteration | JobFailed | NonFiniteError | None = None
        runner = self.runner
        if self.rank == RESULTS:
            try:
                outcome = iteration_results(self._now, runner.algorithm, runner.settings, batch, names, replayed)
            except (JobFailed, NonFiniteError) as error:
                outcome = error
        sent = outcome.for_other_ranks() if isinstance(outcome, Iteration) else outcome
        received: Iteration = self._from_results(sent)
        return outcome if isinstance(outcome, Iteration) else received

    def _from_results(self, outcome: object) -> Any:
        """Rank 0's result, on every rank. If it is an exception, every rank raises it."""
        self.alarm.set_activity(f"waiting for the results of {self._now.step.name}")
        return self._raised(self.exchange.broadcast(outcome))

    def _raised(self, outcome: object) -> Any:
        if isinstance(outcome, Exception):
            raise outcome from self._now.failure
        return outcome


def make_executor(placement: Placement, algorithm: Algorithm, settings: CallSettings) -> Executor:
    """The executor of a placement, with a new exchange and a new alarm. All ranks call this together."""
    exchange = Exchange(placement.plan, placement.rank, placement.control)
    alarm = Alarm(current_watchdog() if placement.plan.cluster.size > 1 else None)
    return Executor(placement, exchange, algorithm, settings, alarm)
