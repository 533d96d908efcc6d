"""One rank's part of calls that train, and the checks of trained weights. `train` runs one call, `train_together` two
calls that the plan fuses, and `add_gradients` a loss without an optimizer step.

Other kinds of call are in `generate_and_score`. Only the engines communicate here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from transformers.utils import logging

from ...algorithms.algorithm import TokenLoss
from ...algorithms.nonfinite import NonFiniteError, all_finite, check_rates, with_text
from ...algorithms.rollout import Rollouts
from ...engines.training.fused_training import FusedShare
from ...plan.dataflow import Call
from ..parameters.replica_check import check_replicas, is_due
from ..placement.placement import Placement
from ..process_groups import all_gather_object
from ..samples.routes import sources
from .generate_and_score import CallSettings, Step


logger = logging.get_logger(__name__)
GRAD_NORM = "grad_norm"  # output column of a call that trains: the norm of the step's gradient before clipping


def train(
    placement: Placement,
    settings: CallSettings,
    loss: TokenLoss,
    call: Call,
    mini_batches: Iterable[Rollouts],
    step: Step,
) -> Rollouts:
    """Train one role for all epochs and mini-batches.

    Args:
        mini_batches: this rank's share of the samples of each optimizer step.

    Returns:
        A row for each sample of each optimizer step: `index` (the sample), `update` (the step), the loss's statistics,
            and `grad_norm`, which is the same in all rows of a step. Skipped steps have no rows.

    Raises:
        NonFiniteError: raised on every rank of the mesh, before an optimizer step that is not finite, or after steps
            that left weights that are not finite.
    """
    engine, log = placement.trained(call.role), _TrainingLog(placement, settings, call, step)
    assert engine is not None, "only the ranks of a call's mesh run it"
    if not step.continues:
        engine.drop()
    for update, samples in enumerate(mini_batches):
        try:
            statistics = engine.train(samples, loss, placement.budget(call.name), step.learning_rates[call.role])
        except NonFiniteError as error:
            log.skip(update, samples, error)
        else:
            log.add(update, samples, statistics)
    return log.end()


def add_gradients(placement: Placement, call: Call, samples: Rollouts, step: Step) -> Rollouts:
    """Add the gradients of `step.loss` to the next optimizer step of a role.

    Args:
        samples: this rank's share.

    Returns:
        `index`, and the loss's values for each response token.
    """
    engine = placement.trained(call.role)
    assert engine is not None and step.loss is not None, "the ranks of a call's mesh compute a loss"
    if not step.continues:
        engine.drop()
    columns = engine.add_gradients(samples, step.loss, placement.budget(call.name))
    if not columns:
        return Rollouts()
    responses = samples.ragged("responses")
    return Rollouts(index=samples.tensor("index"), **{name: responses.like(c) for name, c in columns.items()})


def train_together(
    placement: Placement,
    settings: CallSettings,
    losses: tuple[TokenLoss, TokenLoss],
    pair: tuple[Call, Call],
    mini_batches: tuple[Iterable[Rollouts], Iterable[Rollouts]],
    step: Step,
) -> tuple[Rollouts, Rollouts]:
    """Train the two roles that the plan fuses, one mini-batch of each after the other.

    Args:
        mini_batches: this rank's share of each optimizer step's samples, for each role.

    Returns:
        For each role, the columns of `train`.

    Raises:
        NonFiniteError: either role's step or weights are not finite. The other role's step of this mini-batch has been
            taken.
    """
    assert placement.fused is not None, "only the ranks of the calls' mesh run them"
    logs = tuple(_TrainingLog(placement, settings, call, step) for call in pair)
    for update, samples in enumerate(zip(*mini_batches, strict=True)):
        first, second = (
            FusedShare(mini_batch, loss, placement.budget(call.name), step.learning_rates[call.role])
            for call, mini_batch, loss in zip(pair, samples, losses, strict=True)
        )
        outcomes = placement.fused.train((first, second))
        for log, mini_batch, outcome in zip(logs, samples, outcomes, strict=True):
            if isinstance(outcome, NonFiniteError):
                log.skip(update, mini_batch, outcome)
            else:
                log.add(update, mini_batch, outcome)
    return logs[0].end(), logs[1].end()


class _TrainingLog:
    """Collects the outputs of one call's optimizer steps on this rank."""

    def __init__(self, placement: Placement, settings: CallSettings, call: Call, step: Step) -> None:
        self.placement, self.settings, self.call, self.step = placement, settings, call, step
        self.learning_rate = step.learning_rates[call.role]
        engine = placement.trained(call.role)
        assert engine is not None, "only the ranks of a call's mesh run it"
        self._engine = engine
        self._parts: list[Rollouts] = []
        check_rates({call.name: self.learning_rate})

    def add(self, update: int, samples: Rollouts, statistics: Mapping[str, torch.Tensor]) -> None:
        if statistics:
            order = torch.full((len(samples),), update)
            columns = {**statistics, GRAD_NORM: torch.full((len(samples),), self._engine.grad_norm)}
            self._parts.append(Rollouts(index=samples.tensor("index"), update=order, **columns))

    def skip(self, update: int, samples: Rollouts, error: NonFiniteError) -> None:
        """Record a refused optimizer step. Raises `NonFiniteError` unless the run skips such steps."""
        what = f"optimizer step {update + 1} of {self.call.name} in update {self.step.number + 1}"
        if not self.settings.skip_nonfinite:
            raise NonFiniteError(f"{what} was not taken: {error}", error.sample) from None
        if _reports(self.placement, self.call.name, error, samples):
            logger.warning(f"{what} was left out: {with_text(error, samples, self.settings.processing_class)}.")

    def end(self) -> Rollouts:
        """Check the weights. Returns the columns of `train`."""
        rate, name, number = self.learning_rate, self.call.name, self.step.number
        rates = [rate] if isinstance(rate, (int, float)) else [group["lr"] for group in rate]
        when = f"after update {number + 1}, at learning rate {', '.join(map(str, rates))}"
        check_weights(self.placement, name, when)
        if is_due(number):
            check_replicas(self._engine, self.placement.group(name), str(self.call.role))
        return Rollouts.cat(self._parts) if self._parts else Rollouts()


