"""`OneCompletion`: the trainer as TRL's loop over tool calls sees it in the thread of one completion."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...algorithms.async_functions import for_new_thread
from ...plan.spans import TOOL
from ...runtime.calls.generate_and_score import TurnSource
from ..checks.config_checks import ConfigError
from .completion_threads import CompletionThreads, outcome_of
from .user_spans import FunctionSpans


if TYPE_CHECKING:
    from transformers import Trainer


# words in the errors of signal, asyncio and tkinter about a function that runs in another thread
_NEEDS_MAIN_THREAD = ("main thread", "no current event loop in thread")


_PACKAGE = f"{__name__.partition('.')[0]}."


class _LoopEnded(Exception):
    """Ends TRL's `_generate` of one completion after its loop over tool calls, before it gathers metrics."""


class OneCompletion:
    """The trainer in the thread of one completion: TRL's methods see a batch of this completion alone, and an engine
    whose responses come from the trainer's thread. Attributes that they set stay here.

    Args:
        position: of the completion; a function that makes several completions sees position 0.
        tokenizers: the attributes `processing_class` and `_tokenizer`.
        slots: held while a tool runs that is not a method of an environment.
        spans: times the tools, without their wait for the trainer's thread or a slot.
        ahead: keeps the results of tools, if the completion is generated ahead of its training.
    """

    def __init__(
        self,
        trainer: Trainer,
        position: int,
        threads: CompletionThreads,
        tokenizers: tuple[Any, Any],
        slots: threading.Semaphore,
        spans: FunctionSpans,
        ahead: TurnSource | None = None,
    ) -> None:
        self._real_trainer, self._position, self._threads = trainer, position, threads
        self._slots, self._spans, self._ahead = slots, spans, ahead
        self._calls = 0  # of tools so far
        self._limit: float | None = trainer.args.tool_timeout
        self._environment = trainer.environments[position] if trainer.environments else None
        if trainer.tools:
            # without environments all rows have the same tools; the engine's rank may have more samples than rows
            row = position % len(trainer._sync_tool_dicts)
            sync, asynchronous = trainer._sync_tool_dicts[row], trainer._async_tool_dicts[row]
            self._sync_tool_dicts = [{name: self._tool(name, tool) for name, tool in sync.items()}]
            self._async_tool_dicts = [{name: self._async_tool(name, tool) for name, tool in asynchronous.items()}]
        self._batch_environments = getattr(trainer, "_batch_environments", [])[position : position + 1]
        self.processing_class, self._tokenizer = tokenizers
        self.vllm_generation = SimpleNamespace(
            llm=trainer.vllm_generation.llm, generate=self._response, sync_weights=lambda: None
        )

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real_trainer, name)
        if not isinstance(value, MethodType) or value.__self__ is not self._real_trainer:
            return value
        # not this package's, which call `super()`: this object has another class
        owners = (vars(kind) for kind in type(self._real_trainer).__mro__ if not kind.__module__.startswith(_PACKAGE))
        return MethodType(next((owner[name] for owner in owners if name in owner), value.__func__), self)

    def _response(self, prompts: Sequence[list[int]], *_: Any, **__: Any) -> Any:
        asked = [self._threads.ask(self._position + i, "turn", list(ids)) for i, ids in enumerate(prompts)]
        columns = zip(*(answer.result() for answer in asked), strict=True)
        return tuple([row for rows in column for row in rows] for column in columns)

    def loop(self, *arguments: Any) -> tuple[Any, ...]:
        """Run TRL's loop over tool calls."""
        results: tuple[Any, ...] = type(self._real_trainer)._tool_call_loop(self, *arguments)
        return results

    def whole(self, prompt: Any, prompt_ids: list[int]) -> tuple[Any, ...]:
        """Generate the first turn, and run TRL's loop over tool calls. Returns what the loop returns."""

        def loop_only(*arguments: Any) -> None:
            raise _LoopEnded(self.loop(*arguments))

        self._tokenize_prompts: Callable[[Any], Any] = lambda _: ([prompt_ids], None, {})
        self._tool_call_loop = loop_only
        try:
            type(self._real_trainer)._generate(self, [prompt])
        except _LoopEnded as ended:
            results: tuple[Any, ...] = ended.args[0]
            return results
        raise AssertionError("TRL's _generate runs the loop over tool calls")

    # --- tools ------------------------------------------------------------------------------------------------------

    def _tool(self, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        is_shared = self._environment is None or getattr(tool, "__self__", None) is not self._environment
        is_serial = self._ahead is None and self._real_trainer.args.tool_workers <= is_shared
        checked = functools.partial(self._checked, name, tool)
        timed = self._spans.timed(f"{TOOL}{name}", checked, self._position if is_serial else None)

        @functools.wraps(tool, updated=())
        def call(**arguments: Any) -> Any:
            with self._kept() as kept:
                if kept.result is None:
                    function = functools.partial(in_slot, **arguments)
                    asked = self._threads.ask(self._position, "tool", function) if is_serial else None
                    kept.result = function() if asked is None else asked.result()
            return kept.result

        def in_slot(**arguments: Any) -> Any:
            with self._slots if is_shared else contextlib.nullcontext():
                return timed(**arguments)

        return call

    @contextlib.contextmanager
    def _kept(self) -> Iterator[_Kept]:
        """Context of a tool's call; `result` is what it has returned before the run was resumed, if anything. Raises
        the tool's exception again if it has raised one."""
        number, kept = self._calls, _Kept()
        self._calls += 1
        if self._ahead is None:
            yield kept
            return
        text = self._ahead.result_of(self._position, number)
        if text is not None:
            known = json.loads(text)
            if "error" in known:
                raise RuntimeError(known["error"])
            yield _Kept(known["value"])
            return
        try:
            yield kept
        except Exception as error:
            self._ahead.keep_result(self._position, number, json.dumps({"error": str(error)}))
            raise
        # as TRL's loop takes it
        kept.result = kept.result if isinstance(kept.result, list) else str(kept.result)
        with contextlib.suppress(TypeError, ValueError):  # such as an image: a resumed run calls the tool again
            self._ahead.keep_result(self._position, number, json.dumps({"value": kept.result}))

    def _checked(self, name: str, tool: Callable[..., Any], **arguments: Any) -> Any:
        """The tool's result. Fails the run if the tool needs the main thread and does not run there."""
        try:
            return self._limited(name, functools.partial(tool, **arguments))
        except Exception as error:
            if any(words in str(error) for words in _NEEDS_MAIN_THREAD):
                self._threads.fail(
                    ConfigError(
                        f"tool {name!r} needs the main thread ({error}); set tool_workers to 0, so that all tools run "
                        f"there, one after the other, and leave tool_timeout out."
                    )
                )
            raise

    def _limited(self, name: str, function: Callable[[], Any]) -> Any:
        """The function's result. With a time limit it runs in a thread, which goes on after the limit."""
        if self._limit is None:
            return function()
        ended = Future[Future[Any]]()
        run = for_new_thread(lambda: ended.set_result(outcome_of(function)))
        threading.Thread(target=run, daemon=True, name=f"tool {name}").start()
        try:
            outcome = ended.result(self._limit)
        except TimeoutError:
            raise TimeoutError(self._took_too_long(name)) from None
        return outcome.result()

    def _async_tool(self, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(tool, updated=())
        async def call(**arguments: Any) -> Any:
            self._threads.ask(self._position, "tools called")  # TRL awaits async tools after the others
            with self._kept() as kept:
                if kept.result is None:
                    kept.result = await timed(**arguments)
            return kept.result

        async def limited(**arguments: Any) -> Any:
            try:
                async with asyncio.timeout(self._limit) as limit:
                    return await tool(**arguments)
            except TimeoutError:
                if limit.expired():
                    raise TimeoutError(self._took_too_long(name)) from None
                raise
            except (SystemExit, KeyboardInterrupt) as error:  # would end the thread of the event loop
                self._threads.fail(error)
                raise RuntimeError(f"tool {name!r} ended the run") from error

        timed = self._spans.timed(f"{TOOL}{name}", limited)
        return call

    def _took_too_long(self, name: str) -> str:
        return f"{name} took longer than tool_timeout, {self._limit:g} s"


@dataclass
class _Kept:
    """The result of a tool's call; `None` if it has none yet."""

    result: Any = None


def one_at_a_time(trainer: Trainer, *, copied: bool = False) -> tuple[Any, Any]:
    """The trainer's `processing_class` and `_tokenizer` for several threads: tokenizers are not thread-safe, so their
    methods run one at a time.

    Args:
        copied: copies, because the trainer's thread uses its own meanwhile.
    """
    given = trainer.processing_class, trainer._tokenizer
    processing_class, tokenizer = copy.deepcopy(given) if copied else given
    lock = threading.Lock()
    return _OneAtATime(processing_class, lock), _OneAtATime(tokenizer, lock)


class _OneAtATime:
    """An object whose methods run one at a time."""

    def __init__(self, target: Any, lock: threading.Lock) -> None:
        self._target, self._lock = target, lock

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return self._locked(value) if callable(value) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._locked(self._target)(*args, **kwargs)

    def _locked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return method(*args, **kwargs)

        return call
