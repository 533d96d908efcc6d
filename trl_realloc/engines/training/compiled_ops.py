"""Removes stale locks in the folder where torch compiles extensions, such as DeepSpeed's ops. torch would wait for such
a lock forever, without a message.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


logger = logging.getLogger(__name__)

_NETWORK = ("nfs", "lustre", "cifs", "smb", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "fuse", "afs", "wekafs")


def compiles(config: Mapping[str, Any]) -> bool:
    """True if an engine with this DeepSpeed config needs a compiled op, as offload to an NVMe drive does."""
    zero = config.get("zero_optimization", {})
    return any("nvme" in str(zero.get(name, {})) for name in ("offload_optimizer", "offload_param"))


def clear_stale_locks(folder: Path) -> None:
    """Remove the locks in `folder` of jobs that were killed while they compiled, and warn about the other locks.

    torch keeps a lock's file open while it compiles, so a lock that no process has open is stale. A lock whose holder
    may be invisible here (another user's process, or another host's on a network file system) is not removed.
    """
    for lock in folder.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError), _exclusive(lock.parent):
            holders = list(_holders(lock))
            if holders:
                logger.warning("%s is being compiled by process %d; this job may wait for it.", lock.parent, holders[0])
            elif lock.stat().st_uid != os.getuid() or _on_network(lock):
                logger.warning("%s: if no job compiles there, delete this file, or this job waits forever.", lock)
            else:
                lock.unlink()
                logger.warning("removed %s, the lock of a job that was killed while it compiled.", lock)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Excludes other ranks from handling this folder's lock inside the context. Otherwise a rank could remove a new
    lock that replaced the stale one."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _holders(path: Path) -> Iterator[int]:
    """The pids of this user's processes that have the file open."""
    file = os.stat(path)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                for handle in os.scandir(f"/proc/{entry}/fd"):
                    with contextlib.suppress(OSError):
                        if os.path.samestat(os.stat(handle.path), file):
                            yield int(entry)
                            break


def _on_network(path: Path) -> bool:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(inside, key=lambda mount: len(mount[0]), default=("", ""))[1].startswith(_NETWORK)