def _reports(placement: Placement, call: str, error: NonFiniteError, samples: Rollouts) -> bool:
    """True on the one rank of the mesh that reports the error: the source of its sample, or the leader."""
    if error.sample < 0:
        return placement.group(call).is_leader
    return placement.rank in sources(placement.plan, call) and error.sample in samples.tensor("index").tolist()


def check_weights(placement: Placement, call: str, when: str) -> None:
    """Check the weights of a call's role. Collective over the mesh of the call, which trains the role.

    Args:
        when: the end of the message.

    Raises:
        NonFiniteError: the weights are not finite on this or another rank of the mesh.
    """
    if placement.group(call).max(int(not _is_finite(placement, call))):
        role = placement.role_of(call)
        raise NonFiniteError(f"the {role}'s weights are not finite {when}; nothing of them is saved")


def check_first_weights(placement: Placement, origin: str) -> None:
    """Check the weights of all trained roles before the first update. Collective over the job.

    Args:
        origin: the end of the message.

    Raises:
        NonFiniteError: a trained role's weights are not finite. Raised on every rank.
    """
    trainings = [name for name in placement.plan.order if placement.plan.graph.call(name).trains]
    broken = [n for n in trainings if placement.rank in placement.plan.mesh(n) and not _is_finite(placement, n)]
    roles = {str(placement.role_of(n)) for calls in all_gather_object(broken, placement.control) for n in calls}
    if roles:
        raise NonFiniteError(f"the {' and the '.join(sorted(roles))}'s weights are not finite as {origin}")


def _is_finite(placement: Placement, call: str) -> bool:
    engine = placement.engine(call)
    assert engine is not None, "only ranks that train have weights to look at"
    return all_finite(tensor for parts in engine.parts().values() for _, tensor in parts)
