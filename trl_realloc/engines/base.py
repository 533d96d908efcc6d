"""The protocols of the engines that generate, score and train, and the values that their methods take and return.

The engines themselves are in `training` and `generation`. The plan says which engine runs a call;
`runtime/placement/engine_builder` builds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable


if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..algorithms.algorithm import TokenLoss
    from ..algorithms.rollout import Ragged, Rollouts
    from ..realloc.transfer import Parts
    from .parameter_pieces import Piece
    from .training.packed_forward import RoleHead
    from .training_state import StateSpecs, TensorSpec, TrainingState


# Parameters of one bucket under checkpoint (Hugging Face) names: full tensors on any device, in the model's dtype.
Bucket = Sequence[tuple[str, "torch.Tensor"]]
BUCKET_BYTES = 256 << 20  # bytes of a bucket, unless a caller of `export` asks for others

# The optimizer's settings for one step: one learning rate, or a mapping of settings for each parameter group of the
# user's optimizer. Each group of a role's optimizer holds the number of the user's group that it comes from under
# `GROUP`.
Rate = float | Sequence[Mapping[str, Any]]
GROUP = "given_group"


class EngineError(RuntimeError):
    """An engine could not run its call. The message names the call, the rank and the remedy."""


class EngineDied(EngineError):
    """An engine's process ended or stopped answering during a call."""


@dataclass(frozen=True)
class Support:
    """Rules for which tokens of a vocabulary may be drawn, in the order in which they exclude tokens: min-p, top-k,
    top-p, as fields of `Sampling`."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """Settings that tokens are drawn with. The defaults draw from the whole vocabulary, as PPO does.

    The distribution of a token is made in vLLM's order: `regex` excludes tokens, the repetition penalty changes logits,
    they are divided by the temperature, and min-p, top-k and top-p exclude tokens; the probabilities of those that stay
    sum to 1. Transformers' own `generate` applies min-p after top-p, so it keeps other tokens where both are set.

    For importance ratios: a `Completion` has the log-probabilities under this distribution (`processed_logprobs` of
    vLLM, as TRL asks for). A training engine's are of the same `support`, after temperature. It does not follow a
    regular expression, penalties and `extra`: where these exclude tokens, an engine's log-probability is greater by
    minus the logarithm of the probability of the tokens that stayed, so a ratio of the two is biased (TRL's issue
    6789).

    Args:
        max_tokens: most response tokens, the stop token and those that a request has `begun` with included.
        temperature: logits are divided by this; greater than 0.
        stop_token_ids: a response ends with any of these tokens, which is its last; empty for responses of `max_tokens`
            tokens.
        top_p: keep the most probable tokens, as many as have this probability together; in (0, 1].
        top_k: keep this number of most probable tokens; 0 keeps all.
        min_p: keep tokens that have this share of the greatest probability; in [0, 1].
        repetition_penalty: positive logits of tokens that are in the prompt or in the response so far are divided by
            this, negative ones multiplied; greater than 0.
        regex: the response's text matches this regular expression (vLLM's structured outputs). The tokenizer's eos
            token ends a response too. vLLM only, and only an engine that has a tokenizer.
        extra: further arguments of vLLM's `SamplingParams`. vLLM only; checked by `generation/sampling_checks`.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    regex: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def support(self) -> Support | None:
        """The rules that exclude tokens by their probability alone; `None` if none does."""
        support = Support(self.top_p, self.top_k, self.min_p)
        return None if support == Support() else support

    def limit_of(self, request: GenerationRequest) -> int:
        """Most response tokens of this request."""
        return self.max_tokens if request.max_tokens is None else request.max_tokens


class Updates(StrEnum):
    """The effect of a `load` on a running generation."""

    END = "end"  # ends it
    KEEP = "keep"  # decoding goes on, with the keys and values that the parameters before have computed
    RECOMPUTE = "recompute"  # decoding goes on, after all keys and values have been computed again


