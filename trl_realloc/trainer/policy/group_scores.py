"""`GroupScores`: reward functions of TRL's GRPO and RLOO trainers, called for each group of completions when its last
one has ended, while other groups are generated.

TRL calls the functions later, for the whole batch. It then gets what they have returned, if it gives them what the
groups were given; otherwise they are called as TRL calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from ...algorithms.rewards import event_loop, is_async
from .planned_rewards import PlannedRewardModel


READS_WHOLE_BATCH = "reads_whole_batch"  # attribute of a reward function that is to be called on the whole batch
RewardFunction = Callable[..., Any]


@dataclass
class Answer:
    """The scores that a function returned for one group, and its calls of `log_extra` and `log_metric`."""

    scores: list[Any]
    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class PromptGroup:
    """The samples of one prompt on this rank.

    Args:
        start, stop: their positions.
    """

    start: int
    stop: int


@dataclass
class Batch:
    """This rank's samples of one generation.

    Args:
        functions: the reward functions that are called for each group, by their place among TRL's.
        rows: of the data set.
        prompts: as TRL gives them to reward functions.
        columns: further arguments of reward functions, with an entry for each sample.
        others: arguments that are the same for all groups.
    """

    functions: Mapping[int, RewardFunction]
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Any]
    groups: Sequence[PromptGroup]
    columns: Mapping[str, Sequence[Any]]
    others: Mapping[str, Any]
    answers: dict[tuple[int, PromptGroup], Future[Answer]] = field(default_factory=dict)
    ready: queue.SimpleQueue[PromptGroup | None] = field(default_factory=queue.SimpleQueue)  # None: no group any more
    is_dropped: bool = False  # nobody will ask for its scores

    def __post_init__(self) -> None:
        self.completions: list[Any] = [None] * len(self.rows)
        self.ids: list[list[int] | None] = [None] * len(self.rows)
        self.group_of = {at: group for group in self.groups for at in range(group.start, group.stop)}

    def add(self, at: int, ids: list[int], completion: Any) -> PromptGroup | None:
        """A sample has ended. Returns its group if it was the last one of it."""
        self.ids[at], self.completions[at] = ids, completion
        group = self.group_of[at]
        return None if None in self.ids[group.start : group.stop] else group

    def arguments_of(self, group: PromptGroup, logged: list[Any]) -> dict[str, Any]:
        """The arguments of a reward function for one group. What it logs is added to `logged`."""

        def log(name: str, *values: Any, **named: Any) -> None:
            logged.append((name, values, named))

        part = slice(group.start, group.stop)
        return {
            "prompts": self.prompts[part],
            "completions": self.completions[part],
            "completion_ids": self.ids[part],
            **{name: column[part] for name, column in self.columns.items()},
            **self.others,
            "log_extra": functools.partial(log, "log_extra"),
            "log_metric": functools.partial(log, "log_metric"),
        }

    def is_of(self, given: Mapping[str, Any]) -> bool:
        """True if the arguments of a reward function are exactly the samples of this batch; False for a dropped batch.

        Args:
            given: the arguments of the function by name, as TRL passes them.
        """
        own = {"prompts": self.prompts, "completions": self.completions, "completion_ids": self.ids}
        if self.is_dropped or given.keys() != {*own, *self.columns, *self.others, "log_extra", "log_metric"}:
            return False
        columns = (zip(given[name], column, strict=True) for name, column in self.columns.items())
        return (
            all(len(given[name]) == len(self.rows) for name in (*own, *self.columns))
            and all(list(given[name]) == list(value) for name, value in own.items())
            and all(value is other for column in columns for value, other in column)
            and all(given[name] is value for name, value in self.others.items())
        )


class GroupScores:
    """Calls reward functions of this rank for groups of its samples. Functions that are not async are called one at a
    time, as by TRL, those for groups in a thread.

    Args:
        device: of this rank, on which the functions compute that name none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._batch: Batch | None = None
        self._turn = threading.Lock()  # of the function that is being called

    def begin(self, batch: Batch) -> None:
        """A generation begins. What was computed for the one before is dropped."""
        self.drop()
        self._batch = batch
        in_turn = [at for at, function in batch.functions.items() if not is_async(function)]
        for at in in_turn:
            for group in batch.groups:
                batch.answers[at, group] = Future()
        if in_turn:
            threading.Thread(target=self._work, args=(batch, in_turn), daemon=True, name="reward-functions").start()

    def drop(self) -> None:
        """Call no function any more for the groups of the latest generation."""
        if self._batch is not None:
            self._batch.is_dropped = True
            self._batch.ready.put(None)  # the thread may wait for a group that has not ended
            self._batch = None

    def add(self, at: int, ids: list[int], completion: Any) -> None:
        """A sample of the generation has ended."""
        batch = self._batch
        assert batch is not None, "a generation has begun"
        group = batch.add(at, ids, completion)
        if group is None:
            return
        batch.ready.put(group)
        for place, function in batch.functions.items():
            if is_async(function):
                answer = asyncio.run_coroutine_threadsafe(_awaited(function, batch, group), event_loop())
                batch.answers[place, group] = answer

    def _work(self, batch: Batch, places: Sequence[int]) -> None:
        if self.device.type == "cuda":  # the current device belongs to a thread
            torch.cuda.set_device(self.device)
        for _ in batch.groups:
            if (group := batch.ready.get()) is None:
                return
            for at in places:
                with self._turn:
                    if batch.is_dropped:
                        return
                    try:
                        batch.answers[at, group].set_result(_called(batch.functions[at], batch, group))
                    except BaseException as error:  # raised where TRL calls the function
                        batch.answers[at, group].set_exception(error)

    def as_called_by_trl(self, rewards: Sequence[Any]) -> list[Any]:
        """TRL's reward models and functions, of which some have answers of the latest generation."""
        functions = {} if self._batch is None else self._batch.functions
        return [
            reward
            if isinstance(reward, PlannedRewardModel)
            else self._answered(at, reward)
            if at in functions and functions[at] is reward
            else self._in_turn(reward)
            for at, reward in enumerate(rewards)
        ]

    def _answered(self, at: int, function: RewardFunction) -> RewardFunction:
        whole = self._in_turn(function)
        if is_async(function):

            @_named_as(function)
            async def scored_async(**given: Any) -> Any:
                batch = self._of(given)
                if batch is None:
                    return await whole(**given)
                with self._dropping():
                    answers = [await asyncio.wrap_future(batch.answers[at, group]) for group in batch.groups]
                return _joined(answers, given)

            return scored_async

        @_named_as(function)
        def scored(**given: Any) -> Any:
            batch = self._of(given)
            if batch is None:
                return whole(**given)
            with self._dropping():
                answers = [batch.answers[at, group].result() for group in batch.groups]
            return _joined(answers, given)

        return scored

    def _in_turn(self, function: RewardFunction) -> RewardFunction:
        """A function that is called on the whole batch, not while another one is called for a group."""
        if is_async(function):
            return function

        @_named_as(function)
        def called(**given: Any) -> Any:
            with self._turn:
                return function(**given)

        return called

    def _of(self, given: Mapping[str, Any]) -> Batch | None:
        """The batch whose answers are for what TRL gives to a function. If it gives something else, no function is
        called for groups any more."""
        if self._batch is not None and not self._batch.is_of(given):
            self.drop()
        return self._batch

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        """Around the use of answers: after a failure no further group is scored."""
        try:
            yield
        except BaseException:
            self.drop()
            raise


