"""`make check-gpu` as far as it needs no GPU: which part runs when, time limits, what is kept, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import check_gpu  # noqa: E402
import gpu_lanes  # noqa: E402
from gpu_lanes import Outcome, Part, Running, next_part, rank_environment  # noqa: E402
from gpu_parts import PARTS  # noqa: E402


def part(name: str, code: str = "", **settings: Any) -> Part:
    return Part(name, "", ("-c", code), **settings)


def run(parts: list[Part], folder: Path, lanes: int = 1, seconds: float = 60.0) -> tuple[dict[str, Outcome], list[str]]:
    """How the parts ended, and the names of those for which there was no time."""
    ended: dict[str, Outcome] = {}
    left = gpu_lanes.run(
        parts,
        lambda each: Running(each, 0, folder / each.name, threads=1),
        lambda each, outcome: ended.update({each.name: outcome}),
        lanes,
        seconds,
    )
    return ended, [each.name for each in left]


def test_on_a_machine_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(ROOT / "benchmarks" / "check_gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("There is no GPU that PyTorch can use on this machine")


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_one_part_with_an_engine_runs_at_a_time_and_times_are_measured_alone(lanes: int) -> None:
    """Each part takes its limit."""
    waiting, running, order = list(PARTS), list[tuple[float, Part]](), list[Part]()
    clock = 0.0
    while waiting or running:
        while (started := next_part(waiting, [each for _, each in running], lanes)) is not None:
            waiting.remove(started)
            order.append(started)
            running.append((clock + started.limit_s, started))
        beside = [each for _, each in running]
        assert 1 <= len(beside) <= lanes
        assert sum(each.vllm for each in beside) <= 1
        assert len(beside) == 1 or not any(each.alone for each in beside)
        clock = min(end for end, _ in running)
        running = [(end, each) for end, each in running if end > clock]
    assert sorted(each.name for each in order) == sorted(each.name for each in PARTS)
    alone = [each.alone for each in order]
    assert alone == sorted(alone), "those that run alone come last"
    if lanes > 1:
        assert order[0].vllm, "engines take longest together"


def test_names_of_parts_are_unique_and_one_gpu_is_enough_for_all_but_vllms_tensor_groups() -> None:
    assert len({each.name for each in PARTS}) == len(PARTS)
    assert all(each.vllm for each in PARTS if each.gpus > 1)


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl() -> None:
    shared = [rank_environment(rank, 2, 1, 29500) for rank in (0, 1)]
    assert [each["NCCL_HOSTID"] for each in shared] == ["rank0", "rank1"]
    assert {each["ACCELERATE_TORCH_DEVICE"] for each in shared} == {"cuda:0"}
    for gpus in (2, 0):
        assert not any(name.startswith(("NCCL", "ACCELERATE")) for name in rank_environment(1, 2, gpus, 29500))


def test_a_part_ends_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    """What it has started is in a session of its own, as an engine is."""
    child = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys, time\n"
        f"made = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(made.pid))\n"
        "print('started', flush=True); time.sleep(60)"
    )
    begun = time.monotonic()
    ended, _ = run([part("slow", code, limit_s=2.0), part("next")], tmp_path)
    assert (ended["slow"].outcome, ended["next"].outcome) == ("limit", "passed")
    assert "started" in ended["slow"].tail and time.monotonic() - begun < 30
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not stat.exists() or ") Z " in stat.read_text()


def test_what_there_is_no_time_for_is_left_and_not_counted_as_failed(tmp_path: Path) -> None:
    slow = part("slow", "import time; time.sleep(60)")
    ended, left = run([part("first"), slow, part("after")], tmp_path, seconds=2.0)
    assert (list(ended), left) == (["first"], ["slow", "after"])


def test_a_rank_that_fails_ends_others_and_its_output_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lanes, "GRACE_S", 0.5)
    code = "import os, time; os.environ['RANK'] == '1' and 1 / 0; time.sleep(60)"
    ended, _ = run([part("two", code, ranks=2)], tmp_path)
    assert ended["two"].outcome == "failed" and "ZeroDivisionError" in ended["two"].tail
    assert ended["two"].seconds < 30


@pytest.mark.parametrize(("message", "outcome"), [("rank 1 was killed", "passed"), ("an error", "failed")])
def test_a_job_that_has_to_fail_passes_if_it_says_why(tmp_path: Path, message: str, outcome: str) -> None:
    ended, _ = run([part("dies", f"import sys; sys.exit({message!r})", says="rank 1 .*killed")], tmp_path)
    assert ended["dies"].outcome == outcome
    ended, _ = run([part("lives", f"print({message!r})", says="rank 1 .*killed")], tmp_path)
    assert ended["lives"].outcome == "failed"


def test_numbers_are_those_of_the_file_and_of_pytest(tmp_path: Path) -> None:
    write = Part("writes", "", ("-c", "import sys; open(sys.argv[1], 'w').write('{\"x\": 2}')", gpu_lanes.NUMBERS))
    tests = part("tests", "print('1 failed in 0.1s\\n39 passed, 8 skipped in 60.25s (0:01:00)')")
    ended, _ = run([write, tests], tmp_path)
    assert ended["writes"].numbers == {"x": 2}
    assert ended["tests"].numbers == {"passed": 39, "skipped": 8}


def records(folder: Path, *outcomes: tuple[str, str, str, str]) -> list[dict[str, Any]]:
    """A file with records of (part, outcome, commit, GPU), and what is read from it."""
    for name, outcome, commit, gpu in outcomes:
        made = Outcome(outcome, 12.3, {"passed": 4}, "tail" if outcome != "passed" else "")
        check_gpu.put(folder / "r.json", check_gpu.record_of(part(name, ranks=2), made, commit, gpu))
    return check_gpu.load(folder / "r.json")


def test_a_run_goes_on_with_what_has_not_passed_at_its_commit(tmp_path: Path) -> None:
    parts = [part(name) for name in ("a", "b", "c", "d")]
    kept = records(
        tmp_path, ("a", "passed", "now", "H100"), ("b", "failed", "now", "H100"), ("c", "passed", "old", "H100")
    )
    kept = records(tmp_path, ("d", "passed", "now", ""))
    assert [each.name for each in check_gpu.missing(parts, kept, "now", "H100")] == ["b", "c", "d"]
    assert [each.name for each in check_gpu.missing(parts, kept, "now", "")] == ["a", "b", "c"]
    kept = records(tmp_path, ("b", "passed", "now", "H100"))
    assert [each["name"] for each in kept].count("b") == 1, "a record takes the place of the one before"
    assert json.loads((tmp_path / "r.json").read_text())["parts"] == kept


def test_the_page_is_made_between_its_marks_from_the_records(tmp_path: Path) -> None:
    parts = [part(name, ranks=2) for name in ("a", "b", "c")]
    kept = records(
        tmp_path, ("a", "passed", "now", "H100"), ("a", "passed", "old", "H200"), ("b", "failed", "now", "H100")
    )
    lines = check_gpu.tables(kept, parts)
    assert "| a | 2 |  | passed on H100, 12 s (now); passed on H200, 12 s (old) |" in lines
    assert "| b | 2 |  | **failed** on H100, 12 s (now) |" in lines
    assert "| c | 2 |  | not yet |" in lines
    assert any(line.startswith("On H100: torch ") for line in lines)
    assert "| a | passed 4 |" in lines
    page = tmp_path / "page.md"
    page.write_text(f"before\n{check_gpu.BEGIN}\nbefore that\n{check_gpu.END}\nafter\n")
    check_gpu.write_page(kept, page)
    check_gpu.write_page(kept, page)
    text = page.read_text()
    assert text.startswith(f"before\n{check_gpu.BEGIN}\n| part |") and text.endswith(f"|\n{check_gpu.END}\nafter\n")
    assert "before that" not in text


def test_the_table_in_the_documentation_is_that_of_the_results() -> None:
    text = (ROOT / check_gpu.PAGE).read_text()
    lines = check_gpu.tables(check_gpu.load(ROOT / check_gpu.RESULTS))
    assert "\n".join([check_gpu.BEGIN, *lines, check_gpu.END]) in text
