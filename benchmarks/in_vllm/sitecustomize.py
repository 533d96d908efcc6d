"""Runs at the start of every Python process whose path has this folder first: of both sides of `generation.py`. Writes
the times of a vLLM process to the file that `GENERATION_TIMES` names, a JSON object a line: the stages of its start,
and for each generation the seconds inside vLLM's decode steps and inside this package's draw."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


BEGAN = time.time()


def write_times(path: Path) -> None:
    seconds = {"steps": 0.0, "draws": 0.0}

    def note(**values: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def timed(owner: Any, name: str, then: Callable[[float], None]) -> None:
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                then(time.perf_counter() - start)

        setattr(owner, name, method)

    def added(name: str) -> Callable[[float], None]:
        def add(more: float) -> None:
            seconds[name] += more

        return add

    def generated(_: float = 0.0) -> None:
        note(**seconds)
        seconds.update(steps=0.0, draws=0.0)

    # seconds from the start of the process to here, which the operating system has in ticks since boot
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    note(stage="python", seconds=time.clock_gettime(time.CLOCK_BOOTTIME) - (time.time() - BEGAN) - started)
    begin = time.perf_counter()
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    note(stage="imports", seconds=time.perf_counter() - begin)
    timed(EngineArgs, "create_engine_config", lambda s: note(stage="config", seconds=s))
    timed(vllm.LLM, "__init__", lambda s: note(stage="engine with config", seconds=s))
    timed(LLMEngine, "step", added("steps"))
    timed(vllm.LLM, "generate", generated)
    from trl_realloc.engines.generation import vllm_compat
    from trl_realloc.engines.generation.vllm_requests import RunningRequests
    from trl_realloc.engines.generation.vllm_sampler import SeededDraw

    timed(RunningRequests, "end", generated)
    timed(SeededDraw, "forward", added("draws"))
    if "OWN_SAMPLER_OF_VLLM" in os.environ:  # an engine on the CPU has this package's in its place
        from trl_realloc.engines.generation import weight_receiver

        vllm_compat.replace_draw = weight_receiver.replace_draw = lambda *given: None


if "trl_realloc.engines.generation.vllm_host" in sys.orig_argv or "--plain" in sys.orig_argv:
    write_times(Path(os.environ["GENERATION_TIMES"]))
