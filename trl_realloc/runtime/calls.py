"""What each kind of call (generate, forward, train) does on one rank: its share of the samples in, its columns out.

No loop and no communication but that of the engines themselves. Calls are told apart by kind and by the columns that
the graph gives them, never by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..algorithms.base import Algorithm
from ..algorithms.nonfinite import NonFiniteError, all_finite, check_rates, with_text
from ..algorithms.rewards import FunctionReward, ModelReward, decode, weighted_scores
from ..algorithms.rollout import Ragged, Rollouts, balance
from ..engines.base import Completion, GenerationRequest, Rate, Sampling
from ..plan.dataflow import Call, Role
from .exchange import sources
from .placement import Placement
from .process_groups import from_every_rank
from .replica_check import check_replicas, is_due


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Rules:
    """What the calls need to know besides plan, placement and algorithm; the same on every rank.

    Args:
        seed: of the draws of tokens.
        functions: the reward functions; reward models are the placement's.
        reward_weights: by the name of each model and function.
        eos_token_id: ends a response, for the column `has_eos`.
        processing_class: decodes samples for those that read text.
        skip_nonfinite: leave out an update that is not finite, where otherwise the run ends.
        sampling_of: by call name, of the calls that draw otherwise than by `sampling`.
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
    """Which iteration of a run its calls belong to, and what is particular to it.

    Args:
        number: seeds the draws of tokens and of mini-batches.
        rows: the data set's rows of the global batch, for reward functions that read other columns.
        learning_rates: of each role that is trained.
        sampling: instead of the run's own.
    """

    number: int
    rows: Sequence[Mapping[str, Any]] = ()
    learning_rates: Mapping[Role, Rate] = field(default_factory=dict)
    sampling: Sampling | None = None


def share(placement: Placement, call: str, lengths: Sequence[int]) -> list[int]:
    """Positions of this rank's samples of the global batch: even in tokens over the call's data-parallel replicas."""
    assignment = placement.plan[call]
    replica = assignment.mesh.index(placement.rank) // (assignment.strategy.tp * assignment.strategy.pp)
    return balance(lengths, assignment.strategy.dp)[replica]


def sample_seed(seed: int, step: int, index: int, label: str = "") -> int:
    """The seed of one sample's draws: from the run's seed, the step, its place in the batch, and the label of the call
    where an iteration has several that generate. On any plan the same."""
    return int(np.random.SeedSequence((seed, step, index, *label.encode())).generate_state(1)[0])


def generate(
    placement: Placement, rules: Rules, call: Call, samples: Rollouts, step: Step, poll: Callable[[], None]
) -> Rollouts:
    """Responses of this rank's prompts: the call's two output columns (token ids and their log-probabilities), and
    `has_eos`. `poll` is called as samples come in."""
    assignment, generator = placement.plan[call.name], placement.generators.get(call.name)
    if generator is None:
        return Rollouts()
    replica = assignment.mesh.index(placement.rank) // assignment.strategy.tp
    rows, index = samples.ragged(call.inputs[0]).rows(), samples.tensor("index").tolist()
    requests = [
        GenerationRequest(
            index[at], tuple(rows[at].tolist()), sample_seed(rules.seed, step.number, index[at], call.label)
        )
        for at in range(replica, len(samples), assignment.strategy.dp)
    ]
    # with no request too: where the parameters are sharded, generating in place is a collective of the mesh
    sampling = step.sampling or rules.sampling_of.get(call.name, rules.sampling)
    done = list(_watched(generator.generate(requests, sampling), poll))
    return completed(done, rules.eos_token_id, call.outputs)


def _watched(completions: Iterator[Completion], poll: Callable[[], None]) -> Iterator[Completion]:
    for completion in completions:
        poll()
        yield completion


def completed(
    completions: Sequence[Completion],
    eos_token_id: int | None,
    names: Sequence[str] = ("responses", "logprobs"),
) -> Rollouts:
    """Completions as columns.

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


def forward(placement: Placement, rules: Rules, call: Call, samples: Rollouts, step: Step) -> Rollouts:
    """The call's output column of this rank's samples: a value per token of a policy or a value model, or a number per
    sample of a role that scores."""
    samples = as_responses(call, samples)
    if placement.roles[call.role].kind == "score":
        return score(placement, rules, call, samples, step.rows)
    mine = samples.select(share(placement, call.name, samples.lengths.tolist()))
    with placement.scoring(call.name) as (engine,):
        out = engine.forward(mine, placement.budget(call.name))
    column = "logprobs" if placement.roles[call.role].kind == "policy" else "values"
    return Rollouts(index=mine.tensor("index"), **{call.outputs[0]: out[column]}) if out else Rollouts()


def as_responses(call: Call, samples: Rollouts) -> Rollouts:
    """The samples with the call's first two inputs by the graph under the names `prompts` and `responses`."""
    prompts, responses = call.inputs[:2]
    if (prompts, responses) == ("prompts", "responses"):
        return samples
    return samples.plus(prompts=samples[prompts], responses=samples[responses])


