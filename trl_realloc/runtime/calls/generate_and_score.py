"""One rank's part of calls that generate and score: `generate` and `forward` take the rank's share of the samples and
return the call's output columns.

Calls that train are in `training_calls`, the loop over the calls in `executor`, the division of the samples in
`batch`. Only the engines communicate here.
The functions read a call's kind and columns from the graph, never its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ...algorithms.algorithm import TokenLoss
from ...algorithms.rewards import FunctionReward, ModelReward, decode, weighted_scores
from ...algorithms.rollout import Ragged, Rollouts
from ...algorithms.router_loss import ROUTER_COUNTS, ROUTER_PROBS
from ...engines.base import BackgroundEngine, Generation, Rate, ScoringEngine
from ...engines.model_configs import table_positions
from ...engines.requests import Completion, GenerationRequest, Sampling, Unfinished
from ...engines.training.replicated import ReplicatedEngine
from ...plan.algorithm_graphs import ROUTES
from ...plan.dataflow import Call, Role
from ...plan.spans import REWARD_FUNCTION, Span
from ..placement.placement import Placement
from ..samples.context_limit import ContextLimit
from ..samples.routes import FIRST_INDEX, as_responses, sources


logger = logging.get_logger(__name__)
FAILURE_POLL_S = 1.0  # longest time between two checks for another rank's failure
TEXTS = "texts"  # column of bytes, which `CallSettings.reward_tokens` turns into the reward models' inputs
OUTCOMES = "outcomes"  # column of bytes: what `CallSettings.in_turns` returns
TOKENS_READ = "tokens/"  # prefix of columns with the tokens that a reward model read of each sample
EVALUATION_STEP = 1 << 40  # larger step numbers are evaluations, which have separate seeds


class TurnSource(Protocol):
    """Draws the turns of samples that take several. A turn belongs to a position: one below the number of samples is a
    sample's, and code that asks for more responses, such as several for one prompt, uses higher ones."""

    def check(self) -> None:
        """Raise an exception if the samples are not needed any more."""

    def draw(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Rollouts] | None:
        """Begin turns, and wait shortly for turns to end.

        Args:
            prompts: token ids of new turns, by position. A position has one turn at a time.

        Returns:
            The turns that have ended since the last call, by position, each with the columns of `completed`; `None` if
            none is being drawn.

        Raises:
            EngineError: the context has no room for a response, or the engine cannot serve it.
        """

    def result_of(self, position: int, number: int) -> str | None:
        """What a tool returned before the run was resumed (`keep_result`); `None` if the call has not ended.

        Args:
            number: number of the calls of this position before this one.
        """

    def keep_result(self, position: int, number: int, result: str) -> None:
        """Keep what a tool has returned, so that a resumed run does not call it again."""


# Runs the trainer's code for samples with the prompts and the column `TEXTS`, in a thread of its own. Returns an
# outcome for each sample.
InTurns = Callable[[Rollouts, TurnSource], Sequence[bytes]]


@dataclass(frozen=True)
class CallSettings:
    """Settings of a run's calls that are not in the plan, the placement or the algorithm; the same on every rank.

    Args:
        sampling: sampling parameters of all calls but those of `sampling_of`.
        eos_token_id: end token of the column `has_eos`, besides `Completion.stopped`; `None` if there is none.
        processing_class: tokenizer that decodes samples for reward functions and reward models that read text.
        functions: the reward functions. Reward models are in the placement.
        reward_weights: weight of each reward model and function, by name.
        skip_nonfinite: skip an update that is not finite; otherwise it ends the run.
        sampling_of: sampling of single calls, by call name.
        reward_tokens: maps samples with the column `TEXTS` to the token ids, int64, that each reward model reads, by
            model name; `None` where reward models read prompts and responses.
        attention_at: argument `attention_at` of `plan.batching.work` for each role; a role without it divides samples
            by their tokens.
        in_turns: runs the trainer's code for samples that take several turns and are generated ahead; `None` if each
            sample takes one.
        context: context limit of the engines; `None` where every prompt leaves room for the sampling's `max_tokens`.
    """

    sampling: Sampling
    seed: int
    eos_token_id: int | None
    processing_class: PreTrainedTokenizerBase
    functions: Sequence[FunctionReward]
    reward_weights: dict[str, float]
    skip_nonfinite: bool = False
    sampling_of: Mapping[str, Sampling] = field(default_factory=dict)
    attention_at: Mapping[Role, float] = field(default_factory=dict)
    context: ContextLimit | None = None
    reward_tokens: Callable[[Rollouts], Mapping[str, Ragged]] | None = None
    in_turns: InTurns | None = None


