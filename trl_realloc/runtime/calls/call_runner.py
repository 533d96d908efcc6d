"""`CallRunner`: runs one call on this rank: updates its parameters, computes its outputs from this rank's share of the
samples, and publishes them.

The computations are in `generate_and_score` and `training_calls`, the loop over the calls in `executor`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...algorithms.algorithm import Algorithm
from ...algorithms.rollout import Rollouts
from ...engines.base import EngineError
from ...plan.dataflow import Call, CallKind
from ...plan.timeline import Span
from ..failures.alarm import Alarm, JobFailed
from ..parameters.reallocation import Moved
from ..placement.placement import Placement
from ..samples.exchange import CallOutput, CallsFailed, Exchange, Failures, failure_of
from ..samples.shares import PrefixAffinity, Share
from . import generate_and_score as calls
from . import training_calls
from .call_inputs import CallInputs
from .generate_and_score import CallSettings, Step
from .prefetched_generation import PrefetchedGeneration


@dataclass
class RunningIteration:
    """One iteration on this rank.

    Args:
        failure: the latest exception of a call on this rank.
    """

    step: Step
    exchange: Exchange
    inputs: CallInputs
    failure: BaseException | None = None


class CallRunner:
    """Runs the calls of one rank.

    Attributes:
        early: the generation that was begun in the previous iteration.
    """

    def __init__(self, placement: Placement, algorithm: Algorithm, settings: CallSettings, alarm: Alarm) -> None:
        self.placement, self.algorithm, self.settings, self.alarm = placement, algorithm, settings, alarm
        self.early: PrefetchedGeneration | None = None
        self._answered = {name: PrefixAffinity() for name in placement.plan.graph.calls_of(CallKind.GENERATE)}

    def begin(self, step: Step, exchange: Exchange) -> RunningIteration:
        """A new iteration on this rank."""
        inputs = CallInputs(
            exchange,
            self.algorithm,
            self.settings,
            self.alarm,
            step,
            self._answered,
            self.placement.shares_tokens,
        )
        return RunningIteration(step, exchange, inputs)

    def run(self, iteration: RunningIteration, call: Call, share: Share | CallsFailed | None) -> bool:
        """Run a call, and publish its outputs or its failure. A call whose inputs have failed publishes their failures,
        so that every rank gets the messages that it waits for, and learns of the failure at the iteration's end.

        A failure inside a call with collectives is raised at once: the other ranks of its mesh wait in a collective,
        and would mistake this rank's next collective on the same process group for it.

        Args:
            share: this rank's share, or the failures of the inputs; `None` on a rank that only sends parameters.

        Returns:
            True if neither the call nor its inputs failed here.
        """
        output: CallOutput | Failures
        name, step = call.name, iteration.step
        is_collective = True  # the code that runs now contains collectives
        try:
            self.alarm.set_activity(f"{name} of {step.name} (its parameters)")
            try:
                moved = self._refresh(name)
            # an engine refused the parameters: raised on every rank, after the last collective
            except EngineError:
                is_collective = False
                raise
            is_collective = self.placement.has_collectives(name)
            self.alarm.set_activity(f"{name} of {step.name}")
            rank = self.placement.rank
            spans: tuple[Span, ...] = ()
            if moved:
                spans = (Span(moved.name, rank, moved.start, moved.end, step.number, bytes=moved.bytes),)
            if share is None:
                return True
            if isinstance(share, CallsFailed) or share.is_skipped:
                output = share.failures if isinstance(share, CallsFailed) else CallOutput(Rollouts(), spans)
            else:
                self.placement.check_fresh(name)
                if is_collective:
                    self._wait_for_mesh(name, f"{name} of {step.name}")
                start = time.time()
                with self.placement.resident(name):
                    outputs = self.compute(call, share, step)
                functions = calls.function_spans(self.settings, rank, step)
                output = CallOutput(outputs, (*spans, self._span(call, step, outputs, start), *functions))
        except JobFailed:
            raise
        except Exception as error:
            iteration.failure = error
            output = (failure_of(error, self.placement.rank, name, is_collective=is_collective),)
        iteration.exchange.publish(name, output)
        return isinstance(output, CallOutput)

    def run_calls(
        self, iteration: RunningIteration, running: Sequence[Call], shares: Sequence[Share | CallsFailed | None]
    ) -> bool:
        """Run one call as `run` does, or the two that the plan fuses (`ExecutionPlan.runs_of`)."""
        if len(running) == 1:
            return self.run(iteration, running[0], shares[0])
        return self._run_together(iteration, (running[0], running[1]), [s for s in shares if s is not None])

    def _run_together(
        self, iteration: RunningIteration, pair: tuple[Call, Call], shares: Sequence[Share | CallsFailed]
    ) -> bool:
        """Run the two calls that the plan fuses. A failure of one is published for both."""
        step, names = iteration.step, " and ".join(call.name for call in pair)
        outputs: Sequence[CallOutput | Failures]
        failed = [share for share in shares if isinstance(share, CallsFailed)]
        try:
            self.alarm.set_activity(f"{names} of {step.name}")
            if failed:
                outputs = [failed[0].failures, failed[0].failures]
            else:
                outputs = self._trained_together(pair, [s for s in shares if isinstance(s, Share)], step)
        except JobFailed:
            raise
        except Exception as error:
            iteration.failure = error
            failure = failure_of(error, self.placement.rank, names, is_collective=True)
            outputs = [(failure,), (failure,)]
        for call, output in zip(pair, outputs, strict=True):
            iteration.exchange.publish(call.name, output)
        return all(isinstance(output, CallOutput) for output in outputs)

    def _trained_together(self, pair: tuple[Call, Call], shares: Sequence[Share], step: Step) -> list[CallOutput]:
        if any(share.is_skipped for share in shares):
            return [CallOutput(Rollouts(), ())] * 2
        placement, (first, second) = self.placement, pair
        losses = self.algorithm.loss(first.name).of_tokens, self.algorithm.loss(second.name).of_tokens
        batches = shares[0].mini_batches(), shares[1].mini_batches()
        self._wait_for_mesh(first.name, f"{first.name} and {second.name} of {step.name}")
        start = time.time()
        with placement.resident(first.name), placement.resident(second.name):
            columns = training_calls.train_together(placement, self.settings, losses, pair, batches, step)
        return [
            CallOutput(outputs, (self._span(call, step, outputs, start),))
            for call, outputs in zip(pair, columns, strict=True)
        ]

    def compute(self, call: Call, share: Share, step: Step) -> Rollouts:
        """The outputs of a call of any kind for this rank's share."""
        placement, settings = self.placement, self.settings
        match call.kind:
            case CallKind.GENERATE:
                early = self._early_of(call.name)
                begun = early.generation if early is not None else None
                return calls.generate(placement, settings, call, share.samples, step, self.alarm.check, begun)
            case CallKind.FORWARD:
                return calls.forward(placement, settings, call, share.samples, step)
            case CallKind.TRAIN if not step.trains(call):
                return training_calls.add_gradients(placement, call, share.samples, step)
            case CallKind.TRAIN:
                loss = self.algorithm.loss(call.name).of_tokens
                return training_calls.train(placement, settings, loss, call, share.mini_batches(), step)

    def _wait_for_mesh(self, name: str, what: str) -> None:
        """Wait for the other ranks of a call's mesh before its first collective. They may still be in another call,
        such as the rewards of a slow judge."""
        self.alarm.set_activity(f"waiting for the other ranks of {what}")
        self.placement.group(name).host_barrier()
        self.alarm.set_activity(what)

    def _early_of(self, name: str) -> PrefetchedGeneration | None:
        return self.early if self.early is not None and self.early.call == name else None

    def _refresh(self, name: str) -> Moved | None:
        """Update the call's parameters, unless its early generation has updated them."""
        early = self._early_of(name)
        return self.placement.refresh(name) if early is None else early.refreshed()

    def _span(self, call: Call, step: Step, outputs: Rollouts, start: float) -> Span:
        has_tokens = call.kind is CallKind.GENERATE and len(outputs) > 0
        tokens = int(outputs.ragged(call.outputs[0]).lengths.sum()) if has_tokens else 0
        early, end = self._early_of(call.name), max(start, time.time())
        if early is not None and early.generation is not None:
            start, end = early.start, max(early.start, early.generation.ended_at)
        samples = 0 if call.trains else len(outputs)
        shared = self.placement.take_shared_tokens(call.name)
        rank, number = self.placement.rank, step.number
        return Span(call.name, rank, start, end, number, tokens, samples=samples, shared_tokens=shared)
