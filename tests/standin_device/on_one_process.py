"""What one process with the stand-in accelerator can show. `test_standin.py` runs this file in a process of its own."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import standin_device


DEVICE = standin_device.accelerator()  # before anything asks which accelerator there is
SIM = standin_device.rank_device()

import tiny  # noqa: E402
import torch  # noqa: E402
from replay import rollouts  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, GPT2Config  # noqa: E402

from standin_device.batches import SETTINGS, training_batch  # noqa: E402
from trl_realloc import GRPOConfig, GRPOTrainer  # noqa: E402
from trl_realloc.algorithms.ppo import PolicyLoss, ValueLoss, prepare  # noqa: E402
from trl_realloc.algorithms.rollout import Ragged, Rollouts  # noqa: E402
from trl_realloc.common.errors import PlanError  # noqa: E402
from trl_realloc.engines.base import EngineError  # noqa: E402
from trl_realloc.engines.device import has_room  # noqa: E402
from trl_realloc.engines.generation.weight_sender import WeightBuffers  # noqa: E402
from trl_realloc.engines.mesh_group import MeshGroup, SplitGroups  # noqa: E402
from trl_realloc.engines.training import heads, packed_attention, sliced_head  # noqa: E402
from trl_realloc.engines.training.heads import PolicyHead, RoleHead, ScoreHead, ValueHead  # noqa: E402
from trl_realloc.engines.training.megatron import MegatronEngine  # noqa: E402
from trl_realloc.engines.training.packed_row import PackedRow  # noqa: E402
from trl_realloc.engines.training.replicated import ReplicatedEngine  # noqa: E402
from trl_realloc.engines.weight_digest import digest, part_digest  # noqa: E402
from trl_realloc.plan.cluster import Cluster  # noqa: E402
from trl_realloc.plan.execution_plan import ExecutionPlan  # noqa: E402
from trl_realloc.plan.presets import flatten, with_sleeping_engines  # noqa: E402
from trl_realloc.profiling.machine import copies, hardware  # noqa: E402
from trl_realloc.runtime.failures.alarm import JobFailed  # noqa: E402
from trl_realloc.runtime.parameters.cpu_offload import CPUOffload, DroppedCopy, move_to_host  # noqa: E402
from trl_realloc.runtime.placement import engine_builder  # noqa: E402
from trl_realloc.runtime.placement.placement import Placement  # noqa: E402


CPU = torch.device("cpu")
of_standin = pytest.mark.skipif(not DEVICE.is_standin, reason="is about the stand-in")
of_cuda = pytest.mark.skipif(DEVICE.is_standin, reason="needs CUDA's kernels")


@pytest.fixture(autouse=True)
def _memory() -> None:
    """Each test begins with an empty device of 4 GiB."""
    gc.collect()
    torch.accelerator.empty_cache()
    DEVICE.limit(4 << 30)
    torch.accelerator.reset_peak_memory_stats()


def allocated() -> int:
    return DEVICE.allocated()


def on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu")


# --- the device itself -----------------------------------------------------------------------------------------------


@of_standin
def test_tensors_of_host_and_device_do_not_mix() -> None:
    here, there = torch.ones(3), torch.ones(3, device=SIM)
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3, device="sim:1")
    assert (there + torch.tensor(2.0)).tolist() == [3, 3, 3], "a number of the host is taken, as on CUDA"
    with pytest.raises(TypeError):
        there.numpy()


@of_standin
def test_operations_that_make_and_resize_tensors_work() -> None:
    assert torch.arange(5, device=SIM).tolist() == [0, 1, 2, 3, 4]
    assert torch.tensor([[1, 2], [3, 4]], device=SIM).T.reshape(-1).tolist() == [1, 3, 2, 4]
    flat = torch.arange(8, device=SIM, dtype=torch.float32).view(torch.uint8)
    assert flat[4:8].view(torch.float32).item() == 1.0
    empty = torch.empty(0, dtype=torch.uint8, device=SIM)
    assert empty.set_(flat.untyped_storage(), 0, (8,)).view(torch.float32).tolist() == [0, 1]
    assert torch.unique(torch.tensor([3, 1, 3], device=SIM)).tolist() == [1, 3]
    parameter = nn.Parameter(torch.ones(2))
    same = nn.Linear(2, 2)
    weight = same.weight
    assert same.to(SIM).weight is weight and weight.device == SIM, "a module keeps its parameters, as on CUDA"
    parameter.data = parameter.data.to(SIM)
    assert parameter.device == SIM


@of_standin
def test_memory_is_counted_cached_and_limited() -> None:
    DEVICE.limit(1 << 20)
    first = torch.empty(512 << 10, dtype=torch.uint8, device=SIM)
    assert torch.accelerator.memory_allocated(SIM) == 512 << 10
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        torch.empty(768 << 10, dtype=torch.uint8, device=SIM)
    del first
    assert torch.accelerator.memory_allocated(SIM) == 0
    assert torch.accelerator.memory_reserved(SIM) == 512 << 10, "it is in the cache, where no other process finds it"
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(SIM) == 0


@of_standin
def test_a_copy_on_a_stream_of_its_own_is_there_when_its_event_has_been_waited_for() -> None:
    host, target = torch.arange(4.0).pin_memory(), torch.zeros(4, device=SIM)
    assert host.is_pinned()
    stream = torch.Stream(SIM)
    with stream:
        target.copy_(host, non_blocking=True)
    arrived = stream.record_event()
    assert target.isnan().all(), "not yet"
    torch.accelerator.current_stream(SIM).wait_event(arrived)
    assert target.tolist() == [0, 1, 2, 3]


# --- samples ---------------------------------------------------------------------------------------------------------


RAGGED: Mapping[str, Callable[[Ragged], Any]] = {
    "rows": lambda r: torch.cat([row.flip(0) for row in r.rows()]),
    "row_of": lambda r: r.row_of,
    "sum": lambda r: r.sum(),
    "spread": lambda r: r.spread(torch.arange(len(r), device=r.values.device)),
    "select": lambda r: r.select([2, 0]).values,
    "crop": lambda r: r.crop(torch.tensor([1, 0, 2])).values,
    "pad": lambda r: r.pad(-1.0),
    "unpad": lambda r: Ragged.unpad(r.pad(), r.lengths).values,
    "cat": lambda r: Ragged.cat([r, r]).values,
    "one row": lambda r: r[2],
    "of": lambda r: Ragged.of(r.rows(), torch.float32).values,
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_columns_are_divided_and_joined_on_the_device_without_reading_it(name: str) -> None:
    column = Ragged(torch.arange(6.0), torch.tensor([3, 1, 2]))
    there = column.to(SIM)
    with DEVICE.counting() as counted:
        result = RAGGED[name](there)
    assert result.device == SIM and torch.equal(on_host(result), RAGGED[name](column))
    assert counted[0].reads == 0


@of_standin
@pytest.mark.parametrize(("tokens", "is_late"), [(8192, 0), (8193, 1)])
def test_the_host_does_not_wait_for_a_large_column_to_reach_the_device(tokens: int, is_late: int) -> None:
    """A copy from pageable memory of more than 64 KiB blocks the host until the device has come to it."""
    rows = Ragged(torch.arange(tokens), torch.tensor([tokens - 3, 3]))
    with DEVICE.counting() as counted:
        moved = rows.to(SIM)
    assert counted[0].late_copies == is_late and counted[0].writes == 1
    assert torch.equal(on_host(moved.values), rows.values)


def test_rollouts_are_sent_and_sorted_from_the_device() -> None:
    samples = rollouts(6)
    back = Rollouts.from_bytes(samples.to(SIM).to("cpu").to_bytes())
    assert all(torch.equal(back.ragged(n).values, samples.ragged(n).values) for n in ("prompts", "responses"))
    mixed = samples.to(SIM).select([3, 1, 5, 0, 2, 4]).sorted()
    assert on_host(mixed.tensor("index")).tolist() == list(range(6))


# --- forward and losses ----------------------------------------------------------------------------------------------


HEADS: Mapping[str, Callable[[Any], RoleHead]] = {
    "policy": lambda **kwargs: PolicyHead(tiny.policy(**kwargs), 0.7),
    "value": lambda **kwargs: ValueHead(tiny.classifier(**kwargs)),
    "score": lambda **kwargs: ScoreHead(tiny.classifier(**kwargs)),
}


def head_on_both(name: str, padded: bool) -> tuple[RoleHead, RoleHead]:
    """The same head on the host and on the device."""
    here = HEADS[name](attn_implementation="eager") if padded else HEADS[name]()  # type: ignore[call-arg]
    here = here.requires_grad_(False).eval()
    assert here.packed is not padded
    return here, copy.deepcopy(here).to(SIM)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_gives_the_hosts_numbers_without_reading_the_device(name: str, padded: bool) -> None:
    here, there = head_on_both(name, padded)
    samples = rollouts(5)
    expected, micro = here(samples), samples.to(SIM)
    there(micro)  # Transformers' first forward of a model reads its rotary frequencies
    with DEVICE.counting() as counted:
        outputs = there(micro)
    assert counted[0].reads == 0, counted
    for output, column in expected.items():
        assert torch.allclose(on_host(outputs[output].values), column.values, atol=1e-5), output


def of_one_prompt(count: int) -> Rollouts:
    return rollouts(count).plus(prompts=Ragged.of([torch.arange(3, 23)] * count, torch.long))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_computes_a_common_prompt_once_without_reading_the_device(name: str) -> None:
    here, there = head_on_both(name, padded=False)
    samples = of_one_prompt(5)
    tree = here.tree(samples)
    assert tree is not None and tree.tokens == samples.tokens - 4 * 20
    expected, micro = here(samples), samples.to(SIM)
    there(micro, PackedRow.of(tree))  # Transformers' first forward of a model reads its rotary frequencies
    with DEVICE.counting() as counted:
        outputs = there(micro, PackedRow.of(tree))
    assert counted[0].reads == 0, counted
    for output, column in expected.items():
        assert torch.allclose(on_host(outputs[output].values), column.values, atol=1e-5), output


@pytest.mark.parametrize("trains", [False, True])
def test_the_logits_of_many_tokens_are_never_whole_on_the_device(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, samples = 4000, rollouts(8)
    here = PolicyHead(tiny.policy(vocab_size=vocabulary), 0.7)
    expected = here(samples)["logprobs"].values
    expected.sum().backward()
    there = PolicyHead(tiny.policy(vocab_size=vocabulary), 0.7).to(SIM)
    there.load_state_dict(here.state_dict())
    monkeypatch.setattr(sliced_head, "LOGITS_SLICE", 4 * vocabulary)
    peaks, micro = {}, samples.to(SIM)
    for most in (1 << 40, 0):  # whole, and in slices
        monkeypatch.setattr(heads, "MAX_LOGITS", most)
        with torch.set_grad_enabled(trains):
            for _ in range(2):  # the second time beside its gradients
                there.zero_grad(set_to_none=False)
                before = allocated()
                torch.accelerator.reset_peak_memory_stats()
                found = there(micro)["logprobs"].values
                if trains:
                    found.sum().backward()
        peaks[most] = torch.accelerator.max_memory_allocated(SIM) - before
        assert torch.allclose(on_host(found.detach()), expected.detach(), atol=1e-4)
        if trains:
            gradient = there.model.lm_head.weight.grad
            assert torch.allclose(on_host(gradient), here.model.lm_head.weight.grad, atol=1e-4)
    assert there.may_slice
    if DEVICE.is_standin:
        tokens = int(samples.ragged("responses").lengths.sum())
        assert peaks[1 << 40] > 4 * tokens * vocabulary
        weights = 8 * vocabulary * there.model.config.hidden_size  # the weight's gradient, and that of a slice
        assert peaks[0] < peaks[1 << 40] - 2 * tokens * vocabulary + (weights if trains else 0), peaks


@of_cuda
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("most", [1 << 40, 0], ids=["whole", "in slices"])
def test_packed_varlen_rows_give_the_hosts_numbers(most: int, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 on the GPU, against float32 on the host."""
    samples, here = of_one_prompt(4) if shares else rollouts(4), PolicyHead(tiny.policy(head_dim=64), 1.0)
    tree = here.tree(samples)
    assert (tree is not None) is shares
    expected = here(samples)["logprobs"].values
    expected.sum().backward()
    there, calls = PolicyHead(tiny.policy(head_dim=64), 1.0).to(SIM), list[int]()
    varlen = packed_attention.varlen_attention

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return varlen(*arguments)

    monkeypatch.setattr(packed_attention, "varlen_attention", counted)
    monkeypatch.setattr(heads, "MAX_LOGITS", most)
    monkeypatch.setattr(sliced_head, "LOGITS_SLICE", 16 * tiny.VOCABULARY)
    with torch.autocast("cuda", torch.bfloat16):
        row = None if tree is None else PackedRow.of(tree)
        found = there(samples.to(SIM), row)["logprobs"].values
    found.sum().backward()
    assert calls, "torch's variable-length attention is used"
    assert torch.allclose(on_host(found).float(), expected.detach(), rtol=5e-2, atol=5e-2)
    gradients = on_host(there.model.lm_head.weight.grad), here.model.lm_head.weight.grad
    assert torch.allclose(*gradients, rtol=5e-2, atol=5e-2)


