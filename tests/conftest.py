"""Settings of the tests as a whole."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock


# Before anything reads them: no model hub, no notices, one thread per process (two cores are shared by several).
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings


if TYPE_CHECKING:
    from engine_forks import EngineForks
    from ranks import RankServers


# No deadline for a single example: the machine is shared, and an example that takes 2 ms may wait for 300.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


gc.disable()  # while the tests are imported, with some 800,000 objects


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries tell of what they find alive at the end


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> None:
    """Each training ends with a garbage collection, which takes half a second if it looks through all that has been
    imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[RankServers]:
    """Fork ranks from processes that have imported what they need."""
    from ranks import RankServers

    from trl_realloc.engines.generation.vllm_support import is_vllm_available

    starts_engines = any(item.get_closest_marker("vllm") for item in request.session.items)
    made = RankServers(engines=starts_engines and is_vllm_available())
    yield made
    made.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[EngineForks]:
    """Forks engines from a process that has imported vLLM."""
    from engine_forks import EngineForks

    made = EngineForks.started()
    yield made
    made.close()


@pytest.fixture(scope="module")
def forked_engines(forks: EngineForks) -> Iterator[None]:
    """From here to the end of the file, engines are forked where they would be started."""
    from trl_realloc.engines.generation import engine_process

    with mock.patch.object(engine_process, "spawn", forks.spawn):
        yield