def _named_as(function: RewardFunction) -> Callable[[RewardFunction], RewardFunction]:
    """`functools.wraps` for a function or an object that may lack a name, without the attributes of an object."""
    return functools.wraps(function, updated=())


def groupable(rewards: Sequence[Any]) -> dict[int, RewardFunction]:
    """The reward functions that are called for each group, by their place."""
    return {
        at: reward
        for at, reward in enumerate(rewards)
        if not isinstance(reward, PlannedRewardModel) and not getattr(reward, READS_WHOLE_BATCH, False)
    }


def groups_of(count: int, size: int, first: int) -> list[PromptGroup]:
    """The groups of a rank's samples, of which the first and the last may be parts of a group.

    Args:
        count: of the samples.
        size: of a group.
        first: the number of the first sample among those of all ranks.
    """
    parts = [list(part) for _, part in groupby(range(count), lambda at: (first + at) // size)]
    return [PromptGroup(part[0], part[-1] + 1) for part in parts]


def _called(function: RewardFunction, batch: Batch, group: PromptGroup) -> Answer:
    logged: list[Any] = []
    try:
        returned = function(**batch.arguments_of(group, logged))
    except (RuntimeError, ValueError) as error:
        if "thread" not in str(error):
            raise
        raise RuntimeError(  # such as signal.alarm's, or that there is no event loop
            f"the reward function {_name(function)!r} was called in a thread (score_groups_early) and raised "
            f"{type(error).__name__}: {error}. If it must run in the main thread, set its attribute "
            f"{READS_WHOLE_BATCH} = True: it is then called there, on the whole batch."
        ) from error
    return _checked(function, returned, group, logged)


async def _awaited(function: RewardFunction, batch: Batch, group: PromptGroup) -> Answer:
    logged: list[Any] = []
    return _checked(function, await function(**batch.arguments_of(group, logged)), group, logged)


def _checked(function: RewardFunction, returned: Any, group: PromptGroup, logged: list[Any]) -> Answer:
    scores, expected = list(returned), group.stop - group.start
    if len(scores) != expected:
        raise ValueError(
            f"the reward function {_name(function)!r} returned {len(scores)} rewards for a group of {expected} "
            f"completions; it must return one for each, or have the attribute {READS_WHOLE_BATCH} = True if it is for "
            f"whole batches."
        )
    return Answer(scores, logged)


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _joined(answers: Sequence[Answer], given: Mapping[str, Any]) -> list[Any]:
    """The scores of all groups. What the function logged is logged in the order of the samples."""
    for answer in answers:
        for name, values, named in answer.logged:
            given[name](*values, **named)
    return [score for answer in answers for score in answer.scores]
