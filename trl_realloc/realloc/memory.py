"""What the parameters of a plan take of every device's memory: weights, gradients, optimizer state and copies.

Pure. Activations, a generation engine's cache and transfer buffers come on top; they depend on the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..common.errors import PlanError
from ..plan.assignment import Assignment, in_place
from ..plan.dataflow import Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.model_spec import ModelSpec
from .layout import layout_of, vllm_layout


MOMENTS = 8  # bytes per element of AdamW's two float32 moments
_MASTER = 4  # of a float32 weight beside a smaller one


def resident_bytes(
    plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], adapted: Collection[Role] = ()
) -> dict[int, dict[str, int]]:
    """Bytes by device and call.

    Args:
        specs: by call, the models that it runs (of the reward role there may be several).
        adapted: roles of which adapters alone are trained; their gradients and optimizer state are left out.
    """
    found: dict[int, dict[str, int]] = {}
    for name, assignment in plan.assignments.items():
        call = plan.graph.call(name)
        home = plan.graph.train_call(call.role)
        if home is not None and home != name and in_place(plan[home], assignment) and assignment.engine != "vllm":
            continue
        for spec in specs.get(name, ()):
            vllm = assignment.engine == "vllm" and spec.layers > 0  # how others are split only vLLM knows
            layout = vllm_layout(spec, assignment.mesh, assignment.strategy.tp) if vllm else layout_of(assignment, spec)
            for device in layout.devices:
                size = layout.bytes(device)
                if call.trains and call.role not in adapted:
                    size += _learning_bytes(size // spec.bytes_per_element, assignment, spec.bytes_per_element)
                own = found.setdefault(device, {})
                own[name] = own.get(name, 0) + size
    return found


def _learning_bytes(elements: int, assignment: Assignment, element: int) -> int:
    """Gradients and optimizer state of so many elements on a device; ZeRO-3's elements are sharded already."""
    dp, stage = assignment.strategy.dp, assignment.strategy.zero_stage
    state = elements * state_bytes(element)
    return elements * element // (dp if stage == 2 else 1) + state // (dp if stage in (1, 2) else 1)


def state_bytes(element: int, moments: int = MOMENTS) -> int:
    """What an optimizer keeps of a parameter of so many bytes: its moments, and a float32 master of a smaller one."""
    return moments + (_MASTER if element < _MASTER else 0)


def check_memory(plan: ExecutionPlan, specs: Mapping[str, Sequence[ModelSpec]], adapted: Collection[Role] = ()) -> None:
    """Hold the parameters against the cluster's stated memory; of what the plan offloads or drops the largest counts.

    Raises:
        PlanError: a device would have to hold more, with what takes how much.
    """
    if plan.cluster.memory_gb is None:
        return
    fullest, most, taken = 0, 0, dict[str, int]()
    for device, sizes in resident_bytes(plan, specs, adapted).items():
        away = [size for name, size in sizes.items() if plan[name].offload or plan[name].drop]
        total = sum(sizes.values()) - sum(away) + max(away, default=0)
        if total > most:
            fullest, most, taken = device, total, sizes
    if most > plan.cluster.memory_gb * 1e9:
        largest = sorted(taken, key=lambda name: -taken[name])
        parts = ", ".join(f"{name} {taken[name] / 1e9:.2f}" for name in largest)
        raise PlanError(
            f"device {fullest} would hold {most / 1e9:.2f} GB of parameters, gradients and optimizer state ({parts}), "
            f"but cluster.memory_gb is {plan.cluster.memory_gb:g}; split {largest[0]} over more "
            f"devices (zero_stage 3, tp, pp), put roles on different devices, offload frozen ones, or drop copies."
        )
