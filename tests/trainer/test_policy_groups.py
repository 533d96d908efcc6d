"""Reward functions of GRPO and RLOO that are called for each group when its last completion has ended."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
from recorded_rollouts import check_equal, make, result, unequal
from test_policy_scoring import conversations

import trl_realloc
from trl_realloc.algorithms.rewards import is_async
from trl_realloc.engines.generation.transformers import TransformersEngine
from trl_realloc.trainer.policy.group_scores import PromptGroup, groups_of


LIMIT_S = 120.0  # of a wait for what must happen


class Recorded:
    """Reward functions that note how many completions they are called with."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[int]] = {"words": [], "judged": [], "ranked": []}

    @property
    def functions(self) -> list[Any]:
        def ranked(**given: Any) -> list[float]:
            return self.ranked(**given)

        async def judged(**given: Any) -> list[float]:
            return await self.judged(**given)

        ranked.reads_whole_batch = True  # type: ignore[attr-defined]
        return [self.words, judged, ranked]

    def words(
        self, prompts: list[Any], completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **_: Any
    ) -> list[float | None]:
        """Not for every third; logs for every sample, and a mean."""
        self.sizes["words"].append(len(prompts))
        log_extra("first", [ids[0] for ids in completion_ids])
        log_metric("mean", sum(map(len, completion_ids)) / len(prompts))
        return [None if len(ids) % 3 == 0 else float(ids[0] % 5) for ids in completion_ids]

    async def judged(self, completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        self.sizes["judged"].append(len(completions))
        return [float(len(str(of)) % 7) + trainer_state.global_step for of in completions]

    def ranked(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.sizes["ranked"].append(len(completion_ids))
        return [float(sorted(completion_ids).index(ids)) for ids in completion_ids]


def trainer(folder: Path, functions: Any, base: Callable[[type], type] = lambda own: own, **settings: Any) -> Any:
    """Two groups of four in a generation."""
    given = {"reward_funcs": functions, **settings.pop("given", {})}
    return make(trl_realloc, folder, base=base, given=given, **{"max_steps": 2, **settings})


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_rewards_and_logs_are_those_of_the_whole_batch(tmp_path: Path, kind: str, streams: bool) -> None:
    settings: dict[str, Any] = {"kind": kind, "given": {"train_dataset": conversations()} if streams else {}}
    if streams:
        calls = {"actor.generate": {"mesh": "0", "engine": "transformers"}}
        frozen = ("reference.forward",) if kind == "RLOO" else ()
        calls |= {name: {"mesh": "0", "engine": "zero"} for name in ("actor.forward", *frozen, "actor.train")}
        settings["plan"] = {"cluster": {"nodes": 1, "devices_per_node": 1}, "calls": calls, "streams": True}

    def trained(**changes: Any) -> tuple[Any, Any, Any]:
        recorded = Recorded()
        made = trainer(tmp_path, recorded.functions, **{**settings, "given": dict(settings["given"])}, **changes)
        made.train()
        made.close()
        assert list(made.reward_func_names) == ["words", "judged", "ranked"]
        return result(made), dict(made._logs["extra"]), recorded.sizes

    (expected, extra, sizes), (grouped, own_extra, own_sizes) = trained(), trained(score_groups_early=True)
    assert sizes == {"words": [8, 8], "judged": [8, 8], "ranked": [8, 8]}
    assert own_sizes == {"words": [4] * 4, "judged": [4] * 4, "ranked": [8, 8]}
    check_equal(grouped, expected)
    assert {name: list(rows) for name, rows in own_extra.items()} == {name: list(rows) for name, rows in extra.items()}


def test_a_group_is_scored_before_the_generation_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored, waited = threading.Event(), list[bool]()
    generate = TransformersEngine.generate

    def held(self: TransformersEngine, *args: Any) -> Iterator[Any]:
        """Does not end its second group before the first one has been scored."""
        for number, completion in enumerate(generate(self, *args)):
            if number == 4:
                waited.append(scored.wait(LIMIT_S))
            yield completion

    def rewards(completions: list[str], **_: Any) -> list[float]:
        scored.set()
        return [float(len(text)) for text in completions]

    monkeypatch.setattr(TransformersEngine, "generate", held)
    made = trainer(tmp_path, rewards, score_groups_early=True, max_steps=1)
    made.train()
    made.close()
    assert waited == [True]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_function_raises_is_raised_where_trl_calls_it(tmp_path: Path, is_async: bool) -> None:
    def judge(completions: list[str], **_: Any) -> list[float]:
        raise ConnectionError("the judge does not answer")

    async def judge_async(**given: Any) -> list[float]:
        return judge(**given)

    made = trainer(tmp_path, judge_async if is_async else judge, score_groups_early=True)
    with pytest.raises(ConnectionError, match="the judge does not answer"):
        made.train()


def test_the_thread_of_a_generation_that_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TransformersEngine, *args: Any) -> Iterator[Any]:
        raise RuntimeError("the engine is lost")
        yield

    monkeypatch.setattr(TransformersEngine, "generate", fail)
    made = trainer(tmp_path, unequal, score_groups_early=True)
    with pytest.raises(RuntimeError, match="the engine is lost"):
        made.train()
    for thread in threading.enumerate():
        if thread.name == "reward-functions":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_a_group_without_a_reward_for_each_completion_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, lambda completions, **_: [0.0] * 3, score_groups_early=True)
    with pytest.raises(ValueError, match=r"returned 3 rewards for a group of 4 completions.*reads_whole_batch"):
        made.train()


