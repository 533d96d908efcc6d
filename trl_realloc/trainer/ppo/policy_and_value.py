"""`trainer.model`: a module that holds the policy and the critic under TRL's names.

The trainer sets the modules. Which modules a rank has follows from the plan.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class PolicyAndValueWrapper(nn.Module):
    """Policy and critic as one module, with the attributes of TRL's class of this name: `policy`, `value_model`, and
    `critic_backbone`, the critic without its score layer.

    The object stays the same during a run, because callbacks keep references to it. Missing attributes (`config`,
    `generate`, `save_pretrained`, `push_to_hub`, `add_model_tags`, …) are looked up on the policy.

    Args:
        policy, value_model: this rank's modules. On a rank without a part of a role, the role's structure with
            parameters on the `meta` device.
    """

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        self.hold(policy, value_model)

    def hold(self, policy: nn.Module, value_model: nn.Module) -> None:
        """Replace the modules, for example after a plan change."""
        self.policy, self.value_model = policy, value_model
        self.critic_backbone = getattr(value_model, str(getattr(value_model, "base_model_prefix", "")), value_model)

    def forward(self, **inputs: Any) -> tuple[Any, Tensor]:
        """The policy's outputs, and the critic's value at every token, (rows, tokens, 1). Both models must be whole on
        this rank: not under tensor or pipeline parallelism or ZeRO-3, and not on `meta`."""
        backbone = self.critic_backbone(**{**inputs, "output_hidden_states": True})
        values: Tensor = self.value_model.score(backbone.hidden_states[-1])  # type: ignore[operator]
        return self.policy(**inputs), values

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "policy":  # not yet set
                raise
            return getattr(self.policy, name)


__all__ = ["PolicyAndValueWrapper"]
