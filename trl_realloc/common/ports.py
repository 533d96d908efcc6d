"""TCP ports that nothing else takes between their choice and their use."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path


_SPAN = 1000  # ports that are tried; a host has an engine for each of its devices at most
_USUAL_START = 20_000  # below the ports that Linux gives to connections, and below those of Kubernetes' nodes (30,000)


def reserve_port() -> tuple[int, int]:
    """Reserve a port for processes that are started now and listen on it seconds later, after their imports.

    The system would give any free port, and give it again to whoever connects or asks meanwhile: then the one that
    was meant cannot listen. So ports come from outside the range that the system gives away, and a socket whose name
    contains the port keeps others from choosing it here. Such names (abstract ones of Unix sockets) are one network
    namespace's, as ports are, and the system removes them with the last process that has the socket.

    Returns:
        The port, and the file descriptor that reserves it until it is closed.

    Raises:
        OSError: all ports that were tried are taken.
    """
    for port in _candidates():
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holder.bind(f"\0trl_realloc.port.{port}")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.bind(("", port))
        except OSError:
            holder.close()
            continue
        return port, holder.detach()
    tried = list(_candidates())
    remedy = "set the environment variable VLLM_PORT to the first port of a range that is"
    raise OSError(errno.EADDRINUSE, f"none of the ports {tried[0]} to {tried[-1]} is free; {remedy}")


def _candidates() -> Iterator[int]:
    """The ports from the environment variable VLLM_PORT on, or else from outside those that the system gives away."""
    wanted = os.environ.get("VLLM_PORT", "")  # Kubernetes sets it to an address where a service is called vllm
    start = int(wanted) if wanted.isdecimal() else _USUAL_START
    given_away = range(0) if wanted.isdecimal() else _ephemeral_ports()
    ports = range(start, min(start + _SPAN, 65_536))
    outside = [port for port in ports if port not in given_away]
    yield from outside or ports


def _ephemeral_ports() -> range:
    """The ports that Linux gives to connections and to whoever asks for any port."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(first, last + 1)
