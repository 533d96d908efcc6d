"""What is decided, as values: cluster, meshes, dataflow graph, assignments, the execution plan. No torch."""

from .execution_plan import Assignment, ExecutionPlan, ParallelStrategy


__all__ = ["Assignment", "ExecutionPlan", "ParallelStrategy"]
