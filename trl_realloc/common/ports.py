"""TCP ports that stay free between their choice and their use."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from .errors import shown


_PORTS = range(1, 65_536)
_SPAN = 1000  # number of ports to try; a host has at most one engine per device
_USUAL_START = 20_000  # below Linux's ephemeral ports, and below those of Kubernetes nodes (30,000)


def reserve_port() -> tuple[int, int]:
    """Reserve a port for processes that start now and listen on it seconds later, after their imports.

    A free port from the system may be assigned again meanwhile to any connection, and the process cannot listen on it.
    So ports are chosen outside the ephemeral range, and a socket whose name contains the port keeps others from
    choosing it here. Such names (abstract Unix sockets) belong to a network namespace, like ports, and the system
    removes them with the last process that holds the socket.

    Returns:
        The port, and the file descriptor that reserves it until it is closed.

    Raises:
        OSError: all tried ports are taken, or the environment variable VLLM_PORT is not a port.
    """
    candidates = _candidates()
    for port in candidates:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            holder.bind(f"\0trl_realloc.port.{port}")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.bind(("", port))
        except OSError:
            holder.close()
            continue
        return port, holder.detach()
    remedy = "set the environment variable VLLM_PORT to the first port of a range that is"
    raise OSError(errno.EADDRINUSE, f"none of the ports {candidates[0]} to {candidates[-1]} is free; {remedy}")


def _candidates() -> Sequence[int]:
    """Ports to try, at least one: from the environment variable VLLM_PORT on, otherwise outside the ephemeral range.

    Raises:
        OSError: VLLM_PORT is not a port.
    """
    start = _wanted_port()
    given_away = _ephemeral_ports() if start is None else range(0)
    start = start or _USUAL_START
    ports = range(start, min(start + _SPAN, _PORTS.stop))
    return [port for port in ports if port not in given_away] or ports


def _wanted_port() -> int | None:
    """The environment variable VLLM_PORT; `None` if it is unset or empty, or is the address that Kubernetes sets for a
    service named vllm."""
    wanted = os.environ.get("VLLM_PORT", "").strip()
    if not wanted or "://" in wanted:
        return None
    port = int(wanted) if wanted.isdecimal() and len(wanted) < 10 else 0  # int() does not read thousands of digits
    if port not in _PORTS:
        raise OSError(
            errno.EINVAL,
            f"the environment variable VLLM_PORT is {shown(wanted)}, which is not a port; set it to a number from "
            f"{_PORTS.start} to {_PORTS[-1]}, the first port to try, or unset it",
        )
    return port


def _ephemeral_ports() -> range:
    """The ports that Linux assigns to connections and to sockets bound to any port."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(first, last + 1)
