"""`make check-gpu` where there is no GPU. What it does where there is one has to be seen there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


SCRIPT = Path(__file__).parent.parent / "benchmarks" / "check_gpu.py"


def test_on_a_machine_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("There is no GPU that PyTorch can use on this machine")
