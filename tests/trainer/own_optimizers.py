"""Optimizers as users bring them along."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Estimating(torch.optim.Optimizer):
    """Descends by a step size that it estimates from all gradients so far and keeps in its groups, as Prodigy does
    (arXiv 2306.06101)."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "d": 1e-4, "k": 0, "total": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        squares = float(sum((p.grad**2).sum() for p in weights))
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += squares / (1 + squares)
            group["d"] = 1e-4 * (1 + float(group["total"]))
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["d"])
