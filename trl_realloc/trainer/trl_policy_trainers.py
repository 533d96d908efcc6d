"""The installed TRL's `GRPOTrainer` and `RLOOTrainer`, which ours are subclasses of.

Importing them imports vLLM, if it is installed, so a run of PPO does without this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import Trainer as TRLGRPOTrainer
    from transformers import Trainer as TRLRLOOTrainer
else:
    from trl import GRPOTrainer as TRLGRPOTrainer
    from trl import RLOOTrainer as TRLRLOOTrainer


__all__ = ["TRLGRPOTrainer", "TRLRLOOTrainer"]
