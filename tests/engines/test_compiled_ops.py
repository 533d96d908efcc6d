"""Locks at which a job that compiles would wait for ever."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from trl_realloc.engines.torch_compat import extensions_folder
from trl_realloc.engines.training import compiled_ops
from trl_realloc.engines.training.compiled_ops import clear_stale_locks, compiles


def lock_of(folder: Path) -> Path:
    (folder / "async_io").mkdir()
    return folder / "async_io" / "lock"


def test_a_lock_that_a_killed_job_left_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = lock_of(tmp_path)
    taken = f"from torch.utils.file_baton import FileBaton; FileBaton({str(lock)!r}).try_acquire()"
    killed = subprocess.run([sys.executable, "-c", f"{taken}; import os; os.kill(os.getpid(), 9)"], check=False)
    assert killed.returncode == -9 and lock.exists()
    with caplog.at_level(logging.WARNING):
        clear_stale_locks(tmp_path)
    assert not lock.exists()
    assert f"removed {lock}" in caplog.text


def test_a_lock_with_a_living_holder_is_left_and_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = lock_of(tmp_path)
    with subprocess.Popen(["sleep", "60"], stdin=lock.open("x+")) as holder:
        with caplog.at_level(logging.WARNING):
            clear_stale_locks(tmp_path)
        holder.kill()
    assert lock.exists()
    assert f"compiled by process {holder.pid}" in caplog.text


def test_a_lock_whose_holder_may_be_on_another_host_is_left_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_of(tmp_path)
    lock.touch()
    monkeypatch.setattr(compiled_ops, "_on_network", lambda path: True)
    with caplog.at_level(logging.WARNING):
        clear_stale_locks(tmp_path)
    assert lock.exists()
    assert f"{lock}: if no job compiles there, delete this file" in caplog.text


def test_the_folder_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert extensions_folder() / "async_io" == Path(cpp_extension._get_build_directory("async_io", False))


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({}, False),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}, False),
        ({"offload_param": {"device": "nvme", "nvme_path": "/local"}}, True),
    ],
)
def test_of_deepspeeds_settings_only_nvme_drives_need_a_compiled_op(zero: dict[str, object], expected: bool) -> None:
    assert compiles({"zero_optimization": zero}) == expected
