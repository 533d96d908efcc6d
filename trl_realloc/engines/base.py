"""The protocols of the engines that generate, score and train, and the values that their methods take and return.
Those of a generation are in `requests`.

The engines themselves are in `training` and `generation`. The plan says which engine runs a call;
`runtime/placement/engine_builder` builds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .requests import Completion, GenerationRequest, Sampling, Unfinished


if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..algorithms.algorithm import TokenLoss
    from ..algorithms.rollout import Ragged, Rollouts
    from ..realloc.transfer import Parts
    from .parameter_pieces import Piece
    from .training.heads import RoleHead
    from .training_state import StateSpecs, TensorSpec, TrainingState


# Parameters of one bucket under checkpoint (Hugging Face) names: full tensors on any device, in the model's dtype.
Bucket = Sequence[tuple[str, "torch.Tensor"]]
# 64-bit digests (`weight_digest`) of the tensors that a checkpoint's tensor is computed from, by its checkpoint name.
SourceDigests = Mapping[str, tuple[int, ...]]
BUCKET_BYTES = 256 << 20  # default bytes of a bucket of `export`

# The optimizer's settings for one step: one learning rate, or a mapping of settings for each parameter group of the
# user's optimizer. Each group of a role's optimizer stores the number of its group of the user's optimizer as `GROUP`.
Rate = float | Sequence[Mapping[str, Any]]
GROUP = "given_group"


class EngineError(RuntimeError):
    """An engine could not run its call. The message names the call, the rank and the remedy."""


class EngineDied(EngineError):
    """An engine's process ended or stopped answering during a call."""


class Updates(StrEnum):
    """The effect of a `load` on a running generation."""

    END = "end"  # ends it
    KEEP = "keep"  # decoding continues with the keys and values of the earlier parameters


@runtime_checkable
class GenerationEngine(Protocol):
    """Generates responses to prompts.

    Attributes:
        version: version of the actor's parameters in the engine; -1 before the first `load` and after a failed one.
    """

    version: int

    def kept(self, frozen: SourceDigests) -> frozenset[str]:
        """The tensors among these that the engine has with these digests, and that the next `load` may leave out."""

    def load(self, buckets: Iterable[Bucket], version: int, frozen: SourceDigests | None = None) -> None:
        """Take the actor's parameters, bucket by bucket. `version` is set after the last bucket. An engine that
        generates with a training engine's own model sets `version` alone and reads no bucket.

        Args:
            frozen: `source_digests` of the parameters. The buckets may lack those of them that are `kept`.

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
        before sending."""

    def sleep(self) -> None:
        """Free the device memory that the engine takes again at its next use, if the plan says so. If the parameters
        are lost, `version` is -1 afterwards."""

    def close(self) -> None:
        """End the engine and all processes that it started. May be called twice."""


