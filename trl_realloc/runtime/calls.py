"""What one rank does for each kind of call: `generate`, `forward` and `train` take the rank's share of the samples and
return the call's output columns.

The loop over the calls is in `executor`, the division of the samples in `shares`. Only the engines communicate here.
The functions read a call's kind and columns from the graph, never its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..algorithms.base import TokenLoss
from ..algorithms.nonfinite import NonFiniteError, all_finite, check_rates, with_text
from ..algorithms.rewards import FunctionReward, ModelReward, decode, weighted_scores
from ..algorithms.rollout import Ragged, Rollouts
from ..engines.base import Completion, Generation, GenerationRequest, Rate, Sampling, Unfinished
from ..plan.dataflow import Call, Role
from .placement import Placement
from .process_groups import from_every_rank
from .replica_check import check_replicas, is_due
from .routes import sources
from .shares import as_responses


logger = logging.get_logger(__name__)
POLL_S = 1.0  # most time without a look for another rank's failure
EVALUATION_STEP = 1 << 40  # steps from here on are evaluations, which draw from seeds of their own


@dataclass(frozen=True)
class CallSettings:
    """Settings of a run's calls that are not in the plan, the placement or the algorithm; the same on every rank.

    Args:
        sampling: how tokens are drawn.
        seed: of the draws of tokens.
        eos_token_id: ends a response, for the column `has_eos`.
        processing_class: the tokenizer that decodes samples for reward functions and reward models that read text.
        functions: the reward functions. Reward models are in the placement.
        reward_weights: by the name of each reward model and function.
        skip_nonfinite: skip an update that is not finite; otherwise it ends the run.
        sampling_of: by call name, the sampling of calls that do not use `sampling`.
    """

    sampling: Sampling
    seed: int
    eos_token_id: int | None
    processing_class: Any
    functions: Sequence[FunctionReward]
    reward_weights: dict[str, float]
    skip_nonfinite: bool = False
    sampling_of: Mapping[str, Sampling] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One iteration of a run.

    Args:
        number: of the iteration, from 0. It seeds the draws of tokens and of mini-batches.
        rows: the data set's rows of the global batch, for reward functions that read other columns.
        learning_rates: of each role that is trained.
        sampling: replaces the run's sampling in this iteration.
    """

    number: int
    rows: Sequence[Mapping[str, Any]] = ()
    learning_rates: Mapping[Role, Rate] = field(default_factory=dict)
    sampling: Sampling | None = None

    @property
    def name(self) -> str:
        """In messages."""
        return f"update {self.number + 1}" if self.number < EVALUATION_STEP else "an evaluation"


def sample_seed(seed: int, step: int, index: int, label: str = "") -> int:
    """The seed of one sample's draws, the same under any plan: made from the run's seed, the step, the sample's index
    in the batch, and the call's label."""
    return int(np.random.SeedSequence((seed, step, index, *label.encode())).generate_state(1)[0])


def requests_of(
    settings: CallSettings,
    call: Call,
    samples: Rollouts,
    step: Step,
    begun: Mapping[int, Unfinished] | None = None,
) -> list[GenerationRequest]:
    """The requests of a call that generates.

    Args:
        samples: with the columns `index` and the call's first input.
        begun: by sample, what another engine has generated of it.
    """
    begun = begun or {}
    return [
        GenerationRequest(
            index, tuple(row.tolist()), sample_seed(settings.seed, step.number, index, call.label), begun.get(index)
        )
        for index, row in zip(samples.tensor("index").tolist(), samples.ragged(call.inputs[0]).rows(), strict=True)
    ]


def sampling_of(settings: CallSettings, call: Call, step: Step) -> Sampling:
    """How a call draws tokens in an iteration."""
    return step.sampling or settings.sampling_of.get(call.name, settings.sampling)


def completions(
    placement: Placement, settings: CallSettings, call: Call, samples: Rollouts, step: Step
) -> Iterator[Completion]:
    """Generate responses to this rank's prompts. None on a rank without a generation engine.

    To be called without prompts too: where the parameters are sharded, generating in place is a collective of the mesh.
    """
    generator = placement.generators.get(call.name)
    if generator is None:
        return iter(())
    return generator.generate(requests_of(settings, call, samples, step), sampling_of(settings, call, step))


def generate(
    placement: Placement,
    settings: CallSettings,
    call: Call,
    samples: Rollouts,
    step: Step,
    poll: Callable[[], None],
    begun: Generation | None = None,
) -> Rollouts:
    """Generate responses to this rank's prompts.

    Args:
        poll: called after each finished sample.
        begun: a generation of these prompts that runs already.

    Returns:
        The call's two output columns (token ids int64 and log-probabilities float32, ragged) and `has_eos`.
    """
    if placement.generators.get(call.name) is None:
        return Rollouts()
    made = completions(placement, settings, call, samples, step) if begun is None else _rest_of(begun, poll)
    return completed(list(_polled(made, poll)), settings.eos_token_id, call.outputs)


def _rest_of(generation: Generation, poll: Callable[[], None]) -> Iterator[Completion]:
    try:
        while generation.unfinished:
            poll()
            yield from generation.poll(POLL_S)
    finally:
        generation.close()


def _polled(completions: Iterator[Completion], poll: Callable[[], None]) -> Iterator[Completion]:
    for completion in completions:
        poll()
        yield completion


