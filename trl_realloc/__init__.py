"""PPO for people who use TRL, where every model function call has the devices and the parallelism that suit it.

The names below are imported on first use: a plan can be read and written where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .cluster import Cluster, DeviceMesh
    from .config import PPOConfig
    from .dataflow import DataflowGraph
    from .errors import PlanError
    from .plan import Assignment, ExecutionPlan, ParallelStrategy
    from .plugin import ReallocationPlugin
    from .trainer import PPOTrainer


__version__ = "0.1.0"

_HOMES = {
    "Assignment": "plan",
    "Cluster": "cluster",
    "DataflowGraph": "dataflow",
    "DeviceMesh": "cluster",
    "ExecutionPlan": "plan",
    "PPOConfig": "config",
    "PPOTrainer": "trainer",
    "ParallelStrategy": "plan",
    "PlanError": "errors",
    "ReallocationPlugin": "plugin",
}

__all__ = [
    "Assignment",
    "Cluster",
    "DataflowGraph",
    "DeviceMesh",
    "ExecutionPlan",
    "PPOConfig",
    "PPOTrainer",
    "ParallelStrategy",
    "PlanError",
    "ReallocationPlugin",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
