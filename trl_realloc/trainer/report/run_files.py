"""`RunFiles`: the files in a run's folder, read for its report.

`run_record` writes the files, and a script the completions. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import FiniteFloat
from typing_extensions import TypedDict

from ...common.errors import PlanError
from ...common.files import MAX_RECORD_BYTES, exists, read_json, read_text
from ...common.schema import checked
from ...plan.execution_plan import ExecutionPlan
from ...plan.timeline import Timeline
from .estimate_part import ESTIMATE_FILE, FIRST_ESTIMATE_FILE
from .logged_updates import METRICS, STATE, LogRow, logged_updates


PLAN, TIMELINE, FACTS, COMPLETIONS = "plan.yaml", "timeline.json", "run.json", "completions.json"
MIN_LOGS = 2  # minimum to compare

Completion = TypedDict("Completion", {"query": str, "model response": str, "score": FiniteFloat})


class Completions(TypedDict):
    """The content of `completions.json`: completions of the same prompts before and after training."""

    before: list[Completion]
    after: list[Completion]


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's files. All except `rows` or `timeline` may be missing.

    Args:
        rows: logs of updates, from `logged_updates`; empty if there are fewer than two, which cannot be compared.
        plan_text: content of `plan.yaml`, which may not be a valid plan.
        facts: result of `run_facts`.
        estimate: estimate of the iteration; `None` without one, or without a timeline to compare it with.
        first_estimate: estimate when the plan was chosen, if `estimate` was corrected during the run.
    """

    folder: Path
    rows: Sequence[LogRow] = ()
    timeline: Timeline | None = None
    plan_text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    completions: Completions | None = None
    estimate: Timeline | None = None
    first_estimate: Timeline | None = None

    @classmethod
    def load(cls, folder: str | Path) -> RunFiles:
        """Read the files of a folder.

        Raises:
            PlanError: there is no timeline and a log has fewer than two updates, or a file cannot be read.
        """
        folder = Path(folder)
        rows, completions, facts = logged_updates(folder), None, dict[str, str]()
        timeline = _timeline(folder / TIMELINE)
        if len(rows) < MIN_LOGS:
            if timeline is None:
                raise PlanError(
                    f"{folder} holds no {TIMELINE}, which a run under a plan writes when it ends, and {_logs(rows)}"
                )
            rows = []
        if exists(folder / COMPLETIONS):
            read = read_json(folder / COMPLETIONS, "the completions", MAX_RECORD_BYTES)
            completions = checked(Completions, read, str(folder / COMPLETIONS))
        if exists(folder / FACTS):
            read = read_json(folder / FACTS, "the facts of the run", MAX_RECORD_BYTES)
            facts = checked(dict[str, str], read, str(folder / FACTS))
        plan = read_text(folder / PLAN, "the plan") if exists(folder / PLAN) else ""
        estimate = None if timeline is None else _timeline(folder / ESTIMATE_FILE)
        first = None if estimate is None else _timeline(folder / FIRST_ESTIMATE_FILE)
        return cls(folder, rows, timeline, plan, facts, completions, estimate, first)

    @cached_property
    def plan(self) -> ExecutionPlan | None:
        """The plan; `None` if the text is not one."""
        try:
            return ExecutionPlan.from_yaml(self.plan_text)
        except PlanError:
            return None

    @property
    def updates(self) -> int:
        """Number of the last update."""
        return self.rows[-1]["step"] if self.rows else self.timeline.steps[-1] + 1 if self.timeline else 0


def _timeline(path: Path) -> Timeline | None:
    """The timeline of a file; `None` if there is no file, or no span in it."""
    timeline = Timeline.load(path) if exists(path) else Timeline()
    return timeline if timeline.spans else None


def _logs(rows: Sequence[LogRow]) -> str:
    """The missing logs, as the end of a sentence."""
    if not rows:
        return f"no logs of updates: no {METRICS}, and no {STATE} in it or in a checkpoint."
    return f"{len(rows)} log of an update, where a report compares {MIN_LOGS}; train longer, or with logging_steps=1."
