"""Plans of one device: forwards that fit, an engine's share of the memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llamas import pricing, specs, work

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.assignment import MEMORY_SHARE
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.planner.cost.device_memory import gpu_memory
from trl_realloc.planner.cost.pricing import Pricing
from trl_realloc.planner.cost.workload import Workload
from trl_realloc.planner.search.choose import choose
from trl_realloc.planner.search.decision import Decision
from trl_realloc.planner.search.space import Space


GRAPH = grpo_graph(reference=False)


def models(billions: int, trained: float = 1.0) -> dict[str, list[ModelSpec]]:
    """A policy whose parameters are trained in the given share."""
    found = {name: list(of_call) for name, of_call in specs(billions, graph=GRAPH).items()}
    found["actor.train"] = [replace(spec, trained_share=trained) for spec in found["actor.train"]]
    return found


def prices(gigabytes: float, devices: int = 1, workload: Workload | None = None, share: float | None = None) -> Pricing:
    return replace(pricing(1, devices, workload), memory=gpu_memory(gigabytes * 1e9), vllm_share=share)


def plan_of(billions: int, costs: Pricing, trained: float = 1.0) -> Decision:
    return choose(Space.of_run(models(billions, trained), costs, graph=GRAPH), time_limit_s=0.3)


def test_a_batch_that_does_not_fit_is_trained_on_in_smaller_forwards() -> None:
    wide = work(train_tokens=1 << 19, forward_tokens=1 << 19, episodes=2048, recompute=False)
    best = plan_of(1, prices(40, workload=wide)).best
    tokens = best.plan["actor.train"].strategy.micro_batch_tokens
    assert best.fits and tokens is not None and wide.longest <= tokens < wide.train_tokens
    roomy = plan_of(1, prices(4000, workload=wide)).best.plan
    assert roomy["actor.train"].strategy.micro_batch_tokens is None


def test_an_engine_with_too_small_a_cache_gets_a_larger_share() -> None:
    long = work(prompt_tokens=1024, response_tokens=(3072,), episodes=256)
    usual = plan_of(7, prices(80, workload=long, share=MEMORY_SHARE), trained=0.01).best
    best = plan_of(7, prices(80, workload=long), trained=0.01).best
    share = best.plan["actor.generate"].memory_share
    assert share is not None and share > MEMORY_SHARE
    assert best.fits and best.seconds < 0.8 * usual.seconds


def test_an_engine_sleeps_where_training_needs_its_share_meanwhile() -> None:
    generate = plan_of(7, prices(36), trained=0.01).best.plan["actor.generate"]
    assert generate.drop and generate.memory_share is not None and generate.memory_share > MEMORY_SHARE


def test_where_the_cache_is_large_enough_the_engine_has_its_usual_share_and_stays_awake() -> None:
    generate = plan_of(1, prices(80)).best.plan["actor.generate"]
    assert (generate.memory_share or MEMORY_SHARE) == MEMORY_SHARE and not generate.drop


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_planner_keeps_to_the_share_and_the_sleep_that_the_settings_say(sleeps: bool) -> None:
    generate = plan_of(1, replace(prices(80, share=0.4), vllm_sleeps=sleeps)).best.plan["actor.generate"]
    assert generate.memory_share is None and generate.drop == sleeps
    generate = plan_of(1, replace(prices(80), vllm_sleeps=sleeps)).best.plan["actor.generate"]
    assert generate.drop == sleeps


def test_on_several_devices_the_share_is_the_usual_one() -> None:
    given, unset = (plan_of(1, prices(80, 2, share=share)).best for share in (MEMORY_SHARE, None))
    assert given.plan.assignments == unset.plan.assignments and given.seconds == unset.seconds


def test_a_plan_says_its_engines_share() -> None:
    best = plan_of(7, prices(80, workload=work(prompt_tokens=2048, episodes=256)), trained=0.01).best.plan
    assert best["actor.generate"].memory_share is not None
    assert ExecutionPlan.from_dict(best.to_dict()).assignments == best.assignments


def test_a_refusal_names_the_largest_part_and_what_would_fit() -> None:
    with pytest.raises(PlanError) as refused:
        plan_of(7, prices(80))
    said = str(refused.value)
    assert "actor.train fits on no mesh of 1 node of 1 device" in said
    assert "for parameters and optimizer state" in said and "of these devices would be enough" in said
    assert plan_of(7, prices(80), trained=0.01).best.fits


def test_calls_that_fit_alone_and_not_together_are_refused_with_what_they_hold() -> None:
    with pytest.raises(PlanError, match=r"takes [0-9.]+ GB per device \([0-9.]+ for .*(actor|critic)\.train"):
        choose(Space.of_run(specs(1, 1), prices(34)), time_limit_s=0.3)
