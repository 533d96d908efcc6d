"""Runs at the start of every Python process of the tests' engines, whose path has this folder first. In an engine's
main process it lets a test hold the decoding and spoil weights (`holding`), and launch two steps at a time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def let_tests_hold_the_decoding(limit: Path) -> None:
    """While the file exists, no request draws more tokens than its number. Messages are answered meanwhile."""
    from trl_realloc.engines.generation.vllm_compat import count_drawn
    from trl_realloc.engines.generation.vllm_requests import RunningRequests

    step = RunningRequests.step

    def held(requests: RunningRequests) -> list[Any]:
        try:
            most = int(limit.read_text())
        except FileNotFoundError:
            return step(requests)
        if most > max((count_drawn(requests._engine, name) for name in requests._submitted), default=0):
            return step(requests)
        time.sleep(0.002)
        return requests._finished([])

    RunningRequests.step = held  # type: ignore[method-assign]


def let_tests_spoil_the_weights(fault: Path) -> None:
    """While the file exists, one bit of a parameter is another one after each update of the weights."""
    import torch

    from trl_realloc.engines.generation.weight_receiver import SharedMemoryWeightTransfer

    finish = SharedMemoryWeightTransfer.finish_weight_update

    def spoiled(transfer: Any) -> None:
        finish(transfer)
        if fault.exists():
            transfer.model.get_parameter(fault.read_text()).data.view(torch.int32)[7] ^= 1

    SharedMemoryWeightTransfer.finish_weight_update = spoiled  # type: ignore[method-assign]


def launch_two_steps_at_a_time() -> None:
    """vLLM launches a step while another is under way, as with asynchronous scheduling on a GPU. A step has then the
    requests that are not in the other one. The numbers of steps under way at updates go into the log."""
    from vllm.config.vllm import VllmConfig

    from trl_realloc.engines.generation import vllm_compat

    def counted(engine: Any, drain: Any = vllm_compat.drain) -> list[Any]:
        under_way = len(engine.engine_core.engine_core.batch_queue)
        print("under way:", under_way, file=sys.stderr, flush=True)
        finished: list[Any] = drain(engine)
        return finished

    VllmConfig.max_concurrent_batches = property(lambda config: 2)
    vllm_compat.drain = counted


if "trl_realloc.engines.generation.vllm_host" in sys.orig_argv:
    if "TWO_STEPS_AT_A_TIME" in os.environ:  # before `vllm_requests` takes `drain`
        launch_two_steps_at_a_time()
    let_tests_hold_the_decoding(Path(os.environ["HOLD_THE_DECODING"]))
    let_tests_spoil_the_weights(Path(os.environ["HOLD_THE_DECODING"]).with_suffix(".spoil"))
