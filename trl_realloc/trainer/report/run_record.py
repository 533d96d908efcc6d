"""`save_record`: the files that a run writes at its end, and its report (`run_report`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from transformers import TrainerState

from ...common.notices import notice
from ...plan.execution_plan import ExecutionPlan
from ...plan.timeline import Timeline
from ...planner.search.priced_plan import PricedPlan
from .estimate_part import ESTIMATE_FILE, FIRST_ESTIMATE_FILE, LENGTHS_FACT, estimate_table
from .logged_updates import STATE
from .run_files import FACTS, PLAN, TIMELINE
from .run_report import report_run


MIN_UPDATES = 3  # minimum for an automatic report: its means leave out the first update, which compiles


def save_record(
    plan: ExecutionPlan,
    timeline: Timeline,
    expected: PricedPlan | None,
    folder: Path,
    *,
    when_chosen: PricedPlan | None = None,
    of_update: bool = True,
    facts: Mapping[str, str] | None = None,
    state: TrainerState | None = None,
) -> None:
    """Save the files that `run_files` reads: `plan.yaml`, `timeline.json`, `run.json` with the facts,
    `trainer_state.json` with the logs; with an estimate `estimate.json`. Also prints the estimate next to the
    measured times, and writes the report of three or more updates. Does nothing if no call was run.

    Args:
        expected: estimate of the plan, corrected with the run's times.
        when_chosen: estimate when the plan was chosen, if it differs; saved as `first_estimate.json`.
        of_update: whether an estimated iteration is one update, so that times can be compared. Not so if a generation
            in TRL's loop has more or less than one update.
        facts: result of `run_facts`.
        state: state of the trainer.
    """
    if not timeline.spans:
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / PLAN)
    timeline.save(folder / TIMELINE)
    for of_earlier_run in (FACTS, ESTIMATE_FILE, FIRST_ESTIMATE_FILE):
        (folder / of_earlier_run).unlink(missing_ok=True)
    if facts is not None:
        if expected is not None:
            facts = {**facts, LENGTHS_FACT: expected.space.pricing.workload.lengths_text}
        (folder / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    if state is not None:
        state.save_to_json(str(folder / STATE))
    if expected is not None and of_update:
        expected.timeline.save(folder / ESTIMATE_FILE)
        first = None if when_chosen is None else when_chosen.timeline
        if first is not None:
            first.save(folder / FIRST_ESTIMATE_FILE)
        lengths = expected.space.pricing.workload.lengths_text
        Console(stderr=True).print(estimate_table(expected.timeline, timeline.joined(plan.fused), first, lengths))
    if len(timeline.steps) < MIN_UPDATES:
        return
    try:
        report_run(folder)
    except Exception as error:  # a failure to draw must not fail a finished run
        notice(f"the report was not written ({error}); trl-realloc report {folder} writes it again.")
