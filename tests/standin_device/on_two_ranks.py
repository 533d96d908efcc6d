"""What two ranks, each with a stand-in accelerator and a process group that sends from it alone, can show.
`test_standin.py` runs this file in two processes, which run the same tests in the same order."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import standin_device


DEVICE = standin_device.accelerator()  # before anything asks which accelerator there is
SIM, RANK = standin_device.rank_device(), int(os.environ["RANK"])

import tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from standin_device.batches import training_batch  # noqa: E402
from trl_realloc.algorithms.nonfinite import NonFiniteError  # noqa: E402
from trl_realloc.algorithms.ppo import PolicyLoss, ValueLoss  # noqa: E402
from trl_realloc.engines.device import group_device  # noqa: E402
from trl_realloc.engines.mesh_group import MeshGroup, SplitGroups, split_ranks  # noqa: E402
from trl_realloc.engines.models import load_classifier, load_policy, seeded  # noqa: E402
from trl_realloc.engines.training.fused_training import FusedShare, FusedTraining  # noqa: E402
from trl_realloc.engines.training.heads import PolicyHead, RoleHead, ValueHead  # noqa: E402
from trl_realloc.engines.training.megatron import MegatronEngine  # noqa: E402
from trl_realloc.engines.training.replicated import ReplicatedEngine  # noqa: E402
from trl_realloc.plan.batching import balance  # noqa: E402
from trl_realloc.plan.cluster import Cluster  # noqa: E402
from trl_realloc.plan.execution_plan import ExecutionPlan  # noqa: E402
from trl_realloc.plan.model_spec import ModelSpec  # noqa: E402
from trl_realloc.profiling.auto_plan import JobPlan  # noqa: E402
from trl_realloc.profiling.machine import links  # noqa: E402
from trl_realloc.realloc.layout import Layout, whole  # noqa: E402
from trl_realloc.realloc.schedule import make_schedule  # noqa: E402
from trl_realloc.realloc.transfer import Transfer, TransferOptions  # noqa: E402
from trl_realloc.runtime.fused.orders import FusedOrders  # noqa: E402
from trl_realloc.runtime.process_groups import all_gather_object, from_first_rank  # noqa: E402


CPU = torch.device("cpu")
dist.init_process_group(DEVICE.backend, timeout=timedelta(seconds=120))
HOST = dist.new_group(backend="gloo")


def on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu")


def allocated() -> int:
    return DEVICE.allocated(SIM.index)


# --- the process group -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not DEVICE.is_standin, reason="NCCL sends objects through its memory")
def test_the_group_takes_tensors_of_the_device_alone() -> None:
    numbers = torch.tensor([1.0 + RANK], device=SIM)
    dist.all_reduce(numbers)
    assert numbers.item() == 3.0
    with pytest.raises(RuntimeError, match="simccl takes tensors of sim alone"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="no Python objects"):
        dist.all_gather_object([None, None], "an object")


def test_decisions_and_objects_go_over_the_host() -> None:
    assert group_device() == SIM and group_device(HOST) == CPU
    assert from_first_rank({"rank": RANK}, 60.0) == {"rank": 0}
    assert all_gather_object(RANK, HOST) == [0, 1]


def test_links_between_devices_are_measured() -> None:
    assert all(o.seconds > 0 for o in links(Cluster(1, 2), SIM))


# --- engines ---------------------------------------------------------------------------------------------------------


def head_of(name: str) -> RoleHead:
    return PolicyHead(tiny.policy(), 1.0) if name == "policy" else ValueHead(tiny.classifier())


SETTINGS: Mapping[str, Any] = {
    "make_optimizer": lambda module: torch.optim.AdamW(module.parameters(), lr=0.0, eps=1e-4),
    "max_grad_norm": 0.5,
}
LOSSES: Mapping[str, Any] = {"policy": PolicyLoss(0.2), "value": ValueLoss(0.2, 0.1)}


def split_groups(tp: int, pp: int) -> SplitGroups:
    rank_values = {"mesh": MeshGroup((0, 1), RANK, dist.group.WORLD, SIM)}
    for kind, all_members in split_ranks((0, 1), tp, pp).items():
        for members in all_members:
            group = dist.new_group(list(members)) if len(members) > 1 else None
            if RANK in members:
                rank_values[kind] = MeshGroup(members, RANK, group, SIM)
    return SplitGroups(**rank_values)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2)], ids=["dp 2", "tp 2", "pp 2"])
def test_an_engine_of_two_devices_trains_and_scores_as_one_host_does(degrees: tuple[int, int], name: str) -> None:
    batch, (tp, pp) = training_batch(), degrees
    here = ReplicatedEngine(head_of(name), MeshGroup((0,), 0), CPU, **SETTINGS)
    there: Any
    if tp * pp == 1:
        there = ReplicatedEngine(head_of(name), MeshGroup((0, 1), RANK, dist.group.WORLD, SIM), SIM, **SETTINGS)
        positions = balance(batch.lengths.tolist(), 2)[RANK]
    else:
        there = MegatronEngine(head_of(name), split_groups(tp, pp), SIM, **SETTINGS)
        positions = list(range(len(batch)))
    own = batch.select(positions)
    reads = []
    for budget in (64, 12, 64, 12):
        expected = here.train(batch, LOSSES[name], 64, 1e-2)
        with DEVICE.counting() as counted:
            result = there.train(own, LOSSES[name], budget, 1e-2)
        reads.append(counted[0].reads)
        for key, column in expected.items():
            assert torch.allclose(result[key], column[torch.tensor(positions)], atol=1e-3, rtol=1e-3), key
    scored, answers = here.forward(batch, 64), there.forward(own, 64)
    for key, column in scored.items():
        assert torch.allclose(answers[key].values, column.select(positions).values, atol=1e-3, rtol=1e-3), key
    for part in (tensor for cells in there.parts().values() for _, tensor in cells):
        assert part.device == SIM
    print(f"rank {RANK}, {name}, tp {tp} pp {pp}: {reads} reads back of a step in 2, 8, 2, 8 micro-batches")
    if pp == 1:
        assert reads[3] <= reads[2] + 1, reads


def test_two_roles_train_fused_as_one_host_trains_each() -> None:
    """Their messages have no tags."""
    batch, groups = training_batch(), split_groups(1, 2)
    here = [ReplicatedEngine(head_of(name), MeshGroup((0,), 0), CPU, **SETTINGS) for name in LOSSES]
    places = groups, groups.reversed()
    first, second = (
        MegatronEngine(head_of(name), place, SIM, **SETTINGS) for name, place in zip(LOSSES, places, strict=True)
    )
    fused = FusedTraining((first, second), FusedOrders())
    for budget in (64, 12, 12):
        one, other = (FusedShare(batch, loss, budget, 1e-2) for loss in LOSSES.values())
        outcomes = fused.train((one, other))
        for engine, share, outcome in zip(here, (one, other), outcomes, strict=True):
            assert not isinstance(outcome, NonFiniteError), outcome
            for key, column in engine.train(batch, share.loss, 64, 1e-2).items():
                assert torch.allclose(outcome[key], column, atol=1e-3, rtol=1e-3), key
    assert all(sum(fused.times.fits[model, back].line()) > 0 for model in (0, 1) for back in (False, True))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2)], ids=["dp 2", "tp 2", "pp 2"])
def test_a_model_given_by_path_is_read_onto_each_device_in_its_parts(degrees: tuple[int, int], name: str) -> None:
    """The critic's score layer is not in the checkpoint."""
    load, (tp, pp) = (load_policy if name == "policy" else load_classifier), degrees
    path = str(Path(os.environ["STANDIN_FOLDER"]) / f"{name}-{tp}-{pp}")
    if RANK == 0:  # Transformers writes nothing on other ranks
        tiny.policy(vocab_size=1000).save_pretrained(path)
    dist.barrier(group=HOST)
    with seeded(3):
        expected = dict(load(path, trained=True, in_parts=False).named_parameters())
    with seeded(3):
        model = load(path, trained=True)
    head = PolicyHead(model, 1.0) if name == "policy" else ValueHead(model)
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    made: Any
    if tp * pp == 1:
        made = ReplicatedEngine(head, MeshGroup((0, 1), RANK, dist.group.WORLD, SIM), SIM, **SETTINGS)
    else:
        made = MegatronEngine(head, split_groups(tp, pp), SIM, **SETTINGS)
    share = 0
    for parameter, cells in made.parts().items():
        for box, tensor in cells:
            share += tensor.nbytes
            assert tensor.device == SIM
            assert torch.equal(on_host(tensor), expected[parameter][tuple(slice(*bounds) for bounds in box)]), parameter
    assert all(buffer.device == SIM for buffer in model.buffers())
    peak = torch.accelerator.max_memory_allocated(SIM) - before
    assert peak <= share + max(p.nbytes for p in expected.values()) + (64 << 10), (peak, share)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loaded_model_is_split_without_being_on_a_device_whole(name: str) -> None:
    head, groups = head_of(name), split_groups(2, 1)
    largest = max(parameter.nbytes for parameter in head.parameters())
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    made = MegatronEngine(head, groups, SIM, make_optimizer=SETTINGS["make_optimizer"])
    share = sum(tensor.nbytes for cells in made.parts().values() for _, tensor in cells)
    assert all(tensor.device == SIM for cells in made.parts().values() for _, tensor in cells)
    assert all(buffer.device == SIM for buffer in head.buffers())
    peak = torch.accelerator.max_memory_allocated(SIM) - before
    assert peak <= share + 2 * largest + (64 << 10), (peak, share)


