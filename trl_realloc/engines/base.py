"""What every engine promises, and the small values that cross its border.

An engine executes one role's calls on one device mesh. This file owns the protocols; who builds which engine, and
when it is resident, is `runtime.placement`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable


if TYPE_CHECKING:
    import torch

    from ..algorithms.base import TokenLoss
    from ..algorithms.rollout import Ragged, Rollouts


# One bucket of parameters in checkpoint (Hugging Face) names: full tensors, any device, in the model's own dtype.
Bucket = Sequence[tuple[str, "torch.Tensor"]]


# What a process holds of a model: for each parameter, by the module's own name, boxes (half-open intervals of indices,
# one per dimension) with a live tensor of exactly that box.
Parts = Mapping[str, Sequence[tuple[tuple[tuple[int, int], ...], "torch.Tensor"]]]


# What an optimizer is set to before a step: one learning rate, or the settings of each group of the user's optimizer.
# The groups of a role's optimizer, which are some of the user's, have their number among those under `GROUP`.
Rate = float | Sequence[Mapping[str, Any]]
GROUP = "given_group"


class EngineError(RuntimeError):
    """An engine could not do its call. The message names the call, the rank and what to do."""


class EngineDied(EngineError):
    """The process behind an engine ended or stopped answering while it was needed."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: by `temperature` from the whole vocabulary, as PPO's ratio demands.

    Args:
        max_tokens: most response tokens, the stop token included.
        temperature: logits are divided by this; greater than 0.
        stop_token_id: the token that ends a response (and is part of it), or `None` for always `max_tokens` tokens.
    """

    max_tokens: int
    temperature: float
    stop_token_id: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue. `index` is its place in the global batch; `seed` fixes its random draws."""

    index: int
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One finished response: `token_ids` with the stop token if it `stopped`, and each token's `logprobs`, natural
    logarithms under the distribution that was sampled from (after temperature)."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


@runtime_checkable
class GenerationEngine(Protocol):
    """Continues prompts. `version` is that of the weights it holds, -1 before the first `load`."""

    version: int

    def load(self, buckets: Iterable[Bucket], version: int) -> None:
        """Take the actor's parameters, bucket by bucket; `version` is set only after the last one."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as they finish, in any order. Raises `EngineDied`."""

    def close(self) -> None:
        """End the engine and everything it started. May be called twice."""


@runtime_checkable
class ScoringEngine(Protocol):
    """Runs a role's forward. Every rank of the engine's mesh calls it together."""

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> Ragged:
        """This rank's samples through the role's head: one value per token or one per sample, on the CPU, float32."""

    def close(self) -> None: ...


@runtime_checkable
class TrainingEngine(ScoringEngine, Protocol):
    """A role that learns. `version` counts its optimizer steps."""

    version: int

    def train(
        self,
        samples: Rollouts,
        loss: TokenLoss,
        micro_batch_tokens: int,
        learning_rate: Rate,
    ) -> Mapping[str, float]:
        """One optimizer step over this rank's share of one mini-batch; statistics summed over the mesh."""

    def parts(self) -> Parts:
        """What training changes of this process's parameters, live; for reallocations to read and to fill."""

    def export(self) -> Iterator[Bucket]:
        """The parameters as full tensors in checkpoint names. Collective over the mesh: all ranks iterate."""

    def state_dict(self) -> dict[str, object]:
        """Weights and optimizer state by parameter name, whatever the layout. Collective; full on the first rank."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """The inverse of `state_dict`, under this or another layout."""
