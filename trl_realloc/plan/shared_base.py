"""The copies of a policy with adapters that a plan needs: to merge the adapters for vLLM engines, and for its own
reference, the policy without its adapters. The functions are about one plan's assignments, and load nothing.

`runtime.placement` makes the copies. `realloc.memory` and `planner.search.plan_memory` count them.
"""

from __future__ import annotations

from collections.abc import Mapping

from .assignment import Assignment, in_place, whole_everywhere
from .dataflow import CallKind, DataflowGraph, Role


def needs_reallocation(home: Assignment, other: Assignment, *, adapted: bool) -> bool:
    """True if a call needs a trained role's parameters in another layout than that of their training, in a copy.

    vLLM engines on devices of a ZeRO stage 3 training need no copy of a policy with adapters. The training gathers the
    adapted weights a bucket at a time, and merges the adapters into them.

    Args:
        home, other: assignments of the role's training and of the call.
        adapted: the role trains only adapters.
    """
    is_sharded = home.engine == "zero" and home.strategy.zero_stage == 3
    merges_at_home = adapted and is_sharded and other.engine == "vllm" and other.mesh.inside(home.mesh)
    return not merges_at_home and not in_place(home, other)


def base_holder(graph: DataflowGraph, assignments: Mapping[str, Assignment], scoring: str) -> str | None:
    """The call of the actor whose copy of the policy has the base that a scoring call of the reference needs, in that
    call's layout, on all of its devices. `None` if there is none, so that the reference needs parameters of its own.

    Args:
        graph: the run's calls. The actor trains adapters, and the reference is the actor without them.
    """
    home = graph.train_call(Role.ACTOR)
    if home is None:
        return None
    wanted = assignments[scoring]
    if in_place(assignments[home], wanted):
        return home
    for name in graph.uses_of(Role.ACTOR):
        copied = assignments[name]
        if not needs_reallocation(assignments[home], copied, adapted=True):
            continue
        if graph.call(name).kind is CallKind.GENERATE:
            # a copy for generation is whole, on the first rank of each engine
            if copied.strategy.tp == 1 and whole_everywhere(wanted) and wanted.mesh.inside(copied.mesh):
                return name
        elif in_place(copied, wanted) and not copied.offload:  # `offload` moves the base to host memory
            return name
    return None


def has_merging_copy(home: Assignment, generation: Assignment, device: int) -> bool:
    """True if a device has a copy of a policy with adapters beside the weights of its vLLM engine: in the training's
    dtype, on the first device of each engine, to merge the adapters for the engine.

    Args:
        home, generation: assignments of the policy's training and of a call that generates with it.
    """
    is_reallocated = generation.engine == "vllm" and needs_reallocation(home, generation, adapted=True)
    if not is_reallocated or device not in generation.mesh:
        return False
    return generation.mesh.index(device) % generation.strategy.tp == 0
