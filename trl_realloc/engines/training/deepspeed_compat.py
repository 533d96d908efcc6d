"""All uses of undocumented DeepSpeed interfaces, the differences between DeepSpeed's releases, and workarounds where it
assumes that an engine spans the whole process or job.

Run with DeepSpeed 0.19.8 (docs/versions.md). Line numbers in comments are of that release.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_deepspeed_available
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..device import is_accelerator
from ..mesh_group import MeshGroup


if TYPE_CHECKING:
    from deepspeed.runtime.base_optimizer import ZeROOptimizer as ZeROOptimizer  # other files import it from here


def is_installed() -> bool:
    return bool(is_deepspeed_available())


# --- partitioned parameters (stage 3) ---------------------------------------------------------------------------------


def is_partitioned(parameter: object) -> bool:
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> tuple[int, ...]:
    """The full shape of a parameter. The `shape` of a partitioned one is (0,) outside a gather."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def full_bytes(parameter: Any) -> int:
    return full_numel(parameter) * int(parameter.element_size())  # numel() of a partitioned parameter is 0


def partition(parameter: Any) -> Tensor:
    """This rank's partition, (n,): live memory, not a copy."""
    flat: Tensor = parameter.ds_tensor.data
    return flat


def move_partition(parameter: Any, device: torch.device) -> None:
    """Move this rank's partition of a parameter, in place."""
    parameter.ds_tensor.data = parameter.ds_tensor.data.to(device)