def test_a_model_whose_logits_cannot_be_cut_gives_the_hosts_numbers() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2))
    here = PolicyHead(model.eval().requires_grad_(False), 1.0)
    samples = rollouts(4)
    there = copy.deepcopy(here).to(SIM)(samples.to(SIM))
    assert torch.allclose(on_host(there["logprobs"].values), here(samples)["logprobs"].values, atol=1e-5)


def test_what_ppo_computes_between_the_calls_is_the_same_on_the_device() -> None:
    samples, settings = training_batch(), SETTINGS
    there = prepare(samples.to(SIM), settings)
    for name in ("kl", "advantages", "returns"):
        assert torch.allclose(on_host(there.ragged(name).values), samples.ragged(name).values, atol=1e-5), name


LOSSES: Mapping[str, Any] = {"policy": PolicyLoss(0.2), "value": ValueLoss(0.2, 0.1)}


def engine(name: str, device: torch.device, **changes: Any) -> ReplicatedEngine:
    return ReplicatedEngine(
        HEADS[name](),  # type: ignore[call-arg]
        MeshGroup((0,), 0),
        device,
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=0.0, eps=1e-4),
        max_grad_norm=0.5,
        **changes,
    )


@pytest.mark.parametrize("kind", ["float32", "autocast"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_replica_trains_as_on_the_host_and_reads_the_device_as_often_for_two_micro_batches_as_for_eight(
    name: str, kind: str
) -> None:
    compute_dtype = torch.bfloat16 if kind == "autocast" else None
    batch, loss = training_batch(), LOSSES[name]
    here, there = (engine(name, device, compute_dtype=compute_dtype) for device in (CPU, SIM))
    expected = [here.train(batch, loss, 64, 1e-2) for _ in range(3)]
    results, reads = [], []
    for budget in (64, 1, 64):
        with DEVICE.counting() as counted:
            results.append(there.train(batch, loss, budget, 1e-2))
        reads.append(counted[0].reads)
    print(f"{name}, {kind}: {reads} reads back of a step in 2, 8 and 2 micro-batches")
    tolerance = 0.15 if compute_dtype else 1e-4  # of sums over a response
    for step, result in zip(expected, results, strict=True):
        for key in step:
            assert result[key].device == CPU and torch.allclose(
                result[key], step[key], atol=tolerance, rtol=tolerance
            ), key
    if kind == "float32":
        assert reads[1] == reads[2] <= 4, reads
        pairs = zip(here.head.parameters(), there.head.parameters(), strict=True)
        assert all(torch.allclose(on_host(b), a, atol=1e-4) for a, b in pairs)


@pytest.mark.parametrize("name", HEADS)
def test_scoring_reads_the_device_as_often_for_one_micro_batch_as_for_eight(name: str) -> None:
    batch = training_batch()
    there = ReplicatedEngine(HEADS[name](), MeshGroup((0,), 0), SIM)  # type: ignore[call-arg]
    there.forward(batch, 1000)
    reads = []
    for budget in (1000, 1):
        with DEVICE.counting() as counted:
            out = there.forward(batch, budget)
        reads.append(counted[0].reads)
    assert all(column.values.device == CPU for column in out.values())
    assert reads[0] == reads[1] <= 2, reads


def test_activations_are_recomputed_on_the_device() -> None:
    batch = training_batch()
    plain, there = (engine("policy", SIM) for _ in range(2))
    there.head.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = plain.train(batch, LOSSES["policy"], 64, 1e-2)["policy_loss"]
    assert torch.allclose(there.train(batch, LOSSES["policy"], 64, 1e-2)["policy_loss"], expected, atol=1e-5)


def test_a_split_engine_of_one_rank_trains_sixteen_bit_parameters_through_masters() -> None:
    batch, alone = training_batch(), MeshGroup((0,), 0)
    results = []
    for device in (CPU, SIM):
        head = PolicyHead(tiny.policy().bfloat16(), 1.0)
        made = MegatronEngine(
            head,
            SplitGroups(alone, alone, alone, alone, alone),
            device,
            make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=0.0),
            max_grad_norm=0.5,
        )
        results.append(made.train(batch, LOSSES["policy"], 64, 1e-3))
    assert torch.allclose(results[0]["policy_loss"], results[1]["policy_loss"], atol=1e-2)


def test_a_split_engine_that_is_let_go_of_frees_its_sixteen_bit_parameters_and_masters() -> None:
    alone, before = MeshGroup((0,), 0), allocated()
    made: Any = MegatronEngine(
        PolicyHead(tiny.policy().bfloat16(), 1.0),
        SplitGroups(alone, alone, alone, alone, alone),
        SIM,
        make_optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=0.0),
    )
    made.train(training_batch(), LOSSES["policy"], 64, 1e-3)
    assert allocated() > before
    del made
    assert allocated() == before


