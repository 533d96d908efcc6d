"""A rank of a run under `plan: auto`, with an empty cache or with that of a run before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tiny

from trl_realloc.engines.base import EngineError
from trl_realloc.engines.generation.transformers import TransformersEngine
from trl_realloc.plan.timeline import Timeline
from trl_realloc.profiling import late_measuring
from trl_realloc.profiling import profile_cache as cache


def fail_while_measuring() -> None:
    """The first short run's generation fails on rank 1."""
    measure, generate = cache.measure, TransformersEngine.generate

    def failing(*given: Any, **named: Any) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise EngineError("the engine of the short run has failed.")

        if os.environ["RANK"] == "1":
            TransformersEngine.generate = refuse
        try:
            return measure(*given, **named)
        finally:
            TransformersEngine.generate = generate

    cache.measure = failing


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    if options.pop("measures", False):  # as soon as it is asked
        late_measuring.LateMeasuring.cost = lambda *given: 0.0
    measured = []
    measure = cache.measure
    cache.measure = lambda *given, **named: measured.append(1) or measure(*given, **named)
    if options.pop("fails", False):
        fail_while_measuring()
    made = tiny.trained(folder, given={"reward_model": tiny.classifier(2)}, **options)
    if made.accelerator.is_main_process:
        found = made.setup.job_plan.priced
        said = {"measured": len(measured), "plan": made.plan.to_dict(), "estimate": found.timeline.seconds_per_step}
        calls = Timeline(span for span in made.timeline.spans if not span.is_host_work)
        said["took"] = [calls.of_step(step).seconds_per_step for step in calls.steps]
        said["step"] = made.state.log_history[-1]["time/step"] if made.state.log_history else None
        (folder / "log.json").write_text(json.dumps({**said, "updates": tiny.updates(made)}))
    made.close()


if __name__ == "__main__":
    main()