def full(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
    """The context in which partitioned parameters are full. Collective over the ranks that share them."""
    import deepspeed

    gathering: AbstractContextManager[object] = deepspeed.zero.GatheredParameters(list(parameters))
    return gathering


class Partitioner:
    """Partitions parameters one by one, as `deepspeed.zero.Init` does for new modules.

    Args:
        group: ranks that share the parameters.
        settings: DeepSpeed's config of the engine.
        topology: DeepSpeed's `mpu` argument.
    """

    def __init__(self, group: MeshGroup, settings: Mapping[str, object], topology: object) -> None:
        import deepspeed

        self._init = deepspeed.zero.Init(
            module=nn.Module(), data_parallel_group=group.group, config_dict_or_path=dict(settings), mpu=topology
        )

    def partition(self, parameter: Any) -> None:
        """Replace a full parameter by this rank's partition, in place."""
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()


def gathered(model: object) -> Any:
    """Replace a module's partitioned parameters with full ones in host memory. The `Parameter` objects, which a user's
    optimizer may have, stay. Anything else is returned unchanged. Collective over the ranks that share the model.

    In a job launched with ZeRO-3, Transformers creates every model under `deepspeed.zero.Init`, partitioned over all
    ranks of the job and in the dtype of DeepSpeed's config. A plan may need it on other ranks or in another layout.

    Parameters are gathered one at a time, so a device has memory for one full parameter at most.
    """
    if not isinstance(model, nn.Module):
        return model
    for parameter in filter(is_partitioned, model.parameters()):
        with full([parameter]):
            whole = parameter.data.to("cpu", copy=True)
        # the attributes by which DeepSpeed recognizes a partitioned parameter
        for name, value in list(vars(parameter).items()):
            if name.startswith("ds_") or callable(value) or name in ("nvme_swapper", "is_external_param"):
                delattr(parameter, name)
        parameter.data = whole
    return model


# --- the state of a ZeRO optimizer ------------------------------------------------------------------------------------


def flat_weights(optimizer: ZeROOptimizer) -> list[Tensor]:
    """The float32 weights of this rank's flat partitions, which are the parameters of the inner optimizer."""
    # stage 3; stages 1 and 2; stage 1 in bfloat16 with gradients in float32
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return list(next(getattr(optimizer, name) for name in names if hasattr(optimizer, name)))


def state_range(optimizer: ZeROOptimizer, parameter: Any, key: str | None, index: int) -> tuple[int, Tensor] | None:
    """This rank's range of one tensor of a parameter's training state: the first element's index in the flattened
    tensor, and a view of the range. `None` if the parameter is in other ranks' partitions.

    Args:
        key: key in the optimizer's state; `None` for the float32 weight.
        index: index of this rank in its mesh.
    """
    if is_partitioned(parameter):
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        tensor = flat if key is None else optimizer.optimizer.state[flat][key]
        return index * parameter.ds_tensor.numel(), tensor.data[offset:][:length]
    fragment = parameter._hp_mapping
    if fragment is None:
        return None
    return fragment.lp_fragment_address.start, fragment.get_hp_fragment(key).data


def publish_weights(optimizer: ZeROOptimizer, parameters: Iterable[Any], stage: int) -> None:
    """Copy the float32 weights into the parameters. Collective over the mesh."""
    if stage < 3:
        optimizer.update_lp_params()
        return
    for parameter in parameters:
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        partition(parameter)[:length].copy_(optimizer.fp32_partitioned_groups_flat[group].data[offset:][:length])
    if persistent := optimizer.persistent_parameters:  # small ones, which stay full beside their partitions
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def link_state(optimizer: ZeROOptimizer) -> None:
    """Give every parameter of stages 1 and 2 views of its optimizer state, which `state_range` reads. DeepSpeed creates
    the views once, after the first step of the first parameter group, when the other groups have no state yet."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


@contextlib.contextmanager
def without_hooks(optimizer: ZeROOptimizer, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Removes stage 3's hooks from the modules inside the context. They partition parameters after a module's forward,
    gathered ones too, and gather them for the next forward over the whole mesh: ranks that decode for different numbers
    of steps would wait for each other forever. The same hooks are put back, because new ones would lose the recorded
    order of modules by which DeepSpeed prefetches."""
    zero = getattr(optimizer, "parameter_offload", optimizer)
    ids = {handle.id for handle in (zero.fwd_pre_hook, *zero.forward_hooks, *zero.backward_hooks)}
    saved: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for table in (module._forward_pre_hooks, module._forward_hooks):
            if not ids.isdisjoint(table):
                saved.append((table, dict(table)))
                for hook in ids.intersection(table):
                    del table[hook]
    try:
        yield
    finally:
        for table, hooks in saved:
            table.clear()
            table.update(hooks)


# --- an engine on a part of the job -----------------------------------------------------------------------------------


@contextlib.contextmanager
def initializing(group: MeshGroup, device: torch.device) -> Iterator[None]:
    """The context in which `deepspeed.initialize` creates an engine on one mesh.

    The constructor of a ZeRO-3 optimizer calls barriers without a group, that is over the whole job (stage3.py:765,
    774, 914). On a mesh that is only a part of the job, they would wait forever for the other ranks. Inside the context
    such a barrier is over the mesh, and DeepSpeed uses the engine's device (`_local_rank`).
    """
    from deepspeed import comm

    leave_out_shared_memory_op()
    # torch 2.13 warns at every call of two collectives that DeepSpeed 0.19.8 calls under their deprecated names
    warnings.filterwarnings("ignore", message=r".*(reduce_scatter_tensor|all_gather_into_tensor).* is deprecated")
    _skip_job_wide_order_check()
    job_barrier, linear = comm.barrier, nn.functional.linear

    mesh = group.group

    def barrier(group: object = None, *args: object, **kwargs: object) -> Any:
        return job_barrier(mesh if group is None else group, *args, **kwargs)

    comm.barrier = barrier
    try:
        with _local_rank(device), _without_second_copy(), _without_gradient_memory(), _without_first_gather():
            yield
    finally:
        comm.barrier = job_barrier
        nn.functional.linear = linear  # stage 3 replaces it for the whole process (`memory_efficient_linear`)


@contextlib.contextmanager
def _local_rank(device: torch.device) -> Iterator[None]:
    """Sets LOCAL_RANK to the index of the device among this process's devices inside the context, because DeepSpeed
    makes that device the process's (engine.py:1943, partition_parameters.py:1138).

    A launcher may give each process one device, which has index 0 for all of them (Slurm's --gpus-per-task), and a
    process without a launcher has no LOCAL_RANK. It is not set outside, because Accelerate takes a process that has it
    for a launched one. DeepSpeed compares it with Open MPI's variable (engine.py:1962).
    """
    if is_accelerator(device):
        number = str(torch.accelerator.current_device_index() if device.index is None else device.index)
    else:
        number = os.environ.get("LOCAL_RANK", "0")
    names = ["LOCAL_RANK", *(name for name in ("OMPI_COMM_WORLD_LOCAL_RANK",) if name in os.environ)]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, number))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_second_copy() -> Iterator[None]:
    """Makes a stage 3 optimizer over float32 parameters use them as its float32 weights. DeepSpeed intends this
    (stage3.py:1162), but compares a device with a string, which are never equal, and makes a copy."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    create = Stage3._create_fp32_partitions

    def create_without_copy(optimizer: ZeROOptimizer) -> None:
        name = optimizer.device
        if not optimizer.offload_optimizer:
            optimizer.device = torch.device(name)
        create(optimizer)
        optimizer.device = name

    Stage3._create_fp32_partitions = create_without_copy
    try:
        yield
    finally:
        Stage3._create_fp32_partitions = create


@contextlib.contextmanager
def _without_gradient_memory() -> Iterator[None]:
    """Makes a stage 3 optimizer not write to the memory of its gradients at creation (stage3.py:791).
    `GradientMemory` frees it afterwards and zeroes it before use. On a CPU that memory is then never allocated."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    set_up = Stage3._setup_for_real_optimizer

    def set_up_without_zeros(optimizer: ZeROOptimizer) -> None:
        size = sum(p.partition_numel() for group in optimizer.fp16_groups for p in group)
        keeps_zeros = optimizer.offload_optimizer or optimizer.use_muon
        with contextlib.nullcontext() if keeps_zeros else _Unwritten(size):
            set_up(optimizer)

    Stage3._setup_for_real_optimizer = set_up_without_zeros
    try:
        yield
    finally:
        Stage3._setup_for_real_optimizer = set_up


