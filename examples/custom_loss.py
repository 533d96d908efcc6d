"""A loss of one's own for GRPO: GMPO (Zhao et al. 2025, arXiv 2507.20673), which clips the logarithm of each token's
ratio and takes their mean, so that a response has the geometric mean of its tokens' ratios.

Use `GMPOTrainer` in place of `GRPOTrainer`, under any plan. A test compares it with the same loss over TRL's trainer.
"""

from __future__ import annotations

from typing import Any

import torch

from trl_realloc import GRPOTrainer


CLIP = 0.4  # of a token's log-ratio, as in the paper


class GMPOTrainer(GRPOTrainer):
    """GRPO whose loss is -mean(A · exp(mean over a response's tokens of the clipped log-ratio))."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask, advantages = inputs["completion_mask"], inputs["advantages"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], mask], dim=1)
        logprobs = self._get_per_token_logps_and_entropies(model, ids, attention, mask.size(1))[0]
        old = inputs.get("old_per_token_logps")
        log_ratio = logprobs - (logprobs.detach() if old is None else old)
        sign = advantages.sign()[:, None]
        clipped = sign * torch.minimum(sign * log_ratio, (sign * log_ratio).clamp(-CLIP, CLIP))
        ratio = ((clipped * mask).sum(1) / mask.sum(1).clamp(min=1)).exp()
        return -(ratio * advantages).mean() / self.current_gradient_accumulation_steps
