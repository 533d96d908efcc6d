"""Executing a plan on the ranks of a job."""
