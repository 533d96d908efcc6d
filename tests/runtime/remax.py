"""ReMax, the algorithm of `examples/custom_algorithm.py`, on tiny models.

It is here to hold that the runtime knows no algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import custom_algorithm
import tiny
import torch
from custom_algorithm import GRAPH, GREEDY, LENGTH
from torch import Tensor, nn

from trl_realloc.algorithms.prompt_batches import PromptBatch
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan import ExecutionPlan
from trl_realloc.plan.dataflow import Role
from trl_realloc.runtime.calls.generate_and_score import Step
from trl_realloc.runtime.executor import Executor
from trl_realloc.runtime.placement.engine_options import EngineOptions


__all__ = ["GRAPH", "GREEDY", "LENGTH"]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def options(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> EngineOptions:
    """Of engines of tiny models."""
    return custom_algorithm.options(tiny.PAD, make_optimizer)


def place(plan: ExecutionPlan, rank: int) -> Executor:
    """An executor of ReMax on a tiny policy. All ranks together; the plan's graph is `GRAPH`."""
    return custom_algorithm.executor_of(plan, rank, tiny.policy(), tiny.tokenizer(), sgd)


def prompts() -> PromptBatch:
    rows = [torch.tensor(ids) for ids in ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16])]
    batch = Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))
    return PromptBatch(batch, [{"prompt": f"prompt {at}"} for at in range(len(rows))])


def whole_run(executor: Executor) -> Rollouts:
    return executor.run(prompts(), 0, {Role.ACTOR: 0.1}).samples


def call_by_call(executor: Executor) -> Rollouts:
    """The same iteration driven from outside, in another order than the graph's, the sampled responses in two parts."""
    batch = prompts()
    samples = batch.prompts
    perform = partial(executor.perform, Step(0, batch.rows, {Role.ACTOR: 0.1}))
    samples = samples.plus(**perform(GREEDY, samples))
    samples = samples.plus(**perform("reward.forward.greedy", samples))
    parts = [perform("actor.generate", samples.select(at)) for at in ([0, 1, 2], [3, 4])]
    samples = samples.plus(**Rollouts.cat(parts))
    samples = samples.plus(**perform("reward.forward", samples))
    return samples.plus(**perform("actor.train", samples).only(["grad_norm"]))


def learned(executor: Executor) -> dict[str, Tensor]:
    engine = executor.placement.trained(Role.ACTOR)
    return {} if engine is None else {n: p.detach().clone() for n, p in engine.head.model.named_parameters()}
