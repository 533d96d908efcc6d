"""`ReallocationPlugin`: settings of the plan and of reallocations, as an Accelerate-style plugin dataclass.

Accelerate does not accept plugins of other packages (an unknown handler is a KeyError), so the trainers take this one
themselves, as `reallocation_plugin`. The settings of PPO are in `ppo_config`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..common.errors import PlanError, shown


if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass
class ReallocationPlugin:
    """Settings of the plan and of reallocations that a trainer takes as `reallocation_plugin`, and that `accelerate
    launch` can pass through the environment. A value that is given here takes precedence over the environment's, and a
    field of the trainer's configuration over both.

    Args:
        plan (`str`, `dict` or `ExecutionPlan`, *optional*, defaults to `"auto"`):
            Execution plan: `auto` (the planner chooses), a preset's name, a YAML file or a plan. Environment:
            `TRL_REALLOC_PLAN`.
        generation_engine (`str`, *optional*):
            Engine that generates: `"vllm"` or `"transformers"`; by default vLLM where it is installed. Environment:
            `TRL_REALLOC_GENERATION_ENGINE`.
        bucket_mb (`int`, *optional*, defaults to `256`):
            Maximum mebibytes that a device receives in one bucket of a reallocation. Two buckets are in flight at a
            time. Environment: `TRL_REALLOC_BUCKET_MB`.
        transfer_timeout (`float`, *optional*):
            Timeout in seconds of a message of a reallocation; by default the config's `ddp_timeout`. Environment:
            `TRL_REALLOC_TRANSFER_TIMEOUT`.
        replan (`float`, *optional*, defaults to `0.1`):
            Share by which the lengths of responses must change the plan's estimate for the planner of `plan: auto` to
            search again between two updates; 0 or less for never. Environment: `TRL_REALLOC_REPLAN`.
        measure (`str`, *optional*, defaults to `"between"`):
            Time at which `plan: auto` measures a machine that was not measured for these models: `between` starts at
            once with a plan from the device's data sheet, and measures between two updates as soon as a better plan can
            save more time than measuring takes; `first` measures before the first update; `never` does not.
            Environment: `TRL_REALLOC_MEASURE`.
        heartbeat_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds without a heartbeat of a rank, or with a rank stopped, after which the job ends. Environment:
            `TRL_REALLOC_HEARTBEAT_TIMEOUT`.

    Raises:
        PlanError: a value is not allowed.
    """

    plan: Any = field(default=None, metadata={"help": "A preset's name, a YAML file or a plan."})
    generation_engine: str | None = field(default=None, metadata={"help": "`vllm` or `transformers`."})
    bucket_mb: int | None = field(default=None, metadata={"help": "Maximum MiB received in one bucket."})
    transfer_timeout: float | None = field(default=None, metadata={"help": "Seconds for a message."})
    replan: float | None = field(default=None, metadata={"help": "Change that lets the planner search again."})
    measure: str | None = field(default=None, metadata={"help": "`between` two updates, `first` or `never`."})
    heartbeat_timeout: float | None = field(default=None, metadata={"help": "Longest silence of a rank in seconds."})

    def __post_init__(self) -> None:
        if self.plan is None:
            self.plan = os.environ.get("TRL_REALLOC_PLAN", "auto")
        if self.generation_engine is None:
            self.generation_engine = os.environ.get("TRL_REALLOC_GENERATION_ENGINE")
        if self.generation_engine not in (None, "vllm", "transformers"):
            raise PlanError(f"generation_engine must be 'vllm' or 'transformers', not {shown(self.generation_engine)}.")
        if self.bucket_mb is None:
            self.bucket_mb = int(_number("TRL_REALLOC_BUCKET_MB", 256))
        if self.transfer_timeout is None and "TRL_REALLOC_TRANSFER_TIMEOUT" in os.environ:
            self.transfer_timeout = _number("TRL_REALLOC_TRANSFER_TIMEOUT", 0.0)
        if self.heartbeat_timeout is None:
            self.heartbeat_timeout = _number("TRL_REALLOC_HEARTBEAT_TIMEOUT", 30.0)
        if self.replan is None:
            self.replan = _number("TRL_REALLOC_REPLAN", 0.1)
        if self.measure is None:
            self.measure = os.environ.get("TRL_REALLOC_MEASURE", "between")
        if self.measure not in ("between", "first", "never"):
            raise PlanError(f"measure must be 'between', 'first' or 'never', not {shown(self.measure)}.")
        if self.bucket_mb < 1 or (self.transfer_timeout is not None and not self.transfer_timeout > 0):
            raise PlanError(
                f"bucket_mb is 1 or more and transfer_timeout above 0, not {self.bucket_mb} and "
                f"{self.transfer_timeout}."
            )
        if not 5 <= self.heartbeat_timeout < float("inf"):
            raise PlanError(
                f"heartbeat_timeout is 5 s or more, not {self.heartbeat_timeout}: a busy machine needs some seconds."
            )

    def under(self, args: TrainingArguments) -> ReallocationPlugin:
        """This plugin with the fields that a trainer's configuration sets replaced.

        Args:
            args: configuration with `plan`, `generation_engine` and `heartbeat_timeout`, each set or `None`.

        Raises:
            PlanError: a value is not allowed.
        """
        names = ("plan", "generation_engine", "heartbeat_timeout")
        set_fields = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        return replace(self, **set_fields)


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise PlanError(f"the environment's {variable} must be a finite number, not {shown(text)}.")
    return number
