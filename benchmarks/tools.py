"""Updates of GRPO whose completions call a slow tool: TRL's loop, tools at once, and each completion by itself.

    python benchmarks/tools.py --json FILE [--modes trl at_once by_itself two_engines ahead] [--tool-seconds 0.05 1.0]

Rows in FILE with the same mode and seconds are replaced, and others are kept.

A toy Llama draws 32 completions of 1 to 6 turns (3 on average) of some 40 tokens each by a real vLLM engine on the CPU.
Each turn but the last calls a tool, which sleeps: log-normally distributed seconds (sigma 1) with a mean of `tool_s`.
Every mode has a run of its own, with the same seeds. Turns and seconds follow from the tokens, so modes with equal
tokens do the same work.

`trl`: TRL's own loop, whose rounds call one tool after the other. `at_once`: rounds, with the tools of a round at once.
`by_itself`: a completion's next turn begins when its tools have returned. `update_s` is the median over the updates,
`speedup` that of `trl` divided by it, and `equal_tokens` says whether all tokens are those of `trl` (of the first mode,
if it is left out). `generation_s` is the part of `update_s` until the rewards. `tool_s` 0 is the decoding and training
alone.

Two modes run on two processes: `two_engines`, where each has half of the completions and an engine, and a completion's
next turn begins by itself; and `ahead`, where one trains while the other draws the next update's completions. Their
`speedup` is that over `two_engines`, and `tool_share` is the part of an update of `two_engines` that it does not take
with `tool_s` 0. `update_s` is the mean here, because an update of `ahead` waits for what an earlier one began.
`ahead` has seeds of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import result_file
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]

import tiny  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from trl_realloc import GRPOConfig, GRPOTrainer  # noqa: E402
from trl_realloc.runtime.call_server import CallServer  # noqa: E402


MODES = ("trl", "at_once", "by_itself")
PAIR: dict[str, dict[str, Any]] = {
    "two_engines": {"plan": "flatten"},
    "ahead": {"plan": "separate", "max_staleness": 1, "vllm_importance_sampling_correction": True},
}
SAMPLES, GROUP = 32, 4
VOCABULARY = 42  # a random policy draws each token alike, so a turn has 42 tokens on average
TURNS = (1, 1, 2, 3, 3, 4, 4, 6)  # of a completion, by its first token
PROMPT = 6  # tokens of a prompt as the template renders it
# The words w2, w3 and w4 begin the messages of the user, the policy and the tool. A turn of the policy ends with <eos>.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}w3 {{ m['content'] }} "
    "{% for c in m.get('tool_calls') or [] %}{{ c['function']['name'] }} {{ c['function']['arguments'] }} {% endfor %}"
    "<eos> {% else %}{{ 'w4' if m['role'] == 'tool' else 'w2' }} {{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w3{% endif %}"
)


def message(_: Any, ids: Sequence[int], prefix: Sequence[int], **__: Any) -> dict[str, Any]:
    """The message of a turn, with a call of the tool unless it is the completion's last turn. Stands in for TRL's
    `parse_response`, because a random policy writes no calls.

    Args:
        prefix: tokens of the prompt and of all turns before.
    """
    answer: dict[str, Any] = {"role": "assistant", "content": "w5"}
    tokens = [*prefix, *ids]
    if list(prefix).count(tiny.EOS) + 1 < TURNS[tokens[PROMPT] % len(TURNS)]:
        means = random.Random(str(tokens)).lognormvariate(-0.5, 1.0)
        answer["tool_calls"] = [{"type": "function", "function": {"name": "ask", "arguments": {"means": means}}}]
    return answer


class Schedule(TrainerCallback):  # type: ignore[misc]
    """The mean seconds of the tool in each update, and what the updates did.

    Args:
        tool_s: the means of all updates.
    """

    def __init__(self, tool_s: Sequence[float]) -> None:
        self.tool_s, self.update, self.begun = tool_s, 0, 0.0
        # of each update
        self.seconds: list[float] = []
        self.generation_s: list[float] = []
        self.tokens: list[Any] = []

    def ask(self, means: float) -> str:
        """Ask something.

        Args:
            means: how long the answer takes, as a multiple of the mean.
        """
        time.sleep(means * self.tool_s[self.update])
        return "w6 w7 w8"

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.perf_counter()

    def reward(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        self.generation_s.append(time.perf_counter() - self.begun)
        self.tokens.append([list(ids) for ids in completion_ids])
        return [float(sum(ids) % 5) for ids in completion_ids]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "time/step" in (logs or {}):
            self.seconds.append(logs["time/step"])
            self.update += 1


class TRLLoop(GRPOTrainer):  # type: ignore[misc]
    """A user's subclass, which keeps TRL's loop over tool calls. Its turns have the seeds of the other modes."""

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, *others: Any) -> Any:
        engine: Any = self.vllm_generation  # type: ignore[has-type]

        def generate(prompts: Sequence[Sequence[int]], **given: Any) -> Any:
            begun = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
            positions: list[int] = []
            for row in prompts:
                after = positions[-1] + 1 if positions else 0  # TRL keeps their order
                positions.append(next(i for i in range(after, len(begun)) if row[: len(begun[i])] == begun[i]))
            return engine.generate(prompts, of=positions, **given)

        self.vllm_generation = SimpleNamespace(llm=engine.llm, generate=generate)
        try:
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, *others)
        finally:
            self.vllm_generation = engine


@contextmanager
def trainer_class(mode: str) -> Iterator[type]:
    """The trainer of a mode. Where each rank has a vLLM engine, completions take their turns by themselves by default;
    `at_once` keeps rounds, as other plans do."""
    if mode == "at_once":
        with patch.object(CallServer, "draws_by_itself", False):
            yield GRPOTrainer
    else:
        yield TRLLoop if mode == "trl" else GRPOTrainer


def run(mode: str, schedule: Schedule, folder: Path) -> None:
    """Train by one mode."""
    words = random.Random(0)
    texts = [" ".join(f"w{words.randrange(9, VOCABULARY)}" for _ in range(PROMPT - 2)) for _ in range(256)]
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {"type": "object"}
    args = GRPOConfig(
        str(folder),
        **tiny.BARE,
        **PAIR.get(mode, {"plan": "flatten"}),
        use_vllm=True,
        per_device_train_batch_size=SAMPLES // (2 if mode in PAIR else 1),
        num_generations=GROUP,
        max_completion_length=1024,
        max_steps=len(schedule.tool_s),
        learning_rate=1e-6,
        beta=0.0,
        tool_workers=SAMPLES,
    )
    with trainer_class(mode) as kind, patch("trl.trainer.grpo_trainer.parse_response", message):
        trainer = kind(
            tiny.policy(vocab_size=VOCABULARY, max_position_embeddings=2048),
            schedule.reward,
            args,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]}),
            processing_class=tokenizer,
            tools=[schedule.ask],
            callbacks=[schedule],
        )
        try:
            trainer.train()
        finally:
            trainer.close()


def run_rank(mode: str, means: Sequence[float], file: Path) -> None:
    """One process of a mode that has two; the first writes the schedule."""
    schedule = Schedule(means)
    with tempfile.TemporaryDirectory() as folder:
        run(mode, schedule, Path(folder))
    if schedule.seconds:
        file.write_text(json.dumps([schedule.seconds, schedule.generation_s]))


def run_pair(mode: str, schedule: Schedule, folder: Path) -> None:
    """Train by a mode that has two processes."""
    file, log = folder.with_suffix(".json"), folder.with_suffix(".log")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    command += ["--rank", mode, str(file), *map(str, schedule.tool_s)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    with log.open("w") as written:
        code = subprocess.run(command, env=environment, stdout=written, stderr=written, check=False).returncode
    if code:
        sys.exit(f"the job of {mode} failed:\n{log.read_text()[-4000:]}")
    schedule.seconds, schedule.generation_s = json.loads(file.read_text())


def pair_rows(schedules: dict[str, Schedule], tool_s: Sequence[float]) -> list[dict[str, Any]]:
    """The rows of the modes on two processes."""
    rows, without = list[dict[str, Any]](), 0.0
    for mean in tool_s:
        # the first update with a mean has completions that were begun before it
        updates = [u for u, of_update in enumerate(schedules["two_engines"].tool_s) if of_update == mean][1:]
        base = statistics.mean(schedules["two_engines"].seconds[u] for u in updates)
        without = base if not mean else without
        for mode, schedule in schedules.items():
            seconds = statistics.mean(schedule.seconds[u] for u in updates)
            row = {"mode": mode, "tool_s": mean, "update_s": round(seconds, 3), "speedup": round(base / seconds, 2)}
            row["generation_s"] = round(statistics.mean(schedule.generation_s[u] for u in updates), 3)
            rows.append({**row, "tool_share": round(max(0.0, 1 - without / base), 2)})
    return rows


def rows_of(schedules: dict[str, Schedule], tool_s: Sequence[float]) -> list[dict[str, Any]]:
    """The rows of all modes."""
    first, rows = next(iter(schedules.values())), list[dict[str, Any]]()
    for mean in tool_s:
        updates = [update for update, of_update in enumerate(first.tool_s) if update and of_update == mean]
        for mode, schedule in schedules.items():
            seconds, base = (statistics.median(s.seconds[u] for u in updates) for s in (schedule, first))
            row = {"mode": mode, "tool_s": mean, "update_s": round(seconds, 3), "speedup": round(base / seconds, 2)}
            row["generation_s"] = round(statistics.median(schedule.generation_s[u] for u in updates), 3)
            row["equal_tokens"] = all(schedule.tokens[u] == first.tokens[u] for u in updates)
            rows.append(row)
    return rows


def merge(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put rows in the file, each with its commit, in place of those of the same mode and seconds."""
    known = json.loads(path.read_text())["rows"] if path.is_file() else []
    made = [{**row, "commit": result_file.commit()} for row in rows]
    of = {(row["mode"], row["tool_s"]): row for row in [*known, *made]}
    about = {"hardware": result_file.about()["hardware"], "samples": SAMPLES}
    result_file.write(path, {**about, "rows": [of[key] for key in sorted(of, key=_place)]})