def test_weights_reach_an_engines_shared_memory_from_the_device() -> None:
    buffers = WeightBuffers()
    weight = torch.arange(6.0, device=SIM).view(2, 3)
    filled = buffers.fill(0, [("weight", weight.T), ("half", weight.bfloat16())])
    offset = filled.tensors[0][3]
    memory = torch.from_file(f"/proc/self/fd/{buffers.fds[0]}", shared=True, size=filled.size, dtype=torch.uint8)
    assert memory[offset : offset + 24].view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_a_digest_is_the_hosts(dtype: torch.dtype) -> None:
    for tensor in ((torch.randn(33, 75) * 100).to(dtype), (torch.randn(70001) * 100).to(dtype)):
        assert digest(tensor.to(SIM)).cpu() == digest(tensor)
        assert digest(tensor[1:].to(SIM)[1:]).cpu() == digest(tensor[2:])
        if tensor.dim() == 2:
            part, box = tensor[3:30, 5:72], ((3, 30), (5, 72))
            assert part_digest(part.t().to(SIM).t(), box, tensor.shape).cpu() == part_digest(part, box, tensor.shape)


def test_offloaded_parameters_leave_the_device_and_return_on_one_stream_beside_the_call_before() -> None:
    here, head = head_on_both("policy", padded=False)
    samples = rollouts(4)
    expected, micro = here(samples)["logprobs"].values, samples.to(SIM)
    size = sum(p.nbytes for p in head.parameters())
    before = allocated()
    hook = CPUOffload.attach(head, SIM)
    assert before - allocated() >= size
    assert all(p.device == CPU and p.is_pinned() for p in head.parameters())
    hook.prefetch()
    assert not hook.resident, "what the other calls allocate is not known before the first iteration"
    with DEVICE.counting() as counted:
        for _ in range(4):
            assert torch.allclose(on_host(head(micro)["logprobs"].values), expected, atol=1e-5)
            hook.release()
            hook.prefetch()
            assert hook.resident
            if DEVICE.is_standin:
                assert all(bool(p.isnan().any()) for p in head.parameters()), "the copies run beside the call before"
    assert counted[0].streams <= 1
    hook.release()  # the call failed before its first forward
    assert all(p.device == CPU for p in head.parameters())
    assert torch.allclose(on_host(head(micro)["logprobs"].values), expected, atol=1e-5)


