"""`CallServer`: runs calls for the training loop of another library. That trainer, such as TRL's GRPO, runs on every
rank with its local samples, and asks for a call when it needs the call's outputs.

All ranks ask for the same calls in the same order, each with its local samples, possibly none. The plan says where the
calls run. Streamed scoring calls run during generation, and the loop gets their outputs when it asks for them. Under a
plan with a staleness, the next batches are generated while the loop trains (`ahead_server`).
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..algorithms.algorithm import TokenLoss
from ..algorithms.prompt_batches import PromptBatch
from ..algorithms.rewards import whole_texts
from ..algorithms.rollout import Ragged, Rollouts
from ..engines.base import Rate
from ..engines.requests import Sampling
from ..plan.dataflow import CallKind, Role
from ..plan.spans import Span
from .calls.generate_and_score import EVALUATION_STEP, TEXTS, TOKENS_READ, Step
from .calls.local_turns import LocalTurns
from .calls.results import ages, with_ages
from .executor import Executor
from .overlap.ahead_server import AheadServer
from .process_groups import all_gather_object
from .samples.known_outputs import KnownOutputs
from .samples.partial_rollouts import PartialRollouts
from .samples.routes import FIRST_INDEX


class CallServer:
    """Runs calls for the loop of another trainer.

    Args:
        executor: this rank's executor; its plan's graph has one call that generates and one that trains.
        around: makes a context around each call.
        generation: number of the next generation of the training.
    """

    def __init__(
        self,
        executor: Executor,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        generation: int = 0,
    ) -> None:
        self.executor, self.around, self.generation = executor, around, generation
        self._update, self._evaluates = 0, False
        self._draws = {False: 0, True: 0}  # generations of this update so far: {training, evaluation}
        # of the latest generation: number of turns so far, and samples of each rank in the first
        self._turns: int | None = None
        self._first_sizes: list[int] = []
        plan = executor.plan
        self.ahead = (
            AheadServer(executor.placement, executor.alarm, executor.runner, executor.channels)
            if plan.staleness.versions
            else None
        )
        self._ages: dict[str, float] = {}
        self._announced: list[Rollouts] = []  # this rank's prompts of the later generations
        self._spans: list[Span] = []
        # key: streamed call, and reward model where texts were scored (else "")
        self._streamed: dict[tuple[str, str], KnownOutputs] = defaultdict(KnownOutputs)
        self._has_gradients = False  # gradients of an optimizer step that has not been taken
        self._all_finished = False  # no rank wants to generate more

    def at(self, update: int, *, evaluates: bool = False) -> None:
        """Set the update that the next calls belong to. The update and its number of earlier generations seed the
        sampling, so that a resumed run draws the same tokens as an uninterrupted one. Generations of the training and
        of evaluations are counted apart.

        Args:
            evaluates: the calls belong to an evaluation.
        """
        if update != self._update:
            self._update, self._draws = update, {False: 0, True: 0}
        self._evaluates = evaluates

    def begin_evaluation(self) -> None:
        """Reset the seed counter of evaluations, so that each evaluation of an update draws the same tokens."""
        self._draws[True] = 0

    def begin_generation(self) -> None:
        """The next calls of `generate` are the turns of one generation. Without this, each is a generation by itself.
        All ranks together."""
        self._draws[self._evaluates] += 1
        self._turns = 0

    def announce(self, batches: Sequence[tuple[Sequence[Sequence[int]], Sequence[bytes] | None]]) -> None:
        """Announce the prompts of later generations, so that they can be generated ahead.

        Args:
            batches: this rank's prompts and texts, as in `generate`, of each later generation, in order; at most as
                many generations as the plan's staleness. A generation that not all ranks announce is not generated
                ahead.
        """
        self._announced = [_with_texts(*batch) for batch in batches]

    @property
    def reads_texts(self) -> bool:
        """True if a streamed call, or code that takes turns ahead (`CallSettings.in_turns`), reads the texts of
        `generate`."""
        if self.generates_turns:
            return True
        graph = self.executor.plan.graph
        return any(graph.call(name).role is Role.REWARD for name in self.executor.plan.streamed)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[bytes] | None = None,
        sampling: Sampling | None = None,
        *,
        of: Sequence[int] | None = None,
        finished: bool = False,
    ) -> Rollouts:
        """Responses to this rank's prompts.

        Args:
            texts: input of `CallSettings.reward_tokens` or `in_turns` for each prompt, if `reads_texts`.
            sampling: replaces the run's sampling, except where batches are generated ahead.
            of: the position of each prompt's sample among this rank's prompts of the generation's first turn. The
                sampling then does not depend on which other samples take this turn.
            finished: this rank has no more prompts (`finish_turns`).

        Returns:
            Columns `responses` (token ids) and `logprobs`, in the order of the prompts; in a training under a plan with
            a staleness also the columns `corrections.OF_GENERATION` and `corrections.AGES`.

        Raises:
            JobFailed: the call failed on some rank.
        """
        samples = _with_texts(prompts, texts if self.reads_texts else None)
        if self._turns is None:
            self._draws[self._evaluates] += 1
        if of is not None:
            first = sum(self._first_sizes[: self.executor.rank])
            samples = samples.plus(**{FIRST_INDEX: torch.tensor(of, dtype=torch.long) + first})
        if self.ahead is not None and not self._evaluates:
            return self._generate_ahead(self.ahead, samples)
        if self.ahead is not None:
            self.ahead.batches.stop()
        self.generation += not self._evaluates
        (name,) = self.executor.plan.graph.calls_of(CallKind.GENERATE)
        return self._perform(name, samples, finished=finished, sampling=sampling)

    @property
    def generates_turns(self) -> bool:
        """True if the next generation's samples take several turns and are generated ahead."""
        return self.ahead is not None and not self._evaluates and self.executor.runner.settings.in_turns is not None

    @property
    def draws_by_itself(self) -> bool:
        """True if each rank has an engine of its own, which can draw the turns of its samples in the background
        (`drawing`)."""
        plan = self.executor.plan
        (name,) = plan.graph.calls_of(CallKind.GENERATE)
        assignment = plan[name]
        is_whole = assignment.engine == "vllm" and assignment.strategy.dp == plan.cluster.size
        return is_whole and not plan.streamed and not plan.staleness.versions

    @contextlib.contextmanager
    def drawing(self, count: int) -> Iterator[LocalTurns]:
        """Context of a generation in which this rank's engine draws each turn of this rank's samples as soon as it is
        asked for. Only if `draws_by_itself`. All ranks together; they do not wait for each other inside the context.

        Args:
            count: number of this rank's samples.

        Raises:
            JobFailed: the engine did not get its parameters, or another rank failed.
        """
        (name,) = self.executor.plan.graph.calls_of(CallKind.GENERATE)
        if self._turns is None:
            self._draws[self._evaluates] += 1
        self.generation += not self._evaluates
        sizes = [size for size, _ in self._of_ranks(name, count)]
        step = Step(self._number, draw=self._draws[self._evaluates])
        with self.around(), self.executor.runner.drawing(name, step, sum(sizes[: self.executor.rank])) as turns:
            yield turns
        spans = self.executor.channels.all_gather(turns.spans)
        if not self.executor.rank:
            self._spans += [replace(span, step=self._update) for rank_spans in spans for span in rank_spans]

    @property
    def _number(self) -> int:
        return self._update + (EVALUATION_STEP if self._evaluates else 0)

    def _take_turn(self, sizes: Sequence[int]) -> int:
        """The number of turns of the generation before the next one."""
        if self._turns is None:
            return 0
        if not self._turns:
            self._first_sizes = list(sizes)
        self._turns += 1
        return self._turns - 1

    def finish_turns(self) -> None:
        """Take part in the generations of other ranks until all ranks have called this. Where ranks generate different
        numbers of times, a rank calls it when it has no more prompts.

        Raises:
            JobFailed: a generation failed on some rank.
        """
        while not self._all_finished:
            self.generate([], finished=True)
        self._all_finished = False

    def _generate_ahead(self, ahead: AheadServer, prompts: Rollouts) -> Rollouts:
        self.executor.alarm.set_activity(f"generation {self.generation + 1} (the prompts of all ranks)")
        announced, self._announced = self._announced[: ahead.versions], []
        (samples, first), *following = self._of_all_ranks([prompts, *announced])
        if not len(samples):
            return Rollouts()
        with self.around():
            output = ahead.generate(self.generation, [samples, *(batch for batch, _ in following)])
        self._ages, samples = ages(output.samples, self.generation), with_ages(output.samples, self.generation)
        self.generation += 1
        self._spans += [replace(span, step=self._update) for span in output.spans]
        return samples.select(range(first, first + len(prompts)))

    def go_on_with(self, partial_samples: PartialRollouts | None) -> None:
        """Use samples that were under way in another run. Before the first call, all ranks together.

        Args:
            partial_samples: the samples, on rank 0; `None` if there are none.
        """
        if self.ahead is None:
            return
        partial_samples = self.executor.channels.broadcast(partial_samples)
        if partial_samples is not None:
            self.generation = partial_samples.next
            self.ahead.batches.restore(partial_samples)

    def samples_under_way(self, *, again: int) -> PartialRollouts | None:
        """Finished and partial samples for later generations, on rank 0; `None` on the others, and under a plan without
        a staleness. All ranks call this together.

        Args:
            again: number of the latest generations that a resumed run repeats, because this run has not trained on all
                of their samples.
        """
        if self.ahead is None:
            return None
        partial_samples = self.ahead.batches.drawn(self.generation)
        return None if partial_samples is None else replace(partial_samples, next=self.generation - again)

    def stop(self) -> None:
        """Stop generating ahead until the next generation. All ranks together."""
        if self.ahead is not None:
            self.ahead.batches.stop()

    def end(self) -> None:
        """Stop generating ahead for good, before `samples_under_way`. All ranks together."""
        if self.ahead is not None:
            self.ahead.batches.end()

    def forward(self, name: str, samples: Rollouts, *, trained: bool = True) -> Rollouts:
        """The outputs of a call that scores, for this rank's samples. Equal samples are computed once.

        Args:
            samples: columns `prompts` and `responses`, each of one token or more.
            trained: the call's model may be trained on the samples, and keeps their graphs for this if it can.

        Raises:
            JobFailed: the call failed on some rank.
        """
        return self._known_or_performed(name, samples, trained=trained)

    def score(self, name: str, model: str, tokens: Sequence[Sequence[int]]) -> list[float]:
        """The scores of one reward model for this rank's texts, infinite where they are not finite. Equal texts are
        computed once.

        Args:
            name: the call of the reward models.
            tokens: token ids of each text.

        Raises:
            JobFailed: the call failed on some rank.
        """
        texts = whole_texts(Ragged.of(tokens, torch.long))
        (column,) = self.executor.plan.graph.call(name).outputs
        outputs = self._known_or_performed(name, texts, model)
        if not len(outputs):
            return []
        values = outputs.tensor(column)
        # to TRL's loop NaN would be a score that the model does not give
        scores: list[float] = values.masked_fill(values.isnan(), math.inf).tolist()
        return scores

    def _known_or_performed(self, name: str, samples: Rollouts, model: str = "", *, trained: bool = True) -> Rollouts:
        streamed = self._streamed.get((name, model), KnownOutputs())
        # missing are, for example, samples that the loop has changed since
        return streamed.complete(samples, lambda missing: self._perform(name, missing, model=model, keeps=trained))

    def train(self, samples: Rollouts, rate: Rate) -> Rollouts:
        """One optimizer step on the samples of all ranks.

        Args:
            samples: this rank's samples, with the columns that the algorithm's loss reads.

        Returns:
            A row with the norm of the gradient before clipping (`training_calls.GRAD_NORM`); none if the step was
            skipped.

        Raises:
            JobFailed: the call failed on some rank.
            NonFiniteError: a number of the samples is not finite.
        """
        (name,) = [call.name for call in self.executor.plan.graph.calls if call.trains]
        role = self.executor.plan.graph.call(name).role
        continues, self._has_gradients = self._has_gradients, False
        for (call, _), outputs in self._streamed.items():
            if self.executor.plan.graph.call(call).role == role:
                outputs.forget()
        return self._perform(name, samples, {role: rate}, continues=continues)

    def add_gradients(self, samples: Rollouts, loss: TokenLoss) -> Rollouts:
        """Add the gradients of a loss on the samples of all ranks to the optimizer step that `train` takes.

        Args:
            samples: this rank's samples, with `prompts` and `responses`.
            loss: the loss, on every rank. It reads samples whose `index` counts all ranks' samples in rank order.

        Returns:
            The loss's values for this rank's response tokens.

        Raises:
            JobFailed: the call failed on some rank.
        """
        (name,) = [call.name for call in self.executor.plan.graph.calls if call.trains]
        continues, self._has_gradients = self._has_gradients, False
        outputs = self._perform(name, samples, loss=loss, continues=continues)
        self._has_gradients = True
        return outputs

    def forget_gradients(self) -> None:
        """Drop the gradients of `add_gradients`: the optimizer step will not be taken."""
        self._has_gradients = False

    def take_ages(self) -> dict[str, float]:
        """Ages of the latest generation's tokens (`results.ages`), on every rank; empty if none was generated ahead
        since the last call."""
        taken, self._ages = self._ages, {}
        return taken

    def take_spans(self) -> tuple[Span, ...]:
        """Times of each call on each rank since the last call of this method; on rank 0, empty on the others."""
        taken, self._spans = tuple(self._spans), []
        return taken

    def _perform(
        self,
        name: str,
        samples: Rollouts,
        rates: Mapping[Role, Rate] | None = None,
        *,
        finished: bool = False,
        model: str = "",
        sampling: Sampling | None = None,
        loss: TokenLoss | None = None,
        continues: bool = False,
        keeps: bool = True,
    ) -> Rollouts:
        """The outputs for this rank's samples, or the statistics of a training."""
        generates, executor = self.executor.plan.graph.call(name).kind is CallKind.GENERATE, self.executor
        if self.ahead is not None:
            self.ahead.check()
        ranks = self._of_ranks(name, len(samples), finished)
        sizes = [size for size, _ in ranks]
        self._all_finished = all(rank_finished for _, rank_finished in ranks)
        if not any(sizes):
            return Rollouts()
        step = Step(
            self._number,
            learning_rates=rates or {},
            sampling=sampling,
            draw=self._draws[self._evaluates],
            turn=self._take_turn(sizes) if generates else 0,
            model=model,
            loss=loss,
            continues=continues,
            keeps=keeps,
        )
        with self.around():
            if generates:
                self._streamed.clear()  # outputs for an earlier generation are not asked for again
            if generates and executor.plan.streamed:
                outputs = self._run_streamed(step, name, samples)
            else:
                outputs = executor.perform(step, name, samples, sizes)
        self._spans += [replace(span, step=self._update) for span in executor.take_spans()]
        return outputs

    def _of_ranks(self, name: str, count: int, finished: bool = False) -> list[tuple[int, bool]]:
        self.executor.alarm.set_activity(f"{name} of update {self._update + 1} (the samples of all ranks)")
        return self.executor.channels.all_gather((count, finished))

    def _run_streamed(self, step: Step, name: str, local_prompts: Rollouts) -> Rollouts:
        # every rank gets the prompts of all ranks, because it may score any of them
        ((prompts, first),) = self._of_all_ranks([local_prompts])
        streamed = self.executor.perform_streamed(step, PromptBatch(prompts, [{}] * len(prompts)))
        local = range(first, first + len(local_prompts))
        outputs = {call: call_outputs.select(local) for call, call_outputs in streamed.items()}
        if not len(local_prompts):
            return Rollouts()
        generated = local_prompts.plus(**outputs[name])
        for call, call_outputs in outputs.items():
            if call != name:
                self._keep(call, generated, call_outputs)
        return outputs[name]

    def _keep(self, call: str, samples: Rollouts, outputs: Rollouts) -> None:
        """Cache a streamed call's outputs by its samples, or by the texts that it read instead."""
        texts = [column for column in outputs if column.startswith(TOKENS_READ)]
        if not texts:
            self._streamed[call, ""].add(samples, outputs)
        for column in texts:
            model, (name,) = column.removeprefix(TOKENS_READ), self.executor.plan.graph.call(call).outputs
            scores = outputs[f"reward/{model}" if len(texts) > 1 else name]
            self._streamed[call, model].add(whole_texts(outputs.ragged(column)), Rollouts(**{name: scores}))

    def _of_all_ranks(self, local_batches: Sequence[Rollouts]) -> list[tuple[Rollouts, int]]:
        """For each batch, the samples of all ranks, numbered in rank order, and the number of this rank's first one.
        Omits the last batches, if not all ranks have them."""
        content = [(len(batch), batch.to_bytes() if len(batch) else b"") for batch in local_batches]
        parts = all_gather_object(content, self.executor.placement.control)
        return [self._joined(rank_parts) for rank_parts in zip(*parts, strict=False)]

    def _joined(self, rank_parts: Sequence[tuple[int, bytes]]) -> tuple[Rollouts, int]:
        first = sum(size for size, _ in rank_parts[: self.executor.rank])
        samples = Rollouts.cat([Rollouts.from_bytes(part) for size, part in rank_parts if size] or [Rollouts()])
        return samples.plus(index=torch.arange(len(samples))) if len(samples) else samples, first


def _with_texts(prompts: Sequence[Sequence[int]], texts: Sequence[bytes] | None) -> Rollouts:
    """Samples with these prompts and, if there are texts, with the column `TEXTS`."""
    samples = Rollouts(prompts=Ragged.of(prompts, torch.long))
    return samples if texts is None else samples.plus(**{TEXTS: Ragged.of_bytes(texts)})
