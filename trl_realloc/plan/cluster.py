"""`Cluster`: the nodes and devices of a job, and `DeviceMesh`: the devices of one call.

A device is one rank of the job; devices are numbered node by node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import PlanError, Problems, shown


__all__ = ["Cluster", "DeviceMesh", "PlanError", "check_mesh", "halves", "is_legal", "legal_meshes", "nearest_mesh"]


MAX_DEVICES = 1 << 20


@dataclass(frozen=True, order=True)
class DeviceMesh:
    """The consecutive devices `first`, …, `first + size - 1`. `check_mesh` checks whether a cluster allows them.

    Raises:
        PlanError: `first` is negative or `size` less than 1, or either is not an integer.
    """

    first: int
    size: int

    def __post_init__(self) -> None:
        if not (is_whole(self.first) and is_whole(self.size) and self.first >= 0 and self.size >= 1):
            raise PlanError(
                f"a device mesh starts at device 0 or later and has 1 device or more, "
                f"not first={shown(self.first)}, size={shown(self.size)}."
            )

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.size)

    @property
    def leader(self) -> int:
        """The first device, which acts for the mesh if one device is enough."""
        return self.first

    @property
    def last(self) -> int:
        return self.first + self.size - 1

    def __contains__(self, device: object) -> bool:
        return isinstance(device, int) and self.first <= device <= self.last

    def index(self, device: int) -> int:
        """The position of `device` in the mesh, 0 for the first. Raises `PlanError` if it is not in the mesh."""
        if device not in self:
            raise PlanError(f"device {device} is not in the mesh {self}.")
        return device - self.first

    def overlaps(self, other: DeviceMesh) -> bool:
        return self.first <= other.last and other.first <= self.last

    def inside(self, other: DeviceMesh) -> bool:
        return other.first <= self.first and self.last <= other.last

    def __str__(self) -> str:
        return str(self.first) if self.size == 1 else f"{self.first}-{self.last}"

    @staticmethod
    def parse(value: str | int | Sequence[int]) -> DeviceMesh:
        """The mesh of a text or list such as `"0-3"`, `2`, `"2"` or `[0, 1, 2, 3]`. The inverse of `str`.

        Raises:
            PlanError: the value is none of these, or a list that is not consecutive and ascending.
        """
        if isinstance(value, (list, tuple)):
            devices = list(value)
            if devices and all(map(is_whole, devices)) and devices == [devices[0] + i for i in range(len(devices))]:
                return DeviceMesh(devices[0], len(devices))
            raise PlanError(f"a mesh's devices are consecutive and ascending, like [0, 1, 2, 3], not {shown(devices)}.")
        first, dash, last = (part.strip() for part in str(value).partition("-"))
        if isinstance(value, bool) or not _digits(first) or (dash and not _digits(last)):
            raise PlanError(f"a mesh is written as 0-3, 2 or [0, 1, 2, 3], not {shown(value)}.")
        if dash and int(last) < int(first):
            raise PlanError(f"the mesh {value} ends before it starts; write it as {last}-{first}.")
        return DeviceMesh(int(first), int(last) - int(first) + 1 if dash else 1)


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `devices_per_node` devices each; device d is number `d % devices_per_node` of its node.

    Args:
        memory_gb: memory of a device, in 10^9 bytes; `None` if unknown, which skips the memory check of plans.

    Raises:
        PlanError: a count is not an integer from 1, or the memory is not a number above 0.
    """

    nodes: int
    devices_per_node: int
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        problems = Problems(
            f"a cluster's {name} is a whole number from 1, not {shown(value)}."
            for name, value in (("nodes", self.nodes), ("devices_per_node", self.devices_per_node))
            if not is_whole(value) or value < 1
        )
        memory = self.memory_gb
        if memory is not None and (
            isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 < memory < float("inf")
        ):
            problems.append(
                f"a cluster's memory_gb is a number of gigabytes above 0, not {shown(memory)}; or leave it out."
            )
        if not problems and self.size > MAX_DEVICES:
            problems.append(
                f"a cluster of {shown(self.nodes)} nodes of {shown(self.devices_per_node)} devices has more than the "
                f"{MAX_DEVICES:,} devices that a plan can be for."
            )
        problems.refuse()

    @property
    def size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all devices."""
        return DeviceMesh(0, self.size)

    def __str__(self) -> str:
        return f"{_count(self.nodes, 'node')} of {_count(self.devices_per_node, 'device')}"


def is_legal(mesh: DeviceMesh, cluster: Cluster) -> bool:
    """True if a mesh is whole consecutive nodes, or a power-of-two part of one node, aligned to its size."""
    if mesh.last >= cluster.size:
        return False
    start = mesh.first % cluster.devices_per_node
    if start == 0 and mesh.size % cluster.devices_per_node == 0:
        return True
    power_of_two = mesh.size & (mesh.size - 1) == 0
    return power_of_two and start % mesh.size == 0 and start + mesh.size <= cluster.devices_per_node


def check_mesh(mesh: DeviceMesh, cluster: Cluster) -> None:
    """Check that a mesh is legal.

    Raises:
        PlanError: it is not. The message names the nearest legal mesh.
    """
    if is_legal(mesh, cluster):
        return
    if mesh.last >= cluster.size:
        reason = f"mesh {mesh} is not within the cluster's devices {cluster.mesh} ({cluster})"
    else:
        reason = f"mesh {mesh} is neither whole nodes nor an aligned power-of-two part of one node ({cluster})"
    raise PlanError(f"{reason}; the nearest legal mesh is {nearest_mesh(mesh, cluster)}.")


def legal_meshes(cluster: Cluster) -> tuple[DeviceMesh, ...]:
    """Every legal mesh, sorted by first device and size. `nodes * (nodes + 1) / 2` of them are whole nodes."""
    per_node = cluster.devices_per_node
    meshes = {
        DeviceMesh(node * per_node, count * per_node)
        for node in range(cluster.nodes)
        for count in range(1, cluster.nodes - node + 1)
    }
    size = 1
    while size <= per_node:
        for node in range(cluster.nodes):
            meshes.update(DeviceMesh(node * per_node + start, size) for start in range(0, per_node - size + 1, size))
        size *= 2
    return tuple(sorted(meshes))


def nearest_mesh(mesh: DeviceMesh, cluster: Cluster) -> DeviceMesh:
    """The legal mesh that is nearest in size, then in first device. The larger, then the earlier one wins a tie.

    Looks only at meshes near `mesh`, because a cluster of a thousand nodes has half a million meshes.
    """
    per_node = cluster.devices_per_node
    node = min(mesh.first // per_node, cluster.nodes - 1)
    nodes = [n for n in (node, node + 1) if n < cluster.nodes]
    candidates = []
    for count in {min(max(mesh.size // per_node + extra, 1), cluster.nodes) for extra in (0, 1)}:
        candidates += [DeviceMesh(min(n, cluster.nodes - count) * per_node, count * per_node) for n in nodes]
    for exponent in range(per_node.bit_length()):
        size = 1 << exponent
        last_part = per_node // size - 1
        for n in nodes:
            part = min(max(mesh.first - n * per_node, 0) // size, last_part)
            candidates += [DeviceMesh(n * per_node + p * size, size) for p in {part, min(part + 1, last_part)}]

    def distance(legal: DeviceMesh) -> tuple[int, int, int, int]:
        return abs(legal.size - mesh.size), abs(legal.first - mesh.first), -legal.size, legal.first

    return min(candidates, key=distance)


def halves(cluster: Cluster) -> tuple[DeviceMesh, DeviceMesh]:
    """Two disjoint legal meshes for two concurrent calls. The smaller one is as large as possible, because its call
    usually ends last; then the larger one is as large as possible.

    Several nodes are divided between nodes (3 nodes: 2 and 1). One node is divided within the node: 8 devices give 4
    and 4, 6 give 0-3 and 4-5, 3 give 0-1 and 2; 5 give 0-1 and 2-3, and device 4 is not used.

    Raises:
        PlanError: the cluster has one device.
    """
    if cluster.size == 1:
        raise PlanError("one device cannot be halved; give every call the whole mesh (plan: flatten).")
    if cluster.nodes > 1:
        first = (cluster.nodes + 1) // 2 * cluster.devices_per_node
        return DeviceMesh(0, first), DeviceMesh(first, cluster.size - first)
    smaller = 1 << ((cluster.size // 2).bit_length() - 1)  # the largest power of two that fits twice
    larger = 2 * smaller if 3 * smaller <= cluster.size else smaller
    return DeviceMesh(0, larger), DeviceMesh(larger, smaller)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12  # Python does not parse 4,300 digits and more


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