@dataclass(frozen=True)
class Step:
    """One iteration of a run.

    Args:
        number: index of the iteration, from 0. It seeds sampling and mini-batches.
        rows: the data set's rows of the global batch, for reward functions that read other columns.
        sampling: replaces the run's sampling in this iteration.
        draw: index of this generation among the iteration's generations by the same call.
        turn: number of the samples' turns before this one in the same generation.
        model: the only reward model that is run; empty for all.
        first: position of the batch's first sample in the data set of an evaluation, which seeds its sampling.
        loss: a call that trains adds the gradients of this loss, and takes no optimizer step.
        continues: a call that trains adds to the present gradients; otherwise it clears them first.
        keeps: a scoring model that will be trained may keep the graphs of the samples.
    """

    number: int
    rows: Sequence[Mapping[str, Any]] = ()
    learning_rates: Mapping[Role, Rate] = field(default_factory=dict)
    sampling: Sampling | None = None
    draw: int = 0
    turn: int = 0
    model: str = ""
    first: int = 0
    loss: TokenLoss | None = None
    continues: bool = False
    keeps: bool = True

    def trains(self, call: Call) -> bool:
        """True if the call takes optimizer steps."""
        return call.trains and self.loss is None

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"update {self.number + 1}" if self.number < EVALUATION_STEP else "an evaluation"


def sample_seed(seed: int, step: int, index: int, label: str = "", draw: int = 0, turn: int = 0) -> int:
    """Sampling seed of one sample, the same under any plan. Derived from the run's seed, the step, the sample's index
    in the batch (in an evaluation: in the data set), the call's label, the index of the generation in the step, and the
    turn in the generation."""
    further = (draw, turn) if turn else (draw,) if draw else ()
    # SeedSequence splits integers of 2**32 and more, which could collide with another sample's entropy
    apart = (1,) if step >= EVALUATION_STEP else ()
    entropy = (seed, step, index, *label.encode(), *further)
    return int(np.random.SeedSequence(entropy, spawn_key=apart).generate_state(1)[0])


def requests_of(
    settings: CallSettings,
    call: Call,
    samples: Rollouts,
    step: Step,
    begun: Mapping[int, Unfinished] | None = None,
) -> list[GenerationRequest]:
    """The requests of a call that generates.

    Args:
        samples: columns `index`, the call's first input and, in a further turn, `FIRST_INDEX`.
        begun: partial responses from another engine, by sample index.

    Raises:
        EngineError: the context has no room for a response to some prompt.
    """
    begun = begun or {}
    most = sampling_of(settings, call, step).max_tokens
    first_index = samples.tensor(FIRST_INDEX if FIRST_INDEX in samples else "index").tolist()
    return [
        GenerationRequest(
            index,
            tuple(row.tolist()),
            sample_seed(settings.seed, step.number, step.first + first, call.label, step.draw, step.turn),
            begun.get(index),
            None if settings.context is None else settings.context.response(len(row), most),
        )
        for index, first, row in zip(
            samples.tensor("index").tolist(), first_index, samples.ragged(call.inputs[0]).rows(), strict=True
        )
    ]


def sampling_of(settings: CallSettings, call: Call, step: Step) -> Sampling:
    """Sampling of a call in an iteration: the iteration's, else the call's, else the run's."""
    return step.sampling or settings.sampling_of.get(call.name, settings.sampling)


def generate(
    placement: Placement,
    settings: CallSettings,
    call: Call,
    samples: Rollouts,
    step: Step,
    poll: Callable[[], None],
    begun: Generation | None = None,
) -> Rollouts:
    """Generate responses to this rank's prompts.

    Args:
        poll: called after each finished sample, and each second meanwhile if the engine runs in the background.
        begun: a running generation of these prompts.

    Returns:
        The columns of `completed`.
    """
    generator = placement.generators.get(call.name)
    if generator is None:
        return Rollouts()
    requests, sampling = requests_of(settings, call, samples, step), sampling_of(settings, call, step)
    finished = list[Completion]()
    if isinstance(generator, BackgroundEngine):
        if requests:
            finished = _to_the_end(begun or generator.start(requests, sampling), poll)
    else:  # without prompts too: with sharded parameters, generating in place is a collective of the mesh
        for completion in generator.generate(requests, sampling):
            poll()
            finished.append(completion)
    return completed(finished, settings.eos_token_id, call.outputs)


def _to_the_end(generation: Generation, poll: Callable[[], None]) -> list[Completion]:
    """All completions of a generation, which is closed."""
    finished = list[Completion]()
    try:
        while generation.unfinished:
            poll()
            finished += generation.poll(FAILURE_POLL_S)
    finally:
        generation.close()
    return finished


