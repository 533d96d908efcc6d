"""The Accelerate side: a plugin that carries the plan, in the manner of Accelerate's own plugin dataclasses.

Accelerate has no registry for foreign plugins (a handler it does not know is a KeyError), so the trainer reads this one
itself, where it makes its accelerator.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ReallocationPlugin:
    """What `accelerate launch` can say about placement through the environment; `PPOConfig`'s fields come first.

    Args:
        plan (`str`, `dict` or `ExecutionPlan`, *optional*, defaults to `"flatten"`):
            A preset's name, a YAML file or a plan. Environment: `TRL_REALLOC_PLAN`.
        generation_engine (`str`, *optional*):
            `"vllm"` or `"transformers"`; by default vLLM where it is installed. Environment:
            `TRL_REALLOC_GENERATION_ENGINE`.
    """

    plan: Any = field(default=None, metadata={"help": "A preset's name, a YAML file or a plan."})
    generation_engine: str | None = field(default=None, metadata={"help": "`vllm` or `transformers`."})

    def __post_init__(self) -> None:
        if self.plan is None:
            self.plan = os.environ.get("TRL_REALLOC_PLAN", "flatten")
        if self.generation_engine is None:
            self.generation_engine = os.environ.get("TRL_REALLOC_GENERATION_ENGINE")
        if self.generation_engine not in (None, "vllm", "transformers"):
            raise ValueError(f"generation_engine must be 'vllm' or 'transformers', not {self.generation_engine!r}.")
