"""Faults of tools and environments: what the policy reads of them, and what ends the run."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tool_users

from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.trainer.checks.config_checks import ConfigError


LIMIT_S, LATE_S = 0.3, 0.5
MOST = 40  # tokens of a completion


class Tools:
    """Two tools, the first of which does `fault`, and the completions of the latest evaluation."""

    def __init__(self) -> None:
        self.fault: Callable[[Tools], Any] = lambda tools: None
        self.trainer: Any = None
        self.calls = 0
        self.completions: list[Any] = []
        self.lengths: list[int] = []
        self.released = threading.Event()

    def look_up(self, word: int) -> Any:
        """Look up a word.

        Args:
            word: the word.
        """
        return self.fault(self)

    async def wait_for(self, word: int) -> str:
        """Wait for a word.

        Args:
            word: the word.
        """
        return f"w{word}"

    def score(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.completions, self.lengths = completions, list(map(len, completion_ids))
        return [float(len(ids) % 5) for ids in completion_ids]

    def results(self, name: str) -> set[str]:
        """The different results of a tool that completions have."""
        messages = [message for completion in self.completions for message in completion]
        return {message["content"] for message in messages if message.get("name") == name}


@pytest.fixture(scope="module", params=["vllm"])
def tools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    """The tools of a trainer. With a vLLM engine completions do not wait for each other; with the other, which starts
    in less time, they take their turns in rounds."""
    if request.param == "vllm" and not is_vllm_available():
        pytest.skip("vLLM is not installed")
    if request.param == "vllm":
        request.getfixturevalue("forked_engines")
    made = Tools()
    given = {"reward_funcs": made.score, "eval_dataset": tool_users.PROMPTS.select(range(2))}
    with pytest.MonkeyPatch.context() as patch:
        made.trainer = tool_users.trainer(
            tmp_path_factory.mktemp("faults"),
            patch,
            [made.look_up, made.wait_for],
            given=given,
            per_device_eval_batch_size=8,
            max_completion_length=MOST,
            tool_workers=8,
            tool_timeout=LIMIT_S,
            use_vllm=request.param == "vllm",
        )
        yield made
        made.released.set()
        made.trainer.close()


def hang(tools: Tools) -> None:
    tools.released.wait()


def answer_late(_: Any) -> str:
    time.sleep(LATE_S)
    return "w77"


def fail(_: Any) -> None:
    raise LookupError("no such word")


def answer_once_at_length(tools: Tools) -> str:
    """10 MB. The first call alone, because their tokens take seconds."""
    tools.calls += 1
    return " ".join(["x" * 100_000] * 100) if tools.calls == 1 else "w77"


READ: dict[str, tuple[Callable[[Tools], Any], set[str]]] = {
    "hangs": (hang, {"{'error': 'look_up took longer than tool_timeout, 0.3 s'}"}),
    "returns after its limit": (answer_late, {"{'error': 'look_up took longer than tool_timeout, 0.3 s'}"}),
    "raises": (fail, {"{'error': 'no such word'}"}),
    "returns 10 MB": (answer_once_at_length, {"w77"}),  # TRL leaves out what has no room, and the completion ends
}


@pytest.mark.parametrize("fault", READ)
def test_the_policy_reads_of_a_tools_fault_and_the_run_goes_on(tools: Tools, fault: str) -> None:
    tools.fault, expected = READ[fault]
    tools.trainer.evaluate()
    assert tools.results("look_up") == expected and len(tools.results("wait_for")) > 1
    assert len(tools.completions) == 8 and max(tools.lengths) <= MOST


def test_the_result_of_a_tool_of_a_completion_that_was_cut_off_is_left_out(tools: Tools) -> None:
    tools.fault = lambda _: "w77 " * 5
    tools.trainer.evaluate()
    cut_off = [i for i, completion in enumerate(tools.completions) if completion[-1].get("tool_calls")]
    assert cut_off and all(tools.completions[i][-1]["role"] == "assistant" for i in cut_off)


ENDING: dict[str, tuple[Callable[[Tools], Any], type[BaseException], str]] = {
    "ends its thread": (lambda _: sys.exit("enough"), SystemExit, "enough"),
    "evaluates": (lambda tools: tools.trainer.evaluate(), ConfigError, "a tool used the trainer"),
    "generates": (lambda tools: tools.trainer.vllm_generation.generate([[5]]), ConfigError, "a tool used the trainer"),
    "saves": (lambda tools: tools.trainer.save_model(), ConfigError, "a tool used the trainer"),
    "trains": (lambda tools: tools.trainer.train(), ConfigError, "a tool used the trainer"),
    "needs the main thread": (
        lambda _: signal.signal(signal.SIGALRM, signal.SIG_DFL),
        ConfigError,
        "'look_up' needs the main thread .*; set tool_workers to 0",
    ),
}


@pytest.mark.parametrize("tools", ["transformers"], indirect=True)
@pytest.mark.parametrize("fault", ENDING)
def test_a_tools_fault_that_ends_the_run_is_named(tools: Tools, fault: str) -> None:
    tools.fault, kind, words = ENDING[fault]
    before = set(threading.enumerate())
    with pytest.raises(kind, match=words):
        tools.trainer.evaluate()
    deadline = time.monotonic() + 10
    while left := {thread.name for thread in threading.enumerate() if thread not in before}:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


class Offline:
    """An environment whose second reset fails."""

    resets = 0

    def reset(self, **_: Any) -> None:
        Offline.resets += 1
        if Offline.resets > 1:
            raise LookupError("the page is gone")

    def look_up(self, word: int) -> str:
        """Look up a word.

        Args:
            word: the word.
        """
        return f"w{word}"


def test_an_environment_whose_reset_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tool_users.trainer(tmp_path, monkeypatch, [], given={"environment_factory": Offline}, use_vllm=False)
    with pytest.raises(LookupError, match="the page is gone"):
        made.train()
    made.close()