@of_standin
def test_nothing_is_moved_early_where_it_does_not_fit_beside_the_call_before() -> None:
    module = nn.Linear(256, 256, bias=False).requires_grad_(False).to(SIM)
    hook = CPUOffload.attach(module, SIM)
    data = torch.ones(1, 256, device=SIM)
    module(data)
    hook.release()
    call = torch.empty(1 << 20, dtype=torch.uint8, device=SIM)
    del call
    torch.accelerator.empty_cache()
    DEVICE.limit((1 << 20) + (128 << 10))
    assert not has_room(SIM, 256 << 10)
    hook.prefetch()
    assert not hook.resident
    DEVICE.limit(4 << 20)
    hook.prefetch()
    assert hook.resident


def test_a_dropped_copy_gives_its_memory_back() -> None:
    class Copy:
        version = 3

    module = nn.Linear(64, 64).requires_grad_(False).to(SIM)
    data = [p.data for p in module.parameters()]
    before = allocated()
    dropped = DroppedCopy(Copy(), data, [], stale=-1)
    assert before - allocated() >= 64 * 65 * 4
    dropped.restore()
    assert allocated() == before
    for tensor in data:
        tensor.fill_(1.0)
    assert module(torch.ones(1, 64, device=SIM))[0, 0].item() == 65.0


