from __future__ import annotations

from pathlib import Path

import pytest
from custom_plan import grpo_plan
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
from trl_realloc.plan.cluster import Cluster, DeviceMesh, PlanError, check_mesh, halves
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.fitting import plan_of_run
from trl_realloc.plan.presets import PRESETS, flatten, interleave, presets_of, resolve_plan, separate


PROXIMAL = ppo_graph(proximal=True)
ENGINES = ("vllm", "transformers")
clusters = st.builds(Cluster, st.integers(1, 8), st.integers(1, 64))
engines, stages, presets = st.sampled_from(ENGINES), st.integers(0, 3), st.sampled_from(sorted(PRESETS))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_plan_for_every_world_size(preset: str) -> None:
    for world_size in range(1, 65):
        for nodes in (n for n in range(1, 9) if world_size % n == 0):
            plan = PRESETS[preset](Cluster(nodes, world_size // nodes))
            plan.check_world(world_size)
            plan_devices = set(range(world_size))
            used = {device for call in plan.order for device in plan.mesh(call).devices}
            halved = preset == "separate" and world_size > 1  # what the halves leave over rests
            expected = {device for half in halves(plan.cluster) for device in half.devices} if halved else plan_devices
            assert used == expected


@given(presets, clusters, engines, stages)
def test_presets_are_legal_with_every_engine_and_stage(preset: str, cluster: Cluster, engine: str, stage: int) -> None:
    plan = PRESETS[preset](cluster, generation_engine=engine, zero_stage=stage)
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    assert plan["actor.generate"].engine == engine
    for name in plan.order:
        check_mesh(plan.mesh(name), cluster)
        strategy = plan[name].strategy
        assert (strategy.dp, strategy.tp, strategy.pp) == (plan.mesh(name).size, 1, 1)
    for call in map(plan.graph.call, plan.order):
        if call.name != "actor.generate":
            expected = stage if call.trains or stage == 3 else 0
            assert plan[call.name].strategy.zero_stage == expected, call.name


@given(presets, clusters, engines, stages)
def test_with_the_proximal_policy_a_preset_has_one_more_call_for_which_no_parameters_move(
    preset: str, cluster: Cluster, engine: str, stage: int
) -> None:
    plain = PRESETS[preset](cluster, generation_engine=engine, zero_stage=stage)
    plan = PRESETS[preset](cluster, generation_engine=engine, zero_stage=stage, graph=PROXIMAL)
    assert plan.graph == PROXIMAL
    assert plan.order == (*plain.order[:4], "actor.forward", *plain.order[4:])
    assert {name: plan[name] for name in plain.order} == dict(plain.assignments)
    assert plan.mesh("actor.forward") == plan.mesh("actor.train")
    assert plan.reallocations == plain.reallocations
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan and "graph:" not in plan.to_yaml()
    assert plan_of_run(plan, ppo_graph()) == plain and plan_of_run(plain, PROXIMAL) == plan


@given(clusters, engines, stages)
def test_flatten_has_every_call_on_all_devices(cluster: Cluster, engine: str, stage: int) -> None:
    plan = flatten(cluster, generation_engine=engine, zero_stage=stage)
    assert {plan.mesh(name) for name in plan.order} == {DeviceMesh(0, cluster.size)}


@given(clusters, engines, stages)
def test_interleave_differs_from_flatten_in_two_scoring_roles_alone(cluster: Cluster, engine: str, stage: int) -> None:
    flat = flatten(cluster, generation_engine=engine, zero_stage=stage)
    plan = interleave(cluster, generation_engine=engine, zero_stage=stage)
    if cluster.size == 1:
        assert plan == flat
        return
    assert {name for name in plan.order if plan[name] != flat[name]} == {"reference.forward", "reward.forward"}
    assert (plan.mesh("reference.forward"), plan.mesh("reward.forward")) == halves(cluster)


def test_a_plan_may_be_given_by_name_by_path_as_a_dictionary_or_as_itself(tmp_path: Path) -> None:
    cluster = Cluster(1, 4)
    plan = interleave(cluster, zero_stage=2)
    path = tmp_path / "mine.yaml"
    plan.save(path)
    assert resolve_plan("interleave", cluster, generation_engine="vllm", zero_stage=2) == plan
    for given_as in (str(path), path, plan.to_dict(), plan):
        # a written plan says its engine and stage itself
        assert resolve_plan(given_as, cluster, generation_engine="transformers", zero_stage=0) == plan


def test_a_preset_is_made_for_the_job_and_a_written_plan_must_be_for_it() -> None:
    plan = flatten(Cluster(1, 4))
    with pytest.raises(PlanError, match=r"is for 4 devices .* processes is 2"):
        resolve_plan(plan, Cluster(1, 2))
    assert resolve_plan(plan, Cluster(2, 2)) == plan
    assert resolve_plan("flatten", Cluster(1, 2)).cluster == Cluster(1, 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_generates_with_vllm_and_shards_nothing_where_nothing_is_said(preset: str) -> None:
    plan = PRESETS[preset](Cluster(1, 4))
    assert plan == resolve_plan(preset, Cluster(1, 4)) == PRESETS[preset](Cluster(1, 4), generation_engine="vllm")
    assert {plan[name].strategy.zero_stage for name in plan.order} == {0}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "flaten",
            "'flaten' is neither a file nor one of the presets flatten, interleave, separate; did you mean 'flatten'?",
        ),
        ("Interleave", "did you mean 'interleave'?"),
        ("zzz", "'zzz' is neither a file nor one of the presets flatten, interleave, separate."),
        (
            "plans/mine.yaml",
            "there is no plan file 'plans/mine.yaml'; give its path, or one of the presets flatten, inter",
        ),
        ("mine.yml", "there is no plan file 'mine.yml'"),
    ],
)
def test_a_plan_that_does_not_exist_is_refused_with_the_presets(name: str, told: str) -> None:
    with pytest.raises(PlanError) as refusal:
        resolve_plan(name, Cluster(1, 2))
    assert told in str(refusal.value)


