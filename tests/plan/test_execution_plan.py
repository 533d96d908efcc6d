from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from graphs import GRAPHS
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.algorithm_graphs import ppo_graph
from trl_realloc.plan.assignment import ENGINE_ABILITIES
from trl_realloc.plan.cluster import Cluster, DeviceMesh, is_legal, legal_meshes
from trl_realloc.plan.dataflow import CallKind, DataflowGraph
from trl_realloc.plan.execution_plan import (
    ENGINES,
    LONGEST_NAME,
    Assignment,
    ExecutionPlan,
    ParallelStrategy,
    PlanError,
)
from trl_realloc.plan.presets import flatten, separate


RECIPES = Path(__file__).parents[2] / "recipes" / "plans"
clusters = st.builds(Cluster, st.integers(1, 4), st.integers(1, 9))
tokens = st.none() | st.integers(1, 1 << 20)
# Any text but lone surrogates, which no file can hold.
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=LONGEST_NAME)


@st.composite
def plans(draw: st.DrawFn) -> ExecutionPlan:
    """Any plan that is legal today, for any of the graphs."""
    cluster = draw(clusters)
    graph = draw(st.sampled_from(list(GRAPHS.values())))
    meshes = st.sampled_from(legal_meshes(cluster))
    assignments = {}
    for call in map(graph.call, graph.order):
        mesh = draw(meshes)
        engine = draw(st.sampled_from([n for n, ability in ENGINE_ABILITIES.items() if call.kind in ability.kinds]))
        tp = pp = 1
        if "tp" in ENGINE_ABILITIES[engine].degrees:
            # a vLLM engine lies within a node
            most = min(mesh.size, cluster.devices_per_node) if engine == "vllm" else mesh.size
            tp = draw(st.sampled_from([tp for tp in range(1, most + 1) if most % tp == 0]))
        if "pp" in ENGINE_ABILITIES[engine].degrees:
            pp = draw(st.sampled_from([pp for pp in range(1, mesh.size // tp + 1) if mesh.size // tp % pp == 0]))
        trained = graph.train_call(call.role) is not None
        stage = draw(st.sampled_from([s for s in ENGINE_ABILITIES[engine].zero_stages if call.trains or s in (0, 3)]))
        most = None if call.kind is CallKind.GENERATE else draw(tokens)
        strategy = ParallelStrategy(mesh.size // tp // pp, tp, pp, stage, most)
        away = not trained and stage < 3 and draw(st.booleans())
        assignments[call.name] = Assignment(mesh, strategy, engine, away)
    return ExecutionPlan(cluster, assignments, graph, draw(names))


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(PlanError) as refusal:
        ExecutionPlan.from_yaml(text)
    return refusal.value.problems


def edited(**calls: Any) -> str:
    """Flatten for two nodes of four devices with single values changed: `actor__train={"dp": 3}`."""
    plan = flatten(Cluster(2, 4)).to_dict()
    for name, changes in calls.items():
        plan["calls"][name.replace("__", ".")].update(changes)
    return str(plan)  # the written form of plain values is YAML's flow style too


# ---- a plan is a file ----


@given(plans())
def test_a_plan_is_read_back_from_its_yaml_and_its_dictionary_without_loss(plan: ExecutionPlan) -> None:
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan
    assert ExecutionPlan.from_dict(plan.to_dict()) == plan


@given(plans())
def test_a_plan_is_equal_to_its_copies_and_hashes_like_them(plan: ExecutionPlan) -> None:
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), replace(plan)):
        assert other == plan
        assert hash(other) == hash(plan)
    assert replace(plan, name=plan.name + "!") != plan


@pytest.mark.parametrize(
    "name", ["", "yes", "12", "a: b # c", "Pläne 計画", "two\nlines\r", "\x85", "\u2028\ufeff", "'\""]
)
def test_a_plan_keeps_its_name_in_a_file(name: str, tmp_path: Path) -> None:
    plan = replace(flatten(Cluster(1, 1)), name=name)
    plan.save(tmp_path / "plan.yaml")
    assert ExecutionPlan.load(tmp_path / "plan.yaml") == plan


def test_a_saved_plan_is_the_file_that_a_person_would_write(tmp_path: Path) -> None:
    written = """\
name: by hand
cluster: {nodes: 1, devices_per_node: 2}
calls:
  actor.generate: {mesh: 0-1, engine: vllm, dp: 1, tp: 2}
  reference.forward: {mesh: 0, engine: zero, dp: 1, offload: true}
  reward.forward: {mesh: 1, engine: zero, dp: 1}
  critic.forward: {mesh: 0-1, engine: zero, dp: 2, zero_stage: 3}
  actor.train: {mesh: 0-1, engine: zero, dp: 2, zero_stage: 2, micro_batch_tokens: 4096}
  critic.train: {mesh: 0-1, engine: zero, dp: 2, zero_stage: 3}
"""
    plan = ExecutionPlan.from_yaml(written)
    plan.save(tmp_path / "plan.yaml")
    saved = (tmp_path / "plan.yaml").read_text()
    comment = [line for line in saved.splitlines() if line.startswith("#")]
    assert saved == "\n".join(comment) + "\n" + written
    assert len(comment) >= 4
    assert ExecutionPlan.load(tmp_path / "plan.yaml") == plan


def test_a_plan_may_be_written_with_anchors_lists_and_in_any_order() -> None:
    plan = ExecutionPlan.from_yaml("""
calls:
  critic.train: &home {mesh: [0, 1], engine: zero, dp: 2}
  actor.train: {<<: *home, zero_stage: 2}
  critic.forward: *home
  reward.forward: *home
  reference.forward: {<<: *home, mesh: "0", dp: 1}
  actor.generate: {mesh: 1, engine: transformers}
cluster: {devices_per_node: 2, nodes: 1}
""")
    assert plan["actor.train"] == Assignment(DeviceMesh(0, 2), ParallelStrategy(2, zero_stage=2), "zero")
    assert plan.mesh("reference.forward") == DeviceMesh(0, 1)
    assert tuple(plan.assignments) == plan.order == ppo_graph().order


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_plan_among_the_recipes_is_what_its_file_name_says(path: Path) -> None:
    plan = ExecutionPlan.load(path)
    preset, _, devices = path.stem.rpartition("-")
    assert plan.name == preset
    plan.check_world(int(devices))
    assert path.read_text() == plan.to_yaml()


def test_there_are_recipes_for_both_presets_on_two_and_four_devices() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} >= {"flatten-2", "flatten-4", "interleave-2", "interleave-4"}


# ---- what a plan answers ----


@given(plans())
def test_a_device_has_the_calls_whose_mesh_holds_it(plan: ExecutionPlan) -> None:
    for device in plan.cluster.mesh.devices:
        calls = plan.calls_on(device)
        assert set(calls) == {name for name in plan.order if device in plan.mesh(name)}
        assert sorted(calls, key=plan.order.index) == list(calls)


def test_a_plan_cannot_be_changed() -> None:
    plan = flatten(Cluster(1, 2))
    with pytest.raises(TypeError):
        plan.assignments["actor.train"] = plan["critic.train"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        plan.name = "other"  # type: ignore[misc]
    given = dict(plan.assignments)
    made = ExecutionPlan(plan.cluster, given)
    given.clear()
    assert len(made.assignments) == 6


def test_asking_a_plan_for_an_unknown_call_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"'actor\.generat'; did you mean 'actor\.generate'\?"):
        flatten(Cluster(1, 2))["actor.generat"]


def test_a_plan_for_another_world_is_refused_with_both_numbers_and_the_remedies() -> None:
    plan = flatten(Cluster(2, 2))
    plan.check_world(4)
    with pytest.raises(PlanError, match=r"4 devices .* processes is 2; launch with --num_processes 4, edit .* preset"):
        plan.check_world(2)


# ---- what is refused ----


@pytest.mark.parametrize(("nodes", "per_node", "tp", "remedy"), [(2, 8, 16, 8), (2, 6, 4, 3), (3, 4, 3, 2)])
def test_a_vllm_engine_over_two_nodes_is_refused_with_the_largest_degree_that_fits_a_node(
    nodes: int, per_node: int, tp: int, remedy: int
) -> None:
    plan = flatten(Cluster(nodes, per_node)).to_dict()
    size = nodes * per_node
    plan["calls"]["actor.generate"] |= {"dp": size // tp, "tp": tp}
    with pytest.raises(PlanError, match=f"^actor.generate: a vLLM engine lies within a node, .* use tp: {remedy},"):
        ExecutionPlan.from_dict(plan)
    plan["calls"]["actor.generate"] |= {"dp": size // remedy, "tp": remedy}
    ExecutionPlan.from_dict(plan)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            edited(actor__train={"dp": 4}),
            "actor.train: dp 4 x tp 1 x pp 1 = 4 devices, but mesh 0-7 has 8; dp: 8 would",
        ),
        (edited(actor__generate={"dp": 4, "tp": 4}), "but mesh 0-7 has 8; dp: 2 would fit"),
        (edited(actor__generate={"dp": 1, "tp": 3}), "but mesh 0-7 has 8; dp: 8, tp: 1, pp: 1 would fit"),
        (edited(reward__forward={"mesh": "0-8"}), "reward.forward: mesh 0-8 is not within the cluster's devices 0-7"),
        (edited(reward__forward={"mesh": "1-2", "dp": 2}), "the nearest legal mesh is 0-1"),
        (edited(reward__forward={"mesh": "x"}), "reward.forward: a mesh is written as 0-3"),
        (edited(reward__forward={"zero_stage": 2}), "use 0, or 3 to shard its parameters"),
        (edited(reference__forward={"zero_stage": 1}), "reference.forward: zero_stage 1 shards optimizer state"),
        (edited(critic__forward={"zero_stage": 1}), "which a call that does not train has none of; use 0, or 3"),
        (edited(critic__forward={"mesh": "0-3", "dp": 4, "zero_stage": 2}), "critic.forward: zero_stage 2 shards"),
        (edited(reward__forward={"zero_stage": 4}), "zero_stage is 0, 1, 2 or 3, not 4"),
        (edited(reward__forward={"micro_batch_tokens": 0}), "micro_batch_tokens is a number of tokens from 1, not 0"),
        (
            edited(reward__forward={"micro_batch_tokens": "4k"}),
            "micro_batch_tokens is a number of tokens from 1, not '4k'",
        ),
        (edited(reward__forward={"dp": 0}), "dp is a whole number from 1, not 0"),
        (edited(reward__forward={"dp": 8.0}), "dp is a whole number from 1, not 8.0"),
        (edited(reward__forward={"offload": "yes please"}), "offload is true or false, not 'yes please'"),
        (edited(reward__forward={"tp": 8, "dp": 1}), "engine zero cannot split by tp (tp: 8); set tp: 1"),
        (edited(reward__forward={"microbatch_tokens": 8}), "'microbatch_tokens'; did you mean 'micro_batch_tokens'?"),
        (edited(reward__forward={"engine": "zeros"}), "no engine 'zeros'; did you mean 'zero'?"),
        (edited(reward__forward={"engine": "vllm"}), "engine vllm cannot forward; use zero or megatron."),
        (edited(actor__generate={"engine": "zero"}), "engine zero cannot generate; use vllm or transformers."),
        (edited(actor__generate={"zero_stage": 3}), "engine vllm has no zero_stage 3; leave it out"),
        (edited(actor__generate={"dp": 4, "pp": 2}), "engine vllm cannot split by pp (pp: 2); set pp: 1"),
        (
            edited(actor__generate={"engine": "transformers", "dp": 4, "tp": 2}),
            "engine transformers cannot split by tp (tp: 2); set tp: 1",
        ),
        (edited(reference__forward={"engine": "megatron", "zero_stage": 3}), "megatron has no zero_stage 3; leave it"),
        (edited(actor__train={"engine": "megatron", "tp": 4}), "dp 8 x tp 4 x pp 1 = 32 devices, but mesh 0-7 has 8"),
        (edited(actor__generate={"micro_batch_tokens": 8}), "engine vllm forms its batches itself; leave micro_batch"),
        (
            edited(actor__generate={"engine": "transformers", "offload": True}),
            "actor.generate: offload applies to scoring calls and vLLM engines",
        ),
        (edited(critic__train={"offload": True}), "critic.train: offload applies to scoring calls"),
        (
            edited(critic__forward={"offload": True}),
            "critic.forward: it uses critic.train's parameters in place; leave offload out",
        ),
        (edited(critic__forward={"drop": True}), "it uses critic.train's parameters in place; leave drop out"),
        (edited(reward__forward={"drop": 1}), "drop is true or false, not 1"),
        (edited(actor__generate={"memory_share": 1.5}), "memory_share is a number above 0 and up to 1, not 1.5"),
        (edited(actor__generate={"memory_share": True}), "memory_share is a number above 0 and up to 1, not True"),
        (edited(actor__train={"memory_share": 0.5}), "memory_share applies only to vLLM engines, not to engine zero"),
        (edited(reward__forward={"drop": True}), "reward.forward: drop applies to copies of a trained role"),
        (edited(actor__train={"drop": True}), "actor.train: drop applies to copies of a trained role's parameters"),
        (edited(actor__generate={"drop": True, "offload": True}), "actor.generate: drop frees the copy"),
        (edited(critic__forward={"drop": True, "offload": True}), "keeps it in host memory; choose one"),
        (edited(critic__forward={"drop": True, "zero_stage": 3}), "zero_stage 3 shards parameters; leave drop out"),
        (edited(reward__forward={"offload": True, "zero_stage": 3}), "reward.forward: zero_stage 3 shards parameters"),
        ("cluster: {nodes: 1, devices_per_node: 2}", "calls has a line for each call"),
        ("cluster: {nodes: 1, devices_per_node: 2}\ncalls: {}", "actor.train is missing; set its mesh"),
        ("calls: {actor.train: 3}", "actor.train: an assignment reads like {mesh: 0-1"),
        ("calls: {}", "cluster reads like {nodes: 1, devices_per_node: 2}, not None"),
        ("cluster: {nodes: 1, devices: 2}\ncalls: {}", "'devices'; did you mean 'devices_per_node'?"),
        ("cluster: {nodes: 0, devices_per_node: 2}\ncalls: {}", "nodes is a whole number from 1, not 0"),
        ("cals: {}", "a plan has no key 'cals'; did you mean 'calls'?"),
        ("name: 7", "a plan's name is text, not 7"),
        ("graph: {calls: {actor.trian: {}}}", "did you mean 'actor.train'?"),
        ("calls: [", "the plan is not YAML"),
        ("calls: {a: 1, a: 2}", "'a' is written twice (line 1)"),
        ("name: 2020-13-45", "the plan is not YAML"),
        ("", "a plan has the keys cluster and calls; this is None"),
        ("flatten", "this is 'flatten'"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_value_and_the_remedy(text: str, told: str) -> None:
    assert any(told in problem for problem in problems_of(text)), problems_of(text)


def test_all_that_is_wrong_with_a_plan_is_told_at_once() -> None:
    problems = problems_of("""
nam: x
cluster: {nodes: 1, devices_per_node: 4}
calls:
  actor.generat: {mesh: 0-3, engine: vlm, dpp: 4}
  actor.train: {mesh: 1-2, engine: zero, dp: 4}
  critic.train: {mesh: 0-3, engine: zero, dp: 4}
  critic.forward: {mesh: 0-3, dp: 4}
""")
    told = [
        "no key 'nam'; did you mean 'name'?",
        "actor.generat: there is no key 'dpp'; did you mean 'dp'?",
        "actor.generat: there is no engine 'vlm'; did you mean 'vllm'?",
        "there is no call 'actor.generat'; did you mean 'actor.generate'?",
        "critic.forward: engine is missing.",
        "reference.forward is missing",
        "reward.forward is missing",
        "actor.train: mesh 1-2 is neither whole nodes nor an aligned",
        "actor.train: dp 4 x tp 1 x pp 1 = 4 devices, but mesh 1-2 has 2",
    ]
    assert [sum(sentence in problem for problem in problems) for sentence in told] == [1] * len(told), problems
    assert len(problems) == len(told)
    assert all(problem.endswith((".", "?")) for problem in problems)


def test_a_refused_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("calls: {}")
    with pytest.raises(PlanError, match=r"mine\.yaml: cluster reads like"):
        ExecutionPlan.load(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"mine\.yaml: the plan"):
        ExecutionPlan.load(tmp_path / "mine.yaml")
    with pytest.raises(PlanError, match=r"none\.yaml: the plan cannot be read"):
        ExecutionPlan.load(tmp_path / "none.yaml")


@given(plans(), st.data())
def test_a_plan_with_one_wrong_value_is_refused_and_the_call_is_named(plan: ExecutionPlan, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(plan.order))
    right = plan[name]
    degree = data.draw(st.sampled_from(["dp", "tp", "pp"]))
    meshes = st.builds(DeviceMesh, st.integers(0, 40), st.just(right.mesh.size))
    wrong = data.draw(
        st.one_of(
            meshes.filter(lambda mesh: not is_legal(mesh, plan.cluster)).map(lambda mesh: replace(right, mesh=mesh)),
            st.integers(2, 5).map(
                lambda factor: replace(
                    right, strategy=replace(right.strategy, **{degree: factor * getattr(right.strategy, degree)})
                )
            ),
            st.sampled_from([e for e in ENGINES if plan.graph.call(name).kind not in ENGINE_ABILITIES[e].kinds]).map(
                lambda engine: replace(right, engine=engine)
            ),
        )
    )
    with pytest.raises(PlanError) as refusal:
        replace(plan, assignments={**plan.assignments, name: wrong})
    assert any(problem.startswith(f"{name}: ") for problem in refusal.value.problems)


@given(plans(), st.data())
def test_a_plan_that_lacks_a_call_is_refused_and_the_call_is_named(plan: ExecutionPlan, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(plan.order))
    fewer = {other: assignment for other, assignment in plan.assignments.items() if other != name}
    with pytest.raises(PlanError) as refusal:
        replace(plan, assignments=fewer)
    assert refusal.value.problems == (f"{name} is missing; set its mesh and engine.",)


KEYS = """
    name cluster graph calls sources inputs outputs nodes devices_per_node actor.train actor.generate critic.forward
    mesh engine dp tp zero_stage micro_batch_tokens offload zero vllm 0-1 prompts
"""
keys = st.sampled_from(KEYS.split())
leaves = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | keys | st.text(max_size=3)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | leaves, inner, max_size=5), max_leaves=15
)


@given(trees)
def test_whatever_is_given_as_a_plan_is_a_plan_or_refused(value: Any) -> None:
    with contextlib.suppress(PlanError):
        ExecutionPlan.from_dict(value)


@given(plans(), st.data())
def test_a_plan_file_with_a_value_replaced_is_a_plan_or_refused(plan: ExecutionPlan, data: st.DataObject) -> None:
    tree = plan.to_dict()
    part = data.draw(st.sampled_from([tree, tree["cluster"], tree["calls"], *tree["calls"].values()]))
    part[data.draw(st.sampled_from(sorted(part)) | keys)] = data.draw(trees)
    try:
        read = ExecutionPlan.from_dict(tree)
    except PlanError:
        return
    assert ExecutionPlan.from_yaml(read.to_yaml()) == read


@given(st.text("abc:{}[]&*!<-0 \n\"'#|>%@`,?~\t", max_size=40))
def test_whatever_is_given_as_yaml_is_refused_in_sentences(text: str) -> None:
    with pytest.raises(PlanError):
        ExecutionPlan.from_yaml(text)


def _grpo(cluster: Cluster, train: Assignment, generate: Assignment) -> ExecutionPlan:
    frozen = Assignment(DeviceMesh(0, 1), ParallelStrategy(), "zero")
    calls = {"actor.generate": generate, "reference.forward": frozen, "reward.forward": frozen, "actor.train": train}
    return ExecutionPlan(cluster, calls, GRAPHS["grpo"].without(["actor.forward"]))


def test_whole_copies_serve_any_call_inside_their_mesh_and_parameters_move_to_all_others() -> None:
    cluster = Cluster(1, 4)
    for train in legal_meshes(cluster):
        for generate in legal_meshes(cluster):
            home = Assignment(train, ParallelStrategy(train.size), "zero")
            plan = _grpo(cluster, home, Assignment(generate, ParallelStrategy(generate.size), "vllm"))
            moves = [(edge.source, edge.target) for edge in plan.reallocations]
            assert moves == ([] if generate.inside(train) else [("actor.train", "actor.generate")])


@pytest.mark.parametrize(
    ("key", "calls"), [("offload", ["critic.forward"]), ("drop", ["critic.forward", "actor.generate"])]
)
def test_a_trained_roles_copy_in_its_own_layout_may_rest_in_host_memory_or_be_dropped(
    key: str, calls: list[str]
) -> None:
    written = separate(Cluster(1, 4), generation_engine="transformers").to_dict()
    for call in calls:
        written["calls"][call][key] = True
    plan = ExecutionPlan.from_dict(written)
    assert all(getattr(plan[call], key) for call in calls)
    assert ExecutionPlan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("engine", ["zero", "megatron"])
def test_scoring_uses_the_parameters_that_training_keeps_whatever_the_stage_shards(engine: str, stage: int) -> None:
    if engine == "megatron" and stage > 1:
        return
    split = ParallelStrategy(2, 2) if engine == "megatron" else ParallelStrategy(4)
    plan = flatten(Cluster(1, 4), generation_engine="transformers").to_dict()
    plan["calls"]["critic.train"] = Assignment(DeviceMesh(0, 4), replace(split, zero_stage=stage), engine).to_dict()
    plan["calls"]["critic.forward"] = Assignment(DeviceMesh(0, 4), split, engine).to_dict()
    moved = {edge.target for edge in ExecutionPlan.from_dict(plan).reallocations}
    assert ("critic.forward" in moved) == (stage == 3)


@pytest.mark.parametrize(
    ("home", "other", "moves"),
    [
        (ParallelStrategy(4, zero_stage=3), ParallelStrategy(4), False),  # gathered along the mesh
        (ParallelStrategy(4, zero_stage=3), ParallelStrategy(2, 2), True),  # two of the four would gather in vain
        (ParallelStrategy(2, 2), ParallelStrategy(4), True),
        (ParallelStrategy(4, zero_stage=2), ParallelStrategy(1, 4), False),
    ],
)
def test_which_training_layouts_feed_vllm_engines_without_a_reallocation(
    home: ParallelStrategy, other: ParallelStrategy, moves: bool
) -> None:
    engine = "megatron" if home.tp > 1 else "zero"
    plan = _grpo(Cluster(1, 4), Assignment(DeviceMesh(0, 4), home, engine), Assignment(DeviceMesh(0, 4), other, "vllm"))
    assert bool(plan.reallocations) == moves


def test_a_graph_that_is_not_ppos_stands_in_the_file() -> None:
    cluster, train = Cluster(1, 1), Assignment(DeviceMesh(0, 1), ParallelStrategy(), "zero")
    dpo = ExecutionPlan(cluster, {"reference.forward": train, "actor.train": train}, GRAPHS["dpo"])
    assert "graph:" in dpo.to_yaml()
    assert isinstance(ExecutionPlan.from_yaml(dpo.to_yaml()).graph, DataflowGraph)
    assert "graph:" not in flatten(cluster).to_yaml()
