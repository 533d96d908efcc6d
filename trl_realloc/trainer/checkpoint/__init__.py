"""Checkpoints: what of a run is on disk (`state`), when a checkpoint is whole (`manifest`), and how one is written
(`saving`), found and checked (`resuming`). Owns no training."""

from __future__ import annotations


VALUE_FOLDER = "value_model"  # beside the policy's files, in TRL's word for the critic
STATE_FILE = "optimizer.pt"  # where Trainer keeps it; one in the policy's folder, one in the critic's


class CheckpointError(ValueError):
    """A checkpoint that cannot be gone on from. The message names the file, what is wrong with it and what to do."""


class SaveError(RuntimeError):
    """A checkpoint or model that cannot be written. The message names the path; older checkpoints are as they were."""


__all__ = ["STATE_FILE", "VALUE_FOLDER", "CheckpointError", "SaveError"]
