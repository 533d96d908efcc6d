"""`PartialRollouts`: finished and partial samples of batches that have not been trained. Checkpoints and changes of
plan keep them, so that a resumed run draws no token again and trains no sample twice."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Ragged
from ...engines.requests import Sampling


if TYPE_CHECKING:
    from ...engines.requests import Routes

logger = logging.get_logger(__name__)
_UNFINISHED = -1  # value of `stopped` in a file


@dataclass(frozen=True)
class Drawn:
    """The tokens of one sample so far.

    Args:
        versions: the engine's parameter version for each token.
        stopped: `Completion.stopped`; `None` if the sample has not ended.
        seconds: time in generation.
        routes: `Completion.routes`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stopped: bool | None = None
    seconds: float = 0.0
    routes: Routes | None = field(default=None, compare=False)


@dataclass
class PartialRollouts:
    """Finished and partial samples of iterations that have not been trained.

    Args:
        samples: samples by iteration and by index in its batch.
        checksums: checksum of the prompts of each iteration's batch.
        update_of: number of optimizer updates behind each of the engine's parameter versions.
        next: the first iteration that another library's loop asks for on resume.
    """

    samples: dict[int, dict[int, Drawn]] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    update_of: dict[int, int] = field(default_factory=dict)
    sampling: Sampling | None = None
    next: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.samples.values()))

    def add(self, other: PartialRollouts) -> None:
        """Add the samples of another rank."""
        for number, samples in other.samples.items():
            self.samples.setdefault(number, {}).update(samples)
        self.checksums |= other.checksums
        self.update_of |= other.update_of
        self.sampling = self.sampling or other.sampling

    def for_batch(
        self, number: int, batch: PromptBatch, versions: int, sampling: Sampling | None
    ) -> Mapping[int, Drawn]:
        """The samples of an iteration, by index, except samples with tokens that would be too old.

        Args:
            batch: the iteration's batch. If its prompts have changed, no sample is used.
            versions: maximum age, in updates, of a token relative to the trained policy.
            sampling: the run's sampling. If it has changed, no sample is used: with another token limit, finished
                samples would be unfinished, or finished at the wrong place.
        """
        samples = self.samples.get(number, {})
        if samples and self.checksums.get(number) != checksum(batch):
            logger.warning(f"the prompts of batch {number + 1} have changed; its samples are generated again.")
            return {}
        if samples and sampling != self.sampling:
            logger.warning(
                f"the sampling changed from {self.sampling} to {sampling}; unfinished samples of batch {number + 1} "
                f"are generated again."
            )
            return {}
        return {
            index: sample
            for index, sample in samples.items()
            if all(self.update_of.get(version, -1) >= number - versions for version in set(sample.versions))
        }

    def to_tensors(self) -> dict[str, Any]:
        """Tensors and numbers that `torch.load` reads with `weights_only`."""
        return {
            "samples": {number: _columns(samples) for number, samples in self.samples.items() if samples},
            "checksums": self.checksums,
            "update_of": self.update_of,
            "next": self.next,
            "sampling": None if self.sampling is None else asdict(self.sampling),
        }

    @staticmethod
    def from_tensors(content: Mapping[str, Any]) -> PartialRollouts:
        """The inverse of `to_tensors`."""
        samples = {number: _drawn(columns) for number, columns in content["samples"].items()}
        sampling = None if content["sampling"] is None else Sampling(**content["sampling"])
        numbers = dict(content["checksums"]), dict(content["update_of"])
        return PartialRollouts(samples, *numbers, sampling, content.get("next", 0))


def _columns(samples_by_index: Mapping[int, Drawn]) -> dict[str, torch.Tensor]:
    partial_rollouts = list(samples_by_index.values())
    recorded = next((sample.routes for sample in partial_rollouts if sample.routes is not None), None)
    routes: dict[str, torch.Tensor] = {}
    if recorded is not None:
        parts = [recorded[:0] if sample.routes is None else sample.routes for sample in partial_rollouts]
        column = Ragged.of(map(torch.from_numpy, parts), torch.from_numpy(recorded).dtype)
        routes = {"routes": column.values, "route_lengths": column.lengths}
    return {
        **routes,
        "index": torch.tensor(list(samples_by_index), dtype=torch.long),
        "lengths": torch.tensor([len(sample.token_ids) for sample in partial_rollouts], dtype=torch.long),
        "token_ids": Ragged.of([sample.token_ids for sample in partial_rollouts], torch.long).values,
        "logprobs": Ragged.of([sample.logprobs for sample in partial_rollouts], torch.float64).values,
        "versions": Ragged.of([sample.versions for sample in partial_rollouts], torch.long).values,
        "stopped": torch.tensor([_UNFINISHED if s.stopped is None else int(s.stopped) for s in partial_rollouts]),
        "seconds": torch.tensor([sample.seconds for sample in partial_rollouts], dtype=torch.float64),
    }


def _drawn(columns: Mapping[str, torch.Tensor]) -> dict[int, Drawn]:
    lengths = columns["lengths"]
    ragged = {name: Ragged(columns[name], lengths).rows() for name in ("token_ids", "logprobs", "versions")}
    routes: list[Routes | None] = [None] * len(lengths)
    if "routes" in columns:
        rows = Ragged(columns["routes"], columns["route_lengths"]).rows()
        routes = [part.numpy() if len(part) else None for part in rows]
    result = {}
    for row, index in enumerate(columns["index"].tolist()):
        stopped = int(columns["stopped"][row])
        result[index] = Drawn(
            tuple(ragged["token_ids"][row].tolist()),
            tuple(ragged["logprobs"][row].tolist()),
            tuple(ragged["versions"][row].tolist()),
            None if stopped == _UNFINISHED else bool(stopped),
            float(columns["seconds"][row]),
            routes[row],
        )
    return result


def checksum(batch: PromptBatch) -> int:
    """CRC-32 of a batch's prompts and their indices, to recognise the batch on resume."""
    return zlib.crc32(batch.prompts.only(("index", "prompts")).to_bytes())
