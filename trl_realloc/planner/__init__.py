"""Choosing an execution plan: pure, and without torch."""
