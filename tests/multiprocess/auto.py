"""A rank of a run under `plan: auto`, with an empty cache or with that of a run before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny

from trl_realloc.profiling import late_measuring
from trl_realloc.profiling import profile_cache as cache


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    if options.pop("measures", False):  # as soon as it is asked
        late_measuring.LateMeasuring.cost = lambda *given: 0.0
    measured = []
    measure = cache.measure
    cache.measure = lambda *given, **named: measured.append(1) or measure(*given, **named)
    made = tiny.trainer(folder, given={"reward_model": tiny.classifier(2)}, **options)
    made.train()
    if made.accelerator.is_main_process:
        found = made.setup.job_plan.priced
        said = {"measured": len(measured), "plan": made.plan.to_dict(), "estimate": found.timeline.seconds_per_step}
        said["took"] = [made.timeline.of_step(step).seconds_per_step for step in made.timeline.steps]
        said["step"] = made.state.log_history[-1]["time/step"] if made.state.log_history else None
        (folder / "log.json").write_text(json.dumps({**said, "updates": tiny.updates(made)}))
    made.close()


if __name__ == "__main__":
    main()
