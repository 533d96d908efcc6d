"""`HostCalls`: the calls of an algorithm whose loop is not the executor's. A trainer of another library, such as TRL's
GRPO, runs on every rank with samples of its own, and asks for a call when it needs its outputs.

All ranks ask for the same calls in the same order, each with its own samples, of which it may have none. The calls
themselves run where the plan says. Where the plan streams scoring calls, these run while samples are being generated,
and the loop gets their outputs when it asks for them. Where it has a staleness, the next batches are generated while
the loop trains (`host_ahead`).
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..algorithms.algorithm import TokenLoss
from ..algorithms.prompt_batches import PromptBatch
from ..algorithms.rewards import whole_texts
from ..algorithms.rollout import Ragged, Rollouts, token_keys
from ..engines.base import Rate, Sampling
from ..plan.dataflow import CallKind, Role
from ..plan.timeline import Span
from .calls.generate_and_score import EVALUATION_STEP, TEXTS, TOKENS_READ, Step
from .executor import Executor
from .overlap.host_ahead import HostAhead
from .process_groups import from_every_rank
from .samples.drawn_samples import DrawnSamples
from .samples.results import ages, with_ages


# makes the outputs of a call for this rank's samples, from these and the number of those of each rank
Run = Callable[[str, Rollouts, Sequence[int]], Rollouts]
_FINISHED = -1


class HostCalls:
    """Runs calls for the loop of another trainer.

    Args:
        executor: of this rank; its plan's graph has one call that generates and one that trains.
        around: makes a context around each call.
        generation: the number of the next generation of the training.
    """

    def __init__(
        self,
        executor: Executor,
        around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        generation: int = 0,
    ) -> None:
        self.executor, self.around, self.generation = executor, around, generation
        self._update, self._evaluates = 0, False
        self._rounds = {False: 0, True: 0}  # generations of this update before the next: of training, of an evaluation
        plan = executor.plan
        self.ahead = (
            HostAhead(executor.placement, executor.alarm, executor.runner, executor.exchange)
            if plan.staleness.versions
            else None
        )
        self._ages: dict[str, float] = {}
        self._announced: list[Rollouts] = []  # this rank's prompts of the generations after it
        self._spans: list[Span] = []
        # by call that has run with the generation, and by reward model where texts were scored
        self._streamed: dict[tuple[str, str], KnownOutputs] = defaultdict(KnownOutputs)
        self._has_gradients = False  # of an optimizer step that has not been taken
        self._all_finished = False  # all ranks take part in a generation without a wish to generate more

    def at(self, update: int, *, evaluates: bool = False) -> None:
        """Set the update that the next calls belong to. Together with the number of generations in it before, it seeds
        the draws of tokens, so that a resumed run draws as one without an interruption. Generations of the training and
        of evaluations are counted apart.

        Args:
            evaluates: the calls are of an evaluation.
        """
        if update != self._update:
            self._update, self._rounds = update, {False: 0, True: 0}
        self._evaluates = evaluates

    def begin_evaluation(self) -> None:
        """Reset the seed counter of evaluations, so that each evaluation of an update draws the same tokens."""
        self._rounds[True] = 0

    def announce(self, prompts: Sequence[Sequence[Sequence[int]]]) -> None:
        """Announce the prompts of later generations, so that they can be generated ahead.

        Args:
            prompts: of this rank: of each later generation, in their order; as many generations as the plan's staleness
                has, or fewer. What not all ranks announce is not generated ahead.
        """
        self._announced = [Rollouts(prompts=Ragged.of(of_one, torch.long)) for of_one in prompts]

    @property
    def reads_texts(self) -> bool:
        """True if a streamed call reads the texts of `generate`."""
        graph = self.executor.plan.graph
        return any(graph.call(name).role is Role.REWARD for name in self.executor.plan.streamed)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[bytes] | None = None,
        sampling: Sampling | None = None,
    ) -> Rollouts:
        """Responses to this rank's prompts.

        Args:
            texts: of each prompt what `CallSettings.reward_tokens` reads, if `reads_texts`.
            sampling: replaces the run's sampling. Not where batches are generated ahead.

        Returns:
            Columns `responses` (token ids) and `logprobs`, in the order of the prompts; in a training under a plan with
            a staleness also those of `results.OF_GENERATION` and `corrections.AGES`.

        Raises:
            JobFailed: the call failed on some rank.
        """
        own = Rollouts(prompts=Ragged.of(prompts, torch.long))
        if texts is not None and self.reads_texts:
            of_bytes = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]
            own = own.plus(**{TEXTS: Ragged.of(of_bytes, torch.uint8)})
        return self._generate(own, sampling)

    def finish_turns(self) -> None:
        """Take part in the generations of other ranks until all ranks have called this. A rank calls it when it has no
        more prompts, where ranks may generate different numbers of times.

        Raises:
            JobFailed: a generation failed on some rank.
        """
        while not self._all_finished:
            self._generate(Rollouts(), finished=True)
        self._all_finished = False

    def _generate(
        self,
        own: Rollouts,
        sampling: Sampling | None = None,
        *,
        finished: bool = False,
    ) -> Rollouts:
        (name,) = self.executor.plan.graph.calls_of(CallKind.GENERATE)
        self._rounds[self._evaluates] += 1  # on every rank, whether it has prompts or not: any may draw for the others
        if self.ahead is not None and not self._evaluates:
            return self._generate_ahead(self.ahead, own)
        if self.ahead is not None:
            self.ahead.stop()
        self.generation += not self._evaluates
        return self._perform(name, own, finished=finished, sampling=sampling)

    def _generate_ahead(self, ahead: HostAhead, own: Rollouts) -> Rollouts:
        self.executor.alarm.at(f"generation {self.generation + 1} (the prompts of all ranks)")
        announced, self._announced = self._announced[: ahead.versions], []
        (samples, first), *following = self._of_all_ranks([own, *announced])
        if not len(samples):
            return Rollouts()
        with self.around():
            output = ahead.generate(self.generation, [samples, *(of_one for of_one, _ in following)])
        self._ages, samples = ages(output.samples, self.generation), with_ages(output.samples, self.generation)
        self.generation += 1
        self._spans += [replace(span, step=self._update) for span in output.spans]
        return samples.select(range(first, first + len(own)))

    def go_on_with(self, drawn: DrawnSamples | None) -> None:
        """Use samples that were under way in another run. Before the first call, all ranks together.

        Args:
            drawn: on rank 0; `None` if nothing was.
        """
        if self.ahead is not None and (drawn := self.executor.exchange.spread(drawn)) is not None:
            self.generation = drawn.next
            self.ahead.restore(drawn)

    def samples_under_way(self, *, again: int) -> DrawnSamples | None:
        """The samples that have been drawn for later generations, on rank 0; `None` on the others, and under a plan
        without a staleness. All ranks call this together.

        Args:
            again: how many of the latest generations a run that goes on asks for again, because it has not trained on
                all of them.
        """
        if self.ahead is None:
            return None
        drawn = self.ahead.drawn(self.generation)
        return None if drawn is None else replace(drawn, next=self.generation - again)

    def stop(self) -> None:
        """Stop what is generated ahead. It goes on with the next generation. All ranks together."""
        if self.ahead is not None:
            self.ahead.stop()

    def forward(self, name: str, samples: Rollouts, *, trained: bool = True) -> Rollouts:
        """The outputs of a call that scores, for this rank's samples. Equal samples are computed once.

        Args:
            samples: with `prompts` and `responses`, each of one token or more.
            trained: the call's model may be trained on them, and keeps their graphs for this if it can.

        Raises:
            JobFailed: the call failed on some rank.
        """
        return self._known_or_performed(name, samples, trained=trained)

    def score(self, name: str, model: str, tokens: Sequence[Sequence[int]]) -> list[float]:
        """The scores of one reward model for this rank's texts, infinite where they are not finite. Equal texts are
        computed once.

        Args:
            name: of a call of reward models.
            tokens: the token ids of each text.

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
        known = self._streamed.get((name, model), KnownOutputs())
        # computed are those, for example, that the loop has changed since
        return known.complete(samples, lambda missing: self._perform(name, missing, model=model, keeps=trained))

    def train(self, samples: Rollouts, rate: Rate) -> Rollouts:
        """One optimizer step on the samples of all ranks.

        Args:
            samples: of this rank, with the columns that the algorithm's loss reads.

        Returns:
            A row with the norm of the gradient before clipping (`training_calls.GRAD_NORM`); none if the step was
            skipped.

        Raises:
            JobFailed, NonFiniteError: as `Executor.perform`.
        """
        (name,) = [call.name for call in self.executor.plan.graph.calls if call.trains]
        role = self.executor.plan.graph.call(name).role
        continues, self._has_gradients = self._has_gradients, False
        for (call, _), known in self._streamed.items():
            if self.executor.plan.graph.call(call).role == role:
                known.forget()
        return self._perform(name, samples, {role: rate}, continues=continues)

    def add_gradients(self, samples: Rollouts, loss: TokenLoss) -> Rollouts:
        """Add the gradients of a loss of the samples of all ranks to those of the optimizer step that `train` takes.

        Args:
            samples: of this rank, with `prompts` and `responses`.
            loss: on every rank; of samples whose `index` counts those of all ranks, in the order of the ranks.

        Returns:
            What the loss returns of this rank's response tokens.

        Raises:
            JobFailed: the call failed on some rank.
        """
        (name,) = [call.name for call in self.executor.plan.graph.calls if call.trains]
        continues, self._has_gradients = self._has_gradients, False
        outputs = self._perform(name, samples, loss=loss, continues=continues)
        self._has_gradients = True
        return outputs

    def forget_gradients(self) -> None:
        """Forget what `add_gradients` has added: the optimizer step will not be taken."""
        self._has_gradients = False

    def take_ages(self) -> dict[str, float]:
        """Ages of the latest generation's tokens (`results.ages`), on every rank; empty if none was generated ahead
        since the last call."""
        taken, self._ages = self._ages, {}
        return taken

    def take_spans(self) -> tuple[Span, ...]:
        """When each rank ran each call since this was last asked; on rank 0, empty on the others."""
        taken, self._spans = tuple(self._spans), []
        return taken

    def _perform(
        self,
        name: str,
        own: Rollouts,
        rates: Mapping[Role, Rate] | None = None,
        *,
        finished: bool = False,
        model: str = "",
        sampling: Sampling | None = None,
        loss: TokenLoss | None = None,
        continues: bool = False,
        keeps: bool = True,
    ) -> Rollouts:
        """Run a call on all ranks' samples; the outputs for this rank's samples, or the statistics of a training."""
        call, executor = self.executor.plan.graph.call(name), self.executor
        number = self._update + (EVALUATION_STEP if self._evaluates else 0)
        executor.alarm.at(f"{name} of update {self._update + 1} (the samples of all ranks)")
        if self.ahead is not None:
            self.ahead.check()
        # a rank without a wish to generate more says so by a negative number
        sizes = executor.exchange.sizes(_FINISHED if finished else len(own))
        self._all_finished = max(sizes) == _FINISHED
        sizes = [max(size, 0) for size in sizes]
        if not any(sizes):
            return Rollouts()
        with self.around():
            executor.begin(
                Step(
                    number,
                    learning_rates=rates or {},
                    sampling=sampling,
                    draw=self._rounds[self._evaluates],
                    model=model,
                    loss=loss,
                    continues=continues,
                    keeps=keeps,
                )
            )
            run: Run = executor.perform_own
            if call.kind is CallKind.GENERATE:
                self._streamed.clear()  # nobody asks for what was made of an earlier generation
                run = self._run_streamed if executor.plan.streamed else run
            outputs = run(name, own, sizes)
        self._spans += [replace(span, step=self._update) for span in executor.take_spans()]
        return outputs

    def _run_streamed(self, name: str, own: Rollouts, sizes: Sequence[int]) -> Rollouts:
        """Generate, and keep what the streamed calls make of this rank's samples. Every rank has the prompts of all
        ranks, because any may score any."""
        self._streamed.clear()
        ((prompts, first),) = self._of_all_ranks([own])
        of_all = self.executor.perform_streamed(PromptBatch(prompts, [{}] * len(prompts)))
        outputs = {call: of_call.select(range(first, first + len(own))) for call, of_call in of_all.items()}
        if not len(own):
            return Rollouts()
        generated = own.plus(**outputs[name])
        for call, of_call in outputs.items():
            if call != name:
                self._keep(call, generated, of_call)
        return outputs[name]

    def _keep(self, call: str, samples: Rollouts, outputs: Rollouts) -> None:
        """Keep what a streamed call has made of the samples, or of the texts that it has read instead."""
        texts = [column for column in outputs if column.startswith(TOKENS_READ)]
        if not texts:
            self._streamed[call, ""].add(samples, outputs)
        for column in texts:
            model, (name,) = column.removeprefix(TOKENS_READ), self.executor.plan.graph.call(call).outputs
            scores = outputs[f"reward/{model}" if len(texts) > 1 else name]
            self._streamed[call, model].add(whole_texts(outputs.ragged(column)), Rollouts(**{name: scores}))

    def _of_all_ranks(self, own: Sequence[Rollouts]) -> list[tuple[Rollouts, int]]:
        """For each batch, the samples of all ranks in the order of the ranks, numbered, and the number of this rank's
        first one. Batches that not all ranks have are left out at the end."""
        content = [(len(batch), batch.to_bytes() if len(batch) else b"") for batch in own]
        parts = from_every_rank(content, self.executor.placement.control)
        return [self._joined(of_ranks) for of_ranks in zip(*parts, strict=False)]

    def _joined(self, of_ranks: Sequence[tuple[int, bytes]]) -> tuple[Rollouts, int]:
        first = sum(size for size, _ in of_ranks[: self.executor.rank])
        samples = Rollouts.cat([Rollouts.from_bytes(part) for size, part in of_ranks if size] or [Rollouts()])
        return samples.plus(index=torch.arange(len(samples))) if len(samples) else samples, first