class Generation(Protocol):
    """A generation in the background, in the engine's process. One thread at a time uses it and the engine."""

    @property
    def unfinished(self) -> int:
        """The number of requests that have neither finished nor been withdrawn. A request has finished when `poll` has
        returned its completion."""

    @property
    def ended_at(self) -> float:
        """End of the latest sample that `poll` or `withdraw` has received, in seconds since the epoch by this host's
        clock; the generation's start before the first one."""

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
            EngineError: a request cannot be served, or its index is that of an unfinished request; or as in `poll`.
            EngineDied: the engine's process ended.
        """

    def withdraw(self, indices: Collection[int], least_tokens: int = 1) -> list[Unfinished]:
        """Stop these requests between two decode steps.

        Args:
            indices: indices of requests. Finished requests are left out, because `poll` returns them, and so are
                requests of other generations.
            least_tokens: fewest remaining tokens of a request that is stopped; requests with fewer go on.

        Returns:
            The tokens of each withdrawn request so far; none if its decoding has not begun.

        Raises:
            EngineError, EngineDied: see `poll`.
        """

    def peek(self) -> list[Unfinished]:
        """The tokens of every unfinished request so far, read between two decode steps without stopping any. Finished
        requests are left out, because `poll` returns them.

        Raises:
            EngineError, EngineDied: see `poll`.
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
        stopped_s: seconds for which the last `load` stopped a generation, from the end of the last decode step before
            it until the end of the `load`. 0 if no request was being generated.
    """

    stopped_s: float

    @property
    def decode_steps(self) -> Sequence[DecodeStep]:
        """Seconds of the decode steps of the latest closed generation, by the number of samples in them; empty before
        the first."""

    def start(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, updates: Updates = Updates.END
    ) -> Generation:
        """Start a generation. The next `generate`, `start` or `sleep` closes it, and so does the next `load` with
        `Updates.END`.

        With other `updates`, a `load` leaves it open. The engine decodes until the first bucket has arrived, and
        continues after the last one with the new version. A `load` that fails closes the generation.

        Args:
            requests: may be empty if requests are added later (`Generation.add`).
            updates: effect of a `load` on the generation.

        Raises:
            EngineError, EngineDied: see `generate`.
        """


@runtime_checkable
class ScoringEngine(Protocol):
    """Runs the forward of one model on a mesh. Every rank of the mesh calls each method, with the same arguments except
    for the samples.

    Attributes:
        version: number of optimizer steps that made the parameters; -1 while they are incomplete. A reallocation that
            fills the parameters sets it.
    """

    version: int

    @property
    def head(self) -> RoleHead:
        """The module that computes the role's outputs; `head.model` is this rank's part of the Transformers model."""

    @property
    def parameter_specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of all parameters of the whole model, also on other ranks, in the model's order."""

    @property
    def has_replicas(self) -> bool:
        """True if several ranks of the mesh may have the same part of a parameter."""

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> Mapping[str, Ragged]:
        """The head's outputs for this rank's samples, without gradients and without dropout.

        Args:
            samples: samples with the columns `index`, `prompts` and `responses`.
            micro_batch_tokens: most tokens of one forward; a longer sample is a micro-batch by itself.

        Returns:
            Outputs by name (`logprobs` and `entropy`, `values`, or `scores`), float32 on the CPU, in the order of the
            samples; an empty mapping on a rank without samples.
        """

    def parts(self) -> Parts:
        """This rank's parts of the trained parameters, or of all parameters of a frozen model. The
        tensors are live and stay the same for the engine's life: a reallocation reads and writes them."""

    def source_digests(self) -> SourceDigests:
        """Digests of the parameters that training does not change, by checkpoint name: each tensor's are those of the
        tensors that `export` computes it from. Collective over the mesh if its ranks hold partitions (ZeRO-3). Empty if
        they hold parts by tensor or pipeline parallelism."""

    def export(
        self,
        bucket_bytes: int = ...,
        *,
        merged: bool = True,
        names: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> Iterator[Bucket]:
        """The parameters as full tensors in buckets of about `bucket_bytes`. They may be live, so a receiver that keeps
        them copies them. Collective: every rank of the mesh iterates to the end. The mesh's first rank gets every
        tensor; another rank gets every tensor too, or empty buckets.

        Args:
            merged: True for checkpoint names, with adapters merged into their weights. False for the module's own
                names, with the adapters as separate parameters.
            names: parameters to export if not `merged`; `None` for all.
            without: checkpoint names of tensors to leave out if `merged`.
        """

    def close(self) -> None:
        """Free the resources that the engine holds in libraries. May be called twice."""


@runtime_checkable
class TrainingEngine(ScoringEngine, Protocol):
    """A scoring engine with an optimizer. `version` is the number of its optimizer steps.

    Attributes:
        grad_norm: L2 norm of the whole model's gradient in the latest `train`, before clipping; the same on every rank
            of the mesh. `nan` before the first step. Not finite if the step was refused or skipped.
    """

    grad_norm: float

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> Mapping[str, Tensor]:
        """Take one optimizer step on one mini-batch. `samples` are this rank's share of it.

        Args:
            loss: function of the head's outputs and a micro-batch. Returns a loss, which is summed over all
                micro-batches of the mesh, and statistics of the samples.
            micro_batch_tokens: most tokens of one forward.

        Returns:
            Each statistic, float32 on the CPU, in the order of the samples: (n,), or (tokens,) for response tokens.

        Raises:
            NonFiniteError: the gradients are not finite. Raised on every rank of the mesh; the step was not taken.
        """

    def add_gradients(self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int) -> Mapping[str, Tensor]:
        """Compute gradients that are added to those of the next `train`. Arguments and results as in `train`."""

    def drop(self) -> None:
        """Discard the gradients of `add_gradients` or of an interrupted `train`. Collective over the mesh."""

    def pieces(self, piece_bytes: int, names: Collection[str] | None = None) -> Iterator[Sequence[Piece]]:
        """The parameters for files. The mesh's first rank gets each element once, a tensor or a few at a time; other
        ranks may get none. For a parameter that is divided into ranges, the first rank holds about `piece_bytes` of
        another rank's part at a time, otherwise the whole part. Collective, like `export`.

        Args:
            names: the module's names of the parameters; `None` for all.
        """

    def training_state(self) -> TrainingState:
        """This rank's part of the training state. The tensors are live. Not collective."""

    def loading(self, specs: StateSpecs) -> AbstractContextManager[TrainingState]:
        """Inside the context, this rank's part of the training state can be overwritten: the cells of its tensors in
        place, `version`, `scalars`, `group_numbers` and `scaler` by assignment. At the end the engine applies it,
        collectively over the mesh.

        Args:
            specs: tensors of the whole state, the same on every rank.

        Raises:
            EngineError: the state is of another model.
        """


@runtime_checkable
class InPlaceEngine(Protocol):
    """An engine that can lend its model, with all its parameters, for generation in place."""

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """The Transformers model with full parameters inside the context, in evaluation mode. Entering it is collective
        over the mesh; a forward inside is not."""
