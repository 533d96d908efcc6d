"""A graph whose only trained role is the actor runs, changes its plan and is measured, in all its forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from policy_alone import adam, driven, execute, learned, place, roles, update
from remax import options

from trl_realloc import Cluster, PPOConfig
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.dataflow import DataflowGraph, Role
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.planner.cost.measured_rates import MeasuredRates
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.search.problem import estimate_plan
from trl_realloc.profiling import profile_cache
from trl_realloc.profiling.job_models import JobModels, specs_of
from trl_realloc.runtime.placement.placement import Placement
from trl_realloc.runtime.placement.run_state import RunState
from trl_realloc.trainer.run.job_builder import make_job


ONE = Cluster(1, 1)
FORMS = [grpo_graph(reference=r, reward_models=m) for r in (True, False) for m in (True, False)]
forms = pytest.mark.parametrize("graph", FORMS, ids=lambda graph: "+".join(graph.roles))


def alone(graph: DataflowGraph) -> ExecutionPlan:
    return flatten(ONE, generation_engine="transformers", graph=graph)


@forms
def test_an_iteration_has_the_columns_of_its_calls_whole_and_call_by_call(graph: DataflowGraph) -> None:
    whole, by_call = place(alone(graph), 0), place(alone(graph), 0)
    before = learned(whole)
    samples, called = update(whole), driven(by_call)
    assert ("ref_logprobs" in samples, "scores" in samples) == (
        Role.REFERENCE in graph.roles,
        Role.REWARD in graph.roles,
    )
    for column in ("logprobs", "policy_logprobs", "entropies"):
        assert torch.equal(samples.ragged(column).values, called.ragged(column).values)
    if Role.REFERENCE in graph.roles:  # before training it is the policy
        assert torch.equal(samples.ragged("ref_logprobs").values, samples.ragged("policy_logprobs").values)
    after, other = learned(whole), learned(by_call)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert all(torch.equal(after[name], other[name]) for name in after)


@forms
def test_a_run_goes_on_under_another_plan(graph: DataflowGraph) -> None:
    straight, moved = place(alone(graph), 0), place(alone(graph), 0)
    for executor in (straight, moved):
        update(executor)
    state = RunState(moved.placement)
    moved.placement.discard()
    other = replace(alone(graph), name="the same again")
    placement = Placement(other, 0, state.roles(roles(graph), other), options(adam))
    placement.start()
    state.load_into(placement)
    moved = execute(placement)
    for executor in (straight, moved):
        update(executor, 1)
    expected, got = learned(straight), learned(moved)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("graph", [FORMS[0], FORMS[-1]], ids=["all", "bare"])
def test_a_machine_is_measured_for_the_models_that_there_are(tmp_path: Path, graph: DataflowGraph) -> None:
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False)
    configs = {role: [tiny.config(num_labels=1)] for role in graph.roles}
    models = JobModels(configs, specs_of(configs, graph))
    steps = {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "num_iterations": 1}
    work = Workload.of_groups(**steps, episodes=4, prompt_tokens=4, response_tokens=(8,))
    job = make_job(args, ONE, 0, "transformers", models, graph, work, options(adam))
    profile = profile_cache.measure(job)
    measured = {row.work for row in profile.observations}
    assert {"generate", "forward", "train", "activations"} <= measured
    assert MeasuredRates(profile).layer(models.specs["actor.forward"][0], 100, 1000, 1) > 0
    assert estimate_plan(alone(graph), models.specs, job.pricing(profile)).seconds > 0
