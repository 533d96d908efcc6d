"""Calls of a trainer whose loop is not the executor's, on tiny models; whatever the number of ranks, the samples of all
of them together are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from policy_alone import execute, learned, roles
from remax import options, sgd

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.algorithms.trainer_loss import LOGPROB_GRADS, TrainerLoss
from trl_realloc.plan import ExecutionPlan
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.runtime.call_server import CallServer
from trl_realloc.runtime.executor import make_executor
from trl_realloc.runtime.placement.placement import Placement


GRAPH = grpo_graph(reference=True, reward_models=False)
PROMPTS = [[5, 6, 7], [5, 6, 7], [10, 11, 12, 13], [14], [15, 16]]  # a group of two, which one engine generates
SECOND_TURN = [[20, 21], [22]]


@dataclass(frozen=True)
class Outcome:
    """What the calls of one rank gave, and the parameters of the policy where it trains."""

    responses: list[list[int]]
    again: list[list[int]]
    logprobs: list[list[float]]
    reference: list[list[float]]
    weights: dict[str, torch.Tensor]


def start(plan: ExecutionPlan, rank: int) -> CallServer:
    """All ranks together."""
    placement = Placement(plan, rank, roles(plan.graph), options(sgd))
    placement.start()
    return CallServer(make_executor(placement, TrainerLoss(plan.graph), execute(placement).runner.settings))


def rows(outputs: Rollouts, column: str) -> list[list[Any]]:
    return [row.tolist() for row in outputs.ragged(column).rows()] if len(outputs) else []


def drive(calls: CallServer, own: slice, second_turn: bool) -> Outcome:
    """An update with this rank's part of the prompts.

    Args:
        second_turn: this rank generates once more, for `SECOND_TURN`.
    """
    prompts = PROMPTS[own]
    calls.at(0)
    responses = rows(calls.generate(prompts), "responses")
    again = rows(calls.generate(SECOND_TURN), "responses") if second_turn else []
    calls.finish_turns()
    columns = {"prompts": Ragged.of(prompts, torch.long), "responses": Ragged.of(responses, torch.long)}
    samples = Rollouts(**columns) if prompts else Rollouts()
    scores = [calls.forward(name, samples) for name in ("actor.forward", "reference.forward")]
    logprobs, reference = (rows(s, c) for s, c in zip(scores, ("policy_logprobs", "ref_logprobs"), strict=True))
    if prompts:
        grads = [[(len(row) - at) * 0.01 for at in range(len(row))] for row in responses]
        samples = samples.plus(**{LOGPROB_GRADS: Ragged.of(grads, torch.float32)})
    calls.train(samples, 0.1)
    return Outcome(responses, again, logprobs, reference, learned(calls.executor))
