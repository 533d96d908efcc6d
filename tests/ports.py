"""A port for a job of the tests."""

from __future__ import annotations

from trl_realloc.common.ports import reserve_port


def free_port() -> int:
    """A port that no other job of the tests gets until this process ends."""
    port, _ = reserve_port()
    return port
