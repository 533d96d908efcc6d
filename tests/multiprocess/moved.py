"""A rank of a run that moves from one written plan to another after its second update, whatever the planner thinks, and
counts what it keeps meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import tiny

from trl_realloc.plan.execution_plan import ExecutionPlan
from trl_realloc.profiling.auto_plan import JobPlan
from trl_realloc.runtime.placement.placement import Placement
from trl_realloc.trainer.run import plan_change


class Forced:
    """In a replanner's place. Finds a plan after so many iterations."""

    def __init__(self, plan: ExecutionPlan, after: int = 2) -> None:
        self.plan, self.after, self.iterations = plan, after, 0

    def note(self, lengths: Sequence[int]) -> None:
        pass

    def follow(self, job_plan: JobPlan) -> None:
        """The plan that comes next is written."""

    def better(self, updates_left: int, move_seconds: float) -> JobPlan | None:
        self.iterations += 1
        return JobPlan(self.plan) if self.iterations == self.after else None


class Counted(plan_change.RunState):
    """Writes the bytes of this rank's parts, and of what it has kept of them."""

    folder: Path

    def __init__(self, placement: Placement) -> None:
        live = 0
        for call, _, engine in placement.home_engines():
            trained = placement.plan.graph.call(call).trains
            parts = [cell for *_, cell in engine.training_state().cells()] if trained else []  # type: ignore[attr-defined]
            parts = parts or [cell for cells in engine.parts().values() for _, cell in cells]
            live += sum(cell.nbytes for cell in parts)
        super().__init__(placement)
        kept = sum(t.nbytes for held in self._parts.values() for cells in held.tensors.values() for _, t in cells)
        (self.folder / f"kept-{placement.rank}.json").write_text(json.dumps([kept, live]))


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    Counted.folder = folder
    plan_change.RunState = Counted  # type: ignore[misc]
    to = options.pop("to", None)
    made = tiny.trainer(folder, given={"reward_model": tiny.classifier(2)}, **options)
    made.run.change.replanner = Forced(ExecutionPlan.from_dict(to)) if to else None
    made.train()
    if made.accelerator.is_main_process:
        (folder / "log.json").write_text(json.dumps({"updates": tiny.updates(made), "plan": made.plan.to_dict()}))
    made.save_model(str(folder / "final"))
    made.close()


if __name__ == "__main__":
    main()
