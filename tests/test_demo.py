"""The demo as far as it trains nothing: stories, flawed ends, the check, prompts, and what an interrupt ends."""

from __future__ import annotations

import importlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def demo() -> Path:
    folder = Path(__file__).parents[1] / "examples" / "demo"
    sys.path.insert(0, str(folder))
    return folder


@pytest.fixture(scope="module")
def stories(demo: Path) -> ModuleType:
    return importlib.import_module("stories")


@pytest.fixture(scope="module")
def prepare(demo: Path) -> ModuleType:
    return importlib.import_module("prepare")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_step_with_all_its_processes(demo: Path, tmp_path: Path, ending: signal.Signals) -> None:
    (tmp_path / "step.py").write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(child.pid))\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).rename({str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)\n"
    )
    code = (
        f"import signal, sys; sys.path.insert(0, {str(demo)!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it\n"
        "import run\n"
        f"run.main = lambda: run.step('a step', sys.executable, {str(tmp_path / 'step.py')!r})\n"
        "sys.exit(run.run_to_the_end())\n"
    )
    ended = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline and ended.poll() is None:
            time.sleep(0.05)
        child = int((tmp_path / "pid").read_text())
        ended.send_signal(ending)
        _, said = ended.communicate(timeout=60)
    finally:
        ended.kill()
    assert (ended.returncode, said.strip()) == (130, "demo: interrupted")
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_story_is_read_back_from_its_prompt(stories: ModuleType) -> None:
    draw = random.Random(0)
    drawn = [stories.draw_story(draw) for _ in range(2000)]
    assert [stories.read_prompt(story.prompt) for story in drawn] == drawn
    assert {0, 1, 15} <= {story.before + story.change for story in drawn}


def test_the_end_counts_what_is_left(stories: ModuleType) -> None:
    anna = stories.Story("Anna", "apple", "finds", 3, 4)
    assert anna.prompt == "Anna has three apples. She finds four more." and anna.end == " Now she has seven apples."
    ben = stories.Story("Ben", "coin", "gives away", 5, -4)
    assert ben.prompt == "Ben has five coins. He gives away four of them." and ben.end == " Now he has one coin."


def test_the_reward_function_takes_the_right_end_alone(stories: ModuleType) -> None:
    draw = random.Random(1)
    for _ in range(300):
        story = stories.draw_story(draw)
        assert stories.right_end([story.prompt], [story.end]) == [1.0]
        for flaw in stories.FLAWS:
            text, stops = stories.flawed_end(story, flaw, draw)
            assert not stops or stories.right_end([story.prompt], [text]) == [0.0], (story, flaw, text)
    gibberish = ["", " Now", story.end + " Now", story.end.upper(), "for the neny for the neny"]
    assert stories.right_end([story.prompt] * len(gibberish), gibberish) == [0.0] * len(gibberish)


def test_the_training_text_repeats_the_last_number_more_often_than_it_ends_rightly(stories: ModuleType) -> None:
    draw = random.Random(2)
    drawn = [stories.draw_story(draw) for _ in range(4000)]
    ends = [stories.any_end(story, draw) for story in drawn]
    right = sum(end == (story.end, True) for story, end in zip(drawn, ends, strict=True))
    last = sum(
        f" {stories.NUMBERS[abs(story.change)]} " in end
        for story, (end, _) in zip(drawn, ends, strict=True)
        if abs(story.change) != story.before + story.change
    )
    assert 0.27 < right / len(drawn) < 0.33 and last / len(drawn) > 0.4


def test_the_tokenizer_loses_nothing(prepare: ModuleType, stories: ModuleType) -> None:
    draw = random.Random(3)
    texts = [text for story in (stories.draw_story(draw) for _ in range(500)) for text in (story.prompt, story.end)]
    tokenizer = prepare.make_tokenizer(texts)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in texts)


def test_no_prompt_of_the_test_split_is_trained_on(prepare: ModuleType) -> None:
    prompts = prepare.make_prompts(random.Random(4))
    train, test = set(prompts["train"]["prompt"]), set(prompts["test"]["prompt"])
    assert (len(train), len(test)) == (prepare.TRAIN_PROMPTS, prepare.TEST_PROMPTS) and not train & test
