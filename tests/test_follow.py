"""`benchmarks/follow.py` counts files, lines, frames and hand-overs of a call tree right, without vLLM."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import follow  # noqa: E402


OURS = """
def chosen(method):
    def wrapper(*given):
        return method(*given)

    return wrapper


@chosen
def generate(send):
    return [send(word) for word in ["load", "generate"]][-1]


def train(library, send):
    write_file = library.loop(generate, send)
    return write_file


def serve(engine, thread):
    thread.start()
    thread.join()
    engine().step()


def write():
    return 1


def unused():
    return 0
"""
LIBRARY = """
def loop(generate, send):
    return generate(send)
"""
ENGINE = """
class LLMEngine:
    def step(self):
        pass
"""


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """The row of a made-up package whose engine is in the same process."""
    files = {"ours/run.py": OURS, "ours/other.py": OURS, "library/loop.py": LIBRARY, "vllm/engine.py": ENGINE}
    modules = []
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        modules.append(SimpleNamespace())
        exec(compile(text, path, "exec"), vars(modules[-1]))
    ours, _, library, vllm = modules
    receiver, sender = multiprocessing.Pipe()

    def traced(call: Callable[[], object]) -> dict[str, Any]:
        trace = follow.Trace()
        trace.begin()
        call()
        trace.end()
        result: dict[str, Any] = trace.result({tmp_path / "ours": follow.OURS, tmp_path / "library": follow.HOST})
        return result

    with receiver, sender:
        rank = traced(lambda: ours.train(library, lambda word: sender.send((word, 0))))
    engine = traced(lambda: ours.serve(vllm.LLMEngine, threading.Thread(target=ours.write)))
    return follow.row_of("PPO", rank, engine)


def test_a_file_counts_by_the_functions_that_were_called_in_it_each_line_once(row: dict[str, Any]) -> None:
    (of_file,) = row["files_with_lines"].values()
    # generate (3 with its decorator), wrapper (2), train (3), serve (4), write (2)
    assert of_file == {"lines": len(OURS.splitlines()), "path_lines": 14}
    assert (row["files"], row["file_lines"], row["path_lines"]) == (1, of_file["lines"], 14)
    assert row["share"] == round(14 / of_file["lines"], 3)


def test_frames_and_hand_overs_are_those_of_the_stack_of_the_request(row: dict[str, Any]) -> None:
    assert row["call_stack"] == [
        "ours/run.py train",
        "library/loop.py loop",
        "ours/run.py chosen.<locals>.wrapper",
        "ours/run.py generate",
        "ours/run.py serve",
    ]
    assert (row["frames"], row["hand_overs"]) == (4, 2)


def test_lines_of_a_function_inside_another_that_was_called_count_once() -> None:
    functions = [(follow.__file__, 1, 10), (follow.__file__, 4, 6), (follow.__file__, 9, 12)]
    side = {"functions": functions, "asking": [], "stepping": []}
    assert follow.row_of("GRPO", side, side)["path_lines"] == 12
