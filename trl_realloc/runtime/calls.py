"""What each kind of call does on one rank: its share of the samples in, its columns out.

No loop and no communication but that of the engines themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..algorithms import ppo
from ..algorithms.nonfinite import NonFiniteError, all_finite, check_rates, with_text
from ..algorithms.ppo import PPOSettings
from ..algorithms.rewards import FunctionReward, ModelReward, decode, weighted_scores
from ..algorithms.rollout import Ragged, Rollouts, balance
from ..engines.base import Completion, GenerationRequest, Rate, Sampling
from ..plan.dataflow import Role
from .exchange import sources
from .placement import Placement
from .process_groups import from_every_rank
from .replica_check import check_replicas, is_due


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Rules:
    """What the calls need to know besides plan and placement; the same on every rank.

    Args:
        functions: the reward functions; reward models are the placement's.
        reward_weights: by the name of each model and function.
        eos_token_id: ends a response for `missing_eos_penalty` and `val/num_eos_tokens`.
        processing_class: decodes samples for those that read text.
        skip_nonfinite: leave out an update that is not finite, where otherwise the run ends.
    """

    settings: PPOSettings
    sampling: Sampling
    seed: int
    eos_token_id: int | None
    processing_class: Any
    functions: Sequence[FunctionReward]
    reward_weights: dict[str, float]
    skip_nonfinite: bool = False


def share(placement: Placement, call: str, lengths: Sequence[int]) -> list[int]:
    """Positions of this rank's samples of the global batch: even in tokens over the call's data-parallel replicas."""
    assignment = placement.plan[call]
    replica = assignment.mesh.index(placement.rank) // (assignment.strategy.tp * assignment.strategy.pp)
    return balance(lengths, assignment.strategy.dp)[replica]


def sample_seed(seed: int, step: int, index: int) -> int:
    """The seed of one sample's draws: from the run's seed, the step and its place in the batch, on any plan."""
    return int(np.random.SeedSequence((seed, step, index)).generate_state(1)[0])


def generate(
    placement: Placement, rules: Rules, prompts: Rollouts, step: int, sampling: Sampling, poll: Callable[[], None]
) -> Rollouts:
    """`responses`, `logprobs`, `has_eos` of this rank's prompts. `poll` is called as samples come in."""
    assignment, generator = placement.plan["actor.generate"], placement.generator
    if generator is None:
        return Rollouts()
    replica = assignment.mesh.index(placement.rank) // assignment.strategy.tp
    rows = prompts.ragged("prompts").rows()
    requests = [
        GenerationRequest(at, tuple(rows[at].tolist()), sample_seed(rules.seed, step, at))
        for at in range(replica, len(prompts), assignment.strategy.dp)
    ]
    # with no request too: where the parameters are sharded, generating in place is a collective of the mesh
    done = list(_watched(generator.generate(requests, sampling), poll))
    return completed(done, rules.eos_token_id)


def _watched(completions: Iterator[Completion], poll: Callable[[], None]) -> Iterator[Completion]:
    for completion in completions:
        poll()
        yield completion


def completed(completions: Sequence[Completion], eos_token_id: int | None) -> Rollouts:
    """Completions as columns."""
    responses = Ragged.of([c.token_ids for c in completions], torch.long)
    return Rollouts(
        index=torch.tensor([c.index for c in completions], dtype=torch.long),
        responses=responses,
        logprobs=Ragged.of([c.logprobs for c in completions], torch.float32),
        has_eos=torch.tensor([eos_token_id in c.token_ids for c in completions], dtype=torch.bool),
    )


def reference_forward(placement: Placement, samples: Rollouts) -> Rollouts:
    mine = samples.select(share(placement, "reference.forward", samples.lengths.tolist()))
    with placement.as_reference() as engine:
        out = engine.forward(mine, placement.budget("reference.forward"))
    return Rollouts(index=mine.tensor("index"), ref_logprobs=out["logprobs"]) if out else Rollouts()


def critic_forward(placement: Placement, samples: Rollouts) -> Rollouts:
    mine = samples.select(share(placement, "critic.forward", samples.lengths.tolist()))
    out = placement.scoring_critic.forward(mine, placement.budget("critic.forward"))
    return Rollouts(index=mine.tensor("index"), values=out["values"]) if out else Rollouts()


