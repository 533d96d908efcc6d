"""The network interface that gloo uses on this host, and whether other hosts can reach it.

gloo takes the address that the hostname resolves to. Many installers give the hostname a loopback address, and then
processes on other hosts wait for an answer that cannot come. NCCL leaves loopback out by itself. Which processes are on
which host is `hosts`' business.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping

import psutil


VARIABLE = "GLOO_SOCKET_IFNAME"
# of containers and virtual machines: other hosts reach none of these
VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxc")


class NetworkError(RuntimeError):
    """The hosts of a job cannot reach each other. The message says which, at which address, and what to set."""


def addresses() -> dict[str, str]:
    """This host's interfaces, each with its first address that is not link-local; IPv4 before IPv6."""
    found: dict[str, str] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                address = entry.address.partition("%")[0]
                if entry.family == family and not ipaddress.ip_address(address).is_link_local:
                    found.setdefault(name, address)
    return found


def gloo_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address at which this process's gloo groups listen.

    Raises:
        NetworkError: `GLOO_SOCKET_IFNAME` names an interface that this host has not, or that has no address.
    """
    names = environment.get(VARIABLE)
    if names:
        here = addresses()
        for name in names.split(","):
            if name not in here:
                raise NetworkError(
                    f"{VARIABLE} is {names}, but {socket.gethostname()} has no interface {name} with an address; it "
                    f"has {_listed(here)}."
                )
        return here[names.split(",")[0]]
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            if _binds(family, kind, protocol, address):
                return str(address[0])
    except OSError:  # the hostname does not resolve
        pass
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def set_gloo_interface(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Before the first process group is made: where gloo would listen on loopback and the launcher's variables name
    another host's address, name the interface that leads there. A name that the user has set stays.

    Returns:
        The interface that was set, `None` where none had to be.

    Raises:
        NetworkError: an interface has to be set, and which one cannot be told.
    """
    processes = environment.get("WORLD_SIZE", "1")
    master = environment.get("MASTER_ADDR", "")
    if environment.get(VARIABLE) or processes == "1" or environment.get("LOCAL_WORLD_SIZE") == processes:
        return None
    if not master or not is_loopback(gloo_address(environment)):
        return None
    here, own = addresses(), _source_towards(master)
    if own is None:
        return None  # torch says what is wrong with MASTER_ADDR
    if is_loopback(own) and "LOCAL_WORLD_SIZE" not in environment:
        return None  # as far as one can tell, all processes are on this host
    found = [name for name, address in here.items() if address == own and not is_loopback(address)]
    if not found:  # this host is MASTER_ADDR, by a name that stands for loopback
        found = [name for name, ip in here.items() if not is_loopback(ip) and not name.startswith(VIRTUAL)]
    if len(found) != 1:
        raise NetworkError(
            f"this job has several hosts, and on {socket.gethostname()} gloo would listen at "
            f"{gloo_address(environment)}, which no other host can reach; set {VARIABLE} to the interface that leads "
            f"to the other hosts, one of {_listed(here)}."
        )
    environment[VARIABLE] = found[0]
    return found[0]


def _source_towards(host: str) -> str | None:
    """This host's address on the way to another. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _binds(family: int, kind: int, protocol: int, address: tuple) -> bool:
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _listed(here: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in here.items()) or "none"
