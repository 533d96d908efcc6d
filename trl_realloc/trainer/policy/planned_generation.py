"""`EngineGeneration`: replaces TRL's `VLLMGeneration` under a plan, and generates through `runtime.call_server`.
Completions that take several calls of the engine are in `turns`."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ...algorithms.corrections import AGES
from ...algorithms.rollout import Rollouts
from ...engines.model_configs import ModelError
from ...runtime.call_server import CallServer
from ...runtime.calls.generate_and_score import OUTCOMES
from .ahead import PromptsAhead
from .sampled_routes import SampledRoutes
from .single_candidates import SingleCandidates


Generated = tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]


class ResponseIds(list[int]):
    """The token ids of a response. `ids[-1]` tells TRL how the response ended.

    TRL takes a response as truncated if `ids[-1]` is neither an eos token nor the pad token. So `ids[-1]` is an eos
    token if the engine ended the response, by any token or rule, and -1 if the response reached its limit. Slices,
    iteration and other indices give the sampled tokens.

    Args:
        ending: value of `ids[-1]`.
    """

    def __init__(self, ids: Iterable[int], ending: int | None) -> None:
        super().__init__(ids)
        self.ending = ending

    def __getitem__(self, index: Any) -> Any:
        return self.ending if isinstance(index, int) and index == -1 else super().__getitem__(index)

    def __radd__(self, before: list[int]) -> ResponseIds:
        """The tokens of several turns, as TRL concatenates them, with the ending of the last turn."""
        return ResponseIds([*before, *self], self.ending)


_CUT_OFF = -1  # not a token id


def for_trl(prompts: Sequence[Sequence[int]], outputs: Rollouts, eos_token_id: int | None) -> Generated:
    """(prompts, responses, log-probabilities, token ids) of a generation. TRL expects a list of candidates per token;
    here it has only the sampled token, the only one whose log-probability is computed.

    Args:
        outputs: columns `responses`, `logprobs` and `has_eos`.
        eos_token_id: the tokenizer's eos token, which TRL reads too.
    """
    if not len(outputs):
        return [], [], [], []
    responses: list[list[int]] = [
        ResponseIds(row.tolist(), eos_token_id if ended else _CUT_OFF)
        for row, ended in zip(outputs.ragged("responses").rows(), outputs.tensor("has_eos").tolist(), strict=True)
    ]
    logprobs = [[[value] for value in row.tolist()] for row in outputs.ragged("logprobs").rows()]
    return [list(map(int, row)) for row in prompts], responses, logprobs, [[[id_] for id_ in row] for row in responses]


def length_limits(max_model_len: int) -> Any:
    """Stands in for vLLM's `LLM`: TRL's loop over tool calls reads from it the maximum tokens of a prompt with its
    response."""
    return SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len)))


class TurnTaking(Protocol):
    """Completions that take several turns (`turns.Turns`)."""

    def first_turns(self, prompt_ids: Sequence[Sequence[int]]) -> Rollouts | None:
        """The responses of the first turn, if all turns are drawn at once."""

    def first_of(self, ahead: Rollouts) -> Rollouts:
        """The responses of the first turn of samples that were generated ahead."""

    def refuse_use(self) -> None:
        """Raise `ConfigError` if completions are calling tools."""


class EngineGeneration:
    """Stands in for `trl.generation.vllm_generation.VLLMGeneration`, with the attributes and methods that TRL's GRPO
    and RLOO trainers use.

    Args:
        calls: runs the generation.
        max_model_len: maximum tokens of a prompt with its completion, which TRL's loop over tool calls reads.
        ahead: announces the prompts of later generations.
        turns: draws completions that do not wait for each other.
        forced: gets the log-probabilities of each generation.
        routes: gets the experts of each completion.
        eos_token_id: eos token of the policy's tokenizer.

    An attribute of TRL's class that this one does not have, such as the temperature, cannot be set either.

    Attributes:
        logprobs: sampling log-probabilities of the tokens of each response in this rank's latest call.
        ages: age in generations of the policy that sampled each token of these responses; `None` if all are current.
    """

    __slots__ = ("_prompts", "ages", "ahead", "calls", "eos_token_id", "forced", "llm", "logprobs", "routes", "turns")

    def __init__(
        self,
        calls: CallServer,
        max_model_len: int,
        ahead: PromptsAhead,
        forced: SingleCandidates,
        turns: TurnTaking,
        routes: SampledRoutes,
        eos_token_id: int | None = None,
    ) -> None:
        self.calls, self.ahead, self.forced, self.turns, self.routes = calls, ahead, forced, turns, routes
        self.llm, self.eos_token_id = length_limits(max_model_len), eos_token_id
        self._forget(None)

    def begin(self, prompts: Sequence[Any] | None) -> None:
        """A generation begins. If a user's subclass makes its completions, there are no engine log-probabilities.

        Args:
            prompts: this rank's prompts, as in the data set.
        """
        self.calls.begin_generation()
        self._forget(prompts)

    def _forget(self, prompts: Sequence[Any] | None) -> None:
        self._prompts = prompts  # until the first call, because later ones are further turns
        self.logprobs: list[torch.Tensor] = []
        self.ages: list[torch.Tensor] | None = None

    def drawn(self, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        """`logprobs` if the latest call generated completions of these lengths, otherwise no rows (a user's subclass
        may join completions of several calls).

        Args:
            lengths: tokens of this rank's completions; 0 also for a masked one.
        """
        sizes = [len(row) for row in self.logprobs]
        is_of_them = len(sizes) == len(lengths) and all(n in (0, size) for n, size in zip(lengths, sizes, strict=True))
        return self.logprobs if is_of_them else []

    def sync_weights(self) -> None:
        """Does nothing: the engines take new parameters before they generate."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int = 1,
        profiler: contextlib.AbstractContextManager[Any] | None = None,
        of: Sequence[int] | None = None,
    ) -> Generated:
        """Responses to this rank's prompts. All ranks together; a rank may have none.

        Args:
            prompts: token ids; a prompt with several responses is repeated.
            num_generations: not used, because prompts are repeated.
            profiler: a context around the generation.
            of: see `CallServer.generate`.

        Returns:
            (prompts, responses, log-probabilities, token ids) in the form of `for_trl`.

        Raises:
            ModelError: there are images.
            JobFailed: the generation failed on some rank.
        """
        if images is not None and any(images):
            raise ModelError(
                "the prompts have images, and this policy is trained and generates by the plan's engines, which take "
                "text alone; leave the columns image and images out of the dataset, or give a policy that reads images."
            )
        given, self._prompts = self._prompts, None
        announcing = contextlib.nullcontext() if given is None else self.ahead.announcing()
        with announcing, profiler or contextlib.nullcontext():
            if of is None:
                self.turns.refuse_use()
            outputs = None if given is None else self.turns.first_turns(prompts)
            if outputs is None:
                texts = _texts(given, len(prompts)) if self.calls.reads_texts else None
                outputs = self.calls.generate(prompts, texts, of=of)
                if OUTCOMES in outputs:
                    outputs = self.turns.first_of(outputs)
        self.logprobs = list(outputs.ragged("logprobs").rows()) if len(outputs) else []
        self.ages = list(outputs.ragged(AGES).rows()) if AGES in outputs else None
        self.routes.add(prompts, outputs)
        if given is not None:
            self.forced.begin_generation(self.logprobs)
        return for_trl(prompts, outputs, self.eos_token_id)


def _texts(prompts: Sequence[Any] | None, count: int) -> list[bytes]:
    """The prompts, pickled for the calls that score samples (`CallServer.generate`); `None` for each if their number
    differs from `count`, because a subclass generates in its own way."""
    texts = prompts if prompts is not None and len(prompts) == count else [None] * count
    return [pickle.dumps(text) for text in texts]
