"""`trainer.model`: the policy and the critic under TRL's names, whichever modules the plan's engines made of them.

Owns no placement: the trainer tells it which modules this rank has.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class PolicyAndValueWrapper(nn.Module):
    """Policy and critic as one module, as TRL's class of this name: `policy`, `value_model` and `critic_backbone`, the
    critic without its score layer. It stays the same object for a whole run, callbacks hold it.

    What it does not have itself (`config`, `generate`, `save_pretrained`, `push_to_hub`, `add_model_tags`, …) is the
    policy's.

    Args:
        policy, value_model: this rank's modules; on a rank without a part of a role its structure, with parameters on
            the device `meta`.
    """

    def __init__(self, policy: nn.Module, value_model: nn.Module) -> None:
        super().__init__()
        self.hold(policy, value_model)

    def hold(self, policy: nn.Module, value_model: nn.Module) -> None:
        """Take other modules in place of those held, as after a change of the plan."""
        self.policy, self.value_model = policy, value_model
        self.critic_backbone = getattr(value_model, str(getattr(value_model, "base_model_prefix", "")), value_model)

    def forward(self, **inputs: Any) -> tuple[Any, Tensor]:
        """The policy's outputs, and the critic's value (rows, tokens, 1) at every token. Needs whole models on this
        rank: not under tensor or pipeline parallelism or ZeRO-3, and not on `meta`."""
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
