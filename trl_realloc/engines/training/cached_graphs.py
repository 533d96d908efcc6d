"""The autograd graph of a scoring forward. Training on the same samples with the same parameters begins with its
backward: GRPO's old log-probabilities and PPO's values are outputs of the forward that the first optimizer step would
compute again. `runtime/calls/generate_and_score` decides which calls keep their graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from ...algorithms.rollout import Ragged, Rollouts, token_keys
from ..device import has_room, is_accelerator
from .packed_row import PackedRow


# A backward takes twice as long as a forward. If the trained samples have a smaller share of a graph's tokens than
# this, a new forward and backward of them cost less than the graph's backward.
MIN_USED = 2 / 3
MIN_FREE = 1 / 4  # least share of the host's memory that must be free to keep a graph there


class CachedGraphs:
    """The outputs of micro-batches with their graphs; empty at first."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Rollouts, Mapping[str, Ragged]]] = []
        self.tokens = 0  # computed tokens of the kept outputs

    def run(
        self,
        head: Callable[[Rollouts, PackedRow | None], Mapping[str, Ragged]],
        samples: Rollouts,
        row: PackedRow | None,
        device: torch.device,
    ) -> Mapping[str, Ragged]:
        """The head's outputs for one micro-batch, without gradients, on the device. They are kept with their graph,
        unless too little memory is left.

        Args:
            samples: samples on the CPU, with `index`, `prompts` and `responses`.
            row: row of the samples if they share tokens.
        """
        before = _allocated(device)
        with torch.enable_grad():
            outputs = head(samples.to(device), row)
        if _has_room(device, before):
            self._micro_batches.append((samples, outputs))
            self.tokens += samples.tokens if row is None else row.tokens
        return {name: column.like(column.values.detach()) for name, column in outputs.items()}

    def take(self, samples: Rollouts) -> list[tuple[list[int], Mapping[str, Ragged]]]:
        """The kept outputs that are worth a backward for these samples. Nothing is kept afterwards.

        Args:
            samples: samples on the CPU, with `prompts` and `responses`.

        Returns:
            For each such micro-batch the positions of its samples, and their outputs with the graph. No position is in
            two of them.
        """
        graphs = self._micro_batches
        self.forget()
        keys, taken = token_keys(samples), list[tuple[list[int], Mapping[str, Ragged]]]()
        left = dict.fromkeys(range(len(keys))) if graphs else {}
        for batch, outputs in graphs:
            row_of = {key: row for row, key in enumerate(token_keys(batch))}
            positions = [position for position in left if keys[position] in row_of]
            if not positions or samples.select(positions).tokens < MIN_USED * batch.tokens:
                continue
            rows = [row_of[keys[position]] for position in positions]
            taken.append((positions, {name: column.select(rows) for name, column in outputs.items()}))
            for position in positions:
                del left[position]
        return taken

    def forget(self) -> None:
        """Free the graphs, because the parameters change or no training on them follows."""
        self._micro_batches, self.tokens = [], 0


def _has_room(device: torch.device, before: int) -> bool:
    """True if there is memory to keep a graph while other calls run. `before` is the accelerator's allocated memory
    without it."""
    if is_accelerator(device):
        return has_room(device, _allocated(device) - before)
    memory = psutil.virtual_memory()
    return bool(memory.available >= MIN_FREE * memory.total)


def _allocated(device: torch.device) -> int:
    memory: Any = torch.get_device_module(device) if is_accelerator(device) else None
    return 0 if memory is None else int(memory.memory_allocated(device))
