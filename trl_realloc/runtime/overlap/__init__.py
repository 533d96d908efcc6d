"""Calls that overlap: streams within an iteration, and batches ahead of the training."""
