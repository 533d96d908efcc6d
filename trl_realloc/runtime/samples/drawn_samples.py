"""`DrawnSamples`: what has been drawn of the samples that are under way, which checkpoints and changes of plan keep.
A run that goes on with them draws no token again and trains no sample twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from ...algorithms.prompt_batches import PromptBatch
from ...algorithms.rollout import Ragged
from ...engines.base import Sampling


logger = logging.get_logger(__name__)
_UNFINISHED = -1  # of `stopped` in a file


@dataclass(frozen=True)
class Drawn:
    """Tokens that have been drawn of one sample.

    Args:
        versions: of each token, the engine's version of the parameters that drew it.
        stopped: as of `engines.base.Completion`; `None` if the sample has not ended.
        seconds: in generation.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stopped: bool | None = None
    seconds: float = 0.0


@dataclass
class DrawnSamples:
    """Samples, finished or not, that have been drawn for iterations that have not been trained.

    Args:
        samples: by iteration and by index in its batch.
        checksums: of the prompts of each iteration's batch.
        update_of: by the engine's version of the parameters, the number of updates that had made them.
        sampling: how the tokens were drawn.
        next: the iteration that a loop of another library asks for first when it goes on.
    """

    samples: dict[int, dict[int, Drawn]] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    update_of: dict[int, int] = field(default_factory=dict)
    sampling: Sampling | None = None
    next: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.samples.values()))

    def add(self, other: DrawnSamples) -> None:
        """Add the samples of another rank."""
        for number, drawn in other.samples.items():
            self.samples.setdefault(number, {}).update(drawn)
        self.checksums |= other.checksums
        self.update_of |= other.update_of
        self.sampling = self.sampling or other.sampling

    def of_batch(
        self, number: int, batch: PromptBatch, versions: int, sampling: Sampling | None
    ) -> Mapping[int, Drawn]:
        """The drawn samples of an iteration, by index, without those that have tokens that would be too old.

        Args:
            batch: of the iteration. If it has other prompts, nothing of what was drawn is used.
            versions: most updates by which a token may be older than the policy that is trained on it.
            sampling: of the run. If it differs, nothing of what was drawn is used: another limit of tokens would make
                samples unfinished, or finished at the wrong place.
        """
        drawn = self.samples.get(number, {})
        if drawn and self.checksums.get(number) != checksum(batch):
            logger.warning(
                f"batch {number + 1} has other prompts than when its samples were drawn; they are drawn anew."
            )
            return {}
        if drawn and sampling != self.sampling:
            logger.warning(
                f"the samples of batch {number + 1} that were under way are drawn again, because they were drawn "
                f"otherwise: {self.sampling} then, {sampling} now."
            )
            return {}
        return {
            index: of_sample
            for index, of_sample in drawn.items()
            if all(self.update_of.get(version, -1) >= number - versions for version in set(of_sample.versions))
        }

    def to_tensors(self) -> dict[str, Any]:
        """As tensors and numbers, which `torch.load` reads with `weights_only`."""
        return {
            "samples": {number: _columns(drawn) for number, drawn in self.samples.items() if drawn},
            "checksums": self.checksums,
            "update_of": self.update_of,
            "next": self.next,
            "sampling": None if self.sampling is None else asdict(self.sampling),
        }

    @staticmethod
    def from_tensors(content: Mapping[str, Any]) -> DrawnSamples:
        """The inverse of `to_tensors`."""
        samples = {number: _drawn(columns) for number, columns in content["samples"].items()}
        sampling = None if content["sampling"] is None else Sampling(**content["sampling"])
        numbers = dict(content["checksums"]), dict(content["update_of"])
        return DrawnSamples(samples, *numbers, sampling, content.get("next", 0))


def _columns(drawn: Mapping[int, Drawn]) -> dict[str, torch.Tensor]:
    of_samples = list(drawn.values())
    return {
        "index": torch.tensor(list(drawn), dtype=torch.long),
        "lengths": torch.tensor([len(sample.token_ids) for sample in of_samples], dtype=torch.long),
        "token_ids": Ragged.of([sample.token_ids for sample in of_samples], torch.long).values,
        "logprobs": Ragged.of([sample.logprobs for sample in of_samples], torch.float64).values,
        "versions": Ragged.of([sample.versions for sample in of_samples], torch.long).values,
        "stopped": torch.tensor([_UNFINISHED if s.stopped is None else int(s.stopped) for s in of_samples]),
        "seconds": torch.tensor([sample.seconds for sample in of_samples], dtype=torch.float64),
    }


def _drawn(columns: Mapping[str, torch.Tensor]) -> dict[int, Drawn]:
    lengths = columns["lengths"]
    ragged = {name: Ragged(columns[name], lengths).rows() for name in ("token_ids", "logprobs", "versions")}
    result = {}
    for at, index in enumerate(columns["index"].tolist()):
        stopped = int(columns["stopped"][at])
        result[index] = Drawn(
            tuple(ragged["token_ids"][at].tolist()),
            tuple(ragged["logprobs"][at].tolist()),
            tuple(ragged["versions"][at].tolist()),
            None if stopped == _UNFINISHED else bool(stopped),
            float(columns["seconds"][at]),
        )
    return result


def checksum(batch: PromptBatch) -> int:
    """CRC-32 of a batch's prompts and their indices, to recognise the batch on resume."""
    return zlib.crc32(batch.prompts.only(("index", "prompts")).to_bytes())
