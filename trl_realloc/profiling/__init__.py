"""A job as the planner sees it: its models, measurements of its machine, its plan and a later one."""