def test_a_partition_of_zero_3_leaves_the_device_with_its_model() -> None:
    """The parameter itself is empty; DeepSpeed has the rank's partition beside it."""
    model = nn.Linear(2, 2, device=SIM)
    for parameter in model.parameters():
        partition = parameter.data.flatten().clone()
        parameter.data = torch.empty(0, device=SIM)
        parameter.ds_id, parameter.ds_tensor = 0, partition
    kept = on_host(model.weight.ds_tensor).tolist()
    move_to_host(model)
    assert all(p.ds_tensor.device == CPU for p in model.parameters())
    assert model.weight.ds_tensor.tolist() == kept


@of_standin
def test_a_machine_with_it_is_measured() -> None:
    assert hardware(SIM) == "stand-in accelerator"
    assert all(observation.seconds > 0 for observation in copies(SIM))


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tiny.forget_accelerate()
    yield tmp_path
    tiny.forget_accelerate()


def models() -> dict[str, Any]:
    return {"reward_model": tiny.classifier(4), "ref_model": tiny.policy(seed=5)}


OFFLOADED = {
    "cluster": {"nodes": 1, "devices_per_node": 1},
    "calls": {
        "actor.generate": {"mesh": "0", "engine": "transformers"},
        "reference.forward": {"mesh": "0", "engine": "zero", "offload": True},
        "critic.forward": {"mesh": "0", "engine": "zero"},
        "reward.forward": {"mesh": "0", "engine": "zero", "offload": True},
        "actor.train": {"mesh": "0", "engine": "zero"},
        "critic.train": {"mesh": "0", "engine": "zero"},
    },
}


