"""`PlannedGeneration`: generation by this package's vLLM engines, in the place of TRL's `VLLMGeneration`.

It is what TRL's trainers call `vllm_generation`. `plug` makes one for a trainer; how the engines are distributed is in
`generation_plan`, which parameters they get in `engines/training/accelerate_export`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engines.base import Bucket, EngineError, GenerationRequest, Sampling
from ...engines.child_process import die_with_launcher
from ...engines.device import is_accelerator, release_cached_memory
from ...engines.generation.sampling_checks import needs_tokenizer
from ...engines.generation.vllm import VLLMEngine
from ...plan.execution_plan import ExecutionPlan
from ...runtime.calls.generate_and_score import EVALUATION_STEP
from ...runtime.failures.alarm import Alarm
from ...runtime.failures.temporary_folder import temporary_folder
from ...runtime.failures.watchdog_client import watch
from ...runtime.messages import GlooMessages
from ...runtime.placement.vllm_start import VLLMOptions, start_vllm
from ...runtime.process_groups import destroy_groups, new_group
from ...runtime.samples.rounds import Rounds
from .generation_plan import GENERATE, engine_owners
from .prompt_lengths import context_limit


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


class NoImagesError(ValueError):
    """A prompt has images, which the engines do not take."""


@dataclass(frozen=True)
class Policy:
    """The model that generates.

    Args:
        config: its Transformers config.
        export: its parameters as they are now.
        is_collective: whether all ranks must read `export` to its end.
        step: the number of optimizer steps so far; seeds the draws of tokens.
        evaluates: whether it generates for an evaluation, whose draws have seeds of their own: a run that resumes after
            an evaluation draws what it would have drawn without an interruption.
    """

    config: PretrainedConfig
    export: Callable[[], Iterable[Bucket]]
    is_collective: Callable[[], bool]
    step: Callable[[], int]
    evaluates: Callable[[], bool]


class PlannedGeneration:
    """This rank's part of the generation. All ranks make one together, and call its methods together.

    Each rank gets completions for its own prompts. Who generates them is decided in rounds (`runtime.samples.rounds`):
    a rank without an engine sends its prompts to one, and so does a rank with more prompts than its engine's share.

    Args:
        plan: see `generation_plan`.
        rank: this rank.
        options: of this rank's engine.
        sampling: how tokens are drawn.
        seed: of the draws.
        tokenizer: the policy's. Given to the engines if they must read text to draw tokens.
        takes_turns: ranks may call `generate` different numbers of times, and call `finish` when they are done.
        timeout_s: of messages between ranks.

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
        policy: Policy,
        sampling: Sampling,
        *,
        seed: int = 0,
        tokenizer: PreTrainedTokenizerBase = None,
        takes_turns: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        self.plan, self.rank, self.sampling, self.takes_turns = plan, rank, sampling, takes_turns
        self._policy, self._seed, self._device = policy, seed, options.device
        self._context = context_limit(options.context_length, policy.config)
        self._version = 0  # of the engines' parameters: the number of synchronizations
        self._is_stale = True  # whether the engines have no parameters
        self._draws = (-1, 0)  # the step of the seeds, and how often `generate` was called in it before
        size = plan.cluster.size
        self._stack = contextlib.ExitStack()
        group = None
        if size > 1:
            group = new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._stack.callback(destroy_groups, group)
        self._alarm = Alarm(watch(options.heartbeat_timeout_s) if size > 1 else None)
        self._joined: Rounds | None = Rounds(GlooMessages(group), range(size), rank, engine_owners(plan), self._serve)
        limits = SimpleNamespace(max_model_len=options.context_length)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=limits))
        self.engine: VLLMEngine | None = None
        die_with_launcher()
        with self._together("starting the engines"):
            self._start(options, tokenizer)

    def _start(self, options: VLLMOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start this rank's engine. On an accelerator all ranks wait until the engines are ready, because vLLM takes
        for its own what others allocate meanwhile."""
        release_cached_memory(options.device)
        error: Exception | None = None
        try:
            if self.rank in self.plan.mesh(GENERATE):
                options = self._with_tokenizer(options, tokenizer)
                self.engine = start_vllm(self.plan, GENERATE, self.rank, self._policy.config, options, self._stack)
            if self.engine is not None and is_accelerator(options.device):
                self.engine.wait_ready()
                self.engine.sleep()
        except Exception as caught:
            error = caught
        self._rounds.agree(error)

    def _with_tokenizer(self, options: VLLMOptions, tokenizer: PreTrainedTokenizerBase) -> VLLMOptions:
        """The options with the folder of the tokenizer, if the engine needs one."""
        if tokenizer is None or not needs_tokenizer(self.sampling):
            return options
        folder = temporary_folder(self._stack)
        tokenizer.save_pretrained(folder)
        return replace(options, vllm={**options.vllm, "tokenizer": str(folder)})

    def sync_weights(self) -> None:
        """Give the engines the policy's parameters.

        Raises:
            EngineError: this rank's engine did not take them.
            JobFailed: another rank's did not.
        """
        with self._together("sending the policy to the generation engines"):
            self._sync()

    def _sync(self) -> None:
        self._make_room()
        exported, error = iter(self._policy.export()), None
        try:
            if self.engine is not None:
                self.engine.load(exported, self._version + 1)
        except Exception as caught:
            error = caught
        if self._policy.is_collective():
            for _ in exported:  # every rank must take part in the gathering, also one without an engine
                pass
        self._rounds.agree(error)
        self._version, self._is_stale = self._version + 1, False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        num_generations: int = 1,
        profiler: Any = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One completion for each prompt of this rank.

        Args:
            prompts: token ids; the prompt of a group appears once for each of its completions. May be empty.
            images: must be `None`, or hold nothing.
            num_generations: the size of a group. Its completions share the prompt's keys and values in any case.
            profiler: a context for the generation, such as TRL's that measures its time.

        Returns:
            (prompt_ids, completion_ids, logprobs, token_ids). The last two hold a list for each token, of one number,
            because only the drawn token's log-probability is computed.

        Raises:
            NoImagesError: there are images.
            EngineError: this rank's engine cannot serve a prompt, or has died.
            JobFailed: another rank's has.
        """
        if images is not None and any(images):
            raise NoImagesError(
                "a prompt has images, and planned generation is of text alone; train this model with TRL's own "
                "generation."
            )
        with self._together("generation"), profiler or contextlib.nullcontext():
            if self._is_stale:  # the parameters were dropped after the last use
                self._sync()
            prompt_ids = [list(map(int, prompt)) for prompt in prompts]
            answers = self._rounds.join(self._requests(prompt_ids))
            if not self.takes_turns:
                self._rest()
        tokens = [list(drawn) for drawn, _ in answers]
        logprobs = [[[logprob] for logprob in of_sample] for _, of_sample in answers]
        return prompt_ids, tokens, logprobs, [[[token] for token in drawn] for drawn in tokens]

    def finish(self) -> None:
        """Generate for other ranks until all have called this. A rank calls it when it has no more turns to generate,
        before it does anything else together with the others. Raises as `generate` does."""
        with self._together("generation for other ranks"):
            self._rounds.finish()
            self._rest()

    def close(self) -> None:
        """End this rank's engine and its connections to the other ranks, which also end with the process. May be called
        twice. Other ranks may still use theirs."""
        self._stack.close()
        self._joined = None  # a group's connections are closed with the last reference to it

    @property
    def _rounds(self) -> Rounds:
        if self._joined is None:
            raise EngineError("planned generation is closed, so it does not generate; make a new trainer, and plug it.")
        return self._joined

    def _together(self, activity: str) -> contextlib.AbstractContextManager[None]:
        """Around what all ranks do together. A failure ends the engines, and the other ranks with its reason."""
        self._alarm.at(activity)
        return self._alarm.covers(self.close)

    def _make_room(self) -> None:
        """Give this rank's cached memory back before sleeping engines wake up, each on the devices of several ranks."""
        if self._frees_devices():
            release_cached_memory(self._device)
            if self.plan[GENERATE].strategy.tp > 1:
                self._rounds.agree(None)

    def _rest(self) -> None:
        """Free the engine's memory, if the plan says so. The ranks of a tensor group, whose devices one engine has,
        wait until it is free."""
        error: Exception | None = None
        try:
            if self.engine is not None:
                self.engine.sleep()
        except Exception as caught:
            error = caught
        if self._frees_devices() and self.plan[GENERATE].strategy.tp > 1:
            self._rounds.agree(error)
        elif error is not None:
            raise error
        self._is_stale = self.plan[GENERATE].drop

    def _frees_devices(self) -> bool:
        """True if the engines give the memory of accelerators back after each generation."""
        generate = self.plan[GENERATE]
        return is_accelerator(self._device) and (generate.drop or generate.offload)

    def _requests(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
        """(prompt, seed) of each request of this rank. The seeds depend on the optimizer step, not on the plan."""
        step = self._policy.step() + (EVALUATION_STEP if self._policy.evaluates() else 0)
        turn = self._draws[1] + 1 if self._draws[0] == step else 0
        self._draws = step, turn
        return [(prompt, _seed(self._seed, step, turn, self.rank, at)) for at, prompt in enumerate(prompts)]

    def _serve(self, requests: list[tuple[list[int], int]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        assert self.engine is not None, "only ranks with an engine are asked to serve"
        most = self.sampling.max_tokens  # a later turn has a long prompt
        asked = [
            GenerationRequest(at, tuple(prompt), seed, max_tokens=self._context.response(len(prompt), most))
            for at, (prompt, seed) in enumerate(requests)
        ]
        made: dict[int, Any] = {}
        for completion in self.engine.generate(asked, self.sampling):
            self._alarm.check()
            made[completion.index] = completion
        return [(made[at].token_ids, made[at].logprobs) for at in range(len(asked))]


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
