"""`GroupRewards`: async reward functions that are called for each group of completions when its last one has ended
(`score_groups_early`), while completions of other groups go on.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...algorithms.async_functions import event_loop, is_async
from ...plan.spans import REWARD_FUNCTION
from .user_spans import FunctionSpans


if TYPE_CHECKING:
    from transformers import Trainer


_GIVEN = ("prompt", "completion", "completion_ids")  # columns that TRL replaces


@dataclass
class _GroupCall:
    """The call of a reward function for one group.

    Args:
        extra, metrics: arguments of the function's calls of `log_extra` and `log_metric`.
    """

    size: int
    rewards: Future[Any]
    extra: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: list[tuple[str, float]] = field(default_factory=list)


class GroupRewards:
    """The calls of one generation.

    Args:
        trainer: a `PlannedPolicyTrainer`.
        spans: times the functions.
    """

    def __init__(self, trainer: Trainer, spans: FunctionSpans) -> None:
        self.trainer, self.spans = trainer, spans
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._calls: dict[str, dict[int, _GroupCall]] = defaultdict(dict)  # by function and first completion

    def begin_generation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A generation begins, of completions for these rows of the data set."""
        self._rows = rows
        self._calls.clear()

    def groups(self, count: int) -> list[range]:
        """The groups of this rank's completions, if the functions are called for each; otherwise none, also where a
        group has completions of another rank."""
        trainer: Any = self.trainer
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        if not trainer.args.score_groups_early or count % size or not any(map(is_async, trainer.reward_funcs)):
            return []
        return [range(first, first + size) for first in range(0, count, size)]

    def begin_group(
        self, group: range, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[list[int]]
    ) -> None:
        """Call the functions for a group, with the arguments that TRL gives them for all completions.

        Args:
            group: positions among this rank's completions.
            prompts, completions, completion_ids: of the group.
        """
        trainer: Any = self.trainer
        rows = [self._rows[position] for position in group]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _GIVEN}
        if trainer.environments is not None:
            columns["environments"] = [trainer.environments[position] for position in group]
        for reward, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
            if is_async(reward):
                call = _GroupCall(len(group), Future())
                timed = self.spans.timed(f"{REWARD_FUNCTION}{name}", reward)
                arguments = {
                    **columns,
                    "prompts": list(prompts),
                    "completions": list(completions),
                    "completion_ids": [list(ids) for ids in completion_ids],
                    "trainer_state": trainer.state,
                    "log_extra": lambda column, values, extra=call.extra: extra[column].extend(values),
                    "log_metric": lambda metric, value, metrics=call.metrics: metrics.append((metric, value)),
                }
                call.rewards = asyncio.run_coroutine_threadsafe(timed(**arguments), event_loop())
                self._calls[name][group.start] = call

    def of(self, name: str) -> Callable[..., Any] | None:
        """An async function that returns the rewards of all completions from the calls for the groups; `None` if this
        reward function has not been called."""
        if name not in self._calls:
            return None
        calls = [call for _, call in sorted(self._calls.pop(name).items())]

        async def rewards(
            log_extra: Callable[..., None], log_metric: Callable[..., None], **_: Any
        ) -> list[float | None]:
            joined: list[float | None] = []
            for call in calls:
                of_group = await asyncio.wrap_future(call.rewards)
                if len(of_group) != call.size:
                    raise ValueError(
                        f"reward function {name!r} returned {len(of_group)} rewards for {call.size} completions"
                    )
                joined += of_group
            for column in calls[0].extra:
                log_extra(column, [value for call in calls for value in call.extra[column]])
            for call in calls:
                for metric, value in call.metrics:
                    log_metric(metric, value)
            return joined

        rewards.__name__ = name
        return rewards
