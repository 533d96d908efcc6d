"""`Turns`: completions that call tools, or otherwise take several calls of the engine.

Each completion runs TRL's own loop over tool calls in a thread (`completion_threads`), on a trainer whose batch is this
completion alone (`one_completion`). So the tools of different completions run at once, and TRL's code parses, masks,
limits and reports them. The turns that completions ask for are drawn in rounds, when all of them wait, or, where each
rank has an engine of its own, each at once.

Under a plan with a staleness the same runs ahead of the training, in a thread of each batch, on the rank of the engine
(`Turns.ahead`), which returns an outcome for each sample to the rank of its prompt.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...algorithms.async_functions import is_async
from ...algorithms.corrections import AGES
from ...algorithms.rollout import Rollouts
from ...runtime.call_server import CallServer
from ...runtime.calls.generate_and_score import FAILURE_POLL_S, OUTCOMES, TEXTS, TurnSource
from ..checks.config_checks import ConfigError
from ..checks.trainable import users_method
from .completion_threads import RUNS_THIS, CompletionThreads, Draw
from .group_rewards import GroupRewards
from .one_completion import OneCompletion, one_at_a_time
from .planned_generation import for_trl
from .single_candidates import SingleCandidates
from .trl_sampling import tokenizer_of
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
        self._ages: Sequence[Tensor] | None = None  # of all tokens that were generated ahead, for each sample
        self._rollout_func = getattr(trainer, "rollout_func", None)
        self._slots = threading.Semaphore(max(1, getattr(trainer.args, "tool_workers", 1)))
        self._copies = one_at_a_time(trainer, copied=True) if getattr(trainer.args, "max_staleness", 0) else None
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
        if self._rollout_func is not None:
            wrapped["rollout_func"] = self._rollouts(self._finishing(self._rollout_func))
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
            self._prompts, self._loops, self._ages = prompts, None, None
            outputs = generate(prompts, *args, **kwargs)
            if len(outputs) > 4:  # GRPO returns log-probabilities, joined over turns
                joined = outputs[4]
            else:
                joined = self.trainer.vllm_generation.drawn([len(ids) for ids in outputs[1]])
            self.forced.begin_generation(() if joined is None else joined)
            if self._ages is not None:
                engine, masks = self.trainer.vllm_generation, outputs[2] or [[1] * len(ids) for ids in outputs[1]]
                engine.logprobs = [torch.tensor(row) for row in joined]
                engine.ages = [_beside(row, mask) for row, mask in zip(self._ages, masks, strict=True)]
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
        tokenizers = one_at_a_time(self.trainer)
        self._threads = threads = CompletionThreads(self.calls().executor.alarm.check)
        try:
            views = [OneCompletion(self.trainer, i, threads, tokenizers, self._slots, self.spans) for i in range(count)]
            functions = [functools.partial(function, view, i) for i, view in enumerate(views)]
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

    # --- ahead of the training --------------------------------------------------------------------------------------

    def ahead(self, samples: Rollouts, source: TurnSource) -> list[bytes]:
        """Make the completions of samples, or let the user's `rollout_func` make them (`CallSettings.in_turns`).

        Returns:
            For each sample the pickled pair of what TRL's loop returns for it, or its row of `rollout_func`'s outputs,
            and its turns: prompt, and response as `Rollouts`.
        """
        # safe: pickled by a rank of this job
        prompts = [pickle.loads(row.numpy().tobytes()) for row in samples.ragged(TEXTS).rows()]
        prompt_ids = [row.tolist() for row in samples.ragged("prompts").rows()]
        prompt_of: dict[int, list[int]] = {}  # of the latest turn
        turns: dict[int, list[tuple[list[int], bytes]]] = defaultdict(list)
        eos_token_id = tokenizer_of(self.trainer.processing_class).eos_token_id

        def draw(asked: Mapping[int, list[int]], is_busy: bool) -> dict[int, Any] | None:
            prompt_of.update(asked)
            ended = source.draw(asked)
            for position, row in (ended or {}).items():
                turns[position].append((prompt_of[position], row.to_bytes()))
            return ended and {position: for_trl([()], row, eos_token_id) for position, row in ended.items()}

        threads, tokenizers = CompletionThreads(source.check), self._copies
        assert tokenizers is not None, "the plan has a staleness"

        def view(position: int) -> OneCompletion:
            return OneCompletion(self.trainer, position, threads, tokenizers, self._slots, self.spans, source)

        if self._rollout_func is None:
            of_samples = enumerate(zip(prompts, prompt_ids, strict=True))
            functions = [functools.partial(view(i).whole, prompt, ids) for i, (prompt, ids) in of_samples]
        else:
            functions = [functools.partial(self._rollout_func, prompts, view(0))]
        results = threads.results(functions, draw, lambda _: None)
        if self._rollout_func is not None:
            results = _rows(results[0], len(prompts))
        return [pickle.dumps((result, turns[position])) for position, result in enumerate(results)]

    def first_of(self, ahead: Rollouts) -> Rollouts:
        """The responses of the first turn of samples that were generated ahead. What TRL's loop returned for them is
        kept for `_tool_call_loop`."""
        # safe: pickled by a rank of this job
        outcomes = [pickle.loads(row.numpy().tobytes()) for row in ahead.ragged(OUTCOMES).rows()]
        self._loops, self._ages = [result for result, _ in outcomes], ahead.ragged(AGES).rows()
        taken = [[(ids, Rollouts.from_bytes(row)) for ids, row in turns] for _, turns in outcomes]
        for ids, row in (turn for turns in taken for turn in turns):
            self.trainer.vllm_generation.routes.add([ids], row)
        return Rollouts.cat([turns[0][1] for turns in taken if turns] or [Rollouts()])

    def _rollouts(self, rollout_func: Callable[..., Any]) -> Callable[..., Any]:
        """The user's `rollout_func`, unless its completions have been made ahead."""

        @functools.wraps(rollout_func)
        def rollouts(prompts: Any, trainer: Any) -> Any:
            if not self.calls().generates_turns:
                return rollout_func(prompts, trainer)
            trainer.vllm_generation.generate(trainer._tokenize_prompts(prompts)[0])
            rows, self._loops = self._loops, None
            assert rows, "each rank has prompts"
            return {name: [row[name] for row in rows] for name in rows[0]}

        return rollouts

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


def _rows(output: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """The outputs of a user's `rollout_func`, by sample."""
    for name, values in output.items():
        if len(values) != count:
            raise ValueError(f"rollout_func returned {len(values)} {name} for {count} prompts")
    return [{name: values[row] for name, values in output.items()} for row in range(count)]


def _beside(ages: Tensor, mask: Sequence[int]) -> Tensor:
    """The ages of a completion's tokens, 0 for those that the policy did not draw; NaN for all if the completion has
    other tokens than the engine drew for its sample.

    Args:
        ages: of the tokens that were drawn for the sample, of which TRL may have cut off the last.
        mask: 1 for each token of the policy.
    """
    own = torch.tensor(mask, dtype=torch.bool)
    if len(ages) < int(own.sum()):
        return torch.full((len(mask),), torch.nan)
    beside = torch.zeros(len(mask))
    beside[own] = ages[: int(own.sum())].float()
    return beside


def _joined(parts: Sequence[Any]) -> Any:
    """One output of TRL's loop for all completions: a sum of counts, or the rows of all."""
    if isinstance(parts[0], int):
        return sum(parts)
    return None if parts[0] is None else [row for part in parts for row in part]
