"""The state of another process on this host, read from /proc."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """The state letter in /proc (`T`: stopped by a signal), or an empty string if there is no such process."""
    return (_stat_fields(pid) or [""])[0]


def has_ended(pid: int) -> bool:
    """True if the process does not exist or is a zombie."""
    return process_state(pid) in ("", "Z", "X")


def exit_status(pid: int) -> int | None:
    """The `waitpid` status of a process that has ended and was not waited for; `None` if it cannot be read."""
    fields = _stat_fields(pid)
    return int(fields[49]) if fields and len(fields) > 49 and fields[0] in "ZX" else None


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third, the state, on."""
    try:  # pid (name, which may contain any character) state ...
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
