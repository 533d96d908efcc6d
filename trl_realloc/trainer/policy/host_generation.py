"""`HostGeneration`: stands in the place of TRL's `VLLMGeneration` and generates by the plan's engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ...algorithms.rollout import Rollouts
from ...engines.model_configs import ModelError
from ...runtime.host_calls import HostCalls


class Scoring(Protocol):
    """Scores samples while others are generated."""

    def prompts_of(self, count: int) -> list[bytes]:
        """This rank's prompts in order, as the calls that score samples read them (`HostCalls.generate`)."""

    def follow(self, prompts: Sequence[Sequence[int]]) -> Callable[[int, Rollouts], None] | None:
        """The function to call when a sample ends (`HostCalls.generate`); `None` if there is none."""


class HostGeneration:
    """Stands in for `trl.generation.vllm_generation.VLLMGeneration`, with the attributes and methods that TRL's GRPO
    and RLOO trainers use.

    Args:
        calls: runs the generation.
        scoring: scores samples while others are generated.
        max_model_len: most tokens of a prompt and its response, which TRL's loop over tool calls reads.

    An attribute of TRL's class that this one does not have, such as the temperature, cannot be set either.

    Attributes:
        logprobs: for each of this rank's latest responses, the log-probabilities of its tokens when they were drawn.
    """

    __slots__ = ("calls", "llm", "logprobs", "scoring")

    def __init__(self, calls: HostCalls, max_model_len: int, scoring: Scoring) -> None:
        self.calls, self.scoring = calls, scoring
        self.logprobs: list[torch.Tensor] = []
        config = SimpleNamespace(max_model_len=max_model_len)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))

    def sync_weights(self) -> None:
        """Does nothing: the engines take new parameters before they generate, if there are any."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int = 1,
        profiler: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Responses to this rank's prompts. All ranks together; a rank may have none.

        Args:
            prompts: token ids; a prompt with several responses is given several times.
            num_generations: not used, for that reason.
            profiler: a context around the generation.

        Returns:
            (prompts, responses, log-probabilities, token ids): of each token TRL expects a list, here of the one token
            that was drawn.

        Raises:
            ModelError: there are images.
            JobFailed: the generation failed on some rank.
        """
        if images is not None and any(images):
            raise ModelError(
                "the prompts have images, and this policy is trained and generates by the plan's engines, which take "
                "text alone; leave the columns image and images out of the dataset, or give a policy that reads images."
            )
        with profiler or contextlib.nullcontext():
            texts = self.scoring.prompts_of(len(prompts)) if self.calls.reads_texts else None
            outputs = self.calls.generate(prompts, texts, self.scoring.follow(prompts))
        self.logprobs = list(outputs.ragged("logprobs").rows()) if len(outputs) else []
        if not len(outputs):
            return [], [], [], []
        responses = [row.tolist() for row in outputs.ragged("responses").rows()]
        logprobs = [[[value] for value in row.tolist()] for row in self.logprobs]
        return list(map(list, prompts)), responses, logprobs, [[[token] for token in row] for row in responses]