@pytest.mark.parametrize(
    ("needs_main_thread", "told"),
    [
        (lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL), "ValueError: signal only works in main thread"),
        (asyncio.get_event_loop, "RuntimeError: There is no current event loop in thread"),
    ],
    ids=["signal", "event loop"],
)
def test_a_function_that_must_run_in_the_main_thread_is_told_how_it_can(
    tmp_path: Path, needs_main_thread: Callable[[], object], told: str
) -> None:
    def limited(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        needs_main_thread()
        return unequal(prompts, completions)

    made = trainer(tmp_path, limited, score_groups_early=True)
    with pytest.raises(RuntimeError, match=f"'limited' was called in a thread .*{told}.* reads_whole_batch = True"):
        made.train()


@pytest.mark.parametrize("column", ["trainer_state", "log_extra", "log_metric"])
def test_a_column_that_trl_hides_behind_an_argument_is_hidden(tmp_path: Path, column: str) -> None:
    given: list[Any] = []

    def rewards(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        given.append(columns[column])
        return unequal(prompts, completions)

    data = tiny.prompts(32, **{column: ["w2"] * 32})
    made = trainer(tmp_path, rewards, score_groups_early=True, max_steps=1, given={"train_dataset": data})
    made.train()
    made.close()
    assert len(given) == 2  # one call for each group
    assert not any(isinstance(of_group, list) for of_group in given)


def test_completions_that_a_subclass_changes_are_scored_as_they_are_then(tmp_path: Path) -> None:
    def shouting(own: type) -> type:
        class Shouting(own):
            def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
                return super()._calculate_rewards(inputs, prompts, [text.upper() for text in completions], ids)

        return Shouting

    texts: list[list[str]] = []

    def rewards(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        texts.append(completions)
        return unequal(prompts, completions)

    made = trainer(tmp_path, rewards, shouting, score_groups_early=True, max_steps=1)
    made.train()
    made.close()
    *of_groups, of_batch = texts
    assert len(of_batch) == 8
    assert all(len(of_group) == 4 for of_group in of_groups)
    for of_group in of_groups:
        assert of_group not in (of_batch[:4], of_batch[4:])
        assert [text.upper() for text in of_group] in (of_batch[:4], of_batch[4:])


def test_no_function_is_called_while_another_one_is(tmp_path: Path) -> None:
    """The first one on the whole batch, while the second one is called for groups."""
    at_once, most = threading.Semaphore(1), list[bool]()

    def alone(completions: list[str]) -> list[float]:
        most.append(at_once.acquire(blocking=False))
        time.sleep(0.05)
        at_once.release()
        return [0.0] * len(completions)

    def whole(completions: list[str], **_: Any) -> list[float]:
        return alone(completions)

    def grouped(completions: list[str], **_: Any) -> list[float]:
        return alone(completions)

    whole.reads_whole_batch = True  # type: ignore[attr-defined]
    made = trainer(tmp_path, [whole, grouped], score_groups_early=True)
    made.train()
    made.close()
    assert made.reward_funcs == [whole, grouped]
    assert most == [True] * 6


class Bare:
    """An environment without tools."""

    def reset(self, **columns: Any) -> None:
        pass


def test_with_environments_reward_functions_are_called_once_on_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TRL asks for a template that can render tools, which this environment does not have
    monkeypatch.setattr("trl.trainer.grpo_trainer.supports_tool_calling", lambda *_: True)
    sizes: list[int] = []

    def counted(completions: list[Any], environments: Any = None, **_: Any) -> list[float]:
        sizes.append(len(completions))
        assert environments is None or len(environments) == len(completions)
        return [float(len(str(of))) for of in completions]

    given = {"train_dataset": conversations(), "environment_factory": Bare}
    made = trainer(tmp_path, counted, score_groups_early=True, max_steps=1, given=given)
    made.train()
    made.close()
    assert sizes == [8]


def test_objects_and_partial_functions_may_be_async() -> None:
    class Judge:
        async def __call__(self, **given: Any) -> list[float]:
            return []

    async def judge(**given: Any) -> list[float]:
        return []

    assert all(map(is_async, (judge, partial(judge, by=3), Judge(), partial(Judge(), by=3))))
    assert not any(map(is_async, (Recorded().words, partial(Recorded().words), Recorded)))


def test_a_rank_may_have_parts_of_groups() -> None:
    assert groups_of(8, 4, 8) == [PromptGroup(0, 4), PromptGroup(4, 8)]
    assert groups_of(6, 4, 6) == [PromptGroup(0, 2), PromptGroup(2, 6)]
    assert groups_of(0, 4, 0) == []
