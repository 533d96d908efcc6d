"""Checkpoints: the contents of a checkpoint (`state`), its list of files (`manifest`), and how a checkpoint is written
(`saving`), and found and checked (`resuming`). The trainer calls them through `mixin`."""

from __future__ import annotations


VALUE_FOLDER = "value_model"  # the critic's folder within the policy's, by TRL's name for the critic
STATE_FILE = "optimizer.pt"  # Trainer's file name; there is one in the policy's folder and one in the critic's


class CheckpointError(ValueError):
    """A checkpoint that training cannot resume from. The message names the file, the problem and what to do."""


class SaveError(RuntimeError):
    """A checkpoint or model cannot be written. The message names the path. Older checkpoints are unchanged."""


__all__ = ["STATE_FILE", "VALUE_FOLDER", "CheckpointError", "SaveError"]
