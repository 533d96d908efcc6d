"""What the planner is told about a machine: `machine` and `runs` measure, `cache` remembers, `job` is one by itself."""
