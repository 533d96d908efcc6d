"""A recipe as the planner reads it."""