# --- transfers -------------------------------------------------------------------------------------------------------


def test_a_transfer_goes_from_device_to_device_in_buckets() -> None:
    shapes = {"a": (8, 6), "b": (5,), "c": (700, 512)}
    spec = ModelSpec.of_shapes(list(shapes.items()), bytes_per_element=4)
    full = {name: torch.arange(float(torch.Size(s).numel())).view(s) for name, s in shapes.items()}
    source = {0: {name: [whole(s)] for name, s in shapes.items()}, 1: {}}
    halves = {
        rank: {
            name: [((s[0] // 2 * rank, s[0] if rank else s[0] // 2), *((0, d) for d in s[1:]))]
            for name, s in shapes.items()
        }
        for rank in (0, 1)
    }
    schedule = make_schedule(Cluster(1, 2), Layout.of_parts(spec, {0: source[0]}), Layout.of_parts(spec, halves))
    parts = {name: [(whole(shapes[name]), tensor.to(SIM))] for name, tensor in full.items()} if RANK == 0 else {}
    targets = {
        name: [(box, torch.empty([b - a for a, b in box], device=SIM)) for box in boxes]
        for name, boxes in halves[RANK].items()
    }
    moving = Transfer(
        "test",
        schedule,
        RANK,
        dist.group.WORLD,
        SIM,
        dict.fromkeys(shapes, torch.float32),
        TransferOptions(bucket_bytes=1 << 20),
    )
    before = allocated()
    with DEVICE.counting() as counted:
        for _ in moving.run(parts, lambda names: {name: targets[name] for name in names}):
            pass
    for name, [(box, tensor)] in targets.items():
        assert torch.equal(on_host(tensor), full[name][tuple(slice(a, b) for a, b in box)]), name
    assert counted[0].reads == 0, "nothing goes through the host"
    assert allocated() - before <= 2 << 20


# --- whole runs ------------------------------------------------------------------------------------------------------


def plan_of(**calls: Mapping[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "actor.generate": {"mesh": "0-1", "engine": "transformers", "dp": 2},
        "reference.forward": {"mesh": "0-1", "engine": "zero", "dp": 2},
        "critic.forward": {"mesh": "0-1", "engine": "zero", "dp": 2},
        "reward.forward": {"mesh": "0-1", "engine": "zero", "dp": 2},
        "actor.train": {"mesh": "0-1", "engine": "zero", "dp": 2},
        "critic.train": {"mesh": "0-1", "engine": "zero", "dp": 2},
    }
    named = {name.replace("__", "."): call for name, call in calls.items()}
    return {"cluster": {"nodes": 1, "devices_per_node": 2}, "calls": {**base, **named}}


SPLIT = {"mesh": "0-1", "engine": "megatron", "dp": 1}
PLANS: Mapping[str, Any] = {
    "flatten": "flatten",
    "separate": "separate",
    "tensor groups": plan_of(
        actor__train={**SPLIT, "tp": 2},
        critic__train={**SPLIT, "tp": 2},
        critic__forward={**SPLIT, "pp": 2},
        reference__forward={**SPLIT, "tp": 2, "offload": True},
        actor__generate={"mesh": "0-1", "engine": "transformers", "dp": 2, "drop": True},
    ),
    "pipelines": plan_of(
        actor__train={**SPLIT, "pp": 2},
        reference__forward={**SPLIT, "pp": 2, "offload": True},
        reward__forward={"mesh": "1", "engine": "zero", "offload": True},
    ),
}
_logs: dict[str, Any] = {}


@pytest.fixture
def folder() -> Iterator[Path]:
    tiny.forget_accelerate()
    path = Path(os.environ["STANDIN_FOLDER"]) / os.environ["PYTEST_CURRENT_TEST"].split("[")[-1].split("]")[0].replace(
        " ", "_"
    )
    yield path
    tiny.forget_accelerate()


def run(folder: Path, plan: Any, resume: str | None = None, **changes: Any) -> Any:
    given = {"reward_model": tiny.classifier(4), "ref_model": tiny.policy(seed=5)}
    settings = {"max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": False, "adam_epsilon": 1e-4}
    made = tiny.trainer(folder, given=given, plan=plan, **{**settings, **changes})
    assert made.args.device == SIM
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.parametrize("name", PLANS)
def test_ppo_on_two_devices_is_the_same_under_every_plan(name: str, folder: Path) -> None:
    made = run(folder, PLANS[name])
    _logs[name] = tiny.updates(made)
    for here, first in zip(_logs[name], _logs["flatten"], strict=True):
        numbers = {name: value for name, value in here.items() if not name.startswith("realloc/")}
        assert numbers == {name: pytest.approx(value, abs=5e-3, rel=5e-3) for name, value in first.items()}
    made.placement.discard()


def test_what_tensor_groups_save_on_their_devices_pipelines_resume_on_theirs(folder: Path) -> None:
    made = run(folder, PLANS["tensor groups"], save_strategy="steps", save_steps=1)
    expected = tiny.updates(made)[-1]
    made.placement.discard()
    tiny.forget_accelerate()
    resumed = run(folder, PLANS["pipelines"], resume=str(folder / "checkpoint-2"))
    last = {name: value for name, value in tiny.updates(resumed)[-1].items() if not name.startswith("realloc/")}
    wanted = {name: value for name, value in expected.items() if not name.startswith("realloc/")}
    assert last == {name: pytest.approx(value, abs=5e-3, rel=5e-3) for name, value in wanted.items()}
    resumed.save_model(str(folder / "final"))
    resumed.placement.discard()


def test_changes_of_the_plan_give_the_old_plans_memory_back(folder: Path) -> None:
    """From replicas to tensor groups and back: process groups are destroyed twice, and made again."""
    empty = allocated()
    made = run(folder, "flatten", max_steps=2)
    before = allocated()
    assert before > empty
    for changed, share in (({"actor__train": {**SPLIT, "tp": 2}}, 1.1), ({}, 1.01)):
        old = weakref.ref(made.policy_model)
        made.run.change.move_to(JobPlan(ExecutionPlan.from_dict(plan_of(**changed))))
        gc.collect()
        assert old() is None, "nothing refers to the old policy"
        assert allocated() - empty <= (before - empty) * share, changed
    made.placement.discard()
    assert allocated() - empty < (1 << 16)
