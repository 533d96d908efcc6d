"""A rank of a job of `benchmarks/faults.py`: a small run in which something goes wrong at a given moment, once.

`python faults_job.py SETTINGS` with `out` (the run's output folder), `notes` (where the moment is written down),
`fault`, `moment`, `algorithm`, `options` (of the config), `to` (another plan), `resume`, `mark` (what the environment
of every process of the job has), and `rank` (whose fault it is, where not by default).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn


sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / place) for place in ("trainer", "multiprocess")]

import pytest  # noqa: E402
import tiny  # noqa: E402
import tool_users  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from trl_realloc import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # noqa: E402
from trl_realloc.engines.child_process import JOB_SIGNALS, session_members  # noqa: E402
from trl_realloc.plan.execution_plan import ExecutionPlan  # noqa: E402
from trl_realloc.profiling.auto_plan import JobPlan  # noqa: E402
from trl_realloc.profiling.short_runs import Runs  # noqa: E402
from trl_realloc.realloc.transfer import Transfer  # noqa: E402
from trl_realloc.runtime.failures.alarm import Alarm  # noqa: E402
from trl_realloc.runtime.placement.engine_builder import EngineBuilder  # noqa: E402
from trl_realloc.runtime.placement.placement import Placement  # noqa: E402
from trl_realloc.runtime.placement.run_state import RunState  # noqa: E402


UPDATE = 3  # in which the fault happens; two checkpoints have been written by then


class Fault:
    """What goes wrong on this rank, and when."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.kind, self.moment, self.notes = settings["fault"], settings["moment"], Path(settings["notes"])
        self.out, self.where, self.done, self.trainer = Path(settings["out"]), "", False, None
        self.rank: int | None = settings.get("rank")
        self.mark = str(settings.get("mark", "")).encode() + b"\0"
        self.saves = bool(settings["options"].get("enable_jit_checkpoint"))
        self._one_thread = threading.Lock()

    def here(self) -> bool:
        """Whether this rank is the one, in the update of the moment: by default the last of the call's mesh; its first
        for a save, because that writes, and for an engine of several workers, which it owns."""
        if self.trainer is None or f"update {UPDATE}" not in self.where + f" update {self._update()}":
            return False
        return self._is_rank()

    def _is_rank(self) -> bool:
        if self.done or self.trainer is None:
            return False
        plan, rank = self.trainer.plan, self.trainer.accelerator.process_index
        calls = {"save": "actor.train", "replan": "actor.train"}
        calls |= dict.fromkeys(("reallocation", "tool", "reset"), "actor.generate")
        if self.rank is not None:
            return bool(rank == self.rank)
        ranks = list(plan.mesh(calls.get(self.moment, self.moment)).devices)
        first = self.moment == "save" or (self.moment == "actor.generate" and plan[self.moment].strategy.tp > 1)
        return bool(rank == (ranks[0] if first else ranks[-1]))

    def _update(self) -> int:
        return int(self.trainer.state.global_step) if self.trainer else 0

    def in_users_code(self, moment: str) -> Any:
        """Happen in a tool, or in an environment's reset. Returns a tool's result."""
        with self._one_thread:
            is_now = self.moment == moment and self.here()
            self.done |= is_now
        return self.happen() if is_now else None

    def happen(self) -> Any:
        """Do what ends or stops a process, or raise."""
        self.done = True
        note = {"time": time.time(), "where": self.where, "pid": os.getpid()}
        partial = self.notes.with_suffix(".partial")
        partial.write_text(json.dumps(note))
        partial.rename(self.notes)
        if self.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        elif self.kind in ("error", "tool-error"):
            raise ValueError("an error made by benchmarks/faults.py")
        elif self.kind == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB (by benchmarks/faults.py)")
        elif self.kind == "tool-exit":
            sys.exit("an exit made by benchmarks/faults.py")
        elif self.kind == "tool-trainer":
            self.trainer.save_model()  # type: ignore[attr-defined]
        elif self.kind in ("tool-hang", "tool-late"):
            time.sleep(600 if self.kind == "tool-hang" else 1.2 * self.trainer.args.tool_timeout)  # type: ignore[attr-defined]
        elif self.kind == "tool-large":
            return " ".join(["x" * 100_000] * 100)  # 10 MB
        elif self.kind.startswith(("launcher", "rank", "all", "helpers")):
            whom, how = self.kind.split("-")
            again, kills = how.endswith("2"), how.endswith("kill") and how != "kill"
            name = how.removesuffix("2").removesuffix("kill") if again or kills else how
            launcher, helpers, ranks = os.getppid(), *self._processes()
            everyone = [*helpers, *(pid for pid in ranks if pid != os.getpid()), launcher, os.getpid()]
            to = {"launcher": [launcher], "rank": [os.getpid()], "helpers": helpers, "all": everyone}[whom]
            numbers = JOB_SIGNALS if how == "any" else [signal.Signals[f"SIG{name.upper()}"]]
            self._send(to, numbers)
            if again:
                time.sleep(0.3 if how == "int2" else 1.0)
                self._send(to, numbers)
            elif kills:
                time.sleep(1.0)
                self._send([launcher, *(pid for pid in ranks if pid != os.getpid()), os.getpid()], [signal.SIGKILL])
            # a checkpoint at SIGTERM is asked for after 3 s, and this run is over in one
            time.sleep(45.0 if how == "stop" else 5.0 if self.saves else 2.0)
        elif self.kind.startswith(("engine", "worker")):
            assert self.trainer is not None
            process = self.trainer.placement.generators["actor.generate"].pid
            os.kill(self._worker(process) if self.kind.startswith("worker") else process, self._signal())
        elif self.kind == "disk-full":
            free = os.statvfs(self.out)
            with (self.out.parent / "filler").open("wb") as filler:
                filler.write(b"\0" * (free.f_bavail * free.f_frsize))
        else:  # from outside: a host or a link
            time.sleep(5.0)

    def _processes(self) -> tuple[list[int], list[int]]:
        """The engines, their workers and the watchdogs of this job, and its ranks."""
        helpers: list[int] = []
        ranks: list[int] = []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            with contextlib.suppress(OSError):
                process = Path("/proc", str(pid))
                if self.mark not in (process / "environ").read_bytes() + b"\0" or pid == os.getppid():
                    continue
                named = (process / "cmdline").read_text() + (process / "comm").read_text()
                (helpers if re.search("watchdog_process|vllm_host|Worker|multiprocessing", named) else ranks).append(
                    pid
                )
        return helpers, ranks

    @staticmethod
    def _send(pids: Sequence[int], numbers: Sequence[int]) -> None:
        for pid in pids:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _signal(self) -> signal.Signals:
        return signal.SIGKILL if self.kind.endswith("kill") else signal.SIGSTOP

    @staticmethod
    def _worker(session: int) -> int:
        """vLLM's youngest worker process of an engine."""
        members = session_members(session)
        return max(pid for pid in members if "Worker" in Path("/proc", str(pid), "comm").read_text())

    # --- where it happens -------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Know where this rank is, as its watchdog does."""
        set_activity = Alarm.set_activity

        def listening(alarm: Alarm, where: str) -> None:
            self.where = where
            set_activity(alarm, where)

        Alarm.set_activity = listening  # type: ignore[method-assign]

    def before(self, owner: Any, name: str) -> None:
        """Happen before a method is run."""
        method = getattr(owner, name)

        def failing(*given: Any, **named: Any) -> Any:
            last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
            early = self.moment in ("start", "measuring") and last and not self.done
            if early or (self.moment in ("reallocation", "replan") and self.here()):
                self.happen()
            return method(*given, **named)

        setattr(owner, name, failing)

    def inside(self, models: Sequence[nn.Module]) -> None:
        """Happen in the middle of a call: in the last of a model's layers, at its second use in the update."""
        for model in models:
            leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters(recurse=False))]
            if leaves:
                leaves[len(leaves) // 2].register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.where.startswith(f"{self.moment} of update {UPDATE}") or not self.here():
            return None
        if self.kind == "nan":
            self.happen()
            return output * float("nan")
        self.happen()
        return None

    def while_saving(self) -> None:
        """Happen when half of a file of a checkpoint has been written."""
        save = torch.save

        def failing(content: Any, file: Any, *given: Any, **named: Any) -> Any:
            if (
                self.moment == "save"
                and self.where.startswith("saving")
                and self.here()
                and not isinstance(file, io.BytesIO)
            ):
                whole = io.BytesIO()
                save(content, whole, *given, **named)
                if not self.kind.startswith("disk"):
                    half = whole.getvalue()[: whole.tell() // 2]
                    file.write(half) if hasattr(file, "write") else Path(file).write_bytes(half)
                self.happen()
            return save(content, file, *given, **named)

        torch.save = failing

    def while_generating(self, placement: Placement) -> None:
        generator: Any = placement.generators.get("actor.generate")
        if generator is None or not hasattr(generator, "pid"):  # one in this process runs a module, see `inside`
            return
        start, generations = generator.start, itertools.count(1)

        def failing(*given: Any, **named: Any) -> Any:
            under_way = start(*given, **named)
            # it may begin while the update before is trained
            if self.moment == "actor.generate" and next(generations) == UPDATE and self._is_rank():
                self.happen()
            return under_way

        generator.start = failing


class Forced:
    """In a replanner's place: the run moves to a written plan after its third update."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.updates = ExecutionPlan.from_dict(plan), 0

    def note(self, lengths: Sequence[int]) -> None:
        pass

    def follow(self, job_plan: JobPlan) -> None:
        """The plan that comes next is written."""

    def better(self, updates_left: int, move_seconds: float) -> JobPlan | None:
        return JobPlan(self.plan) if updates_left == 1 else None


def trainer(algorithm: str, out: Path, options: dict[str, Any], fault: Fault) -> Any:
    if algorithm.startswith("grpo, "):
        return tool_trainer(algorithm, out, options, fault)
    if algorithm == "ppo":
        return tiny.trainer(out, given={"reward_model": [tiny.short, tiny.classifier(2)]}, **options)
    config, kind = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[algorithm]
    data = {"train_dataset": tiny.prompts(), "processing_class": tiny.tokenizer()}
    return kind(tiny.policy(), tiny.short, config(str(out), **{**tiny.BARE, **options}), **data)


def tool_trainer(algorithm: str, out: Path, options: dict[str, Any], fault: Fault) -> Any:
    """A trainer of GRPO whose policy calls tools, or methods of environments."""

    def look_up(word: int) -> Any:
        """Look up a word.

        Args:
            word: the word.
        """
        time.sleep(0.02)
        return fault.in_users_code("tool") or f"w{word}"

    class Page:
        def reset(self, **_: Any) -> None:
            fault.in_users_code("reset")

        def look_up(self, word: int) -> str:
            """Look up a word.

            Args:
                word: the word.
            """
            return f"w{word}"

    has_tools = algorithm == "grpo, tools"
    given = {} if has_tools else {"environment_factory": Page}
    return tool_users.trainer(
        out, pytest.MonkeyPatch(), [look_up] if has_tools else [], given=given, **{**tiny.BARE, **options}
    )


def policy_weights(made: Any) -> dict[str, torch.Tensor]:
    engine = made.placement.engine("actor.train")
    return {} if engine is None else {name: t.clone() for part in engine.export(merged=False) for name, t in part}


def policy_updates(made: Any) -> list[dict[str, float]]:
    """The logs of the updates as `equal` compares them, less what time makes differ."""
    kept = ("loss", "reward", "grad_norm", "completions/mean_length")
    return [
        {"episode": step, **{name: row[name] for name in kept}}
        for step, row in enumerate(made.state.log_history)
        if "loss" in row
    ]


def main() -> None:
    settings = json.loads(sys.argv[1])
    out, fault = Path(settings["out"]), Fault(settings)
    fault.listen()
    if settings["fault"]:
        fault.before(EngineBuilder, "build")
        fault.before(Runs, "observe")
        fault.before(Transfer, "_post")
        fault.before(RunState, "load_into")
        fault.while_saving()
    made = trainer(settings["algorithm"], out, settings["options"], fault)
    made.run.change.replanner = Forced(settings["to"]) if settings.get("to") else None
    if settings["fault"]:
        fault.trainer = made
        made.placement.start()
        engines = [engine for engines in made.placement.engines.values() for engine in engines]
        fault.inside([engine.head.model for engine in dict.fromkeys(engines)])
        fault.while_generating(made.placement)
    made.train(resume_from_checkpoint=settings["resume"])
    weights = tiny.weights(made) if settings["algorithm"] == "ppo" else policy_weights(made)
    if made.accelerator.is_main_process:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out / "weights.safetensors")
        updates = tiny.updates(made) if settings["algorithm"] == "ppo" else policy_updates(made)
        if made.state.global_step == made.state.max_steps:
            (out / "log.json").write_text(json.dumps(updates))
    made.accelerator.wait_for_everyone()
    made.close()


if __name__ == "__main__":
    main()