class _Unwritten(TorchFunctionMode):
    """Makes `torch.zeros` of this number of elements return `torch.empty`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.empty if func is torch.zeros and args == (self.size,) else func
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _without_first_gather() -> Iterator[None]:
    """Makes a stage 3 optimizer not gather every parameter at creation. DeepSpeed does so to hook the gradients of full
    parameters (stage3.py:1504). Their shapes are enough: autograd checks a gradient against the shape that the
    parameter had when it was hooked."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    create = Stage3.create_reduce_and_remove_grad_hooks

    def create_at_shapes(optimizer: ZeROOptimizer) -> None:
        parameters = [p for group in optimizer.fp16_groups for p in group if p.numel() < p.ds_numel]
        if optimizer.zero_hpz_partition_size > 1:  # a secondary partition is made from the gathered parameter
            parameters = []
        methods = [(p.all_gather, p.partition) for p in parameters]
        for p in parameters:
            p.all_gather, p.partition = partial(_show_shape, p), partial(_hide_shape, p, p.data)
        try:
            create(optimizer)
        finally:
            for p, (all_gather, partition_again) in zip(parameters, methods, strict=True):
                p.all_gather, p.partition = all_gather, partition_again

    Stage3.create_reduce_and_remove_grad_hooks = create_at_shapes
    try:
        yield
    finally:
        Stage3.create_reduce_and_remove_grad_hooks = create


def _show_shape(parameter: Any) -> None:
    """Give a partitioned parameter its full shape, with the memory of one element."""
    parameter.data = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.ds_shape)


def _hide_shape(parameter: Any, placeholder: Tensor) -> None:
    parameter.data = placeholder


@contextlib.contextmanager
def memory_efficient_linear(stage: int, config: Mapping[str, Any]) -> Iterator[None]:
    """Makes `torch.nn.functional.linear` DeepSpeed's of stage 3, which saves no gathered weight for the backward,
    inside the context.

    DeepSpeed itself replaces the function for every model of the process. The gradients of a layer's weight and bias
    then arrive in another order than on ranks without a stage 3 engine. Stage 2 reduces gradients in the order of
    arrival, so an engine of stage 2 added gradients of different parameters if only some of its ranks had an engine of
    stage 3.
    """
    if stage < 3 or not config["zero_optimization"].get("memory_efficient_linear", True):
        yield
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    linear = nn.functional.linear
    nn.functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        nn.functional.linear = linear


def _skip_job_wide_order_check() -> None:
    """Turn off DeepSpeed's check that all ranks ran the modules of a sharded model in the same order. It broadcasts
    from rank 0 over the whole job, and would wait forever if the mesh is only a part of the job. The ranks of a mesh
    run the same calls on the same model, so their order is the same."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda ints: None


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its op for all-reduces in shared memory on a CPU. Must be called before the first
    use of `deepspeed.comm`, including Accelerate's in a job launched with a DeepSpeed config.

    The compilation takes 20 s, on a busy machine minutes, without a message; a job that is killed meanwhile leaves a
    lock at which every later job waits forever. Only DeepSpeed's inference uses the op, and falls back to gloo without
    it.
    """
    try:  # `from deepspeed.comm import torch` would give torch itself
        backend = importlib.import_module("deepspeed.comm.torch")
    except ImportError:  # not installed; Accelerate raises if DeepSpeed is needed
        return
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
