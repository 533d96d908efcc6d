"""The training state of an engine as whole tensors, from the parts of all ranks of its mesh, and back into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trl_realloc.engines.training_state import TensorSpec


def whole_state(engine: Any) -> dict[str, Any]:
    """`version`, `parameters[name][key]`, `scalars[name]` and `group_numbers[number]`; the same on every rank.
    Collective over the mesh."""
    mesh = engine.groups.mesh if hasattr(engine, "groups") else engine.group
    state = engine.training_state()
    shapes = {(n, k): t.spec.shape for n, tensors in state.tensors.items() for k, t in tensors.items()}
    # as arrays of NumPy, which are sent in a tenth of the time: torch pickles each tensor as a file of its own
    cells = [(name, key, box, cell.detach().numpy().copy()) for name, key, box, cell in state.cells()]
    mine = (shapes, cells, state.scalars, state.group_numbers)
    ranks: list[Any] = [mine]
    if mesh.size > 1:
        ranks = [None] * mesh.size
        dist.all_gather_object(ranks, mine, group=mesh.group)
    parameters: dict[str, dict[str, torch.Tensor]] = {}
    for shapes, cells, *_ in ranks:
        for name, key, box, array in cells:
            cell = torch.from_numpy(array)
            tensors = parameters.setdefault(name, {})
            if key not in tensors:
                tensors[key] = torch.full(shapes[name, key], torch.nan if cell.is_floating_point() else 0).to(cell)
            tensors[key][tuple(slice(*ends) for ends in box)] = cell
    scalars = {name: values for _, _, by_name, _ in reversed(ranks) for name, values in by_name.items()}
    numbers = {number: values for *_, by_group in reversed(ranks) for number, values in by_group.items()}
    return {
        "version": state.version,
        "parameters": parameters,
        "scalars": scalars,
        "group_numbers": numbers,
        "scaler": state.scaler,
    }


def load_whole(engine: Any, state: Mapping[str, Any]) -> None:
    """Load what `whole_state` of this or another engine returned, on every rank of the mesh."""
    whole = state["parameters"]
    specs = {n: {k: TensorSpec(tuple(t.shape), t.dtype) for k, t in tensors.items()} for n, tensors in whole.items()}
    with engine.loading(specs) as loading:
        for name, key, box, cell in loading.cells():
            cell.copy_(whole[name][key][tuple(slice(*ends) for ends in box)])
        loading.scalars = {name: dict(state["scalars"][name]) for name in loading.scalars}
        loading.group_numbers = {n: dict(state.get("group_numbers", {}).get(n, {})) for n in loading.group_numbers}
        loading.version, loading.scaler = state["version"], state["scaler"]
