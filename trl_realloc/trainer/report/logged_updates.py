"""`logged_updates`: the metrics of a run's updates, from `metrics.jsonl` or from Trainer's `trainer_state.json`.

`callbacks.MetricsWriter` writes `metrics.jsonl`; `trainer_state.json` is written with every checkpoint and at the end
of a run. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...common.errors import PlanError, shown
from ...common.files import MAX_RECORD_BYTES, exists, parse_json, read_json_mapping, read_text
from ..checkpoint.manifest import step_of


LogRow = Mapping[str, Any]  # a row of `trainer_state.json`: numbers, sometimes a text


SCORES = "objective/scores"
TRL_REWARD = "reward"  # the score's name in TRL's GRPO and RLOO
METRICS, STATE = "metrics.jsonl", "trainer_state.json"


def logged_updates(folder: str | Path) -> list[LogRow]:
    """The rows of a run's log that belong to updates, sorted by step; empty if nothing was logged.

    Reads the newer of `metrics.jsonl` and `trainer_state.json`, because the other may be from an earlier run. The state
    is that of the folder or of its newest checkpoint. Updates of a trainer without a plan have no times.

    Raises:
        PlanError: a row is not valid (`load_metrics`).
    """
    folder = Path(folder)
    metrics, state = folder / METRICS, _trainer_state(folder)
    if exists(metrics) and (state is None or metrics.stat().st_mtime >= state.stat().st_mtime):
        return load_metrics(metrics)
    if state is None:
        return []
    history = read_json_mapping(state, "the trainer's state", MAX_RECORD_BYTES).get("log_history")
    if not isinstance(history, list):
        raise PlanError(f"{state}: log_history is a list of logs, not {shown(history)}.")
    numbered = ((f"{state}, log {number}", row) for number, row in enumerate(history, start=1))
    return _updates(numbered)


def _trainer_state(folder: Path) -> Path | None:
    """The newest `trainer_state.json` of a run: from its newest checkpoint, or from its folder, where the end of the
    run writes one, if that has more steps."""
    # in this order a checkpoint comes after the one of the same name that it replaces
    paths = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ()
    states = {step: path / STATE for path in paths if (step := step_of(path)) is not None and exists(path / STATE)}
    newest = max(states, default=0)
    if exists(folder / STATE):
        last = read_json_mapping(folder / STATE, "the trainer's state", MAX_RECORD_BYTES).get("global_step")
        if not isinstance(last, int) or last >= newest:
            return folder / STATE
    return states.get(newest)


def load_metrics(path: str | Path) -> list[LogRow]:
    """The rows of a metrics file that belong to updates, sorted by step. GRPO's and RLOO's `reward` is their score.

    Raises:
        PlanError: a line is not a JSON object, or an update has no step, or a metric is not a finite number.
    """
    lines = enumerate(read_text(path, "the metrics", MAX_RECORD_BYTES).splitlines(), start=1)
    places = ((f"{path}, line {number}", line) for number, line in lines)
    return _updates((where, parse_json(line, where)) for where, line in places)


def _updates(logs: Iterable[tuple[str, object]]) -> list[LogRow]:
    """The logs that belong to updates, sorted by step. Each log comes with its location for messages."""
    rows = []
    for where, row in logs:
        if not isinstance(row, dict):
            raise PlanError(f"{where}: a line of metrics is a JSON object, not {shown(row)}.")
        if TRL_REWARD in row:
            row.setdefault(SCORES, row[TRL_REWARD])
        if SCORES in row:
            _check_update(row, where)
            rows.append(row)
    return sorted(rows, key=lambda row: row["step"])


def _check_update(row: LogRow, where: str) -> None:
    """Raise `PlanError` if the step is missing, or for the first metric that is not a finite number."""
    if "step" not in row:
        raise PlanError(f"{where}: there is no 'step'; were these metrics written by MetricsWriter?")
    for name, value in row.items():
        if name in ("step", "episode", SCORES, "tokens/s") or name.startswith(("time/", "realloc/", "staleness/")):
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30
            if not number or (name == "time/step" and value <= 0):
                raise PlanError(f"{where}: {name!r} is {shown(value)}, and must be a finite number.")
