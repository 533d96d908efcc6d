"""`CompletionThreads`: runs a function for each completion in a thread, and answers what they ask for in the thread
of the trainer."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ...algorithms.async_functions import for_new_thread
from ...runtime.calls.generate_and_score import FAILURE_POLL_S


# Takes the prompts of the turns that have been asked for since its last call, by position, and whether some completion
# does not wait for a turn. Returns the responses that have ended, by position; `None` if none is being drawn.
Draw = Callable[[Mapping[int, list[int]], bool], Mapping[int, Any] | None]


class Stopped(BaseException):
    """Ends the thread of a completion, because the generation has failed. TRL's loop does not catch it."""


class Asked(NamedTuple):
    """What a completion's thread asks of the trainer's thread.

    Args:
        what: "turn": the response to a prompt; "tool": the result of a function; "tools called": nothing, but this turn
            asks for no more functions; "end": nothing, the completion has a result.
        value: token ids; the function; `None`; a `Future` with the result.
        answer: gets the response or the function's result.
    """

    position: int
    what: str
    value: Any
    answer: Future[Any]


# in the threads and tasks of a completion: the object that runs it, also after it has failed
RUNS_THIS = contextvars.ContextVar["CompletionThreads | None"]("RUNS_THIS", default=None)


class CompletionThreads:
    """Runs a function for each completion in a thread, and answers what they ask for in the thread of `results`.

    Functions that completions ask for run in the order of the completions, as in TRL's loop: those of a completion when
    each one before it waits for its turn or has ended.

    Args:
        check: raises an exception if another rank has failed.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._is_stopped = check, False
        self._inbox = SimpleQueue[Asked]()

    def ask(self, position: int, what: str, value: Any = None) -> Future[Any]:
        """Ask for something, in any thread.

        Args:
            position: position of the completion.
        """
        asked = Asked(position, what, value, Future())
        self._inbox.put(asked)
        if self._is_stopped:  # perhaps nobody reads the question
            raise Stopped
        return asked.answer

    def fail(self, error: BaseException) -> None:
        """Let `results` raise this exception. In any thread."""
        outcome = Future[Any]()
        outcome.set_exception(error)
        self._inbox.put(Asked(-1, "end", outcome, Future()))

    def results(
        self, functions: Sequence[Callable[[], Any]], draw: Draw, ended: Callable[[dict[int, Any]], None]
    ) -> list[Any]:
        """The results of all functions.

        Args:
            draw: draws turns. Called again and again.
            ended: called with the results so far, by position, when a completion has ended.
        """
        for position, function in enumerate(functions):
            run = for_new_thread(functools.partial(self._run, position, function))
            threading.Thread(target=run, daemon=True, name=f"completion {position}").start()
        results: dict[int, Any] = {}
        asked: dict[int, Asked] = {}  # unanswered
        called = set[int]()  # completions that ask for no more functions in this turn
        wait_s = FAILURE_POLL_S
        try:
            while len(results) < len(functions):
                self._check()
                prompts: dict[int, list[int]] = {}
                received = self._received(wait_s)
                for question in received:  # all of them before a result may raise: somebody waits for the answers
                    position, what, value, _ = question
                    if what == "tools called":
                        called.add(position)
                    elif what != "end":
                        asked[position] = question
                        if what == "turn":
                            prompts[position] = value
                for position, what, value, _ in received:
                    if what == "end":
                        results[position] = value.result()
                        ended(results)
                running = set(range(len(functions))) - results.keys()
                tool = self._next_tool(asked, called, running)
                if tool is not None:
                    _answer(tool)
                    del asked[tool.position]
                waiting = sum(question.what == "turn" for question in asked.values())
                responses = draw(prompts, waiting < len(running))
                for position, response in (responses or {}).items():
                    called.discard(position)
                    asked.pop(position).answer.set_result(response)
                wait_s = FAILURE_POLL_S if tool is None and responses is None else 0.0
        finally:
            self._is_stopped = True
            for question in [*asked.values(), *self._received(0.0)]:
                question.answer.set_exception(Stopped())
        return [results[position] for position in range(len(functions))]

    @staticmethod
    def _next_tool(asked: Mapping[int, Asked], called: set[int], running: set[int]) -> Asked | None:
        position = min((position for position in asked if asked[position].what == "tool"), default=None)
        if position is None or position > min(running - asked.keys() - called, default=position):
            return None
        return asked[position]

    def _run(self, position: int, function: Callable[[], Any]) -> None:
        RUNS_THIS.set(self)
        with contextlib.suppress(Stopped):
            self.ask(position, "end", outcome_of(function))

    def _received(self, timeout_s: float) -> list[Asked]:
        received = list[Asked]()
        with contextlib.suppress(Empty):
            received.append(self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait())
            while True:
                received.append(self._inbox.get_nowait())
        return received


def outcome_of(function: Callable[[], Any]) -> Future[Any]:
    """A future with the function's result or exception."""
    future = Future[Any]()
    try:
        future.set_result(function())
    except Stopped:
        raise
    except BaseException as error:
        future.set_exception(error)
    return future


def _answer(tool: Asked) -> None:
    """Run the function that a completion asks for. TRL's loop catches no exception like `SystemExit`, so this does not
    either."""
    try:
        tool.answer.set_result(tool.value())
    except Exception as error:
        tool.answer.set_exception(error)
