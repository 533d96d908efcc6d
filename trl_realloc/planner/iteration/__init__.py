"""Simulation of an iteration: which device runs which call when."""
