"""Checks of what a user passed, before anything expensive begins. A file has a subject: settings (`config_checks`),
settings that engines do not follow (`unfollowed_settings`) or that changed during a run (`fixed_settings`), data sets,
tokenizers and other inputs, models, optimizers, plans, and the runs that Accelerate must train (`trainable`).

What one file alone reads, such as a checkpoint's folder, is checked where it is read.
"""
