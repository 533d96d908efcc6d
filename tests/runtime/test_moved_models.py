"""A run that moves to another plan goes on with the models that it had, whatever they are."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from group_optimizers import Counting
from peft import LoraConfig, get_peft_model
from policy_alone import adam, execute, roles, update
from remax import options, prompts

from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.engines.models import frozen_copy
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.placement.placement import Placement
from trl_realloc.runtime.placement.roles import Roles
from trl_realloc.runtime.placement.run_state import RunState, fixed_models


GRAPH = grpo_graph(reference=True, reward_models=True)
PLAN = flatten(Cluster(1, 1), generation_engine="transformers", graph=GRAPH)


def placed(of: Roles) -> Placement:
    made = Placement(PLAN, 0, of, options(adam))
    made.start()
    return made


def scored(placement: Placement) -> Rollouts:
    calls = ["actor.generate", "reward.forward", "reference.forward"]
    return execute(placement).run(prompts(), 1, {Role.ACTOR: 0.0}, only=calls).samples


def test_a_head_that_its_config_ties_stays_the_models_own() -> None:
    reference = tiny.policy()
    torch.manual_seed(1)
    reference.lm_head.weight = torch.nn.Parameter(torch.randn_like(reference.lm_head.weight) / 20)
    reference.config.tie_word_embeddings = True
    models = dict(roles(GRAPH).models)
    models[Role.REFERENCE] = replace(models[Role.REFERENCE], load=[lambda: frozen_copy(reference)], copy_of=None)
    first = placed(Roles(models))
    before = scored(first)
    assert not list(fixed_models(first))
    state = RunState(first)
    first.discard()
    second = placed(state.roles(Roles(models), PLAN))
    state.load_into(second)
    after = scored(second)
    for name in ("ref_logprobs", "responses"):
        assert torch.equal(before.ragged(name).values, after.ragged(name).values)
    assert torch.equal(before.tensor("scores"), after.tensor("scores"))


def test_numbers_that_the_optimizer_keeps_in_its_groups_move_with_its_state() -> None:
    """Apex's FusedAdam, which `optim` may name, counts its steps there."""
    graph = grpo_graph(reference=False, reward_models=False)
    plan = flatten(Cluster(1, 1), generation_engine="transformers", graph=graph)
    of = roles(graph)

    def started(models: Roles) -> Placement:
        made = Placement(plan, 0, models, options(lambda module: Counting(module.parameters())))
        made.start()
        return made

    first = started(of)
    for number in range(2):
        update(execute(first), number)
    state = RunState(first)
    first.discard()
    second = started(state.roles(of, plan))
    state.load_into(second)
    engine: Any = second.trained(Role.ACTOR)
    assert [group["step"] for group in engine.optimizer.param_groups] == [2]
    second.discard()


class Own(type(tiny.classifier())):  # type: ignore[misc]
    """A user's class, of whose parameters one is not in the config."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bias = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("kind", ["adapters", "a class of the user's"])
def test_the_plan_stays_where_a_model_is_not_what_its_config_says(kind: str) -> None:
    given = Own(tiny.config(num_labels=1))
    if kind == "adapters":
        given = get_peft_model(tiny.classifier(), LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    models = dict(roles(GRAPH).models)
    models[Role.REWARD] = replace(models[Role.REWARD], load=[lambda: given.requires_grad_(False)])
    made = placed(Roles(models))
    assert list(fixed_models(made)) == ["reward.forward"]


def test_a_policy_that_a_script_holds_keeps_no_master_weights_of_an_engine_that_is_gone() -> None:
    policy = tiny.policy().to(torch.bfloat16)
    models = dict(roles(GRAPH).models)
    models[Role.ACTOR] = replace(models[Role.ACTOR], load=[lambda: policy])
    made = placed(Roles(models))
    engine: Any = made.trained(Role.ACTOR)
    masters = [weakref.ref(engine.masters.of(parameter)) for parameter in policy.parameters()]
    assert all(master() is not None for master in masters)
    del engine
    made.discard()
    del made
    gc.collect()
    assert all(master() is None for master in masters)
