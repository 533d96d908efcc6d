"""`check_replicas`: checks that every part of a trained parameter has the same bits on all ranks that hold it.

`engines/training/replica_sync` makes replicas equal at the start.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import torch

from ...engines.base import EngineError, ScoringEngine
from ...engines.mesh_group import MeshGroup
from ...engines.weight_digest import digest


UPDATES_BETWEEN_CHECKS = 10  # a check reads the parameters once and gathers 24 bytes per parameter and rank


class ReplicaError(EngineError):
    """Replicas of one role have different parameters. The message names the role, a parameter and ranks."""


def is_due(step: int) -> bool:
    """True if the replicas are compared after this update."""
    return step % UPDATES_BETWEEN_CHECKS == UPDATES_BETWEEN_CHECKS - 1


def check_replicas(engine: ScoringEngine, group: MeshGroup, role: str) -> None:
    """Compare the parameters that training changes. Collective over the mesh.

    Args:
        engine: the role's training engine.

    Raises:
        ReplicaError: two ranks hold different values of the same part of a parameter. Raised on every rank of the mesh.
    """
    if group.size == 1 or not engine.has_replicas:
        return
    rows = [(_key(name), _key(box), digest(part)) for name, parts in engine.parts().items() for box, part in parts]
    table = torch.zeros((group.max(len(rows)), 3), dtype=torch.int64, device=group.device)
    if rows:
        keys = torch.tensor([row[:2] for row in rows], device=group.device)
        digests = torch.stack([row[2] for row in rows]).to(group.device)
        table[: len(rows)] = torch.cat([keys, digests[:, None]], 1)
    ranks_by_digest: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, rows_of_rank in zip(group.ranks, group.gather(table), strict=True):
        for name, box, value in rows_of_rank.tolist():
            if name:  # rows of zeros fill the table
                ranks_by_digest[name, box][value].append(rank)
    different = {key: list(values.values()) for key, values in ranks_by_digest.items() if len(values) > 1}
    if not different:
        return
    names = {_key(name): name for name in engine.parameter_specs}
    (name, _), (first, *others) = next(iter(different.items()))
    other = ", ".join(str(rank) for ranks in others for rank in ranks)
    raise ReplicaError(
        f"the replicas of the {role} are no longer one model: {names[name]} on rank {other} differs from that on rank "
        f"{first[0]} ({len({key for key, _ in different})} parameters differ in all). Resume from the last checkpoint, "
        f"which makes them equal again, and look for a faulty device, or one of another kind, among these ranks."
    )


def _key(value: object) -> int:
    """A positive hash of a parameter's name or a box."""
    return zlib.crc32(repr(value).encode()) + 1