def completed(
    completions: Sequence[Completion],
    eos_token_id: int | None,
    names: Sequence[str] = ("responses", "logprobs"),
) -> Rollouts:
    """The columns of finished completions.

    Args:
        names: of the columns of token ids and of log-probabilities.
    """
    tokens, logprobs = names[:2]
    columns: dict[str, Any] = {
        tokens: Ragged.of([c.token_ids for c in completions], torch.long),
        logprobs: Ragged.of([c.logprobs for c in completions], torch.float32),
        "has_eos" if tokens == "responses" else f"has_eos_{tokens}": torch.tensor(
            [eos_token_id in c.token_ids for c in completions], dtype=torch.bool
        ),
    }
    return Rollouts(index=torch.tensor([c.index for c in completions], dtype=torch.long), **columns)


def forward(placement: Placement, settings: CallSettings, call: Call, samples: Rollouts, step: Step) -> Rollouts:
    """Compute the call's output column for this rank's samples: a number per token from a policy or a value model, a
    number per sample from a role of the kind `score`."""
    samples = as_responses(call, samples)
    if placement.roles[call.role].kind == "score":
        return score(placement, settings, call, samples, step.rows)
    with placement.scoring(call.name) as (engine,):
        out = engine.forward(samples, placement.budget(call.name))
    column = "logprobs" if placement.roles[call.role].kind == "policy" else "values"
    return Rollouts(index=samples.tensor("index"), **{call.outputs[0]: out[column]}) if out else Rollouts()


def score(
    placement: Placement, settings: CallSettings, call: Call, samples: Rollouts, rows: Sequence[Mapping[str, Any]]
) -> Rollouts:
    """Score this rank's samples by all reward models and functions.

    Args:
        rows: the other columns of every sample of the global batch.

    Returns:
        The call's first output column, the weighted sum of all scores, (n,) float32. Where there are several scores,
        also `reward/<name>` for each.
    """
    budget, roles = placement.budget(call.name), placement.roles[call.role]
    models = [
        ModelReward(name, partial(engine.forward, micro_batch_tokens=budget), processing_class)
        for name, engine, processing_class in zip(
            roles.names, placement.engines.get(call.name, ()), roles.processing_classes, strict=True
        )
    ]
    # the ranks of a replica have the same samples, so only the first calls the functions, which may cost money
    is_source = placement.rank in sources(placement.plan, call.name)
    index = samples.tensor("index").tolist()
    scores, table = weighted_scores(
        models,
        settings.functions if is_source else (),
        settings.reward_weights,
        samples,
        lambda: decode(samples, [rows[at] for at in index], settings.processing_class),
        refuse=not settings.skip_nonfinite,
    )
    if not len(samples) or not is_source:
        return Rollouts()
    parts = {f"reward/{name}": scores for name, scores in table.items()} if len(table) > 1 else {}
    return Rollouts(index=samples.tensor("index"), **{call.outputs[0]: scores}, **parts)


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
        A row for each sample of each optimizer step: `index` (the sample), `update` (the step) and the loss's
            statistics.
        Steps that were skipped have no rows.

    Raises:
        NonFiniteError: on every rank of the mesh, before an optimizer step that is not finite, or after steps that left
            weights that are not finite.
    """
    engine, learning_rate = placement.trained(call.role), step.learning_rates[call.role]
    assert engine is not None, "only the ranks of a call's mesh run it"
    check_rates({call.name: learning_rate})
    parts = []
    for update, samples in enumerate(mini_batches):
        try:
            statistics = engine.train(samples, loss, placement.budget(call.name), learning_rate)
        except NonFiniteError as error:
            what = f"optimizer step {update + 1} of {call.name} in update {step.number + 1}"
            if not settings.skip_nonfinite:
                raise NonFiniteError(f"{what} was refused before it was taken: {error}", error.sample) from None
            if _reports(placement, call.name, error, samples):
                logger.warning(f"{what} was left out: {with_text(error, samples, settings.processing_class)}.")
            continue
        if statistics:
            order = torch.full((len(samples),), update)
            parts.append(Rollouts(index=samples.tensor("index"), update=order, **statistics))
    rates = [learning_rate] if isinstance(learning_rate, (int, float)) else [group["lr"] for group in learning_rate]
    check_weights(
        placement, call.name, f"after update {step.number + 1}, at learning rate {', '.join(map(str, rates))}"
    )
    if is_due(step.number):
        check_replicas(engine, placement.group(call.name), str(call.role))
    return Rollouts.cat(parts) if parts else Rollouts()


def _reports(placement: Placement, call: str, error: NonFiniteError, samples: Rollouts) -> bool:
    """Whether this rank, of all ranks of the mesh, reports the error: the one that has its sample."""
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
        NonFiniteError: on every rank, if a trained role's weights are not finite.
    """
    trainings = [name for name in placement.plan.order if placement.plan.graph.call(name).trains]
    broken = [n for n in trainings if placement.rank in placement.plan.mesh(n) and not _is_finite(placement, n)]
    roles = {str(placement.role_of(n)) for calls in from_every_rank(broken, placement.control) for n in calls}
    if roles:
        raise NonFiniteError(f"the {' and the '.join(sorted(roles))}'s weights are not finite as {origin}")


def _is_finite(placement: Placement, call: str) -> bool:
    """Whether this rank's part of a trained role is finite."""
    engine = placement.engine(call)
    assert engine is not None, "only ranks that train have weights to look at"
    return all_finite(tensor for parts in engine.parts().values() for _, tensor in parts)
