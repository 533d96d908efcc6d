"""The faults of `benchmarks/faults.py`: under which plan, what goes wrong, and at which moment."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "multiprocess"))

from test_plans import CALLS, ZERO3, split
from test_plans import plan as written_plan


# nothing is saved but at SIGTERM
JIT = {"enable_jit_checkpoint": True, "save_strategy": "no"}
VLLM = {"generation_engine": "vllm", "response_length": 64}
GROUPS = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 64, **JIT}
EACH_UPDATE = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
TOOLS = {**GROUPS, **EACH_UPDATE, "enable_jit_checkpoint": False, "max_completion_length": 40, "use_vllm": True}
TOOLS |= {"tool_workers": 4, "tool_timeout": 2.0}
# with a policy that is not trained, because ages differ from run to run
AHEAD = {**TOOLS, "max_staleness": 1, "vllm_importance_sampling_correction": True, "learning_rate": 0.0}
TWO_WORKERS = {"actor.generate": {"mesh": "0-1", "dp": 1, "tp": 2, "engine": "vllm"}}
PLANS: dict[str, dict[str, Any]] = {
    "flatten": {"processes": 2, "plan": "flatten"},
    "separate": {"processes": 2, "plan": "separate"},
    "tensor x pipeline": {
        "processes": 4,
        "plan": written_plan(4, changed={n: split("0-3", tp=2, pp=2) for n in CALLS}),
    },
    "zero 3": {"processes": 2, "plan": written_plan(2, stage=3)},
    "replan": {
        "processes": 2,
        "plan": written_plan(2),
        "to": written_plan(
            2, changed={"actor.train": split("0-1", pp=2), "critic.train": {"mesh": "0-1", "dp": 2, **ZERO3}}
        ),
    },
    "auto": {"processes": 2, "plan": "auto"},
    "vllm": {"processes": 2, "plan": "flatten", "options": VLLM},
    "vllm tp 2": {"processes": 2, "plan": written_plan(2, changed=TWO_WORKERS), "options": VLLM},
    "jit": {"processes": 2, "plan": "flatten", "options": JIT},
    "jit, vllm": {"processes": 2, "plan": "flatten", "options": VLLM | JIT},
    "jit, vllm tp 2": {"processes": 2, "plan": written_plan(2, changed=TWO_WORKERS), "options": VLLM | JIT},
    "jit, vllm, one process": {"processes": 1, "plan": "flatten", "options": VLLM | JIT},
    "jit, grpo": {"processes": 2, "algorithm": "grpo", "plan": "flatten", "options": {**GROUPS, "use_vllm": False}},
    "jit, grpo, vllm": {
        "processes": 2,
        "algorithm": "grpo",
        "plan": "flatten",
        "options": {**GROUPS, "use_vllm": True, "dataloader_num_workers": 1},
    },
    "jit, rloo, vllm": {
        "processes": 2,
        "algorithm": "rloo",
        "plan": "flatten",
        "options": {**GROUPS, "use_vllm": True},
    },
    "grpo, tools": {"processes": 2, "algorithm": "grpo, tools", "plan": "flatten", "options": TOOLS},
    "grpo, tools ahead": {"processes": 2, "algorithm": "grpo, tools", "plan": "separate", "options": AHEAD},
    "grpo, environments": {"processes": 2, "algorithm": "grpo, environments", "plan": "flatten", "options": TOOLS},
    "two hosts": {"processes": 2, "plan": "flatten", "hosts": True},
}
TRAINING = ("actor.train", "critic.train")
INSIDE = ("actor.generate", "critic.forward", *TRAINING)
ENGINE_FAULTS = ("engine-kill", "engine-stop", "kill", "all-term", "all-int", "all-hup", "all-usr1", "helpers-any")
SAVED_AT = ("all-term", "all-term2", "all-termkill", "launcher-term", "launcher-usr1", "rank-term")
# what a tool does, and the run goes on: the policy reads an error, or TRL leaves the result out
READ = ("tool-error", "tool-hang", "tool-late", "tool-large")
# plan -> fault -> moments
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "flatten": {
        "kill": ("start", *INSIDE, "save"),
        "stop": ("start", "actor.generate", "critic.forward", "actor.train", "save"),
        "error": INSIDE,
        "oom": TRAINING,
        "nan": TRAINING,
        "launcher-kill": ("actor.generate", "actor.train"),
        "launcher-stop": ("actor.train",),
        "launcher-term": ("actor.generate", "actor.train"),
        "launcher-int": ("actor.train",),
        "launcher-int2": ("actor.train",),
        "all-term": ("actor.train",),
        "disk-full": ("save",),
        "disk-readonly": ("save",),
    },
    "separate": {
        "kill": (*INSIDE, "reallocation", "save"),
        "stop": ("actor.train", "reallocation"),
        "error": ("reallocation", "actor.train"),
        "oom": ("reallocation",),
    },
    "tensor x pipeline": {
        "kill": ("critic.forward", *TRAINING, "save"),
        "stop": ("actor.train",),
        "error": ("critic.forward", *TRAINING),
        "oom": TRAINING,
        "nan": ("actor.train",),
    },
    "zero 3": {
        "kill": ("start", *INSIDE, "save"),
        "stop": ("actor.train",),
        "error": INSIDE,
        "oom": ("actor.train",),
        "nan": ("actor.train",),
    },
    "replan": {"kill": ("replan",), "stop": ("replan",), "error": ("replan",)},
    "auto": {"kill": ("measuring",), "stop": ("measuring",), "error": ("measuring",)},
    "vllm": dict.fromkeys(ENGINE_FAULTS, ("actor.generate",)),
    "vllm tp 2": {"worker-kill": ("actor.generate",), "worker-stop": ("actor.generate",)},
    "jit": {"all-term": ("actor.train",), "rank-term": ("actor.train",)},
    "jit, vllm": dict.fromkeys(SAVED_AT, ("actor.generate",)),
    "jit, vllm tp 2": {"all-term": ("actor.generate",)},
    "jit, vllm, one process": {"all-term": ("actor.generate",)},
    "jit, grpo": {"rank-term": ("actor.generate",)},
    "jit, grpo, vllm": {"all-term": ("actor.generate",)},
    "jit, rloo, vllm": {"all-term": ("actor.generate",)},
    "grpo, tools": dict.fromkeys((*READ, "tool-exit", "tool-trainer", "kill", "engine-kill"), ("tool",)),
    "grpo, tools ahead": dict.fromkeys(("tool-error", "tool-exit", "tool-trainer", "kill", "engine-kill"), ("tool",)),
    "grpo, environments": {"error": ("reset",)},
    "two hosts": {
        "host-lost": ("actor.train",),
        "link-down": ("actor.generate", "actor.train", "save"),
        "link-drop": ("actor.train",),
        "kill": ("critic.train",),
        "stop": ("actor.train",),
        "error": ("actor.train",),
        "launcher-kill": ("actor.train",),
    },
}
# Signals to the launcher, to one rank, to every process of the job (the launcher last but this rank), or to the engines
# and watchdogs alone (`helpers`): all that a cluster sends. `term2`: twice, a second apart; `termkill`: then SIGKILL of
# the launcher and the ranks.
# What the message must say of the cause, beside rank, host and call.
CAUSES = {
    "kill": r"was ended by SIGKILL",
    "stop": r"stopped by a signal \(SIGSTOP\)",
    "error": r"an error made by benchmarks/faults\.py",
    "oom": r"out of memory",
    "nan": r"not finite|nan",
    "launcher-kill": r"the launcher on host \S+ \(pid \d+\) ended",
    "launcher-stop": r"the launcher of rank",
    "launcher-term": r"was ended by SIGTERM",
    "launcher-int": r"SIGINT|KeyboardInterrupt",
    "launcher-int2": r"SIGINT|KeyboardInterrupt|SIGKILL",
    "all-term": r"was ended by SIGTERM",
    "all-int": r"SIGINT|KeyboardInterrupt",
    "all-hup": r"was ended by SIGHUP",
    "all-usr1": r"was ended by SIGUSR1|the launcher on host",
    "all-termkill": r"was ended by SIGKILL|the launcher on host",
    "engine-kill": r"was ended by SIGKILL",
    "engine-stop": r"was stopped by a signal \(SIGSTOP; it",
    "worker-kill": r"vLLM's worker \S+ \(pid \d+\) was ended by SIGKILL",
    "worker-stop": r"was stopped by a signal \(SIGSTOP; its worker",
    "disk-full": r"MB are needed, .* MB are free",
    "disk-readonly": r"Read-only file system",
    "host-lost": r"ended at once with (the|its) watchdog|nothing was heard",
    "link-down": r"nothing was heard from",
    "tool-exit": r"exit status 1",
    "tool-trainer": r"a tool used the trainer",
}


@dataclass
class Row:
    """One fault.

    Args:
        seconds: from the fault until nothing of the job runs; `None` where it did not end.
        cause_named: also where the run has saved a checkpoint at the signal, or goes on.
        resumed_equal: `None` where what resuming needs was lost with a host, and resuming says so. Of a run that goes
            on, whether it ends as one without a fault.
        exit: the launcher's exit status; minus a signal that ended it.
        saved: the newest whole checkpoint when the job had ended.
    """

    plan: str
    fault: str
    moment: str
    seconds: float | None = None
    cause_named: bool = False
    left: list[str] = field(default_factory=list)
    resumed_equal: bool | None = False
    message: str = ""
    note: str = ""
    exit: int | None = None
    saved: str = ""

    @property
    def key(self) -> str:
        return f"{self.plan}/{self.fault}/{self.moment}"


def rows() -> list[Row]:
    return [
        Row(plan, fault, moment)
        for plan, faults in TABLE.items()
        for fault, moments in faults.items()
        for moment in moments
    ]
