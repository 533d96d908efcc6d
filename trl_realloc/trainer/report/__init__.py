"""Metrics of a run, its record and its report."""
