"""`PolicyRecordMixin`: the times that a run of `PlannedPolicyTrainer` adds to TRL's logs, and the files that its report
is made of.

The report itself is written by `run_report`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...algorithms.rollout import Rollouts
from ...plan.timeline import Span, Timeline
from ...runtime.host_calls import HostCalls
from ...runtime.samples.results import observed
from ..report.run_record import save_record
from ..run.metrics import LENGTHS, SPANS
from ..run.planned_run import PlannedRun
from .policy_host import PolicyHost
from .policy_setup import PolicySetup


@dataclass
class Period:
    """The generations and optimizer steps since the plan could be changed last.

    Args:
        lengths: of this rank's responses, tokens.
        spans: of all ranks; on rank 0, empty on the others.
        seconds: of the optimizer steps, with the generations in them.
    """

    generations: int = 0
    lengths: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    seconds: float = 0.0


class PolicyRecordMixin:
    """Keeps the times of a run's calls. The attributes are those of the trainer that the class is mixed into.

    To TRL's values every log of updates gets means over the updates since the last one: `time/step` and `tokens/s`; on
    rank 0 also `time/<call>`, seconds of the slowest device, and for reallocations `realloc/seconds/<call>` and
    `realloc/bytes/<call>`. An update is an optimizer step.
    """

    args: Any
    state: Any
    model: Any
    accelerator: Any
    run: PlannedRun[PolicySetup, PolicyHost] | None
    calls: HostCalls

    _updates: deque[tuple[Span, ...]]  # spans of the latest updates; on rank 0, empty on the others
    _lengths: deque[int] | None = None  # tokens of this rank's latest responses; None before the training
    _times: _Times
    _period: Period

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._updates, self._times, self._period = deque(), _Times(), Period()
        super().__init__(*args, **kwargs)

    @property
    def timeline(self) -> Timeline:
        """The start and the end of the calls of the latest updates; empty before the first. Rank 0 keeps up to
        `metrics.SPANS` of them, the other ranks none."""
        return Timeline(span for spans in self._updates for span in spans)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, which saves the record of the run at its end."""
        self._updates, self._lengths, self._times = deque(), deque(maxlen=LENGTHS), _Times()
        self._period = Period()
        output = super().train(*args, **kwargs)  # type: ignore[misc]
        if self.accelerator.is_main_process and self.run is not None:
            config, lengths = self.args, list(self._lengths or ())
            observer = self.run.change.observer
            expected, chosen = observer.end(lengths), observer.when_chosen(lengths)
            # the planner estimates a generation with all its optimizer steps
            of_update = config.num_iterations * config.steps_per_generation == config.gradient_accumulation_steps
            folder = Path(config.output_dir)
            save_record(self.run.placed.plan, self.timeline, expected, folder, when_chosen=chosen, of_update=of_update)
        return output

    def _take_spans(self) -> tuple[Span, ...]:
        return () if self.run is None else self.calls.take_spans()

    def _generate(self, prompts: Any) -> Any:
        made = super()._generate(prompts)  # type: ignore[misc]
        if self._lengths is not None and self.model.training:
            lengths = list(map(len, made[1]))
            self._lengths.extend(lengths)
            self._period.generations += 1
            self._period.lengths += lengths
        return made

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._times.runs:
            self._take_spans()  # of what was before the update
            self._times.start(self.state.num_input_tokens_seen)
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """After an update: keep its times, then what Trainer does."""
        if self._times.runs:
            spans = self._take_spans()
            seconds = self._times.stop(self.state.num_input_tokens_seen, observed(Rollouts(), spans))
            self._period.spans += spans
            self._period.seconds += seconds
            if spans:
                self._updates.append(spans)
            while sum(map(len, self._updates)) > SPANS and len(self._updates) > 1:
                self._updates.popleft()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.model.training:
            logs.update(self._times.means())
            self._times = _Times()
        super().log(logs, start_time)  # type: ignore[misc]


class _Times:
    """The times of the updates since the last log. Between two updates, such as while one is saved, it stands still."""

    def __init__(self) -> None:
        self.runs = False
        self._sums: Counter[str] = Counter()
        self._updates = self._tokens = 0
        self._seconds = self._start = 0.0

    def start(self, tokens: int) -> None:
        """An update begins.

        Args:
            tokens: of prompts and responses that the run has generated.
        """
        self.runs, self._start = True, time.perf_counter()
        self._tokens -= tokens

    def stop(self, tokens: int, values: Mapping[str, float]) -> float:
        """The update has ended. Returns its seconds.

        Args:
            values: of the update, of which the means are logged.
        """
        self.runs = False
        seconds = time.perf_counter() - self._start
        self._seconds += seconds
        self._tokens += tokens
        self._updates += 1
        self._sums.update(values)
        return seconds

    def means(self) -> dict[str, float]:
        """The mean of every value over the updates, with `time/step` in seconds, and `tokens/s`; empty without
        updates."""
        if not self._updates:
            return {}
        means = {name: total / self._updates for name, total in self._sums.items()}
        return {**means, "time/step": self._seconds / self._updates, "tokens/s": self._tokens / self._seconds}
