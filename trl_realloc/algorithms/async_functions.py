"""The user's async reward functions and tools: which functions are async, and the event loop in which they run."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch


def is_async(function: Any) -> bool:
    """True for an async function or method, a partial of one, and an object whose `__call__` is async. Other functions
    may return an awaitable too, which only a call shows (`awaited`)."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def awaited(answer: Any) -> Any:
    """The result of a function call, awaited in `event_loop` if it is awaitable. Must not be called in that loop."""
    if not inspect.isawaitable(answer):
        return answer

    async def result() -> Any:
        return await answer

    future = asyncio.run_coroutine_threadsafe(result(), event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process in which the user's async functions run. It runs in its own thread until the
    process ends. A client that a function keeps between calls belongs to one loop, so there is only this one."""
    with _LOOP_LOCK:
        return _started_loop()


_LOOP_LOCK = threading.Lock()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=for_new_thread(loop.run_forever), daemon=True, name="async-functions").start()
    return loop


def for_new_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, for a new thread, with the context variables and the current device of this one."""
    context = contextvars.copy_context()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0

    def run() -> Any:
        if device:  # the current device belongs to a thread, and is 0 in a new one
            torch.accelerator.set_device_index(device)
        return context.run(function)

    return run
