"""The execution plan and its parts as immutable values: cluster, meshes, dataflow graph, assignments. No torch."""

from .execution_plan import Assignment, ExecutionPlan, ParallelStrategy


__all__ = ["Assignment", "ExecutionPlan", "ParallelStrategy"]
