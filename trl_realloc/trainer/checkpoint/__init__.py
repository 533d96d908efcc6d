"""Checkpoints: contents (`model_files`, `state_files`), the list of files (`manifest`), writing (`saving`), and finding
and checking (`resuming`). A run uses them through `checkpoints.Checkpoints`."""

from __future__ import annotations


VALUE_FOLDER = "value_model"  # the critic's folder inside the policy's, with TRL's name for the critic
STATE_FOLDER = "training_state"  # float32 weights and optimizer states, in torch.distributed.checkpoint's format
METADATA = f"{STATE_FOLDER}/.metadata"  # maps parts of tensors to files of this folder


class CheckpointError(ValueError):
    """A checkpoint that training cannot resume from. The message names the file, the problem and what to do."""


class SaveError(RuntimeError):
    """A checkpoint or model cannot be written. The message names the path. Older checkpoints are unchanged."""


__all__ = ["METADATA", "STATE_FOLDER", "VALUE_FOLDER", "CheckpointError", "SaveError"]