def test_ppo_learns_on_the_device_what_it_learns_on_the_host(folder: Path) -> None:
    here = tiny.trained(folder / "cpu", given=models(), plan="flatten", max_steps=3)
    expected, weights = tiny.updates(here), tiny.weights(here)
    here.close()
    tiny.forget_accelerate()
    there = tiny.trainer(folder / "sim", given=models(), plan=OFFLOADED, max_steps=3, use_cpu=False)
    assert there.args.device == SIM
    there.train()
    for a, b in zip(expected, tiny.updates(there), strict=True):
        assert {k: pytest.approx(v, abs=2e-3, rel=2e-3) for k, v in a.items()} == b
    for name, tensor in tiny.weights(there).items():
        assert tensor.device == SIM and torch.allclose(on_host(tensor), weights[name], atol=2e-3), name
    assert not any(hook.resident for hooks in there.placement.residents.values() for hook in hooks)
    there.close()


def test_a_run_on_the_device_saves_and_resumes(folder: Path) -> None:
    settings: dict[str, Any] = {"plan": "flatten", "use_cpu": False, "save_strategy": "steps", "save_steps": 1}
    whole = tiny.trained(folder / "run", given=models(), max_steps=2, **settings)
    expected = tiny.weights(whole)
    whole.close()
    del whole
    tiny.forget_accelerate()
    resumed = tiny.trainer(folder / "run", given=models(), max_steps=2, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-1"))
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in tiny.weights(resumed).items())
    resumed.save_model(str(folder / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert all(torch.isfinite(p).all() for p in loaded.parameters())
    resumed.close()


def test_a_discarded_placement_leaves_nothing_on_the_device_and_no_model_behind(folder: Path) -> None:
    given = models()
    made = tiny.trained(folder, given=given, plan="flatten", use_cpu=False, max_steps=1)
    assert allocated() > 0 and all(p.device == SIM for p in given["reward_model"].parameters())
    policy = weakref.ref(made.policy_model)
    placement = made.placement
    made.close()
    del made
    placement.discard()
    assert all(p.device == CPU for p in given["reward_model"].parameters()), "the script still holds it"
    cached = 1 << 17 if DEVICE.is_standin else 1 << 27  # CUDA's cache still has cuBLAS's workspaces
    assert torch.accelerator.memory_reserved(SIM) < cached and allocated() < 1 << 16
    del placement
    gc.collect()
    assert policy() is None


class Engine:
    """In place of a vLLM engine: it takes its share by what is free when it is ready."""

    version = -1

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.reserved_when_ready = self.reserved_when_asleep = self.unused_when_loaded = -1

    def wait_ready(self) -> None:
        if self.fails:
            raise EngineError("no memory for its cache")
        self.reserved_when_ready = torch.accelerator.memory_reserved(SIM)

    def sleep(self) -> None:
        self.reserved_when_asleep = torch.accelerator.memory_reserved(SIM)

    def kept(self, frozen: Any) -> frozenset[str]:
        return frozenset()

    def load(self, buckets: Any, version: int, frozen: Any = None) -> None:
        self.unused_when_loaded = torch.accelerator.memory_reserved(SIM) - allocated()
        self.version = version
        for _ in buckets:
            pass

    def close(self) -> None:
        pass


@of_standin
@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_is_ready_before_a_model_is_put(fails: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Engine] = []

    def start_vllm(*_: Any) -> Engine:
        started.append(Engine(fails))
        return started[0]

    monkeypatch.setattr(engine_builder, "start_vllm", start_vllm)
    torch.empty(1 << 20, device=SIM)  # freed, and in the cache
    made = tiny.trainer(folder, given=models(), plan="flatten", use_cpu=False)
    plan = with_sleeping_engines(flatten(Cluster(1, 1), generation_engine="vllm"))
    placement = Placement(plan, 0, made.setup.roles, made.setup.engine_options)
    if fails:
        with pytest.raises(EngineError, match="no memory for its cache"):
            placement.start()
        assert torch.accelerator.memory_reserved(SIM) == 0, "nothing was put on the device"
    else:
        placement.start()
        assert started[0].reserved_when_ready == started[0].reserved_when_asleep == 0
        assert allocated() > 0
        torch.empty(1 << 20, device=SIM)  # of a call before, in the cache
        placement.refresh("actor.generate")
        assert 0 <= started[0].unused_when_loaded < 1 << 20, "the engine wakes beside what is in use"
    placement.close()
    made.close()


# --- a card that is too small for the settings ------------------------------------------------------------------------

CONTEXT = 800_000_000  # bytes that a process on a GPU takes beside its tensors, as the planner assumes
VOCABULARY = 10_000
SMALL: dict[str, Any] = {"use_cpu": False, "max_steps": 1, "per_device_train_batch_size": 64, "memory_headroom": 0.15}


def wide(**changes: Any) -> dict[str, Any]:
    """PPO's models, whose logits of a whole batch take much more memory than their parameters."""
    changes["vocab_size"] = VOCABULARY
    critics = {"reward_model": tiny.classifier(4, **changes), "value_model": tiny.classifier(3, **changes)}
    return {"model": tiny.policy(**changes), "ref_model": tiny.policy(seed=5, **changes), **critics}


@pytest.fixture
def small_card() -> Iterator[None]:
    """A device with 250 MB beside its process's context."""
    DEVICE.limit(CONTEXT + 250_000_000)
    DEVICE.take_outside(CONTEXT)
    yield
    DEVICE.take_outside(0)


def trained_on_a_small_card(algorithm: str, folder: Path, plan: str, **changes: Any) -> ExecutionPlan:
    """Trains one update, and gives the plan that it was trained under."""
    made: Any
    if algorithm == "ppo":
        made = tiny.trainer(folder, given=wide(**changes), plan=plan, num_ppo_epochs=1, response_length=32, **SMALL)
    else:
        lengths = {"num_generations": 4, "max_completion_length": 44, "use_vllm": False, "beta": 0.1}
        args = GRPOConfig(output_dir=str(folder), plan=plan, **{**tiny.BARE, **lengths, **SMALL})
        policy = tiny.policy(vocab_size=VOCABULARY, **changes)
        data, words = tiny.prompts(), tiny.tokenizer()
        made = GRPOTrainer(policy, tiny.short, args=args, train_dataset=data, processing_class=words)
    try:
        made.train()
    finally:
        made.close()
    return made.placement.plan


@of_standin
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_what_does_not_fit_is_planned_for_the_memory_there_is(algorithm: str, folder: Path, small_card: None) -> None:
    with pytest.raises((torch.OutOfMemoryError, JobFailed), match="out of memory"):
        trained_on_a_small_card(algorithm, folder / "flatten", "flatten")
    tiny.forget_accelerate()
    gc.collect()
    torch.accelerator.empty_cache()
    plan = trained_on_a_small_card(algorithm, folder / "auto", "auto")
    assert plan.name == "auto (searched)" and plan["actor.train"].strategy.micro_batch_tokens is not None


@of_standin
def test_what_cannot_fit_is_refused_before_a_model_is_on_the_device(folder: Path, small_card: None) -> None:
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()
    with pytest.raises(PlanError) as refused:
        trained_on_a_small_card("grpo", folder, "auto", hidden_size=256)
    assert "actor.train" in str(refused.value) and "of these devices would" in str(refused.value)
    assert torch.accelerator.max_memory_allocated(SIM) < before + (1 << 20)
