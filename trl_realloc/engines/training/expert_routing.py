"""The routers of a mixture of experts during a forward: `recorded` collects their logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..transformers_compat import routers
from .deepspeed_compat import full_shape


if TYPE_CHECKING:
    from transformers import PretrainedConfig


# families whose auxiliary loss is that of `algorithms.router_loss`, by tests that compare it with Transformers'
BALANCED_FAMILIES = frozenset({"granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})


def experts_per_token(config: PretrainedConfig) -> int:
    """The number of experts that a router chooses for a token."""
    top_k: int = config.get_text_config().num_experts_per_tok
    return top_k


def number_of_experts(model: nn.Module) -> int:
    """The number of experts among which a router of the model chooses."""
    return full_shape(routers(model)[0][0].weight)[0]


@contextlib.contextmanager
def recorded(model: nn.Module | None) -> Iterator[list[Tensor]]:
    """Context of one forward. Yields a list to which each router appends its logits, (tokens, experts), in the order of
    the layers; they are differentiable. Without a model the list stays empty.

    Activation checkpointing computes layers again in the backward, outside of the context, and appends nothing then.
    """
    logits: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        for module, index in routers(model) if model is not None else ():
            handle = module.register_forward_hook(partial(_append, logits, index))
            stack.callback(handle.remove)
        yield logits


def _append(logits: list[Tensor], index: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
    logits.append(outputs[index])
