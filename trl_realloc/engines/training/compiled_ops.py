"""Locks in the folder where torch compiles extensions, among them DeepSpeed's ops: whose holder has ended, and what to
say of the others. torch waits for such a lock without a word and without an end.
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
    """Whether an engine of this DeepSpeed config needs a compiled op: reading and writing an NVMe drive does."""
    zero = config.get("zero_optimization", {})
    return any("nvme" in str(zero.get(name, {})) for name in ("offload_optimizer", "offload_param"))


def extensions_folder() -> Path:
    """Where torch compiles extensions, one folder for each."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory("", False))


def clear_stale_locks(folder: Path) -> None:
    """Remove the locks in `folder` that a job has left which was killed while it compiled, and say of the others for
    what this job may wait.

    torch holds a lock's file open while it compiles, so a lock that no process has open is stale. Where the processes
    that may have it cannot be seen (another user's, another host's over a network file system) it is left.
    """
    for lock in folder.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError), _alone(lock.parent):
            holders = list(_holders(lock))
            if holders:
                logger.warning("%s is being compiled by process %d; this job may wait for it.", lock.parent, holders[0])
            elif lock.stat().st_uid != os.getuid() or _on_network(lock):
                logger.warning("%s: if no job compiles there, delete this file, or this job waits for ever.", lock)
            else:
                lock.unlink()
                logger.warning("removed %s, which a job has left that was killed while it compiled.", lock)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, no other rank looks at this folder's lock: one that has just been taken must not be removed as the stale
    one that it replaced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _holders(path: Path) -> Iterator[int]:
    """The processes of this user that have a file open."""
    own = os.stat(path)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                for handle in os.scandir(f"/proc/{entry}/fd"):
                    with contextlib.suppress(OSError):
                        if os.path.samestat(os.stat(handle.path), own):
                            yield int(entry)
                            break


def _on_network(path: Path) -> bool:
    """Whether a file lies on a file system that other hosts may write to."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(point, kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return max(inside, key=lambda mount: len(mount[0]), default=("", ""))[1].startswith(_NETWORK)
