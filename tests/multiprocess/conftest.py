"""Fixtures that launch ranks: each launch has a time limit and leaves no process behind (`launched_job`).

The ranks of most tests are forked from processes that have imported what they need (`ranks`), which leaves out most of
a launch's time. Tests of launchers and of failures start them by `accelerate launch` or `torchrun`, which is forked too
(`forked_launch`) but for a few tests that start every process as a user does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched_job import Job, slowness
from ranks import RankServers


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a script of this folder on so many ranks by a launcher, or by `servers` (with `grace_s` of `Ranks`), or by
    a launcher that they fork (`launched`); ended with the test, however that ends."""
    jobs = []

    def launch(
        script: str,
        processes: int,
        options: dict[str, Any],
        name: str = "job",
        config: Path | None = None,
        restarts: int = 0,
        servers: RankServers | None = None,
        grace_s: float = 0.0,
        launched: bool = False,
    ) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(Job(folder, script, processes, options, config, restarts, servers, grace_s, launched))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.kill()
        job.log.close()


@pytest.fixture
def run(start: Callable[..., Job], servers: RankServers) -> Callable[..., Path]:
    """Run a script on so many ranks and wait for its good end, for `limit_s` seconds of an idle machine; returns the
    folder it wrote to. A launcher starts them if `launched`, or if it is to start them again; nothing is forked if
    `cold`. Without a launcher, the ranks have the variables that it would set for a `config`."""

    def to_the_end(
        script: str,
        processes: int,
        options: dict[str, Any],
        name: str,
        limit_s: float = 200,
        launched: bool = False,
        cold: bool = False,
        restarts: int = 0,
        config: Path | None = None,
    ) -> Path:
        how: dict[str, Any] = {"config": config, "restarts": restarts, "launched": launched or bool(restarts)}
        job = start(script, processes, options, name, **how, servers=None if cold else servers)
        assert job.wait(limit_s * slowness()) == 0, job.problem()
        return job.folder

    return to_the_end
