"""Which network interface gloo uses, and which it is given where its own choice reaches no other host."""

from __future__ import annotations

import socket

import pytest

from trl_realloc.runtime.launch import network_interfaces as interfaces
from trl_realloc.runtime.launch.network_interfaces import NetworkError, gloo_address, set_gloo_interface


JOB = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host with two interfaces, of which the second leads to the other hosts; its hostname is of 127.0.1.1."""
    found = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "ib0": "10.0.0.2"}
    monkeypatch.setattr(interfaces, "addresses", lambda: found)
    monkeypatch.setattr(interfaces, "_source_towards", lambda host: "10.0.0.2")
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    return found


def test_between_hosts_gloo_is_given_the_interface_that_leads_to_the_first(here: dict[str, str]) -> None:
    environment = dict(JOB)
    assert gloo_address(environment) == "127.0.1.1"
    assert set_gloo_interface(environment) == "ib0"
    assert environment["GLOO_SOCKET_IFNAME"] == "ib0" and gloo_address(environment) == "10.0.0.2"


def test_a_loopback_name_takes_the_only_real_interface(here: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "_source_towards", lambda host: "127.0.0.1")
    assert set_gloo_interface(dict(JOB)) == "ib0"
    here["eth0"] = "192.168.0.4"
    with pytest.raises(NetworkError, match=r"would listen at 127.0.1.1, .* one of .*ib0 \(10.0.0.2\), eth0 \(192.168"):
        set_gloo_interface(dict(JOB))


@pytest.mark.parametrize(
    "changes",
    [
        {"GLOO_SOCKET_IFNAME": "docker0"},  # the user's own choice
        {"WORLD_SIZE": "2"},  # all on this host
        {"WORLD_SIZE": "1"},
        {"MASTER_ADDR": ""},
    ],
)
def test_gloo_is_left_alone_by_choice_or_where_there_is_one_host(here: dict[str, str], changes: dict[str, str]) -> None:
    environment = {**JOB, **changes}
    assert set_gloo_interface(environment) is None
    assert environment == {**JOB, **changes}


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(here: dict[str, str]) -> None:
    with pytest.raises(NetworkError, match=r"GLOO_SOCKET_IFNAME is eth7, but .* no interface eth7 .* docker0 \(172"):
        gloo_address({"GLOO_SOCKET_IFNAME": "eth7"})


def test_this_machines_own_interfaces_are_read() -> None:
    assert interfaces.addresses()["lo"] == "127.0.0.1"