class KnownOutputs:
    """The outputs of one scoring call by the token ids of the samples that it read, so that none is computed twice."""

    def __init__(self) -> None:
        self._outputs = Rollouts()
        self._at: dict[tuple[bytes, bytes], int] = {}

    def add(self, samples: Rollouts, outputs: Rollouts) -> None:
        """Keep the outputs for these samples.

        Args:
            samples: with `prompts` and `responses`.
            outputs: of the same samples in the same order.
        """
        self._keep(token_keys(samples), outputs)

    def _keep(self, keys: Sequence[tuple[bytes, bytes]], outputs: Rollouts) -> None:
        if keys:
            first = len(self._outputs)
            self._outputs = Rollouts.cat([self._outputs, outputs])
            self._at |= {key: first + at for at, key in enumerate(keys)}

    def complete(self, samples: Rollouts, compute: Callable[[Rollouts], Rollouts]) -> Rollouts:
        """The outputs for these samples, in their order.

        Args:
            compute: makes the outputs of those that are not known, of equal ones once. It is also called without any,
                because all ranks run a call together.
        """
        keys = token_keys(samples)
        missing = list({key: at for at, key in enumerate(keys) if key not in self._at}.values())
        self._keep([keys[at] for at in missing], compute(samples.select(missing)))
        return self._outputs.select([self._at[key] for key in keys]) if keys else Rollouts()

    def has(self, samples: Rollouts) -> bool:
        """True if the outputs for all of these samples are known."""
        return all(key in self._at for key in token_keys(samples))

    def forget(self) -> None:
        """Forget all of them: the parameters that computed them have changed, or nobody will ask for them again."""
        self._outputs, self._at = Rollouts(), {}
