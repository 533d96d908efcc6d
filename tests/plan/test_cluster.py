from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trl_realloc.plan.cluster import (
    Cluster,
    DeviceMesh,
    PlanError,
    check_mesh,
    halves,
    is_legal,
    legal_meshes,
    nearest_mesh,
)


clusters = st.builds(Cluster, st.integers(1, 4), st.integers(1, 17))
meshes = st.builds(DeviceMesh, st.integers(0, 40), st.integers(1, 40))


@given(meshes)
def test_a_mesh_is_read_back_from_what_it_prints(mesh: DeviceMesh) -> None:
    assert DeviceMesh.parse(str(mesh)) == DeviceMesh.parse(list(mesh.devices)) == mesh


@given(meshes, meshes)
def test_two_meshes_overlap_exactly_when_they_share_a_device(a: DeviceMesh, b: DeviceMesh) -> None:
    assert a.overlaps(b) == b.overlaps(a) == bool(set(a.devices) & set(b.devices))
    assert a.inside(b) == set(a.devices).issubset(b.devices)


@given(meshes, st.integers(0, 90))
def test_a_device_has_an_index_exactly_in_the_meshes_that_hold_it(mesh: DeviceMesh, device: int) -> None:
    assert (device in mesh) == (device in list(mesh.devices))
    if device in mesh:
        assert list(mesh.devices)[mesh.index(device)] == device
    else:
        with pytest.raises(PlanError, match=f"device {device} is not in the mesh"):
            mesh.index(device)
    assert mesh.index(mesh.leader) == 0


@pytest.mark.parametrize(
    ("written", "mesh"),
    [
        ("0-3", DeviceMesh(0, 4)),
        (2, DeviceMesh(2, 1)),
        ("2", DeviceMesh(2, 1)),
        (" 4 - 7 ", DeviceMesh(4, 4)),
        ("3-3", DeviceMesh(3, 1)),
    ],
)
def test_a_mesh_may_be_written_in_several_ways(written: str | int, mesh: DeviceMesh) -> None:
    assert DeviceMesh.parse(written) == mesh


@pytest.mark.parametrize(
    "written", ["", "a", "0-", "-1", "0-1-2", "1 2", "3-0", 2.0, True, None, [], [0, 2], [1, 0], [True], {}]
)
def test_what_is_no_mesh_is_refused_with_the_value(written: object) -> None:
    with pytest.raises(PlanError, match=re.escape(str(written) or "''")):
        DeviceMesh.parse(written)  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "size"), [(-1, 1), (0, 0), (0, -2), (0.0, 1), (True, 1), (0, True)])
def test_a_mesh_of_no_devices_cannot_be_made(first: int, size: int) -> None:
    with pytest.raises(PlanError, match="1 device or more"):
        DeviceMesh(first, size)


@pytest.mark.parametrize(("nodes", "per_node", "told"), [(0, 2, "nodes"), (1, -1, "devices_per_node"), (1, "2", "'2'")])
def test_a_cluster_of_no_devices_cannot_be_made(nodes: int, per_node: int, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Cluster(nodes, per_node)


@given(clusters)
def test_every_legal_mesh_passes_the_check_and_all_devices_are_one(cluster: Cluster) -> None:
    meshes = legal_meshes(cluster)
    assert len(set(meshes)) == len(meshes)
    assert cluster.mesh in meshes
    for mesh in meshes:
        check_mesh(mesh, cluster)


@given(clusters, meshes)
def test_the_check_refuses_exactly_the_meshes_that_are_not_legal(cluster: Cluster, mesh: DeviceMesh) -> None:
    assert is_legal(mesh, cluster) == (mesh in legal_meshes(cluster))


@given(clusters, meshes)
def test_a_refusal_names_the_mesh_the_cluster_and_the_nearest_legal_mesh(cluster: Cluster, mesh: DeviceMesh) -> None:
    assume(not is_legal(mesh, cluster))
    best = min(
        legal_meshes(cluster),
        key=lambda legal: (abs(legal.size - mesh.size), abs(legal.first - mesh.first), -legal.size, legal.first),
    )
    assert nearest_mesh(mesh, cluster) == best
    with pytest.raises(PlanError) as refusal:
        check_mesh(mesh, cluster)
    (problem,) = refusal.value.problems
    assert f"mesh {mesh} " in problem
    assert str(cluster) in problem
    assert ("not within the cluster's devices" in problem) == (mesh.last >= cluster.size)
    assert problem.endswith(f"the nearest legal mesh is {best}.")


@pytest.mark.parametrize(
    ("mesh", "cluster", "legal"),
    [
        ("0-3", Cluster(1, 4), True),
        ("2-3", Cluster(1, 4), True),
        ("1-2", Cluster(1, 4), False),  # not aligned
        ("0-2", Cluster(1, 4), False),  # not a power of two
        ("0-2", Cluster(1, 3), True),  # a whole node
        ("2-5", Cluster(2, 4), False),  # over a node's end
        ("4-7", Cluster(3, 4), True),
        ("4-11", Cluster(3, 4), True),
        ("0-15", Cluster(3, 4), False),  # outside
        ("4-5", Cluster(2, 6), True),
        ("6-7", Cluster(2, 6), True),  # aligned within its node
        ("3", Cluster(2, 2), True),
        ("2-3", Cluster(2, 3), False),  # aligned, but over a node's end
    ],
)
def test_whole_nodes_and_aligned_parts_of_one_node_are_legal(mesh: str, cluster: Cluster, legal: bool) -> None:
    assert is_legal(DeviceMesh.parse(mesh), cluster) == legal


def test_refusing_a_mesh_of_a_very_large_cluster_takes_no_enumeration_of_its_meshes() -> None:
    # 10^10 legal meshes: this ends only because the nearest is looked for among a few
    with pytest.raises(PlanError, match="nearest legal mesh is 800000-800001"):
        check_mesh(DeviceMesh(800001, 2), Cluster(131_072, 8))


@given(clusters)
def test_halves_are_two_disjoint_legal_meshes_that_no_other_pair_betters(cluster: Cluster) -> None:
    assume(cluster.size > 1)
    first, second = halves(cluster)
    check_mesh(first, cluster)
    check_mesh(second, cluster)
    assert not first.overlaps(second)
    meshes = legal_meshes(cluster)
    sizes = {(min(a.size, b.size), max(a.size, b.size)) for a in meshes for b in meshes if not a.overlaps(b)}
    assert (second.size, first.size) == max(sizes)


@pytest.mark.parametrize(
    ("cluster", "first", "second"),
    [
        (Cluster(1, 2), "0", "1"),
        (Cluster(1, 3), "0-1", "2"),
        (Cluster(1, 4), "0-1", "2-3"),
        (Cluster(1, 5), "0-1", "2-3"),
        (Cluster(1, 6), "0-3", "4-5"),
        (Cluster(1, 8), "0-3", "4-7"),
        (Cluster(2, 3), "0-2", "3-5"),
        (Cluster(3, 8), "0-15", "16-23"),
    ],
)
def test_halves_of_the_usual_clusters(cluster: Cluster, first: str, second: str) -> None:
    assert tuple(map(str, halves(cluster))) == (first, second)


def test_a_cluster_prints_as_a_person_would_say_it() -> None:
    assert (str(Cluster(1, 8)), str(Cluster(3, 1))) == ("1 node of 8 devices", "3 nodes of 1 device")


def test_one_device_cannot_be_halved() -> None:
    with pytest.raises(PlanError, match="one device cannot be halved"):
        halves(Cluster(1, 1))
