"""Deciding: the cost of a call, the memory of a plan, the search for the fastest plan. No torch."""
