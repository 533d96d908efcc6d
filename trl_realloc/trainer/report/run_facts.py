"""`run_facts`: the facts of a run for its report: algorithm, script, hardware, versions and commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...engines.device import is_accelerator


NAMED_PACKAGES = ("trl-realloc", "trl", "transformers", "torch", "vllm", "peft", "accelerate")
GIT_TIMEOUT_S = 5.0


def run_facts(algorithm: str, devices: int, device: torch.device) -> dict[str, str]:
    """The facts by their printed names. The script has no arguments, because they may hold a token.

    Args:
        algorithm: name of the algorithm, or of its trainer's class.
        devices: number of devices of the run.
        device: device of this rank.
    """
    on_cpus = f"{devices} process{'es' * (devices > 1)} on CPUs"
    facts = {"algorithm": algorithm, "script": Path(sys.argv[0]).name, "hardware": on_cpus}
    if is_accelerator(device):
        memory = torch.get_device_module(device)
        facts["hardware"] = f"{devices} x {memory.get_device_name(device)}"
        peak = memory.max_memory_allocated(device) / 1e9
        facts["peak memory"] = f"{peak:.1f} GB allocated by the process of device 0, without vLLM's process"
    facts["versions"] = ", ".join([f"Python {platform.python_version()}", *_versions()])
    if commit := _commit():
        facts["commit"] = commit
    return facts


def _versions() -> list[str]:
    versions = []
    for package in NAMED_PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    """The commit of the repository in the working directory; empty without one."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
