"""The network interface that gloo uses on this host, and whether other hosts can reach it.

gloo uses the address that the hostname resolves to. Many installers give the hostname a loopback address; then
processes on other hosts cannot connect and wait until their timeout. NCCL skips loopback.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping

import psutil


VARIABLE = "GLOO_SOCKET_IFNAME"
# prefixes of interfaces of containers and virtual machines, which no other host can reach
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxc")


class NetworkError(RuntimeError):
    """The hosts of a job cannot reach each other. The message names the hosts, the address and the variable to set."""


def addresses() -> dict[str, str]:
    """Interface -> its first address that is not link-local, IPv4 before IPv6."""
    by_interface: dict[str, str] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                address = entry.address.partition("%")[0]
                if entry.family == family and not ipaddress.ip_address(address).is_link_local:
                    by_interface.setdefault(name, address)
    return by_interface


def gloo_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address at which this process's gloo groups listen.

    Raises:
        NetworkError: `GLOO_SOCKET_IFNAME` names an interface that this host does not have, or that has no address.
    """
    names = environment.get(VARIABLE)
    if names:
        local_addresses = addresses()
        for name in names.split(","):
            if name not in local_addresses:
                raise NetworkError(
                    f"{VARIABLE} is {names}, but {socket.gethostname()} has no interface {name} with an address; it "
                    f"has {_listed(local_addresses)}."
                )
        return local_addresses[names.split(",")[0]]
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            if _can_bind(family, kind, protocol, address):
                return str(address[0])
    except OSError:  # the hostname does not resolve
        pass
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def set_gloo_interface(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set the interface for gloo, if gloo would listen on loopback and the launcher's variables name another host.
    Called before the first process group is made. The user's setting is kept.

    Returns:
        The interface that was set; `None` if none had to be set.

    Raises:
        NetworkError: an interface must be set, and several or none are possible.
    """
    processes = environment.get("WORLD_SIZE", "1")
    master = environment.get("MASTER_ADDR", "")
    if environment.get(VARIABLE) or processes == "1" or environment.get("LOCAL_WORLD_SIZE") == processes:
        return None
    if not master or not is_loopback(gloo_address(environment)):
        return None
    local_addresses, source = addresses(), _source_towards(master)
    if source is None:
        return None  # torch says what is wrong with MASTER_ADDR
    if is_loopback(source) and "LOCAL_WORLD_SIZE" not in environment:
        return None  # all processes seem to be on this host
    interfaces = [name for name, address in local_addresses.items() if address == source and not is_loopback(address)]
    if not interfaces:  # this host is MASTER_ADDR, by a name that resolves to loopback
        interfaces = [
            name for name, ip in local_addresses.items() if not is_loopback(ip) and not name.startswith(VIRTUAL)
        ]
    if len(interfaces) != 1:
        raise NetworkError(
            f"this job has several hosts, and on {socket.gethostname()} gloo would listen at "
            f"{gloo_address(environment)}, which no other host can reach; set {VARIABLE} to the interface that leads "
            f"to the other hosts, one of {_listed(local_addresses)}."
        )
    environment[VARIABLE] = interfaces[0]
    return interfaces[0]


def _source_towards(host: str) -> str | None:
    """This host's address on the route to another host; `None` if there is no route. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _can_bind(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _listed(by_interface: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in by_interface.items()) or "none"
