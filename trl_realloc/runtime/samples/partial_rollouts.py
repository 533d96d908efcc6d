"""`PartialRollouts`: finished and partial samples of batches that have not been trained. Checkpoints and changes of
plan keep them, so that a resumed run draws no token again and trains no sample twice."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    """The tokens of one sample so far; of a sample that takes several turns, those of the latest turn.

    Args:
        versions: the engine's parameter version for each token.
        stopped: `Completion.stopped`; `None` if the sample or the turn has not ended.
        seconds: time in generation.
        routes: `Completion.routes`.
        prompt_ids: the prompt of a turn.
        before: the sample's earlier turns.
        results: what the sample's tools have returned, by number of the call.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stopped: bool | None = None
    seconds: float = 0.0
    routes: Routes | None = field(default=None, compare=False)
    prompt_ids: tuple[int, ...] = ()
    before: tuple[Drawn, ...] = ()
    results: Mapping[int, str] = field(default_factory=dict)

    @property
    def turns(self) -> tuple[Drawn, ...]:
        """All turns of the sample so far."""
        return (*self.before, self)


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
            if all(
                self.update_of.get(version, -1) >= number - versions
                for version in {version for turn in sample.turns for version in turn.versions}
            )
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
    partial_rollouts = [turn for sample in samples_by_index.values() for turn in sample.turns]
    recorded = next((sample.routes for sample in partial_rollouts if sample.routes is not None), None)
    routes: dict[str, torch.Tensor] = {}
    if recorded is not None:
        parts = [recorded[:0] if sample.routes is None else sample.routes for sample in partial_rollouts]
        column = Ragged.of(map(torch.from_numpy, parts), torch.from_numpy(recorded).dtype)
        routes = {"routes": column.values, "route_lengths": column.lengths}
    return {
        **routes,
        **_of_turns(samples_by_index),
        "index": torch.tensor([i for i, sample in samples_by_index.items() for _ in sample.turns], dtype=torch.long),
        "lengths": torch.tensor([len(sample.token_ids) for sample in partial_rollouts], dtype=torch.long),
        "token_ids": Ragged.of([sample.token_ids for sample in partial_rollouts], torch.long).values,
        "logprobs": Ragged.of([sample.logprobs for sample in partial_rollouts], torch.float64).values,
        "versions": Ragged.of([sample.versions for sample in partial_rollouts], torch.long).values,
        "stopped": torch.tensor([_UNFINISHED if s.stopped is None else int(s.stopped) for s in partial_rollouts]),
        "seconds": torch.tensor([sample.seconds for sample in partial_rollouts], dtype=torch.float64),
    }


def _of_turns(samples_by_index: Mapping[int, Drawn]) -> dict[str, torch.Tensor]:
    """The columns of samples that take turns, whose rows are turns: their prompts, and on the row of a sample's latest
    turn its results as UTF-8 of JSON."""
    turns = [(turn, sample) for sample in samples_by_index.values() for turn in sample.turns]
    if not any(turn.prompt_ids for turn, _ in turns):
        return {}
    prompts = Ragged.of([turn.prompt_ids for turn, _ in turns], torch.long)
    texts = [json.dumps(list(sample.results.items())) if turn is sample else "" for turn, sample in turns]
    results = Ragged.of([list(text.encode()) for text in texts], torch.uint8)
    columns = {"prompt_ids": prompts.values, "prompt_lengths": prompts.lengths}
    return {**columns, "results": results.values, "result_lengths": results.lengths}


def _drawn(columns: Mapping[str, torch.Tensor]) -> dict[int, Drawn]:
    lengths = columns["lengths"]
    ragged = {name: Ragged(columns[name], lengths).rows() for name in ("token_ids", "logprobs", "versions")}
    routes: list[Routes | None] = [None] * len(lengths)
    if "routes" in columns:
        rows = Ragged(columns["routes"], columns["route_lengths"]).rows()
        routes = [part.numpy() if len(part) else None for part in rows]
    prompts: Sequence[torch.Tensor] = [torch.empty(0)] * len(lengths)
    results: Sequence[torch.Tensor] = prompts
    if "prompt_ids" in columns:
        prompts = Ragged(columns["prompt_ids"], columns["prompt_lengths"]).rows()
        results = Ragged(columns["results"], columns["result_lengths"]).rows()
    result: dict[int, Drawn] = {}
    for row, index in enumerate(columns["index"].tolist()):
        stopped = int(columns["stopped"][row])
        before = result[index].turns if index in result else ()
        result[index] = Drawn(
            tuple(ragged["token_ids"][row].tolist()),
            tuple(ragged["logprobs"][row].tolist()),
            tuple(ragged["versions"][row].tolist()),
            None if stopped == _UNFINISHED else bool(stopped),
            float(columns["seconds"][row]),
            routes[row],
            tuple(prompts[row].tolist()),
            tuple(replace(turn, before=()) for turn in before),
            dict(json.loads(bytes(results[row].tolist()) or b"[]")),
        )
    return result


def checksum(batch: PromptBatch) -> int:
    """CRC-32 of a batch's prompts and their indices, to recognise the batch on resume."""
    return zlib.crc32(batch.prompts.only(("index", "prompts")).to_bytes())
