"""Memory of a plan's parameters on every device: weights, gradients, optimizer state and copies.

Pure. Activations, a generation engine's cache and transfer buffers are not included, because they depend on the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..common.errors import PlanError
from ..plan.assignment import Assignment, in_place
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from ..plan.shared_base import has_merging_copy
from .layout import layout_of, vllm_layout


MOMENTS = 8  # bytes per element of AdamW's two float32 moments
_MASTER = 4  # bytes per element of the float32 master of a weight in 16 bits


@dataclass(frozen=True)
class CallBytes:
    """Bytes of a call on one device.

    Args:
        held: bytes of parameters and optimizer state.
        gradients: bytes of gradients, from the call's first backward to its step.
        kept: bytes that stay when the plan releases the call's memory between its uses: the base of a policy with
            adapters that are merged for a vLLM engine (`shared_base.has_merging_copy`).
    """

    held: int = 0
    gradients: int = 0
    kept: int = 0

    @property
    def most(self) -> int:
        """Bytes while the call runs."""
        return self.held + self.gradients + self.kept

    def __add__(self, other: CallBytes) -> CallBytes:
        return CallBytes(self.held + other.held, self.gradients + other.gradients, self.kept + other.kept)


def call_bytes(
    plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], adapted: Collection[Role] = ()
) -> dict[int, dict[str, CallBytes]]:
    """Bytes of parameters, optimizer state and gradients, by device and call. Calls that use another call's parameters
    in place are left out, and so is a reference that computes in a copy of the policy with adapters.

    Args:
        specs: models of each call. The reward role may have several.
        adapted: roles that train only adapters. Their gradients and optimizer state are left out.
    """
    sizes: dict[int, dict[str, CallBytes]] = {}
    for name, assignment in plan.assignments.items():
        call = plan.graph.call(name)
        home = plan.graph.train_call(call.role)
        if home is not None and home != name and in_place(plan[home], assignment) and assignment.engine != "vllm":
            continue
        for spec in specs.get(name, ()):
            if spec.is_base and plan.base_holder(name) is not None:
                continue
            # vLLM's slices of a model that is described only by shapes (no layers) are unknown
            vllm = assignment.engine == "vllm" and spec.layers > 0
            if vllm:
                layout = vllm_layout(spec, assignment.mesh, assignment.strategy.tp)
            else:
                layout = layout_of(assignment, spec, is_reversed=plan.is_reversed(name))
            for device in layout.devices:
                size = CallBytes(spec.bytes if spec.quantization is not None else layout.bytes(device))
                if call.trains and call.role not in adapted:
                    size += _training_bytes(size.held // spec.bytes_per_element, assignment, spec.bytes_per_element)
                device_sizes = sizes.setdefault(device, {})
                device_sizes[name] = device_sizes.get(name, CallBytes()) + size
        if home is None or call.role not in adapted:
            continue
        copied = CallBytes(kept=sum(spec.bytes for spec in specs.get(home, ())))
        for device in assignment.mesh.devices:
            if has_merging_copy(plan[home], assignment, device):
                device_sizes = sizes.setdefault(device, {})
                device_sizes[name] = device_sizes.get(name, CallBytes()) + copied
    return sizes


def _training_bytes(elements: int, assignment: Assignment, element_bytes: int) -> CallBytes:
    """Optimizer state and gradients of a device's elements. Under ZeRO stage 3, `elements` counts its shard."""
    dp, stage = assignment.strategy.dp, assignment.strategy.zero_stage
    state = elements * state_bytes(element_bytes, assignment)
    gradients = elements * gradient_bytes(element_bytes, assignment)
    return CallBytes(state // (dp if stage in (1, 2) else 1), gradients // (dp if stage == 2 else 1))


def gradient_bytes(element_bytes: int, assignment: Assignment) -> int:
    """Bytes of a parameter element's gradient. DeepSpeed's gradients have the parameter's dtype. The other engines
    accumulate gradients of 16-bit parameters in float32 (`engines.training.optimizer_state`)."""
    is_deepspeed = assignment.engine == "zero" and assignment.strategy.zero_stage > 0
    return element_bytes if is_deepspeed else max(element_bytes, _MASTER)


def state_bytes(element_bytes: int, assignment: Assignment, moments: int = MOMENTS) -> int:
    """Bytes of optimizer state per element of a parameter: the moments, and a float32 master of a 16-bit element.
    Stages 1 and 2 of DeepSpeed's ZeRO (0.19.8) have such a copy of float32 parameters too."""
    is_deepspeed = assignment.engine == "zero" and assignment.strategy.zero_stage in (1, 2)
    return moments + (_MASTER if element_bytes < _MASTER or is_deepspeed else 0)


def check_memory(plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], adapted: Collection[Role] = ()) -> None:
    """Compare the parameters with the cluster's `memory_gb`. Of the calls that the plan offloads or drops, only the
    largest counts. A call's gradients count only while it runs.

    Raises:
        PlanError: a device's parameters exceed it. The message lists the bytes of each call.
    """
    if plan.cluster.memory_gb is None:
        return
    fullest, most, fullest_sizes = 0, 0, dict[str, CallBytes]()
    for device, sizes in call_bytes(plan, specs, adapted).items():
        total = _most_at_once(plan, sizes)
        if total > most:
            fullest, most, fullest_sizes = device, total, sizes
    if most > plan.cluster.memory_gb * 1e9:
        largest = sorted(fullest_sizes, key=lambda name: -fullest_sizes[name].most)
        parts = ", ".join(f"{name} {fullest_sizes[name].most / 1e9:.2f}" for name in largest)
        raise PlanError(
            f"device {fullest} would hold {most / 1e9:.2f} GB of parameters, gradients and optimizer state ({parts}), "
            f"but cluster.memory_gb is {plan.cluster.memory_gb:g}; split {largest[0]} over more "
            f"devices (zero_stage 3, tp, pp), put roles on different devices, offload frozen ones, or drop copies."
        )


def _most_at_once(plan: ExecutionPlan, sizes: Mapping[str, CallBytes]) -> int:
    """Peak bytes of a device."""
    held, adds = 0, [0]
    for names in plan.runs_of([name for name in plan.order if name in sizes]):
        adds.append(0)
        for name in names:
            size, leaves = sizes[name], plan[name].offload or plan[name].drop
            held += size.kept + (0 if leaves else size.held)
            adds[-1] += size.gradients + (size.held if leaves else 0)
    return held + max(adds)
