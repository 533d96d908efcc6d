"""Fused pipelines: the order in which the stages of two models' pipelines run their micro-batches."""