@dataclass(frozen=True)
class Unfinished:
    """A response before its end: it has been withdrawn, or is still being generated (`Generation.peek`).

    Args:
        index: of its request.
        token_ids: all tokens that have been drawn, also those that earlier engines had drawn.
        logprobs: of each token, as in `Completion`.
        versions: of each token, as in `Completion`.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Args:
        index: in the global batch.
        seed: determines the response's random draws.
        begun: the tokens that another engine has already drawn; the generation goes on after them.
        max_tokens: most response tokens of this request, at most those of the `Sampling`; `None` for those.
    """

    index: int
    prompt_ids: tuple[int, ...]
    seed: int
    begun: Unfinished | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """One finished response.

    Args:
        index: of its request.
        token_ids: with the stop token, if it `stopped`, and with those that the request had `begun` with.
        logprobs: of each token, natural logarithms, under the distribution that it was drawn from (`Sampling`).
        stopped: whether it ended with a stop token, or by a rule of `Sampling.regex` or `extra`; otherwise its limit of
            tokens ended it.
        versions: of the parameters that each token was drawn with: the engine's `version` at that time.
        cached_tokens: tokens of the prompt, with those that the request had `begun` with, whose keys and values the
            engine found in its cache; it did not compute these.
        ended_at: when it ended, seconds of `time.time`, where the engine tells.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    versions: tuple[int, ...]
    cached_tokens: int = field(default=0, compare=False)
    ended_at: float | None = field(default=None, compare=False)


@runtime_checkable
class GenerationEngine(Protocol):
    """Generates responses to prompts.

    Attributes:
        version: of the actor's parameters that the engine has; -1 before the first `load`, and after one that failed.
    """

    version: int

    def load(self, buckets: Iterable[Bucket], version: int) -> None:
        """Take the actor's parameters, bucket by bucket. `version` is set after the last bucket. An engine that
        generates with a training engine's own model sets `version` alone and reads no bucket.

        Raises:
            EngineError: the parameters are not those of the engine's model.
            EngineDied: the engine's process ended.
        """

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> Iterator[Completion]:
        """Yield one completion for each request as it finishes, in any order. The tokens depend on the request and on
        the parameters alone, not on the other requests.

        Raises:
            EngineError: a request cannot be served, or there are no parameters to serve it with.
            EngineDied: the engine's process ended.
        """

    def narrower(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """The parameters among these that the engine holds in a narrower dtype, with that dtype. A sender may cast them
        before it sends them."""

    def sleep(self) -> None:
        """Give the device memory that the engine takes back until its next use, if the plan says so. The parameters may
        be lost, and `version` is -1 then."""

    def close(self) -> None:
        """End the engine and all processes that it started. May be called twice."""


class Generation(Protocol):
    """A generation that runs in the background, in the engine's process. Only the thread that started it uses it."""

    @property
    def unfinished(self) -> int:
        """The number of requests that have neither finished nor been withdrawn. A request has finished when `poll` has
        returned its completion."""

    @property
    def ended_at(self) -> float:
        """When the latest sample ended that `poll` or `withdraw` has heard of: seconds since the epoch, by the clock of
        the engine's process, which is on this host. The generation's start before any."""

    def poll(self, timeout_s: float) -> list[Completion]:
        """The responses that have finished since the last call. Waits at most `timeout_s` seconds for the first, and
        not at all if no request is unfinished.

        Raises:
            EngineError: the generation has been closed, by `close` or by a later call of the engine.
            EngineDied: the engine's process ended.
        """

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Generate for more requests, also after all others have finished.

        Raises:
            EngineError: a request cannot be served, or its index is that of an unfinished request; or as for `poll`.
            EngineDied: the engine's process ended.
        """

    def withdraw(self, indices: Collection[int], least_tokens: int = 1) -> list[Unfinished]:
        """Stop these requests between two decode steps.

        Args:
            indices: of requests. Those that have finished meanwhile are left out, because they come out of `poll`, and
                so are those that are not in this generation.
            least_tokens: requests that have fewer tokens left until their limit go on.

        Returns:
            What each withdrawn request has drawn so far. It has no tokens if its decoding has not begun.

        Raises:
            EngineError, EngineDied: as for `poll`.
        """

    def peek(self) -> list[Unfinished]:
        """The tokens that every unfinished request has drawn so far, read between two decode steps without stopping
        any. Finished requests are left out, because they come out of `poll`.

        Raises:
            EngineError, EngineDied: as for `poll`.
        """

    def close(self) -> None:
        """End the generation. Requests that are unfinished are aborted. May be called twice. The engine can then load,
        generate or sleep."""


# mean number of samples in a decode step, mean number of cached tokens of a sample, mean seconds of a step
DecodeStep = tuple[float, float, float]


@runtime_checkable
class BackgroundEngine(GenerationEngine, Protocol):
    """An engine that can generate in the background.

    Attributes:
        stopped_s: for how long the last `load` stopped a generation, in seconds: from the end of the last decode step
            before it to its own end, after which the next step begins. 0 if no request was being generated.
    """

    stopped_s: float

    @property
    def decode_steps(self) -> Sequence[DecodeStep]:
        """Seconds of the decode steps of the latest closed generation, by the number of samples in them; empty before
        the first."""

    def start(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, updates: Updates = Updates.END
    ) -> Generation:
        """Begin to generate. The next `generate`, `start` or `sleep` closes the generation, and so does the next
        `load` with `Updates.END`.

        Otherwise a `load` leaves it open. The engine decodes until the first bucket has arrived, and again from the
        last one on: all tokens drawn then are of the new version. A `load` that fails closes the generation.

        Args:
            requests: may be empty, for an engine that takes the samples of others (`Generation.add`).
            updates: what a `load` does to the generation.

        Raises:
            EngineError, EngineDied: as for `generate`.
        """


@runtime_checkable
class ScoringEngine(Protocol):
    """Runs the forward of one model on a mesh. Every rank of the mesh calls each method, with the same arguments but
    for the samples.

    Attributes:
        version: number of optimizer steps that made the parameters, -1 while they are not complete. A reallocation
            that fills the parameters sets it.
    """

    version: int

    @property
    def head(self) -> RoleHead:
        """The module that computes the role's outputs; `head.model` is this rank's part of the Transformers model."""

    @property
    def parameter_specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of each of the whole model's parameters, also of those on other ranks, in the model's
        order."""

    @property
    def has_replicas(self) -> bool:
        """True if several ranks of the mesh may have the same part of a parameter."""

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> Mapping[str, Ragged]:
        """The head's outputs for this rank's samples, without gradients and without dropout.

        Args:
            samples: with the columns `index`, `prompts` and `responses`.
            micro_batch_tokens: most tokens of one forward; a longer sample is a micro-batch by itself.

        Returns:
            By name (`logprobs` and `entropy`, `values`, or `scores`), float32 on the CPU, in the order of the samples;
            an empty mapping where this rank has no samples.
        """

    def parts(self) -> Parts:
        """This rank's parts of the parameters that training changes, or of all parameters of a frozen model. The
        tensors are live and stay the same for the engine's life: a reallocation reads and writes them."""

    def export(
        self, bucket_bytes: int = ..., *, merged: bool = True, names: Collection[str] | None = None
    ) -> Iterator[Bucket]:
        """The parameters as full tensors in buckets of about `bucket_bytes`. They may be live: a receiver copies what
        it keeps. Collective: every rank of the mesh iterates to the end. The mesh's first rank gets every tensor;
        another rank gets every tensor too, or empty buckets.

        Args:
            merged: under checkpoint names, with adapters merged into the weights that they adapt. Otherwise under the
                module's own names, with the adapters as parameters of their own.
            names: without `merged`, the parameters to export; `None` for all.
        """

    def close(self) -> None:
        """Free what the engine holds in libraries. May be called twice."""


