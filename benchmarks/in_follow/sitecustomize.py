"""Runs at the start of every Python process whose path has this folder first: of the vLLM engines of `follow.py`."""

from __future__ import annotations

import sys
from pathlib import Path


if "trl_realloc.engines.generation.vllm_host" in sys.orig_argv:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from follow import follow_engine

    follow_engine()
