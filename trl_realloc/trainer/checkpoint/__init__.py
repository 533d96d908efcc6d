"""Checkpoints: contents (`model_files`, `state_files`), the list of files (`manifest`), and how they are written
(`saving`), and found and checked (`resuming`). A run has them as `checkpoints.Checkpoints`."""

from __future__ import annotations


VALUE_FOLDER = "value_model"  # the critic's folder within the policy's, by TRL's name for the critic
STATE_FOLDER = "training_state"  # the float32 weights and the optimizers' states, by torch.distributed.checkpoint
METADATA = f"{STATE_FOLDER}/.metadata"  # which file of this folder has which part of which tensor


class CheckpointError(ValueError):
    """A checkpoint that training cannot resume from. The message names the file, the problem and what to do."""


class SaveError(RuntimeError):
    """A checkpoint or model cannot be written. The message names the path. Older checkpoints are unchanged."""


__all__ = ["METADATA", "STATE_FOLDER", "VALUE_FOLDER", "CheckpointError", "SaveError"]
