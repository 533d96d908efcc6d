"""`AheadServer`: generation for another library's loop under a plan with a staleness. While the loop trains on a batch,
the engines generate the next ones. At each new generation they take the trained parameters.

An *iteration* is a generation with all optimizer steps on its samples. All calls but the generation are run when the
loop asks for them. The batches under way and the engine are in `batches_ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Rollouts
from ..calls import generate_and_score as calls
from ..calls.batch import CallOutput, CallsFailed
from ..calls.call_runner import CallRunner
from ..calls.generate_and_score import Step
from ..failures.alarm import Alarm, JobFailed
from ..messages import Channels
from ..placement.placement import Placement
from ..samples.partial_rollouts import checksum
from ..samples.routes import RESULTS
from .batches_ahead import BatchesAhead


class AheadServer:
    """One rank's part. All methods are called by all ranks together.

    Args:
        runner: provides the settings of the calls.
        channels: the executor's; the batches use another series.
    """

    def __init__(self, placement: Placement, alarm: Alarm, runner: CallRunner, channels: Channels) -> None:
        self.rank, self.alarm, self.runner = placement.rank, alarm, runner
        self.batches = BatchesAhead(placement, alarm, runner, channels, ())
        self._known: dict[int, PromptBatch] = {}  # announced batches by iteration

    @property
    def versions(self) -> int:
        """The staleness of the plan."""
        return self.batches.versions

    def generate(self, number: int, prompts: Sequence[Rollouts]) -> CallOutput:
        """The responses of an iteration, most of which were generated before. The engines then go on with the next
        iterations.

        Args:
            number: number of the iteration. Iterations are consecutive.
            prompts: all ranks' prompts of this iteration and of up to `versions` next ones, with columns `index` and
                `prompts`. If they differ from the announced ones, the samples so far are dropped.

        Returns:
            The outputs in ascending order of `index`, with the columns `corrections.OF_GENERATION`; and on rank 0 the
            spans.

        Raises:
            JobFailed: the generation failed on some rank.
        """
        batches = self.batches
        batches.channels.flush()
        iteration_batches = [self._batch(number + offset, batch) for offset, batch in enumerate(prompts)]
        self._known = {number + offset: batch for offset, batch in enumerate(iteration_batches)}
        step = Step(number, iteration_batches[0].rows)
        sampling = calls.sampling_of(self.runner.settings, batches.generate, step)
        current = batches.open(step, iteration_batches, sampling)
        if not batches.begin(number):
            batches.take_update(number)
        batches.admit()
        generates = batches.generate.name in batches.placement.generators
        while generates and not current.is_published:
            self.alarm.set_activity(f"{batches.generate.name} of generation {number + 1}")
            self.alarm.check()
            batches.poll()
            batches.publish()
        outcome: CallOutput | JobFailed | None = None
        if self.rank == RESULTS:
            try:
                outcome = current.batch.outputs(batches.generate.name)
            except CallsFailed as failed:
                outcome = failed.of_job()
        sent = replace(outcome, spans=()) if isinstance(outcome, CallOutput) else outcome
        received: CallOutput = current.batch.from_first_rank(sent)
        return outcome if isinstance(outcome, CallOutput) else received

    def check(self) -> None:
        """Collect the finished samples of this rank's engine. Raises `EngineError` if it has died."""
        self.batches.poll(0.0)
        self.batches.raise_failure()

    def _batch(self, number: int, prompts: Rollouts) -> PromptBatch:
        """The batch of an iteration: the announced object if its prompts are the same."""
        batch = PromptBatch(prompts, [{}] * len(prompts))
        announced = self._known.get(number)
        return batch if announced is None or checksum(announced) != checksum(batch) else announced
