"""`PolicyRecord`: the times that a trainer of one policy adds to TRL's logs, and the files of its report.
`sampled_completions`: completions of the evaluation prompts, which TRL's class has no method for.

The report is written by `run_report`.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase, Trainer

from ...algorithms.rollout import Rollouts
from ...plan.spans import Span, loop_spans
from ...plan.timeline import Timeline
from ...runtime.calls.results import observed
from ...runtime.process_groups import all_gather_object
from ..checks.config_checks import ConfigError
from ..ppo.evaluation import NEAR_GREEDY
from ..report.completions import CompletionRow, show_completions
from ..run.metrics import LENGTHS, SPANS
from .trl_sampling import tokenizer_of


@dataclass
class Period:
    """The generations and optimizer steps since the plan could last be changed.

    Args:
        lengths: tokens of this rank's responses.
        spans: spans of all ranks, on rank 0; empty on the others.
        seconds: duration of the optimizer steps, including their generations.
    """

    generations: int = 0
    lengths: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0


class PolicyRecord:
    """Records the times of updates and their calls, and the lengths of responses.

    Every log of updates gets means over the updates since the last one: `time/step` and `tokens/s`; on rank 0 also
    `time/<call>`, seconds of the slowest device, for reallocations `realloc/seconds/<call>` and `realloc/bytes/<call>`,
    and for work on the host the names of `results.observed`. An update is an optimizer step.

    Args:
        trainer: a `PlannedPolicyTrainer`.

    Attributes:
        lengths: tokens of this rank's latest responses; `None` before training.
        period: updates since the plan could last be changed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.lengths: deque[int] | None = None
        self._reset()

    def _reset(self) -> None:
        self._updates: deque[tuple[Span, ...]] = deque()  # spans of the latest updates, on rank 0; empty on the others
        self._times, self.period, self._begun = _Times(), Period(), 0.0

    @property
    def timeline(self) -> Timeline:
        """`PlannedPolicyTrainer.timeline`."""
        return Timeline(span for spans in self._updates for span in spans)

    def begin_training(self) -> None:
        """Forget the training before."""
        self._reset()
        self.lengths = deque(maxlen=LENGTHS)

    def begin_update(self) -> None:
        """A micro-batch begins, maybe the first of an update."""
        if not self._times.runs:
            self._take_spans()  # drop spans before the update
            self._begun = time.time()
            self._times.start(self.trainer.state.num_input_tokens_seen)

    def add_responses(self, responses: Sequence[Sequence[int]]) -> None:
        """Record the lengths of a training generation's responses."""
        if self.lengths is not None and self.trainer.model.training:
            lengths = list(map(len, responses))
            self.lengths.extend(lengths)
            self.period.generations += 1
            self.period.lengths += lengths

    def end_update(self) -> None:
        """Record the update's times, if this micro-batch ended one, and add their means to TRL's next log."""
        self._end_update()
        trainer = self.trainer
        is_logged = trainer.control.should_log and trainer.state.global_step > trainer._globalstep_last_logged
        if is_logged and trainer.model.training:  # TRL logs the metrics of the mode that its model is in
            trainer._metrics["train"].update({name: [value] for name, value in self._times.means().items()})
            self._times = _Times()

    def _end_update(self) -> None:
        if not self._times.runs:
            return
        spans = self._take_spans()
        if spans:
            spans += loop_spans(spans, self._begun, time.time(), spans[0].step)
        seconds = self._times.stop(self.trainer.state.num_input_tokens_seen, observed(Rollouts(), spans))
        self.period.spans += spans
        self.period.seconds += seconds
        if spans:
            self._updates.append(spans)
        while sum(map(len, self._updates)) > SPANS and len(self._updates) > 1:
            self._updates.popleft()

    def begin_period(self) -> None:
        """Begin a new period, because the plan could be changed now."""
        self.period = Period()

    def save(self) -> None:
        """Save the record of a run under a plan in its output directory."""
        config, name = self.trainer.args, type(self.trainer).__name__.removesuffix("Trainer")
        # the planner estimates a generation with all its optimizer steps
        of_update = config.num_iterations * config.steps_per_generation == config.gradient_accumulation_steps
        self.trainer.run.save_record(name, self.timeline, list(self.lengths or ()), of_update=of_update)

    def _take_spans(self) -> tuple[Span, ...]:
        return (
            () if self.trainer.run is None else self.trainer.calls.take_spans() + self.trainer.run.adapter.spans.take()
        )


