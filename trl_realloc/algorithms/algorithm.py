"""The protocol of an algorithm: dataflow graph, computation between calls, mini-batches, losses and metrics.

An algorithm is arithmetic on samples and uses no process group, engine or plan; `runtime.executor` calls it.
docs/algorithms.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..plan.dataflow import DataflowGraph
from .rollout import Ragged, Rollouts


class TokenLoss(Protocol):
    """The loss of one micro-batch."""

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and statistics to report.

        Args:
            outputs: differentiable outputs of the model's head: `logprobs` and `entropy` per response token of a
                policy, or `values` of a critic, a response's length + 1 each.
            samples: the micro-batch, with the columns that `mini_batches` added.

        Returns:
            A scalar to differentiate: a weighted sum over samples, whose weights do not depend on the micro-batch.
            Statistics by name, without gradients: sums over the tokens of each sample, (n,), or values of response
            tokens, (tokens,).
        """


@dataclass(frozen=True)
class TrainingLoss:
    """The loss of a training call.

    Args:
        name: name in metrics, such as `policy`.
        statistic: a key of the statistics of `of_tokens`. An optimizer step without it was skipped.
        of_tokens: loss of a micro-batch.
    """

    name: str
    statistic: str
    of_tokens: TokenLoss


class Algorithm(Protocol):
    """One reinforcement learning algorithm.

    Every rank has an equal one, and every method is deterministic: all ranks compute the same from the same samples.
    """

    @property
    def graph(self) -> DataflowGraph:
        """The calls of an iteration, and the columns that each call reads and adds."""

    def prepare(self, samples: Rollouts) -> Rollouts:
        """Add columns that the losses read but no call adds, such as advantages.

        Called once per iteration, before any role is trained, on the ranks that have the whole global batch: rank 0 and
        the first rank of each mesh that trains.

        Args:
            samples: the whole global batch, with every column that a training call reads.
        """

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """The samples of each optimizer step of iteration `step`, in order, with their weights as columns. The columns
        of `samples` stay unchanged, because a sample is sent to a rank once, and for each step only its new columns.

        Args:
            samples: the global batch after `prepare`.
        """

    def loss(self, call: str) -> TrainingLoss:
        """The loss of the training call of this name."""

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        """The metrics of one global batch after `prepare`."""

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        """The metrics of one iteration's optimizer steps.

        Args:
            steps: (mini-batch, statistics of its samples, (n,) each), for every optimizer step that was taken. The
                statistics are of every loss of the step.
        """


def training_inputs(graph: DataflowGraph) -> frozenset[str]:
    """The columns that training calls read, which `Algorithm.prepare` may read too."""
    return frozenset(column for call in graph.calls if call.trains for column in call.inputs)