def score(
    placement: Placement, rules: Rules, call: Call, samples: Rollouts, rows: Sequence[Mapping[str, Any]]
) -> Rollouts:
    """The call's first output, the weighted sum of all scores, and `reward/<name>` for each that makes it up, where
    there are several."""
    positions = share(placement, call.name, samples.lengths.tolist())
    mine = samples.select(positions)
    budget, roles = placement.budget(call.name), placement.roles[call.role]
    models = [
        ModelReward(name, partial(engine.forward, micro_batch_tokens=budget), processing_class)
        for name, engine, processing_class in zip(
            roles.names, placement.engines.get(call.name, ()), roles.processing_classes, strict=True
        )
    ]
    # the ranks of a replica have the same samples, and its first is heard: a function, which may cost money, runs once
    speaks = placement.rank in sources(placement.plan, call.name)
    index = samples.tensor("index").tolist()
    scores, table = weighted_scores(
        models,
        rules.functions if speaks else (),
        rules.reward_weights,
        mine,
        lambda: decode(mine, [rows[index[at]] for at in positions], rules.processing_class),
        refuse=not rules.skip_nonfinite,
    )
    if not len(mine) or not speaks:
        return Rollouts()
    several = {f"reward/{name}": scores for name, scores in table.items()} if len(table) > 1 else {}
    return Rollouts(index=mine.tensor("index"), **{call.outputs[0]: scores}, **several)


def train(
    placement: Placement, rules: Rules, algorithm: Algorithm, call: Call, samples: Rollouts, step: Step
) -> Rollouts:
    """All epochs and mini-batches of one role's training. Returns every sample's statistics of every optimizer step,
    `update` (which step) beside `index` (which sample); nothing of a step that was left out.

    Raises:
        NonFiniteError: on every rank of the mesh, before the optimizer step that it is about; or because the steps
            that were taken left weights that are not finite.
    """
    engine, learning_rate = placement.trained(call.role), step.learning_rates[call.role]
    assert engine is not None, "only the ranks of a call's mesh run it"
    check_rates({call.name: learning_rate})
    loss, parts = algorithm.loss(call.name).of_tokens, []
    for update, batch in enumerate(algorithm.mini_batches(samples, step.number)):
        mine = batch.select(share(placement, call.name, batch.lengths.tolist()))
        try:
            statistics = engine.train(mine, loss, placement.budget(call.name), learning_rate)
        except NonFiniteError as error:
            error = with_text(error, batch, rules.processing_class)
            what = f"optimizer step {update + 1} of {call.name} in update {step.number + 1}"
            if not rules.skip_nonfinite:
                raise NonFiniteError(f"{what} was refused before it was taken: {error}", error.sample) from None
            if placement.group(call.name).is_leader:
                logger.warning(f"{what} was left out: {error}.")
            continue
        if statistics:
            order = torch.full((len(mine),), update)
            parts.append(Rollouts(index=mine.tensor("index"), update=order, **statistics))
    rates = [learning_rate] if isinstance(learning_rate, (int, float)) else [group["lr"] for group in learning_rate]
    check_weights(
        placement, call.name, f"after update {step.number + 1}, at learning rate {', '.join(map(str, rates))}"
    )
    if is_due(step.number):
        check_replicas(engine, placement.group(call.name), str(call.role))
    return Rollouts.cat(parts) if parts else Rollouts()


def check_weights(placement: Placement, call: str, when: str) -> None:
    """Collective over the mesh of a call that trains.

    Raises:
        NonFiniteError: its role's weights are not finite, here or on another rank of the mesh.
    """
    if placement.group(call).max(int(not _is_finite(placement, call))):
        role = placement.role_of(call)
        raise NonFiniteError(f"the {role}'s weights are not finite {when}; nothing of them is saved")


def check_first_weights(placement: Placement, origin: str) -> None:
    """Before the first update. Collective over the job.

    Raises:
        NonFiniteError: on every rank, a trained role's weights are not finite.
    """
    trainings = [name for name in placement.plan.order if placement.plan.graph.call(name).trains]
    broken = [n for n in trainings if placement.rank in placement.plan.mesh(n) and not _is_finite(placement, n)]
    roles = {str(placement.role_of(n)) for own in from_every_rank(broken, placement.control) for n in own}
    if roles:
        raise NonFiniteError(f"the {' and the '.join(sorted(roles))}'s weights are not finite as {origin}")


def _is_finite(placement: Placement, call: str) -> bool:
    """Whether this rank's part of a trained role is."""
    engine = placement.engine(call)
    assert engine is not None, "only ranks that train have weights to look at"
    return all_finite(cell for own in engine.parts().values() for _, cell in own)
