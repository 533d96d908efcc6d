"""PPO, GRPO and RLOO for people who use TRL, where every model function call has the devices and the parallelism that
suit it.

The names below are imported on first use: a plan can be read and written where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .common.errors import PlanError
    from .plan.cluster import Cluster, DeviceMesh
    from .plan.dataflow import DataflowGraph
    from .plan.execution_plan import Assignment, ExecutionPlan, ParallelStrategy
    from .trainer.accelerate_plugin import ReallocationPlugin
    from .trainer.grpo_config import GRPOConfig, RLOOConfig
    from .trainer.grpo_trainer import GRPOTrainer, RLOOTrainer
    from .trainer.ppo_config import PPOConfig
    from .trainer.ppo_trainer import PPOTrainer


__version__ = "0.2.0"

_HOMES = {
    "Assignment": "plan.execution_plan",
    "Cluster": "plan.cluster",
    "DataflowGraph": "plan.dataflow",
    "DeviceMesh": "plan.cluster",
    "ExecutionPlan": "plan.execution_plan",
    "GRPOConfig": "trainer.grpo_config",
    "GRPOTrainer": "trainer.grpo_trainer",
    "PPOConfig": "trainer.ppo_config",
    "PPOTrainer": "trainer.ppo_trainer",
    "ParallelStrategy": "plan.execution_plan",
    "PlanError": "common.errors",
    "RLOOConfig": "trainer.grpo_config",
    "RLOOTrainer": "trainer.grpo_trainer",
    "ReallocationPlugin": "trainer.accelerate_plugin",
}

__all__ = [
    "Assignment",
    "Cluster",
    "DataflowGraph",
    "DeviceMesh",
    "ExecutionPlan",
    "GRPOConfig",
    "GRPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "ParallelStrategy",
    "PlanError",
    "RLOOConfig",
    "RLOOTrainer",
    "ReallocationPlugin",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
