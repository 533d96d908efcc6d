"""`Turns`: completions that call tools, or otherwise take several calls of the engine.

Each completion runs TRL's own loop over tool calls in a thread (`completion_threads`), on a trainer whose batch is this
completion alone (`one_completion`). So the tools of different completions run at once, and TRL's code parses, masks,
limits and reports them. The turns that completions ask for are drawn in rounds, when all of them wait, or, where each
rank has an engine of its own, each at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...algorithms.async_functions import is_async
from ...algorithms.rollout import Rollouts
from ...runtime.call_server import CallServer
from ...runtime.calls.generate_and_score import FAILURE_POLL_S
from ..checks.config_checks import ConfigError
from ..checks.trainable import users_method
from .completion_threads import RUNS_THIS, CompletionThreads, Draw
from .group_rewards import GroupRewards
from .one_completion import OneCompletion
from .planned_generation import for_trl
from .single_candidates import SingleCandidates
from .user_spans import FunctionSpans


if TYPE_CHECKING:
    from transformers import Trainer


TOOL_POLL_S = 0.005  # longest wait for the engine while tools run, whose next turns it could draw


class Turns:
    """The turns of the completions of a trainer's generations.

    Args:
        trainer: a `PlannedPolicyTrainer`.
        calls: returns the server of its calls, which a change of the plan replaces.
        spans: times the tools.
        forced: gets the log-probabilities, joined over turns.
        groups: scores completions group by group.
    """

    def __init__(
        self,
        trainer: Trainer,
        calls: Callable[[], CallServer],
        spans: FunctionSpans,
        forced: SingleCandidates,
        groups: GroupRewards,
    ) -> None:
        self.trainer, self.calls, self.spans, self.forced, self.groups = trainer, calls, spans, forced, groups
        self._prompts: Sequence[Any] = ()  # of the generation, with what environments have added
        self._loops: list[tuple[Any, ...]] | None = None  # results of TRL's loop for each completion, not yet returned
        self._threads: CompletionThreads | None = None  # while completions run in them
        self._overrides = users_method(type(trainer), ("_generate", "_generate_single_turn"))
        self._has_tools = bool(getattr(trainer, "tools", None)) and hasattr(trainer, "_tool_call_loop")
        is_trls = self._has_tools and users_method(type(trainer), ("_tool_call_loop",)) is None
        self._has_threads = is_trls and self._overrides is None

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The methods of TRL's trainer, and the user's `rollout_func`, in which completions take several calls of the
        engine, wrapped, by name; empty if each completion takes one. A loop over tool calls that a subclass overrides
        stays as it is."""
        trainer = self.trainer
        wrapped: dict[str, Callable[..., Any]] = {}
        if self._has_tools:
            loop = self._tool_call_loop if self._has_threads else self._finishing(trainer._tool_call_loop)
            wrapped["_tool_call_loop"] = loop
        if getattr(trainer, "rollout_func", None) is not None:
            wrapped["rollout_func"] = self._finishing(trainer.rollout_func)
        if wrapped or self._overrides:
            wrapped["_generate"] = self._around(trainer._generate)
        return wrapped

    def _finishing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, after which this rank takes part in the generations of the others: ranks may generate different
        numbers of times."""

        @functools.wraps(method)
        def finishing(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.calls().finish_turns()
            return result

        return finishing

    def _around(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """TRL's `_generate`. Tools of a user's loop are timed, and `forced` gets the log-probabilities, which TRL or a
        user's subclass has joined."""

        @functools.wraps(generate)
        def around(prompts: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._has_threads:
                self.spans.time_tools()
            self._prompts, self._loops = prompts, None
            outputs = generate(prompts, *args, **kwargs)
            if len(outputs) > 4:  # GRPO returns log-probabilities, joined over turns
                joined = outputs[4]
            else:
                joined = self.trainer.vllm_generation.drawn([len(ids) for ids in outputs[1]])
            self.forced.begin_generation(() if joined is None else joined)
            return outputs

        return around

    # --- tools ------------------------------------------------------------------------------------------------------

    @property
    def why_in_rounds(self) -> str | None:
        """The reason why completions wait for each other before each turn; `None` if they do not, or call no tools."""
        trainer: Any = self.trainer
        if not self._has_threads:
            return None
        if not self.calls().draws_by_itself:
            return "the plan does not give every rank a vLLM engine of its own, without streams"
        workers, shared = trainer.args.tool_workers, [tool for tool in trainer._standalone_tools if not is_async(tool)]
        if workers == 0 or (workers == 1 and shared):
            return f"tool_workers is {workers}, so tools run one after the other"
        return None

    def first_turns(self, prompt_ids: Sequence[Sequence[int]]) -> Rollouts | None:
        """The responses of the first turn, where completions do not wait for each other. Their later turns are drawn
        too, and kept for `_tool_call_loop`. `None` if completions take one turn, or take turns in rounds."""
        if not self._has_threads or self.why_in_rounds is not None:
            return None
        first: dict[int, Rollouts] = {}
        prompt_of: dict[int, list[int]] = {}  # of the latest turn
        engine = self.trainer.vllm_generation
        with self.calls().drawing(len(prompt_ids)) as turns:

            def draw(prompts: Mapping[int, list[int]], is_busy: bool) -> dict[int, Any] | None:
                prompt_of.update(prompts)
                for position, ids in prompts.items():
                    turns.add(position, ids)
                if not turns.unfinished:
                    return None
                ended = turns.poll(TOOL_POLL_S if is_busy else FAILURE_POLL_S)
                for position, row in ended.items():
                    first.setdefault(position, row)
                    engine.routes.add([prompt_of[position]], row)
                return {position: for_trl([()], row, engine.eos_token_id) for position, row in ended.items()}

            self._loops = self._run(
                lambda completion, position: completion.whole(self._prompts[position], list(prompt_ids[position])),
                len(prompt_ids),
                draw,
            )
        return Rollouts.cat([first[position] for position in range(len(prompt_ids))])

    def _tool_call_loop(
        self,
        prompts: Sequence[Any],
        prompt_ids: Sequence[list[int]],
        completion_ids: Sequence[list[int]],
        completions: Sequence[Any],
        logprobs: Sequence[list[float]] | None,
        images: Sequence[Any] | None,
        multimodal_fields: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """TRL's loop of all completions, in rounds unless `first_turns` has run it."""
        if self._loops is None:
            columns = [prompts, prompt_ids, completion_ids, completions, logprobs, images]

            def loop(completion: OneCompletion, position: int) -> tuple[Any, ...]:
                rows = [None if column is None else [column[position]] for column in columns]
                return completion.loop(*rows, multimodal_fields)

            self._loops = self._run(loop, len(prompts), self._round())
            self.calls().finish_turns()
        loops, self._loops = self._loops, None
        return tuple(_joined(parts) for parts in zip(*loops, strict=True))

    def _round(self) -> Draw:
        waiting: dict[int, list[int]] = {}

        def draw(prompts: Mapping[int, list[int]], is_busy: bool) -> dict[int, Any] | None:
            waiting.update(prompts)
            if is_busy or not waiting:
                return None
            positions = sorted(waiting)
            columns = self.trainer.vllm_generation.generate([waiting[position] for position in positions], of=positions)
            waiting.clear()
            return {p: [[value] for value in row] for p, row in zip(positions, zip(*columns, strict=True), strict=True)}

        return draw

    def _run(self, function: Callable[[OneCompletion, int], Any], count: int, draw: Draw) -> list[Any]:
        """The results of a function of each completion of this rank."""
        tokenizing, slots = threading.Lock(), threading.Semaphore(max(1, self.trainer.args.tool_workers))
        self._threads = threads = CompletionThreads(self.calls().executor.alarm.check)
        try:
            functions = [
                functools.partial(function, OneCompletion(self.trainer, i, threads, tokenizing, slots, self.spans), i)
                for i in range(count)
            ]
            return threads.results(functions, draw, self._score_groups(self.groups.groups(count)))
        finally:
            self._threads = None

    def _score_groups(self, groups: Sequence[range]) -> Callable[[dict[int, Any]], None]:
        """A function that begins the scoring of each group whose last completion has just ended."""
        unscored = list(groups)

        def ended(results: dict[int, Any]) -> None:
            for group in [group for group in unscored if all(position in results for position in group)]:
                unscored.remove(group)
                _, completions, completion_ids, *_ = zip(*(results[position] for position in group), strict=True)
                rows = [[row for (row,) in column] for column in (completions, completion_ids)]
                self.groups.begin_group(group, [self._prompts[position] for position in group], *rows)

        return ended

    def refuse_use(self) -> None:
        """Refuse a use of the trainer by a tool, which would run calls of the plan on this rank alone.

        Raises:
            ConfigError: completions are calling tools. The run fails by this error too.
        """
        threads = self._threads or RUNS_THIS.get()
        if threads is not None:
            error = ConfigError(
                "a tool used the trainer while completions were generated; let tools use no trainer, and use it in a "
                "callback."
            )
            threads.fail(error)
            raise error


def _joined(parts: Sequence[Any]) -> Any:
    """One output of TRL's loop for all completions: a sum of counts, or the rows of all."""
    if isinstance(parts[0], int):
        return sum(parts)
    return None if parts[0] is None else [row for part in parts for row in part]