@runtime_checkable
class TrainingEngine(ScoringEngine, Protocol):
    """A scoring engine with an optimizer. `version` is the number of its optimizer steps.

    Attributes:
        grad_norm: L2 norm of the whole model's gradient in the latest `train`, before it was clipped; the same on every
            rank of the mesh. `nan` before the first step. Of a step that was refused or skipped it is not finite.
    """

    grad_norm: float

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> Mapping[str, Tensor]:
        """Take one optimizer step on one mini-batch, of which `samples` are this rank's share.

        Args:
            loss: from the head's outputs and a micro-batch to a loss that is summed over all micro-batches of the
                mesh, and to statistics of its samples.
            micro_batch_tokens: most tokens of one forward.

        Returns:
            Each statistic float32 on the CPU, in the order of the samples: (n,), or of response tokens (tokens,).

        Raises:
            NonFiniteError: the gradients are not finite; on every rank of the mesh. The step was not taken.
        """

    def add_gradients(self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int) -> Mapping[str, Tensor]:
        """Compute gradients of the mini-batch that the next `train` steps on, which adds those of its own samples.

        Args:
            samples, loss, micro_batch_tokens: as of `train`.

        Returns:
            What `train` returns.
        """

    def drop(self) -> None:
        """Forget the gradients that `add_gradients` or an interrupted `train` has left. Collective over the mesh."""

    def pieces(self, piece_bytes: int, names: Collection[str] | None = None) -> Iterator[Sequence[Piece]]:
        """The parameters for files: each element once on the mesh's first rank, tensor by tensor or a few at a time;
        other ranks may get none. Of a parameter that is divided into ranges the first rank holds some `piece_bytes` of
        another rank's at a time, otherwise all of it. Collective, as `export` is.

        Args:
            names: the parameters, by the module's names; `None` for all.
        """

    def training_state(self) -> TrainingState:
        """This rank's part of the training state. The tensors are live. Not collective."""

    def loading(self, specs: StateSpecs) -> AbstractContextManager[TrainingState]:
        """Inside the context, this rank's part of the training state can be filled with another one: the cells of its
        tensors in place, `version`, `scalars`, `group_numbers` and `scaler` by assignment. At the end the engine takes
        it over, which is collective over the mesh.

        Args:
            specs: the tensors of the whole state, the same on every rank.

        Raises:
            EngineError: the state is of another model.
        """


@runtime_checkable
class InPlaceEngine(Protocol):
    """An engine that can lend its model, with all its parameters, for generation in place."""

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """The Transformers model with full parameters inside the context, in evaluation mode. Entering it is collective
        over the mesh; a forward inside is not."""
