"""Fixtures that launch ranks: each launch has a time limit and leaves no process behind (`launched_job`).

Tests of launchers and of failures start their ranks by `accelerate launch` or `torchrun`. The ranks of the others are
forked from processes that have imported what they need (`ranks`), which leaves out most of a launch's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched_job import Job, slowness
from ranks import RankServers

from trl_realloc.engines.generation.vllm_support import is_vllm_available


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[RankServers]:
    starts_engines = any(item.get_closest_marker("vllm") for item in request.session.items)
    made = RankServers(engines=starts_engines and is_vllm_available())
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a script of this folder on so many ranks by a launcher, or by `servers` (with `grace_s` of `Ranks`); ended
    with the test, however that ends."""
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
    ) -> Job:
        folder = tmp_path / name
        folder.mkdir()
        jobs.append(Job(folder, script, processes, options, config, restarts, servers, grace_s))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.kill()
        job.log.close()


@pytest.fixture
def run(start: Callable[..., Job], servers: RankServers) -> Callable[..., Path]:
    """Run a script on so many ranks and wait for its good end, for `limit_s` seconds of an idle machine; returns the
    folder it wrote to. A launcher starts them if `launched`, or if it is to start them again; without it, the ranks
    have the variables that it would set for a `config`."""

    def to_the_end(
        script: str,
        processes: int,
        options: dict[str, Any],
        name: str,
        limit_s: float = 200,
        launched: bool = False,
        restarts: int = 0,
        config: Path | None = None,
    ) -> Path:
        by = None if launched or restarts else servers
        job = start(script, processes, options, name, config=config, restarts=restarts, servers=by)
        assert job.wait(limit_s * slowness()) == 0, job.text()[-4000:]
        return job.folder

    return to_the_end