def test_an_engine_that_cannot_generate_is_refused_in_a_preset() -> None:
    with pytest.raises(PlanError, match="engine zero cannot generate; use vllm or transformers"):
        flatten(Cluster(1, 2), generation_engine="zero")
    with pytest.raises(PlanError, match="'vlm'; did you mean 'vllm'"):
        flatten(Cluster(1, 2), generation_engine="vlm")


@given(clusters, engines, stages)
def test_separate_trains_on_one_half_and_does_all_else_on_the_other(cluster: Cluster, engine: str, stage: int) -> None:
    plan = separate(cluster, generation_engine=engine, zero_stage=stage)
    if cluster.size == 1:
        assert plan == flatten(cluster, generation_engine=engine, zero_stage=stage)
        return
    training, inference = halves(cluster)
    assert not training.overlaps(inference)
    for name in plan.order:
        assert plan.mesh(name) == (training if name.endswith(".train") else inference)
    assert {edge.target for edge in plan.reallocations} == {"actor.generate", "critic.forward"}


@given(st.booleans(), st.booleans(), clusters, engines, stages)
def test_the_presets_of_grpo_are_legal_in_all_its_forms(
    reference: bool, reward_models: bool, cluster: Cluster, engine: str, stage: int
) -> None:
    graph = grpo_graph(reference=reference, reward_models=reward_models)
    presets = presets_of(graph)
    assert ("interleave" in presets) == (reference and reward_models)
    for name, preset in presets.items():
        plan = preset(cluster, generation_engine=engine, zero_stage=stage, graph=graph)
        assert plan == resolve_plan(name, cluster, generation_engine=engine, zero_stage=stage, graph=graph)
        assert plan.graph == graph and ExecutionPlan.from_yaml(plan.to_yaml()) == plan
        assert plan.mesh("actor.forward") == plan.mesh("actor.train")
        assert "actor.forward" not in {edge.target for edge in plan.reallocations}


@pytest.mark.parametrize(
    ("reference", "reward_models", "told"),
    [
        (False, True, "this run has no call reference.forward; name flatten or separate"),
        (True, False, "this run has no call reward.forward;"),
        (False, False, "this run has no call reference.forward and no call reward.forward;"),
    ],
)
def test_interleave_is_refused_without_two_frozen_models(reference: bool, reward_models: bool, told: str) -> None:
    graph = grpo_graph(reference=reference, reward_models=reward_models)
    for devices in (1, 4):
        with pytest.raises(PlanError, match=told):
            resolve_plan("interleave", Cluster(1, devices), graph=graph)


@pytest.mark.parametrize("nodes", [2, 512])
def test_the_plan_of_the_example_is_a_file_that_grpo_with_a_reference_accepts(nodes: int, tmp_path: Path) -> None:
    cluster = Cluster(nodes, devices_per_node=8)
    grpo_plan(cluster).save(tmp_path / "plan.yaml")
    plan = resolve_plan(tmp_path / "plan.yaml", cluster, graph=grpo_graph(reward_models=False))
    assert plan.assignments == grpo_plan(cluster).assignments
