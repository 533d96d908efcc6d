"""What the executor asks of an algorithm: its dataflow graph, what is computed between calls, mini-batches, losses and
metrics.

An algorithm is arithmetic on samples. It knows no process group, no engine and no plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..plan.dataflow import DataflowGraph
from .rollout import Ragged, Rollouts


class TokenLoss(Protocol):
    """A loss of one micro-batch: the weighted sum to differentiate, and (n,) sums per sample to report."""

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True)
class TrainingLoss:
    """The loss of a call that trains.

    Args:
        name: for metrics, such as `policy`.
        statistic: a key of the statistics that the loss returns in every optimizer step that is taken.
        of_tokens: the loss itself.
    """

    name: str
    statistic: str
    of_tokens: TokenLoss


class Algorithm(Protocol):
    """One reinforcement learning algorithm. The same on every rank; every method is deterministic, so all ranks compute
    the same from the same samples."""

    @property
    def graph(self) -> DataflowGraph:
        """The calls of an iteration, and the columns that each reads and makes."""

    def prepare(self, samples: Rollouts) -> Rollouts:
        """Add the columns that the losses read and no call makes, such as advantages.

        Called once per iteration on each rank that trains, with the whole global batch and every column that a call
        that trains reads; before any role is trained.
        """

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """The samples of each optimizer step of iteration `step` in order, with their weights as columns.

        Args:
            samples: the global batch after `prepare`.
        """

    def loss(self, call: str) -> TrainingLoss:
        """The loss of a call that trains, by the call's name."""

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        """The metrics of one global batch after `prepare`."""

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        """The metrics of one iteration's optimizer steps.

        Args:
            steps: each mini-batch, and the statistics of its samples, (n,) each, of every loss that was stepped with.
        """


def training_inputs(graph: DataflowGraph) -> frozenset[str]:
    """The columns that the calls that train read: `Algorithm.prepare` may read these."""
    return frozenset(column for call in graph.calls if call.trains for column in call.inputs)
