"""Completions that call tools, drawn by a real vLLM engine (`tests/multiprocess`: on two processes)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tool_users

from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.runtime.call_server import CallServer
from trl_realloc.trainer.checks.config_checks import ConfigError


pytestmark = pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")
GROUP = 4


class Calls:
    """Tools and a judge that note when they are called."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.judged: list[tuple[float, int]] = []  # time, and number of completions
        self.tools_until = 0.0
        self.trainer: Any = None  # that a tool uses

    def look_up(self, word: int) -> str:
        """Look up a word.

        Args:
            word: the word.
        """
        if self.trainer is not None:
            self.trainer.save_model()
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.02)
        self.running -= 1
        self.tools_until = time.monotonic()
        return f"w{word}"

    async def wait_for(self, word: int) -> str:
        """Wait for a word.

        Args:
            word: the word.
        """
        await asyncio.sleep(0.02)
        return f"w{word} w{word + 1}"

    async def judged_by_length(self, completions: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        self.judged.append((time.monotonic(), len(completions)))
        scores = [float(sum(len(m["content"].split()) for m in messages) % 5) for messages in completions]
        log_extra("length", scores)
        log_metric("mean_length", sum(scores) / len(scores))
        return scores


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, forked_engines: None) -> Iterator[Any]:
    """A trainer whose tools are those of `made.tool_calls`."""
    patch, calls = pytest.MonkeyPatch(), Calls()
    given = {"reward_funcs": calls.judged_by_length}
    tools = [calls.look_up, calls.wait_for]
    trainer = tool_users.trainer(tmp_path_factory.mktemp("turns"), patch, tools, given=given, tool_workers=8)
    trainer.tool_calls = calls
    trainer.run.placed.start()
    yield trainer
    trainer.close()
    patch.undo()


def drawn(made: Any, **changes: Any) -> dict[str, Any]:
    """The tensors of a generation of the first update, and the judge's scores."""
    made.calls.at(1)
    for name, value in changes.items():
        setattr(made.args, name, value)
    with pytest.MonkeyPatch.context() as patch:
        kept: dict[str, Any] = {}
        calculate = made._calculate_rewards

        def calculated(*args: Any) -> Any:
            kept["messages"] = args[2]
            kept["rewards"] = calculate(*args)
            return kept["rewards"]

        patch.setattr(made, "_calculate_rewards", calculated, raising=False)
        made.calls.at(0)
        return kept | made._generate_and_score_completions([{"prompt": row["prompt"]} for row in rows()])


def rows() -> list[dict[str, Any]]:
    return [tool_users.PROMPTS[number // GROUP] for number in range(2 * GROUP)]


def test_completions_draw_by_themselves_what_they_draw_in_rounds(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    itself = drawn(made)
    assert made.tool_calls.most > 1, "tools run at once"
    monkeypatch.setattr(CallServer, "draws_by_itself", False)
    rounds = drawn(made)
    made.tool_calls.most = 0
    one_by_one = drawn(made, tool_workers=1)
    assert made.tool_calls.most == 1
    made.args.tool_workers = 8
    for other in (rounds, one_by_one):
        assert other["messages"] == itself["messages"]
        for name in ("completion_ids", "tool_mask", "sampling_per_token_logps", "rewards", "advantages"):
            assert other[name].equal(itself[name]), name


def test_an_async_reward_function_is_called_for_each_group_as_it_ends(made: Any) -> None:
    calls = made.tool_calls
    calls.judged.clear()
    whole = drawn(made)
    assert [count for _, count in calls.judged] == [2 * GROUP]
    logged = list(made._logs["extra"]["length"])
    made._logs["extra"]["length"].clear()
    calls.judged.clear()
    early = drawn(made, score_groups_early=True)
    made.args.score_groups_early = False
    assert [count for _, count in calls.judged] == [GROUP, GROUP]
    assert calls.judged[0][0] < calls.tools_until, "the first group is scored while the other calls tools"
    assert early["rewards"].equal(whole["rewards"]) and early["advantages"].equal(whole["advantages"])
    assert list(made._logs["extra"]["length"]) == logged[-2 * GROUP :], "in the order of the completions"


def test_a_tool_that_uses_the_trainer_is_refused(made: Any) -> None:
    made.tool_calls.trainer = made
    with pytest.raises(ConfigError, match="a tool used the trainer while completions were generated"):
        drawn(made)
    made.tool_calls.trainer = None
    drawn(made)
