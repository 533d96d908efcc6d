"""`HostAhead`: generation for another library's loop under a plan with a staleness. While the loop trains on a batch,
the engines generate the next ones; before they go on, they take the parameters of the training.

An *iteration* is a generation with all optimizer steps on it. All calls but the generation are run when the loop asks
for them. The batches on their way and the engine are in `batches_ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Rollouts
from ..calls import generate_and_score as calls
from ..calls.call_runner import CallRunner
from ..calls.generate_and_score import Step
from ..failures.alarm import Alarm, JobFailed
from ..placement.placement import Placement
from ..samples.drawn_samples import DrawnSamples, checksum
from ..samples.exchange import CallOutput, CallsFailed, Exchange
from ..samples.routes import RESULTS
from .batches_ahead import BatchesAhead


class HostAhead:
    """One rank's part. All methods are called by all ranks together.

    Args:
        runner: has the settings of the calls.
        exchange: of the executor; its messages' tags are not used.
    """

    def __init__(self, placement: Placement, alarm: Alarm, runner: CallRunner, exchange: Exchange) -> None:
        self.rank, self.alarm, self.runner, self.exchange = placement.rank, alarm, runner, exchange
        self.batches = BatchesAhead(placement, alarm, runner, exchange, ())
        self._known: dict[int, PromptBatch] = {}  # by iteration

    @property
    def versions(self) -> int:
        """The staleness of the plan."""
        return self.batches.versions

    def generate(self, number: int, prompts: Sequence[Rollouts]) -> CallOutput:
        """The responses of an iteration, most of which were drawn before. Then the engines go on with the next ones.

        Args:
            number: of the iteration. Each follows the one before.
            prompts: of this iteration and of the next ones, up to `versions`; of all ranks, with `index` and `prompts`.
                If they are others than were announced, what has been drawn is dropped.

        Returns:
            The outputs in ascending order of `index`, with those of `results.OF_GENERATION`; and on rank 0 the spans.

        Raises:
            JobFailed: the generation failed on some rank.
        """
        batches = self.batches
        batches.messages.flush()
        of_iterations = [self._batch(number + at, of_batch) for at, of_batch in enumerate(prompts)]
        self._known = {number + at: batch for at, batch in enumerate(of_iterations)}
        step = Step(number, of_iterations[0].rows)
        sampling = calls.sampling_of(self.runner.settings, batches.generate, step)
        current = batches.open(step, of_iterations, sampling)
        if not batches.begin(number):
            batches.take_update(number)
        batches.admit()
        generates = batches.generate.name in batches.placement.generators
        while generates and not current.is_published:
            self.alarm.at(f"{batches.generate.name} of generation {number + 1}")
            self.alarm.check()
            batches.poll()
            batches.publish()
        outcome: CallOutput | JobFailed | None = None
        if self.rank == RESULTS:
            try:
                outcome = current.running.inputs.collect(batches.generate.name)
            except CallsFailed as failed:
                outcome = failed.of_job()
        self.alarm.at(f"waiting for the samples of generation {number + 1}")
        sent = replace(outcome, spans=()) if isinstance(outcome, CallOutput) else outcome
        received = self.exchange.spread(sent)
        assert received is not None, "the first rank has collected it"
        if isinstance(received, JobFailed):
            raise received from current.running.failure
        return outcome if isinstance(outcome, CallOutput) else received

    def check(self) -> None:
        """Take what this rank's engine has finished. Raises `EngineError` if it has died."""
        self.batches.poll(0.0)
        self.batches.raise_failure()

    def _batch(self, number: int, prompts: Rollouts) -> PromptBatch:
        """The batch of an iteration: the same object each time that its prompts are the same."""
        made = PromptBatch(prompts, [{}] * len(prompts))
        known = self._known.get(number)
        return made if known is None or checksum(known) != checksum(made) else known

    def stop(self) -> None:
        """Stop the engines, so that they can be used for something else. The next iteration goes on."""
        self.batches.stop()

    def drawn(self, number: int) -> DrawnSamples | None:
        """The samples that have been drawn, in whole or in part, for the iterations from `number` on, on rank 0; `None`
        on the others."""
        return self.batches.drawn(number)

    def restore(self, drawn: DrawnSamples) -> None:
        """Go on with samples that were under way when a checkpoint was saved. Before the first iteration, with the same
        values on all ranks."""
        self.batches.restore(drawn)
