"""Refusals of what a user passed, before anything expensive begins."""