def _place(key: tuple[str, float]) -> tuple[bool, float, int]:
    mode, tool_s = key
    return mode in PAIR, tool_s, [*MODES, *PAIR].index(mode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *PAIR], default=[*MODES, *PAIR])
    parser.add_argument("--tool-seconds", type=float, nargs="+", default=[0.0, 0.05, 0.3, 1.0])
    parser.add_argument("--updates", type=int, default=3, help="for each of these")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)  # mode, file and means of a process
    options = parser.parse_args()
    if options.rank:
        mode, file, *of_updates = options.rank
        run_rank(mode, [float(mean) for mean in of_updates], Path(file))
        return
    # the first update compiles, and is left out
    means = [0.0, *(mean for mean in options.tool_seconds for _ in range(options.updates))]
    schedules: dict[str, Schedule] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes:
            if mode in MODES:
                schedules[mode] = Schedule(means)
                run(mode, schedules[mode], Path(folder, mode))
        pair_means = [0.0, *(mean for mean in options.tool_seconds for _ in range(options.updates + 1))]
        pair = {mode: Schedule(pair_means) for mode in PAIR} if {*PAIR} & {*options.modes} else {}
        for mode, schedule in pair.items():
            run_pair(mode, schedule, Path(folder, mode))
    tables = {"": rows_of(schedules, options.tool_seconds) if schedules else []}
    tables[", on two processes"] = pair_rows(pair, options.tool_seconds) if pair else []
    if options.json:
        merge(options.json, [row for of_table in tables.values() for row in of_table])
    for title, of_table in tables.items():
        if of_table:
            table = Table(*of_table[0], title=f"{SAMPLES} completions that call a tool{title}", title_justify="left")
            for row in of_table:
                table.add_row(*map(str, row.values()))
            Console(width=120).print(table)


if __name__ == "__main__":
    main()