def completed(
    completions: Sequence[Completion],
    eos_token_id: int | None,
    names: Sequence[str] = ("responses", "logprobs"),
) -> Rollouts:
    """The columns of finished completions: token ids int64 and log-probabilities float32, ragged; and `has_eos` (n,)
    bool, true if the response ended (`Completion.stopped` or `eos_token_id`) before its length limit. Completions with
    routes also have the column `routes`.

    Args:
        names: names of the columns of token ids and log-probabilities.
    """
    tokens, logprobs = names[:2]
    columns: dict[str, Any] = {
        tokens: Ragged.of([c.token_ids for c in completions], torch.long),
        logprobs: Ragged.of([c.logprobs for c in completions], torch.float32),
        "has_eos" if tokens == "responses" else f"has_eos_{tokens}": torch.tensor(
            [c.stopped or eos_token_id in c.token_ids for c in completions], dtype=torch.bool
        ),
    }
    recorded = next((torch.from_numpy(c.routes) for c in completions if c.routes is not None), None)
    if recorded is not None:  # a completion from a checkpoint without routes has none
        routes = [recorded[:0] if c.routes is None else torch.from_numpy(c.routes) for c in completions]
        columns[ROUTES] = Ragged.of(routes, recorded.dtype)
    return Rollouts(index=torch.tensor([c.index for c in completions], dtype=torch.long), **columns)


def forward(
    placement: Placement, settings: CallSettings, call: Call, samples: Rollouts, step: Step, *, keeps: bool = True
) -> Rollouts:
    """Compute the call's outputs for this rank's samples: a number per token from a policy or a value model, a number
    per sample from a role of the kind `score`. The second output of a policy is the entropy at each token. A policy
    with an auxiliary loss adds the columns of its routers, and one that records its routes these.

    Args:
        keeps: a model that will be trained on the samples may keep their graphs. Not for streamed samples: their order
            of arrival would be the order of adding gradients, and the run would not be repeatable.
    """
    samples = as_responses(call, samples)
    if placement.roles[call.role].kind == "score":
        return score(placement, settings, call, samples, step)
    with placement.scoring(call.name) as (engine,):
        keeps = keeps and step.keeps and step.number < EVALUATION_STEP
        out = _outputs(placement, engine, call, samples, keeps=keeps)
    if not out:
        return Rollouts()
    columns = ("logprobs", "entropy") if placement.roles[call.role].kind == "policy" else ("values",)
    outputs = {name: out[column] for name, column in zip(call.outputs, columns, strict=False)}
    outputs |= {name: out[name] for name in (ROUTER_COUNTS, ROUTER_PROBS, ROUTES) if name in out}
    return Rollouts(index=samples.tensor("index"), **outputs)


def _outputs(
    placement: Placement, engine: ScoringEngine, call: Call, samples: Rollouts, *, keeps: bool
) -> Mapping[str, Ragged]:
    """The engine's outputs. The model that will be trained on the samples keeps their graphs if `keeps`."""
    home = placement.plan.graph.train_call(call.role)
    if keeps and home is not None and isinstance(engine, ReplicatedEngine) and engine is placement.trained(call.role):
        return engine.forward_to_train(samples, placement.budget(home), placement.most_kept(home))
    return engine.forward(samples, placement.budget(call.name))


def function_spans(settings: CallSettings, rank: int, step: Step) -> tuple[Span, ...]:
    """Spans of the reward functions that this rank has called since the last call of this function."""
    return tuple(
        Span(f"{REWARD_FUNCTION}{function.name}", rank, start, end, step.number)
        for function in settings.functions
        for start, end in function.take_times()
    )


def score(placement: Placement, settings: CallSettings, call: Call, samples: Rollouts, step: Step) -> Rollouts:
    """Score this rank's samples by the reward models and functions.

    Returns:
        The call's first output column, the weighted sum of all scores, (n,) float32. With several scores, also
        `reward/<name>` for each. If models read other tokens than the samples', also these tokens (`TOKENS_READ`).
    """
    budget, roles, rows = placement.budget(call.name), placement.roles[call.role], step.rows
    tokens = settings.reward_tokens(samples) if settings.reward_tokens is not None and TEXTS in samples else {}
    models = [
        ModelReward(
            name,
            partial(engine.forward, micro_batch_tokens=budget),
            processing_class,
            tokens.get(name),
            table_positions(engine.head.model.config),
        )
        for name, engine, processing_class in zip(
            roles.names, placement.engines.get(call.name, ()), roles.processing_classes, strict=True
        )
        if step.model in ("", name)
    ]
    # all ranks of a replica have the same samples; only the first calls the functions, which may cost money
    is_source = placement.rank in sources(placement.plan, call.name)
    index = samples.tensor("index").tolist()
    scores, table = weighted_scores(
        models,
        settings.functions if is_source else (),
        settings.reward_weights,
        samples,
        lambda: decode(samples, [rows[row] if rows else {} for row in index], settings.processing_class),
        refuse=not settings.skip_nonfinite,
    )
    if not len(samples) or not is_source:
        return Rollouts()
    parts = {f"reward/{name}": scores for name, scores in table.items()} if len(table) > 1 else {}
    read = {f"{TOKENS_READ}{name}": model_tokens for name, model_tokens in tokens.items()}
    return Rollouts(index=samples.tensor("index"), **{call.outputs[0]: scores}, **parts, **read)
