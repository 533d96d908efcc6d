"""`CallRunner`: runs one call on this rank: gets its share of the samples, updates its parameters, computes its
outputs, and publishes them.

The computations are in `generate_and_score` and `training_calls`, the loop over the calls in `executor`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence

from ...algorithms.algorithm import Algorithm
from ...algorithms.rollout import Rollouts
from ...engines.base import BackgroundEngine, EngineError
from ...plan.dataflow import Call, CallKind
from ...plan.spans import Span
from ..failures.alarm import Alarm, JobFailed
from ..messages import Channels
from ..parameters.reallocation import Moved
from ..placement.placement import Placement
from ..samples.routes import PrefixAffinity, Share
from . import generate_and_score as calls
from . import training_calls
from .batch import Batch, CallOutput, CallsFailed, Failures
from .generate_and_score import CallSettings, Step
from .local_turns import LocalTurns
from .prefetched_generation import PrefetchedGeneration


class CallRunner:
    """Runs the calls of one rank.

    Attributes:
        early: the generation that was begun in the previous iteration.
    """

    def __init__(self, placement: Placement, algorithm: Algorithm, settings: CallSettings, alarm: Alarm) -> None:
        self.placement, self.algorithm, self.settings, self.alarm = placement, algorithm, settings, alarm
        self.early: PrefetchedGeneration | None = None
        self._affinity = {name: PrefixAffinity() for name in placement.plan.graph.calls_of(CallKind.GENERATE)}

    def batch(
        self,
        step: Step,
        channels: Channels,
        samples: Rollouts,
        *,
        sizes: Sequence[int] | None = None,
        running: Collection[str] = (),
    ) -> Batch:
        """A new batch on this rank. The arguments are those of `Batch`."""
        return Batch(
            self.placement.plan,
            channels,
            step,
            self.algorithm,
            self.settings,
            self.alarm,
            self._affinity,
            self.placement.shares_tokens,
            samples,
            sizes=sizes,
            running=running,
        )

    def run_calls(self, batch: Batch, names: Sequence[str], following: Sequence[str] = ()) -> bool:
        """Run this rank's part of one call, or of the two that the plan fuses (`ExecutionPlan.runs_of`).

        Args:
            following: the calls that this rank runs next, whose parameters are fetched meanwhile.

        Returns:
            True if neither a call nor its inputs failed here.
        """
        running = [self.placement.plan.graph.call(name) for name in names]
        shares = [batch.inputs(call) if self.placement.has(call.name) else None for call in running]
        for name in following:
            self.placement.prefetch(name, beside=names)
        if len(running) == 1:
            return self.run(batch, running[0], shares[0])
        return self._run_together(batch, (running[0], running[1]), [share for share in shares if share is not None])

    def run(self, batch: Batch, call: Call, share: Share | CallsFailed | None) -> bool:
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
        name, step = call.name, batch.step
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
            batch.put_failure([name], error, is_collective=is_collective)
            return False
        batch.put(name, output)
        return isinstance(output, CallOutput)

    def _run_together(self, batch: Batch, pair: tuple[Call, Call], shares: Sequence[Share | CallsFailed]) -> bool:
        """Run the two calls that the plan fuses. A failure of one is published for both."""
        step, names = batch.step, [call.name for call in pair]
        outputs: Sequence[CallOutput | Failures]
        failed = [share for share in shares if isinstance(share, CallsFailed)]
        try:
            self.alarm.set_activity(f"{' and '.join(names)} of {step.name}")
            if failed:
                outputs = [failed[0].failures, failed[0].failures]
            else:
                outputs = self._trained_together(pair, [s for s in shares if isinstance(s, Share)], step)
        except JobFailed:
            raise
        except Exception as error:
            batch.put_failure(names, error, is_collective=True)
            return False
        for name, output in zip(names, outputs, strict=True):
            batch.put(name, output)
        return not failed

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

    @contextlib.contextmanager
    def drawing(self, name: str, step: Step, first: int) -> Iterator[LocalTurns]:
        """Context of a generation by this rank's engine, with the parameters that the call needs. All ranks together.

        Args:
            first: `index` of this rank's first sample in the global batch.
        """
        self.alarm.set_activity(f"{name} of {step.name} (its parameters)")
        moved = self._refresh(name)
        self.placement.check_fresh(name)
        self.alarm.set_activity(f"{name} of {step.name}")
        call, rank = self.placement.plan.graph.call(name), self.placement.rank
        engine = self.placement.generators[name]
        assert isinstance(engine, BackgroundEngine), "the engine generates in the background"
        with self.placement.resident(name):
            generation = engine.start([], calls.sampling_of(self.settings, call, step))
            turns = LocalTurns(generation, self.settings, call, step, first, rank)
            if moved:
                turns.spans.append(Span(moved.name, rank, moved.start, moved.end, step.number, bytes=moved.bytes))
            try:
                yield turns
            finally:
                generation.close()

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
