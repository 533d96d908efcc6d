"""Where a policy with adapters computes its own reference: the policy without its adapters, in a copy of the policy
that the plan has anyway. The functions are about one plan's assignments, and load nothing.

`runtime.placement` runs the reference there. `realloc.memory` and `planner.search.plan_memory` count the base once.
"""

from __future__ import annotations

from collections.abc import Mapping

from .assignment import Assignment, in_place, whole_everywhere
from .dataflow import CallKind, DataflowGraph, Role


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
        if in_place(assignments[home], copied):
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
    if generation.engine != "vllm" or in_place(home, generation) or device not in generation.mesh:
        return False
    return generation.mesh.index(device) % generation.strategy.tp == 0
