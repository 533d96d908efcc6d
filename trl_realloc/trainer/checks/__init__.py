"""Checks of a user's inputs before expensive work begins, by subject: settings (`config_checks`), settings that engines
do not follow (`unfollowed_settings`) or that changed during a run (`fixed_settings`), data sets, tokenizers and other
inputs, models, optimizers, plans, and the runs that Accelerate must train (`trainable`).

Inputs that a single file reads, such as a checkpoint's folder, are checked there.
"""
