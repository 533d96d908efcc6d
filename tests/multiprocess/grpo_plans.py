"""A rank that trains by GRPO or RLOO on fixed responses, once for each of the given runs, by TRL's trainer or under a
plan. Rank 0 writes the logs, and the stage where DeepSpeed trains; each run saves its model."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import mixtures
import tiny
import trl
from moved import Forced
from recorded_rollouts import make, recorded, result, unequal

import trl_realloc
from trl_realloc.engines.training.deepspeed_compat import leave_out_shared_memory_op
from trl_realloc.plan.presets import resolve_plan
from trl_realloc.profiling import late_measuring, profile_cache


def zero_stage(library: Any, made: Any) -> int:
    """The stage of the DeepSpeed engine that has trained on this rank; 0 where another engine has."""
    engine = made.deepspeed if library is trl else getattr(made.placement.engine("actor.train"), "engine", None)
    return 0 if engine is None else int(engine.zero_optimization_stage())


def train(
    folder: Path,
    by: str,
    resumes: str | None = None,
    generates: bool = False,
    evaluates: bool = False,
    reward_model: bool = False,
    mixture: str | None = None,
    moves_to: Any = None,
    after: int = 1,
    measures: bool = False,
    rows: int | None = None,
    pauses_s: float = 0.0,
    **settings: Any,
) -> None:
    """One run.

    Args:
        by: the name of a library.
        resumes: the folder of a checkpoint.
        generates: the plan's engines generate, in the place of fixed responses.
        evaluates: there are prompts for evaluations.
        reward_model: there is a reward model beside the function.
        mixture: the family of the policy, if it is a mixture of experts.
        moves_to: the plan that the run changes to after so many generations, whatever the planner thinks.
        measures: as soon as the run may measure its machine, it does.
        rows: of the training prompts, if not those of `make`.
        pauses_s: between each generation and its training.
    """
    library = {"trl": trl, "trl_realloc": trl_realloc}[by]
    base = (lambda trainer: trainer) if generates else recorded
    given: dict[str, Any] = {"eval_dataset": tiny.prompts(8)} if evaluates else {}
    if reward_model:
        given |= {"reward_funcs": [tiny.classifier(), unequal], "reward_processing_classes": [tiny.tokenizer(), None]}
    if mixture is not None:
        given["model"] = mixtures.mixture(mixture)
    if rows is not None:
        given["train_dataset"] = tiny.prompts(rows)
    made = make(library, folder, base=base, given=given, **settings)
    asked, generate = list[Any](), made._generate

    def noted(prompts: Any) -> Any:
        asked.append(prompts)
        generated = generate(prompts)
        time.sleep(pauses_s)
        return generated

    made._generate = noted
    if moves_to is not None:
        made.run.change.replanner = Forced(resolve_plan(moves_to, made.plan.cluster, graph=made.plan.graph), after)
    measured = 0

    def measure(*arguments: Any, **named: Any) -> Any:
        nonlocal measured
        measured += 1
        return measure_now(*arguments, **named)

    measure_now, cost = profile_cache.measure, late_measuring.LateMeasuring.cost
    profile_cache.measure = measure
    if measures:
        late_measuring.LateMeasuring.cost = lambda *given: 0.0  # type: ignore[method-assign]
    made.train(resume_from_checkpoint=None if resumes is None else str(folder.parent / resumes))
    made.save_model(str(folder / "model"))
    if made.accelerator.is_main_process:
        (folder / "log.json").write_text(json.dumps(result(made).logs))
        (folder / "prompts.json").write_text(json.dumps(asked))
        (folder / "engine.json").write_text(json.dumps({"zero_stage": zero_stage(library, made)}))
        if library is trl_realloc:
            (folder / "plan.json").write_text(json.dumps({"plan": made.plan.to_dict(), "measured": measured}))
    profile_cache.measure, late_measuring.LateMeasuring.cost = measure_now, cost  # type: ignore[method-assign]
    made.accelerator.wait_for_everyone()
    if library is trl_realloc:
        made.close()


if __name__ == "__main__":
    gc.freeze()  # each training ends with a garbage collection
    leave_out_shared_memory_op()  # which TRL's arguments would compile under a launcher's config of DeepSpeed
    for name, run in json.loads(sys.argv[2]).items():
        train(Path(sys.argv[1]) / name, **run)