def reward_forward(placement: Placement, rules: Rules, samples: Rollouts, rows: Sequence[Any]) -> Rollouts:
    """`scores`, the weighted sum, and `reward/<name>` for each that makes it up, where there are several."""
    positions = share(placement, "reward.forward", samples.lengths.tolist())
    mine = samples.select(positions)
    budget = placement.budget("reward.forward")
    models = [
        ModelReward(source.name, partial(engine.forward, micro_batch_tokens=budget), source.processing_class)
        for source, engine in placement.reward_models
    ]
    # the ranks of a replica have the same samples, and its first is heard: a function, which may cost money, runs once
    speaks = placement.rank in sources(placement.plan, "reward.forward")
    scores, table = weighted_scores(
        models,
        rules.functions if speaks else (),
        rules.reward_weights,
        mine,
        lambda: decode(mine, [rows[at] for at in positions], rules.processing_class),
        refuse=not rules.skip_nonfinite,
    )
    if not len(mine) or not speaks:
        return Rollouts()
    each = {f"reward/{name}": own for name, own in table.items()} if len(table) > 1 else {}
    return Rollouts(index=mine.tensor("index"), scores=scores, **each)


def train(placement: Placement, rules: Rules, samples: Rollouts, call: str, step: int, learning_rate: Rate) -> Rollouts:
    """All epochs and mini-batches of one role's training. Returns every sample's statistics of every optimizer step,
    `update` (which step) beside `index` (which sample); nothing of a step that was left out.

    Raises:
        NonFiniteError: on every rank of the mesh, before the optimizer step that it is about; or because the steps
            that were taken left weights that are not finite.
    """
    settings = rules.settings
    check_rates({call: learning_rate})
    is_actor = placement.plan.graph.call(call).role is Role.ACTOR
    engine = placement.actor if is_actor else placement.critic
    assert engine is not None
    loss = ppo.PolicyLoss(settings.cliprange) if is_actor else ppo.ValueLoss(settings.cliprange_value, settings.vf_coef)
    parts = []
    for update, (batch, weights) in enumerate(updates(samples, rules, step)):
        batch = batch.plus(policy_weight=weights.policy, value_weight=weights.value)
        mine = batch.select(share(placement, call, batch.lengths.tolist()))
        try:
            statistics = engine.train(mine, loss, placement.budget(call), learning_rate)
        except NonFiniteError as error:
            error = with_text(error, batch, rules.processing_class)
            what = f"optimizer step {update + 1} of {call} in update {step + 1}"
            if not rules.skip_nonfinite:
                raise NonFiniteError(f"{what} was refused before it was taken: {error}", error.sample) from None
            if placement.group(call).is_leader:
                logger.warning(f"{what} was left out: {error}.")
            continue
        if statistics:
            order = torch.full((len(mine),), update)
            parts.append(Rollouts(index=mine.tensor("index"), update=order, **statistics))
    rates = [learning_rate] if isinstance(learning_rate, (int, float)) else [group["lr"] for group in learning_rate]
    check_weights(placement, call, f"after update {step + 1}, at learning rate {', '.join(f'{r}' for r in rates)}")
    if is_due(step):
        check_replicas(engine, placement.group(call), str(placement.plan.graph.call(call).role))
    return Rollouts.cat(parts) if parts else Rollouts()


def check_weights(placement: Placement, call: str, when: str) -> None:
    """Collective over the mesh of a call that trains.

    Raises:
        NonFiniteError: its role's weights are not finite, here or on another rank of the mesh.
    """
    if placement.group(call).max(int(not _is_finite(placement, call))):
        role = placement.plan.graph.call(call).role.value
        raise NonFiniteError(f"the {role}'s weights are not finite {when}; nothing of them is saved")


def check_first_weights(placement: Placement, origin: str) -> None:
    """Before the first update. Collective over the job.

    Raises:
        NonFiniteError: on every rank, a trained role's weights are not finite.
    """
    trainings = [name for name in placement.plan.order if placement.plan.graph.call(name).trains]
    broken = [n for n in trainings if placement.rank in placement.plan.mesh(n) and not _is_finite(placement, n)]
    roles = {placement.plan.graph.call(n).role.value for own in from_every_rank(broken, placement.control) for n in own}
    if roles:
        raise NonFiniteError(f"the {' and the '.join(sorted(roles))}'s weights are not finite as {origin}")


def _is_finite(placement: Placement, call: str) -> bool:
    """Whether this rank's part of a trained role is."""
    engine = placement.actor if placement.plan.graph.call(call).role is Role.ACTOR else placement.critic
    assert engine is not None, "only ranks that train have weights to look at"
    return all_finite(cell for own in engine.parts().values() for _, cell in own)


def updates(samples: Rollouts, rules: Rules, step: int) -> Iterator[tuple[Rollouts, ppo.Weights]]:
    """The mini-batches of one iteration in order, with their weights; the same on every rank."""
    for positions in ppo.mini_batches(len(samples), rules.settings, rules.seed, step):
        batch = samples.select(positions)
        yield batch, ppo.sample_weights(batch, rules.settings)
