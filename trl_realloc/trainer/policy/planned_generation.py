"""Generation in the place of TRL's `VLLMGeneration`: `HostGeneration` in a run under a plan, `PlannedGeneration` where
Accelerate trains. Both generate by `runtime.host_calls`.

`plug` makes a `PlannedGeneration` for a trainer; how its engines are distributed is in `generation_plan`, which
parameters they get in `engines/training/accelerate_export`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from ...algorithms.corrections import AGES
from ...algorithms.host_loss import HostLoss
from ...algorithms.rollout import Rollouts
from ...engines.base import Bucket, EngineError, GenerationEngine, Sampling
from ...engines.child_process import die_with_launcher
from ...engines.generation.sampling_checks import needs_tokenizer
from ...engines.model_configs import ModelError
from ...plan.dataflow import Role
from ...plan.execution_plan import ExecutionPlan
from ...runtime.calls.generate_and_score import CallSettings
from ...runtime.executor import make_executor
from ...runtime.failures.temporary_folder import temporary_folder
from ...runtime.failures.watchdog_client import watch
from ...runtime.host_calls import HostCalls
from ...runtime.placement.engine_builder import EngineBuilder
from ...runtime.placement.engine_options import EngineOptions
from ...runtime.placement.placement import Placement
from ...runtime.placement.roles import RoleModels, Roles
from ...runtime.placement.vllm_start import VLLMOptions
from ...runtime.process_groups import destroy_groups, meet
from .generation_plan import GENERATE, GRAPH
from .prompt_lengths import context_limit


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


Generated = tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]


class NoImagesError(ValueError):
    """A prompt has images, which the engines do not take."""


class ResponseIds(list[int]):
    """The token ids of a response, whose `ids[-1]` tells TRL's code how the response ended.

    TRL takes a response for cut off if `ids[-1]` is neither an eos token nor the pad token. `ids[-1]` is therefore an
    eos token if the engine ended the response, by any token or rule, and -1 if the response reached its limit. Slices,
    iteration and other indices give the tokens that were drawn.

    Args:
        ending: the value of `ids[-1]`.
    """

    def __init__(self, ids: Iterable[int], ending: int | None) -> None:
        super().__init__(ids)
        self.ending = ending

    def __getitem__(self, at: Any) -> Any:
        return self.ending if isinstance(at, int) and at == -1 else super().__getitem__(at)

    def __radd__(self, before: list[int]) -> ResponseIds:
        """The tokens of several turns, as TRL concatenates them. They end as the last turn does."""
        return ResponseIds([*before, *self], self.ending)


_CUT_OFF = -1  # not a token id


def plain_token_ids(argument: Any) -> Any:
    """Replaces every `ResponseIds` in a list by a plain list, for reward functions, which may read `ids[-1]`."""
    if not isinstance(argument, list):
        return argument
    return [list(ids) if isinstance(ids, ResponseIds) else ids for ids in argument]


def for_trl(prompts: Sequence[Sequence[int]], outputs: Rollouts, eos_token_id: int | None) -> Generated:
    """(prompts, responses, log-probabilities, token ids) of a generation: of each token TRL expects a list, here of the
    one token that was drawn, because only its log-probability is computed.

    Args:
        outputs: with the columns `responses`, `logprobs` and `has_eos`.
        eos_token_id: of the tokenizer, which TRL reads too.
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
    """In the place of vLLM's `LLM`: what TRL's loop over tool calls reads of it, most tokens of a prompt and its
    response."""
    return SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len)))


# --- in a run under a plan -------------------------------------------------------------------------------------------


