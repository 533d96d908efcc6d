"""Hosts for tests: two, on one network, removed with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import Hosts, missing
from ranks import RankServers
from two_starts import TwoStarts


@pytest.fixture(scope="session")
def can_make_hosts() -> None:
    """Skips where the machine does not allow it, and says why."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def make_hosts(can_make_hosts: None, tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """Make hosts; they end with the test."""
    made: list[Hosts] = []

    def make(**how: Any) -> Hosts:
        made.append(Hosts(tmp_path / f"hosts-{len(made)}", **how))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture(scope="session")
def two_starts(
    can_make_hosts: None, tmp_path_factory: pytest.TempPathFactory, servers: RankServers
) -> Iterator[TwoStarts]:
    """A job on two hosts whose hostnames stand for a loopback address, started twice."""
    with Hosts(tmp_path_factory.mktemp("two_starts") / "hosts", rate=None, resolvable=False) as hosts:
        yield TwoStarts(hosts, servers)