class _Times:
    """The times of the updates since the last log. The clock is stopped between updates, for example during a save."""

    def __init__(self) -> None:
        self.runs = False
        self._sums: Counter[str] = Counter()
        self._updates = self._tokens = 0
        self._seconds = self._start = 0.0

    def start(self, tokens: int) -> None:
        """Begin an update. `tokens`: prompt and response tokens that the run has generated so far."""
        self.runs, self._start = True, time.perf_counter()
        self._tokens -= tokens

    def stop(self, tokens: int, values: Mapping[str, float]) -> float:
        """End the update, and return its seconds. `values` are logged as means."""
        self.runs = False
        seconds = time.perf_counter() - self._start
        self._seconds += seconds
        self._tokens += tokens
        self._updates += 1
        self._sums.update(values)
        return seconds

    def means(self) -> dict[str, float]:
        """The mean of every value over the updates, `time/step` in seconds, and `tokens/s`; empty without updates."""
        if not self._updates:
            return {}
        means = {name: total / self._updates for name, total in self._sums.items()}
        return {**means, "time/step": self._seconds / self._updates, "tokens/s": self._tokens / self._seconds}


def sampled_completions(trainer: Trainer) -> list[CompletionRow]:
    """`generate_completions` of a `PlannedPolicyTrainer` whose run has a plan."""
    trainer.run.adapter.turns.refuse_use()
    data = next(iter(trainer.eval_dataset.values())) if isinstance(trainer.eval_dataset, dict) else trainer.eval_dataset
    rows = [] if data is None else list(data)
    if not rows:
        return []
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    share = -(-len(rows) // world)
    # TRL gathers equal numbers of rewards, so the last ranks repeat the last prompt
    local_rows = [rows[min(index, len(rows) - 1)] for index in range(rank * share, (rank + 1) * share)]
    with trainer.run.failing_together(), trainer.run.adapter.mode_kept():
        trainer.run.placed.start()
        trainer.calls.at(trainer.state.global_step, evaluates=True)
        trainer.calls.begin_evaluation()
        table = _completions_of(trainer, local_rows)
        gathered = all_gather_object(table, trainer.run.placed.placement.control)
        trainer.calls.take_spans()
    if rank:
        return []
    table = [row for part in gathered for row in part][: len(rows)]
    show_completions(table, trainer.args.report_to, trainer.state.global_step)
    return table


def _completions_of(trainer: Trainer, rows: list[dict[str, Any]]) -> list[CompletionRow]:
    if getattr(trainer, "environment_factories", None) is not None:
        raise ConfigError("generate_completions has no environments; leave it out, or evaluate the trainer.")
    prompts = [row["prompt"] for row in rows]
    near_greedy = replace(trainer.executor.runner.settings.sampling, temperature=NEAR_GREEDY)
    texts_of = [pickle.dumps(prompt) for prompt in prompts]
    trainer.calls.begin_generation()
    outputs = trainer.calls.generate(trainer._tokenize_prompts(prompts)[0], texts_of, sampling=near_greedy)
    ids = [row.tolist() for row in outputs.ragged("responses").rows()]
    tokenizer: PreTrainedTokenizerBase = tokenizer_of(trainer.processing_class)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    queries, completions = prompts, texts
    if not isinstance(prompts[0], str):  # conversations
        queries = ["\n".join(str(message["content"]) for message in prompt) for prompt in prompts]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    logged = copy.deepcopy((trainer._pending_extra_logs, trainer._pending_metrics, trainer._metrics))
    everything = trainer._calculate_rewards(rows, prompts, completions, ids)  # of all ranks
    # what is logged of these rewards does not belong to the training's logs
    trainer._pending_extra_logs, trainer._pending_metrics, trainer._metrics = logged
    scores = (everything.cpu() * trainer.reward_weights.cpu()).nansum(1)
    first = trainer.accelerator.process_index * len(rows)
    return [
        {"query": query, "model response": text, "score": float(score)}
        for query, text, score in zip(queries, texts, scores[first : first + len(rows)], strict=True)
    ]
