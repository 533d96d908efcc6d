"""What the tests take for left behind in /dev/shm: files that no living process uses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import shared_memory


MAPS = """
    import mmap, os, sys
    with open(sys.argv[1], "w+b") as file:
        file.truncate(4096)
        held = mmap.mmap(file.fileno(), 0) if sys.argv[3] == "mapped" else os.dup(file.fileno())
    os.rename(sys.argv[1], sys.argv[2])  # as a semaphore gets its name
    print(flush=True)
    sys.stdin.read()
    """


@pytest.fixture
def names() -> Iterator[tuple[str, str]]:
    made = (f"trl_realloc_test_{os.getpid()}.first", f"trl_realloc_test_{os.getpid()}")
    yield made
    for name in made:
        Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_a_file_of_a_living_process_is_not_left_and_one_of_a_dead_process_is(how: str, names: tuple[str, str]) -> None:
    before = shared_memory.names()
    first, name = names
    command = [sys.executable, "-c", textwrap.dedent(MAPS), f"/dev/shm/{first}", f"/dev/shm/{name}", how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert name in shared_memory.names() and name not in shared_memory.left(before)
        process.kill()
    assert name in shared_memory.left(before, 0.1)
    assert name not in shared_memory.left(shared_memory.names())
