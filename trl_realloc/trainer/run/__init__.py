"""A run under a plan: its job, its plan, optimizers, checkpoints and change of plan."""
