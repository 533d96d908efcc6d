"""The file that a benchmark writes its result to: of which commit it is, and the writing. What is in it is each
benchmark's own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The short name of the commit that is checked out; empty outside a git repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
