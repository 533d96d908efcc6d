"""`ScoringAhead`: a rank's part of scoring samples of iterations ahead as they end, under a plan with a staleness and
streams.

Which samples are scored where and when is decided by `planner.ahead_order` on rank 0 (`ahead_leader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..algorithms.rollout import Rollouts
from ..planner.ahead_order import EndScoring
from . import calls
from .ahead_leader import AheadEvent, OfIteration, ScoringFailed
from .batches_ahead import BatchesAhead
from .exchange import CallOutput, failure_of
from .failures.alarm import Alarm, JobFailed
from .routes import replica, sources
from .stream_forwards import ForwardRunner
from .stream_messages import Finished, Forward, Scored


class ScoringAhead:
    """One rank of a run that scores samples ahead as they end.

    Args:
        batches: on their way.
        tag: of the samples that the first rank of a replica passes on; it changes when batches were given up.
    """

    def __init__(self, batches: BatchesAhead, alarm: Alarm, tag: Callable[[], int]) -> None:
        self.batches, self.alarm, self._tag = batches, alarm, tag
        self.placement, self.plan, self.rank = batches.placement, batches.plan, batches.rank
        self._forwards = ForwardRunner(self.placement, alarm, batches.messages, 0)

    def close(self) -> None:
        """Let parameters leave the device. May be called at any time."""
        self._forwards.close()

    def ended(self) -> Iterator[OfIteration]:
        """The samples that this rank's engine has ended since this was last asked."""
        name = self.batches.generate.name
        for number, batch in sorted(self.batches.in_flight.items()):
            new = sorted(set(batch.completions) - batch.reported) if batch.is_admitted else []
            if not new:
                continue
            batch.reported.update(new)
            done = [batch.completions[index] for index in new]
            outputs = calls.completed(done, self.batches.runner.settings.eos_token_id, self.batches.generate.outputs)
            tokens = {completion.index: len(completion.token_ids) for completion in done}
            rows = self._forwards.rows(name, outputs)
            yield OfIteration(number, Finished(replica(self.plan, name, self.rank), tokens, rows))

    def forward(self, iteration: int, task: Forward) -> AheadEvent | None:
        """Run one forward. Returns what rank 0 is told, if anything."""
        batch, name = self.batches.in_flight[iteration], task.call
        self._forwards.tag = self._tag()
        try:
            made = self._forwards.run(task, self.batches.runner.settings, batch.running.step, batch.batch)
        except JobFailed:
            raise
        except Exception as error:
            is_collective = self.placement.has_collectives(name)
            batch.running.failure = error
            batch.scoring_failures[name] = (failure_of(error, self.rank, name, is_collective=is_collective),)
            return ScoringFailed(iteration)
        batch.scored[name].append(CallOutput(made.outputs, (made.span,)))
        is_source = self.rank in sources(self.plan, name)
        return OfIteration(iteration, Scored(task.number, made.rows)) if is_source else None

    def publish(self, order: EndScoring) -> None:
        """Publish this rank's part of what a call has made of all samples. If a call of the iteration has failed, its
        own failures, or nothing."""
        batch, name = self.batches.in_flight[order.iteration], order.call
        failures = batch.scoring_failures.get(name, ())
        made = [] if order.failed else batch.scored.pop(name, [])
        batch.running.exchange.publish(name, failures or _together(made))


def _together(made: list[CallOutput]) -> CallOutput:
    parts = [each.samples for each in made if len(each.samples)]
    spans = tuple(span for each in made for span in each.spans)
    return CallOutput(Rollouts.cat(parts) if parts else Rollouts(), spans)
