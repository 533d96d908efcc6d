"""Runs whose only trained role is the actor: GRPO's graph in any form, on tiny models, with a training by token
gradients."""

from __future__ import annotations

from functools import partial

import tiny
import torch
from remax import LENGTH, options, prompts
from torch import Tensor, nn

from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.engines.models import frozen_copy, shell
from trl_realloc.engines.requests import Sampling
from trl_realloc.plan import ExecutionPlan
from trl_realloc.plan.dataflow import DataflowGraph, Role
from trl_realloc.profiling.short_runs import PolicyTraining
from trl_realloc.runtime.calls.generate_and_score import CallSettings, Step
from trl_realloc.runtime.executor import Executor, make_executor
from trl_realloc.runtime.placement.placement import Placement
from trl_realloc.runtime.placement.roles import RoleModels, Roles


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def roles(graph: DataflowGraph, seed: int = 0) -> Roles:
    """The models of a graph's roles; the others have none."""
    policy = tiny.policy(seed)
    models = {
        Role.ACTOR: RoleModels("policy", [lambda: policy], config=policy.config, shell=lambda: shell(policy.config))
    }
    if Role.REFERENCE in graph.roles:
        copied = [lambda: frozen_copy(tiny.policy(seed))]
        models[Role.REFERENCE] = RoleModels("policy", copied, config=policy.config, copy_of=Role.ACTOR)
    if Role.REWARD in graph.roles:
        models[Role.REWARD] = RoleModels("score", [lambda: frozen_copy(tiny.classifier())], ["model"], [None])
    return Roles(models)


def execute(placement: Placement) -> Executor:
    rewards = {"functions": [], "reward_weights": {"model": 1.0}}
    sampling, of_text = Sampling(LENGTH, 1.0, (tiny.EOS,)), {"processing_class": tiny.tokenizer()}
    settings = CallSettings(sampling, seed=3, eos_token_id=tiny.EOS, **of_text, **rewards)
    return make_executor(placement, PolicyTraining(placement.plan.graph), settings)


def place(plan: ExecutionPlan, rank: int, seed: int = 0) -> Executor:
    """An executor on tiny models, started. All ranks together."""
    placement = Placement(plan, rank, roles(plan.graph, seed), options(adam))
    placement.start()
    return execute(placement)


def update(executor: Executor, number: int = 0) -> Rollouts:
    """An iteration; the samples with every column that its calls made."""
    return executor.run(prompts(), number, {Role.ACTOR: 0.01}).samples


def driven(executor: Executor, number: int = 0) -> Rollouts:
    """The same iteration call by call, as a host with a loop of its own drives it."""
    batch = prompts()
    samples = batch.prompts
    perform = partial(executor.perform, Step(number, batch.rows, {Role.ACTOR: 0.01}))
    for name in executor.placement.plan.order[:-1]:
        samples = samples.plus(**perform(name, samples))
    perform("actor.train", samples)
    return samples


def learned(executor: Executor) -> dict[str, Tensor]:
    engine = executor.placement.trained(Role.ACTOR)
    return {} if engine is None else {n: p.detach().clone() for n, p in engine.head.model.named_parameters()}
