"""The installed TRL's `GRPOTrainer` and `RLOOTrainer`, the base classes of ours.

Importing them imports vLLM, if it is installed, so PPO does not import this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trl.chat_template_utils


if TYPE_CHECKING:
    from transformers import Trainer as TRLGRPOTrainer
    from transformers import Trainer as TRLRLOOTrainer
else:
    from trl import GRPOTrainer as TRLGRPOTrainer
    from trl import RLOOTrainer as TRLRLOOTrainer

# converts a response's token ids to a message; not in every release
parse_response: Callable[..., Any] | None = getattr(trl.chat_template_utils, "parse_response", None)


__all__ = ["TRLGRPOTrainer", "TRLRLOOTrainer", "parse_response"]