class Scores(Protocol):
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
        eos_token_id: of the policy's tokenizer.

    An attribute of TRL's class that this one does not have, such as the temperature, cannot be set either.

    Attributes:
        logprobs: for each of this rank's latest responses, the log-probabilities of its tokens when they were drawn.
        ages: for each of them, the generations by which the policy that drew a token was older than the present one;
            `None` where none can be older.
    """

    __slots__ = ("ages", "calls", "eos_token_id", "llm", "logprobs", "scoring")

    def __init__(self, calls: HostCalls, max_model_len: int, scoring: Scores, eos_token_id: int | None = None) -> None:
        self.calls, self.scoring, self.llm = calls, scoring, length_limits(max_model_len)
        self.eos_token_id = eos_token_id
        self.forget()

    def forget(self) -> None:
        """Forget the latest generation. One that a user's subclass makes then has no log-probabilities of an engine."""
        self.logprobs: list[torch.Tensor] = []
        self.ages: list[torch.Tensor] | None = None

    def drawn(self, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        """`logprobs`, if the latest call made completions of these lengths; otherwise no rows, as of completions that a
        user's subclass joins of several calls.

        Args:
            lengths: of this rank's completions; 0 also for one that is masked.
        """
        made = [len(row) for row in self.logprobs]
        is_of_them = len(made) == len(lengths) and all(n in (0, one) for n, one in zip(lengths, made, strict=True))
        return self.logprobs if is_of_them else []

    def sync_weights(self) -> None:
        """Does nothing: the engines take new parameters before they generate, if there are any."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int = 1,
        profiler: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Generated:
        """Responses to this rank's prompts. All ranks together; a rank may have none.

        Args:
            prompts: token ids; a prompt with several responses is given several times.
            num_generations: not used, for that reason.
            profiler: a context around the generation.

        Returns:
            (prompts, responses, log-probabilities, token ids), as of `for_trl`.

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
        self.ages = list(outputs.ragged(AGES).rows()) if AGES in outputs else None
        return for_trl(prompts, outputs, self.eos_token_id)


# --- where Accelerate trains -----------------------------------------------------------------------------------------


@dataclass
class AcceleratePolicy:
    """The model that generates, which Accelerate trains.

    Args:
        config: its Transformers config.
        parameters: makes its parameters as they are now.
        is_collective: whether all ranks must read the parameters to their end.
        step: the number of optimizer steps so far; seeds the draws of tokens.
        evaluates: whether it generates for an evaluation, whose draws have seeds of their own: a run that resumes after
            an evaluation draws what it would have drawn without an interruption.
        version: of the parameters.
    """

    config: PretrainedConfig
    parameters: Callable[[], Iterable[Bucket]]
    is_collective: Callable[[], bool]
    step: Callable[[], int]
    evaluates: Callable[[], bool]
    version: int = 0

    def export(self) -> Iterator[Bucket]:
        """The parameters in buckets, as a training engine exports them (`TrainingEngine`)."""
        return iter(self.parameters())


class GenerationPlacement(Placement):
    """This rank's generation engine in a job whose policy Accelerate trains on all ranks.

    Args:
        takes_turns: the engine does not sleep after each call, but at `rest`.
    """

    def __init__(
        self, plan: ExecutionPlan, rank: int, options: EngineOptions, policy: AcceleratePolicy, takes_turns: bool
    ) -> None:
        super().__init__(plan, rank, Roles({Role.ACTOR: RoleModels("policy", (), config=policy.config)}), options)
        self.policy, self.takes_turns = policy, takes_turns

    def start(self) -> None:
        """Start this rank's engine. All ranks together."""
        die_with_launcher()
        EngineBuilder(self).start_vllm()
        self.started = True

    def trained(self, role: Role) -> Any:
        return self.policy

    def takes_part(self, call: str) -> bool:
        return self.has(call) or self.policy.is_collective()

    def _gathers(self, call: str) -> bool:
        return self.policy.is_collective()

    @contextlib.contextmanager
    def resident(self, call: str) -> Iterator[None]:
        with contextlib.nullcontext() if self.takes_turns else super().resident(call):
            yield

    def rest(self) -> None:
        """Let the engine sleep, if the plan says so. All ranks together: a tensor group's engine has the devices of
        several ranks."""
        with super().resident(GENERATE):
            pass
        meet(self.control)


class PlannedGeneration:
    """This rank's part of the generation. All ranks make one together, and call its methods together.

    Args:
        plan: see `generation_plan`.
        rank: this rank.
        options: of this rank's engine.
        sampling: how tokens are drawn.
        seed: of the draws.
        tokenizer: the policy's. Given to the engines if they must read text to draw tokens.
        takes_turns: ranks may call `generate` different numbers of times, and call `finish` when they are done.
        timeout_s: of collectives of the ranks.

    Attributes:
        engine: this rank's; `None` on a rank without one.
        llm: has `llm_engine.model_config.max_model_len`, which TRL reads in its loop over tool calls.

    Raises:
        EngineError: an engine's settings are invalid.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        rank: int,
        options: VLLMOptions,
        policy: AcceleratePolicy,
        sampling: Sampling,
        *,
        seed: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        takes_turns: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        self.plan, self.takes_turns, self._policy = plan, takes_turns, policy
        self._eos_token_id = None if tokenizer is None else tokenizer.eos_token_id
        self.llm = length_limits(options.context_length)
        if plan.cluster.size > 1:
            watch(options.heartbeat_timeout_s)
        placement = GenerationPlacement(
            plan, rank, _engine_options(options, sampling, seed, timeout_s), policy, takes_turns
        )
        if tokenizer is not None and needs_tokenizer(sampling):
            folder = temporary_folder(placement.stack)
            tokenizer.save_pretrained(folder)
            placement.options = replace(placement.options, vllm={**options.vllm, "tokenizer": str(folder)})
        context = context_limit(options.context_length, policy.config)
        settings = CallSettings(sampling, seed, None, tokenizer, (), {}, context=context)
        executor = make_executor(placement, HostLoss(GRAPH), settings)
        self._placement, self._alarm = placement, executor.alarm
        self._calls: HostCalls | None = HostCalls(executor)
        with self._together("starting the engines"):
            placement.start()
        self.engine: GenerationEngine | None = placement.generators.get(GENERATE)

    def sync_weights(self) -> None:
        """The engines take the policy's parameters anew before they generate next."""
        self._policy.version += 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int = 1,
        profiler: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Generated:
        """One completion for each prompt of this rank.

        Args:
            prompts: token ids; the prompt of a group appears once for each of its completions. May be empty.
            images: must be `None`, or hold nothing.
            num_generations: the size of a group. Its completions share the prompt's keys and values in any case.
            profiler: a context for the generation, such as TRL's that measures its time.

        Returns:
            (prompt_ids, completion_ids, logprobs, token_ids), as of `for_trl`.

        Raises:
            NoImagesError: there are images.
            JobFailed: an engine cannot take the parameters or serve a prompt, or has died, here or on another rank.
        """
        if images is not None and any(images):
            raise NoImagesError(
                "a prompt has images, and planned generation is of text alone; train this model with TRL's own "
                "generation."
            )
        with self._together("generation") as calls, profiler or contextlib.nullcontext():
            outputs = calls.generate(prompts)
            calls.take_spans()  # nobody asks for them
        return for_trl(prompts, outputs, self._eos_token_id)

    def finish(self) -> None:
        """Generate for other ranks until all have called this. A rank calls it when it has no more turns to generate,
        before it does anything else together with the others. Raises as `generate` does."""
        with self._together("generation for other ranks") as calls:
            calls.finish_turns()
            self._placement.rest()

    def close(self) -> None:
        """End this rank's engine and its connections to the other ranks, which also end with the process. May be called
        twice. Other ranks may still use theirs."""
        if self._calls is not None:
            self._placement.close()
            destroy_groups((self._placement.groups, self._placement.control))
            self._calls = None  # a group's connections are closed with the last reference to it
            del self._placement

    @contextlib.contextmanager
    def _together(self, activity: str) -> Iterator[HostCalls]:
        """Around what all ranks do together. A failure ends the engines, and the other ranks with its reason."""
        if self._calls is None:
            raise EngineError("planned generation is closed, so it does not generate; make a new trainer, and plug it.")
        self._alarm.at(activity)
        with self._alarm.covers(self.close):
            self._calls.at(self._policy.step(), evaluates=self._policy.evaluates())
            yield self._calls


def _engine_options(options: VLLMOptions, sampling: Sampling, seed: int, timeout_s: float) -> EngineOptions:
    """The options of a placement that has generation engines alone."""
    return EngineOptions(
        device=options.device,
        temperature=sampling.temperature,
        response_length=sampling.max_tokens,
        context_length=options.context_length,
        forward_batch_size=1,
        train_batch_size=1,
        pad_token_id=0,
        make_optimizer=_by_accelerate,
        compute_dtype=options.compute_dtype,
        seed=seed,
        vllm=options.vllm,
        collective_timeout_s=timeout_s,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        log_folder=options.log_folder,
    )


def _by_accelerate(module: torch.nn.Module) -> NoReturn:
    raise AssertionError("Accelerate makes the optimizer")
