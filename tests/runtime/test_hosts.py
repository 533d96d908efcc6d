"""Processes that tell where they run make a cluster, or a sentence about why they do not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.common.errors import PlanError
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.plan.presets import flatten
from trl_realloc.runtime.launch import hosts
from trl_realloc.runtime.launch.hosts import Process, check_gpus, cluster_of, on_loopback, ranks_by_host
from trl_realloc.runtime.launch.network_interfaces import NetworkError


def processes(*hosts: tuple[str, str, int], gpus: int | None = None) -> list[Process]:
    """Processes of hosts given by hostname, boot id and their number; on GPUs where a process sees so many."""
    return [
        Process(name, machine, local, local % gpus if gpus else None, gpus or 0)
        for name, machine, count in hosts
        for local in range(count)
    ]


@given(st.integers(1, 5), st.integers(1, 9))
def test_hosts_with_equally_many_processes_are_the_nodes(nodes: int, per_node: int) -> None:
    made = processes(*((f"host{at}", f"boot{at}", per_node) for at in range(nodes)))
    assert cluster_of(made) == Cluster(nodes, per_node)
    unsaid = [Process(each.host, each.machine) for each in made]  # a launcher that sets no local rank
    assert cluster_of(unsaid) == Cluster(nodes, per_node)


@pytest.mark.parametrize(
    ("one", "other"),
    [(("localhost", "a", 2), ("localhost", "b", 2)), (("c1", "a", 2), ("c2", "a", 2)), (("gpu", "a", 2),) * 2],
    ids=["machines of one hostname", "containers of a machine", "containers that the launcher counts as hosts"],
)
def test_machines_and_containers_are_hosts(one: tuple[str, str, int], other: tuple[str, str, int]) -> None:
    assert cluster_of(processes(one, other)) == Cluster(2, 2)


def test_unequal_hosts_are_refused_with_their_names_and_numbers() -> None:
    with pytest.raises(PlanError, match=r"unevenly \(3 on alpha, 1 on beta\), .*; start equally many on each host"):
        cluster_of(processes(("alpha", "a", 3), ("beta", "b", 1)))


def test_ranks_dealt_to_the_hosts_in_turn_are_refused() -> None:
    alpha, beta = processes(("alpha", "a", 2)), processes(("beta", "b", 2))
    with pytest.raises(PlanError, match=r"host alpha has the ranks 0, 2, .* consecutive ranks .*--distribution=block"):
        cluster_of([alpha[0], beta[0], alpha[1], beta[1]])


def test_hosts_come_in_the_order_of_their_ranks() -> None:
    assert ranks_by_host(processes(("z", "a", 2), ("b", "b", 2))) == [[0, 1], [2, 3]]


def _tensor(nodes: int, per_node: int, tp: int) -> ExecutionPlan:
    plan = flatten(Cluster(nodes, per_node)).to_dict()
    plan["calls"]["actor.generate"] |= {"dp": nodes * per_node // tp, "tp": tp}
    return ExecutionPlan.from_dict(plan)


def test_an_engine_over_gpus_that_its_process_does_not_see_is_refused() -> None:
    alone = [Process(name, name, local, 0, 1) for name in ("a", "b") for local in range(2)]
    check_gpus(alone, _tensor(2, 2, 1))
    check_gpus(processes(("a", "a", 2), ("b", "b", 2), gpus=2), _tensor(2, 2, 2))
    check_gpus(processes(("a", "a", 2), ("b", "b", 2)), _tensor(2, 2, 2))
    with pytest.raises(PlanError, match="uses the GPUs of 2 processes, but rank 0 on a sees 1 and its own is number 0"):
        check_gpus(alone, _tensor(2, 2, 2))


def test_an_address_that_other_hosts_cannot_reach_is_named_with_its_host() -> None:
    assert not on_loopback(Process("alpha", address="10.0.0.1"))
    assert "127.0.1.1 on alpha" in on_loopback(Process("alpha", address="127.0.1.1"))
    assert "set GLOO_SOCKET_IFNAME" in on_loopback(Process("alpha", address="::1"))


def _meeting(places: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every rank of a meeting gets or is told, ranks being threads; `listens` is each one's gloo address."""
    local = threading.local()
    monkeypatch.setattr(hosts, "gloo_address", lambda: local.listens())
    store = dist.HashStore()

    def one(rank: int) -> Any:
        place = dict(places[rank])
        local.listens = place.pop("listens")
        try:
            return hosts._all_processes(store, rank, len(places), place)
        except NetworkError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(one, range(len(places))))


def _place(host: str, local_rank: int, address: str = "127.0.0.2") -> dict[str, Any]:
    return {"host": host, "machine": host, "local_rank": local_rank, "listens": lambda: address}


def test_processes_of_two_hosts_meet_and_try_each_others_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "is_loopback", lambda address: False)
    found = _meeting([_place(name, local) for name in ("a", "b", "c") for local in (0, 1)], monkeypatch)
    assert len({tuple(each) for each in found}) == 1
    assert cluster_of(found[0]) == Cluster(3, 2)
    assert [process.host for process in found[0]] == ["a", "a", "b", "b", "c", "c"]


def test_all_hosts_are_told_what_is_wrong_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _meeting([_place("a", 0), _place("b", 0)], monkeypatch)
    assert told[0] == told[1] and "gloo listens at 127.0.0.2 on a, which no other host can reach" in told[0]

    def absent() -> str:
        raise NetworkError("GLOO_SOCKET_IFNAME is eth7, but b has none")

    told = _meeting([_place("a", 0), {**_place("b", 0), "listens": absent}], monkeypatch)
    assert told == ["GLOO_SOCKET_IFNAME is eth7, but b has none"] * 2


def test_a_host_that_another_cannot_reach_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(hosts, "is_loopback", lambda address: False)
    monkeypatch.setattr(hosts.socket, "create_connection", refuse)
    told = _meeting([_place("a", 0), _place("b", 0)], monkeypatch)
    assert told[0] == told[1]
    assert "a (127.0.0.2) cannot reach b at 127.0.0.2, where gloo listens there (timed out); set GLOO_SOCKET" in told[0]
