"""The file that a benchmark writes its result to: of which commit and machine it is, and the writing. What is in it is
each benchmark's own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The short name of the commit that is checked out; empty outside a git repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def merge(path: Path, sections: Mapping[str, Any]) -> None:
    """Replace sections of a result's file, and keep the others, which other commits may have made. `made_at` has the
    commit and the machine of each section."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    made_at = {**known.pop("made_at", {}), **{name: about() for name in sections}}
    write(path, {**known, **sections, "made_at": made_at})


def about() -> dict[str, Any]:
    """The commit and the machine."""
    return {"commit": commit(), "hardware": f"{os.cpu_count()} cores, {platform.machine()}"}


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
