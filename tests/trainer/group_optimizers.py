"""Optimizers that keep numbers of their own in their parameter groups: one as Prodigy does, one as Apex's FusedAdam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Adapting(torch.optim.Optimizer):
    """Prodigy in small. Each group has a step size `d`, which grows with sums over the gradients of all parameters, a
    count `k` of steps, and one of these sums (`numerator`, a 0-dimensional tensor).

    Args:
        growth: the most that `d` grows by in a step.
    """

    def __init__(self, params: Any, lr: float = 1.0, d: float = 1e-3, growth: float = 1.25) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.99), "d": d, "k": 0, "numerator": torch.zeros(()), "growth": growth}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm()  # fails on none
        for group in self.param_groups:
            group["numerator"] = 0.9 * group["numerator"] + norm.float().cpu()
            group["d"] = min(group["growth"] * group["d"], group["d"] + 1e-3 * float(group["numerator"]))
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["betas"][0])
                    p -= group["lr"] * group["d"] * average / (1 - 0.9 ** group["k"])


class Counting(torch.optim.Optimizer):
    """Adam's first moment, with the count of steps in the group, where the first step puts it. A group without
    parameters has none."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    average.lerp_(p.grad, 0.1)
                    p -= group["lr"] * average / (1 - 0.9 ** group["step"])
