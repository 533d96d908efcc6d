"""Contract 1 on random plans: `python tests/multiprocess/random_plans.py --count 300 --seed 0`.

Every case (`drawn`) feeds two batches of recorded rollouts through its plan and through one process, and compares the
statistics and the parameters after two updates. A failure is printed with its seed and its plan;
`--seed N --count 1` repeats it. As a rank this script is started with a folder and the seeds of the cases to run.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainer")]

import torch  # noqa: E402
from drawn import case_of, config_of  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402


UPDATES = 2
STATISTICS = 1e-4  # largest difference of a statistic, relative above 1
PARAMETERS = 3e-3  # largest difference of a parameter, of the largest movement of its role (rounding: up to 1.3e-3)
PER_LAUNCH = 20  # every plan makes process groups of its own, which last as long as their process


# --- a rank -----------------------------------------------------------------------------------------------------------


def run(folder: Path, seeds: Sequence[int], whole: bool) -> None:
    """Run each seed's case, under its plan or on one process, and write what it made of it."""
    torch.set_num_threads(1)
    for seed in seeds:
        case = case_of(seed)
        made = trainer(folder, case, whole)
        before = weights(made) if whole else {}
        metrics = [update(made, case, step) for step in range(UPDATES)]
        for role, tensors in weights(made).items():
            if made.placement.group({"policy": "actor.train", "critic": "critic.train"}[role]).is_leader:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{seed}.{role}")
                if whole:
                    save_file(before[role], folder / f"{seed}.{role}.before")
        made.accelerator.wait_for_everyone()
        made.close()
        if made.accelerator.process_index == 0:
            (folder / f"{seed}.json").write_text(json.dumps(metrics))


def trainer(folder: Path, case: Mapping[str, Any], whole: bool) -> Any:
    import tiny

    plan: Any = case["plan"]
    devices = 1 if whole else case["devices"]
    if whole:
        line = {"mesh": 0, "dp": 1, "engine": "zero"}
        calls = {
            name: {**line, "engine": "transformers"} if name == "actor.generate" else line for name in plan["calls"]
        }
        plan = {"cluster": {"nodes": 1, "devices_per_node": 1}, "calls": calls}
    model = case["model"]
    policy = model_of(model, "policy", 1)
    if model["lora"]:
        from peft import LoraConfig, get_peft_model

        policy = get_peft_model(policy, LoraConfig(r=4, target_modules=model["lora"], init_lora_weights=False))
    made = tiny.trainer(
        folder,
        given={
            "model": policy,
            "ref_model": None if model["lora"] else model_of(model, "policy", 2),
            "value_model": model_of(model, "critic", 3),
            "reward_model": model_of(model, "critic", 4),
        },
        plan=plan,
        per_device_train_batch_size=case["samples"] // devices,
        # Adam's default epsilon of 1e-8 makes a step of the rounding noise in a gradient that is 0
        adam_epsilon=1e-4,
        **case["config"],
    )
    rules = made.executor.rules  # past the config, which wants a process's share to divide
    made.executor.rules = replace(rules, settings=replace(rules.settings, num_mini_batches=case["mini_batches"]))
    made.placement.start()
    return made


def model_of(model: Mapping[str, Any], kind: str, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    made = auto.from_config(config_of(model, num_labels=1), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:  # a norm of ones would hide where it is applied
                parameter.add_(0.1 * torch.randn(parameter.shape))
            if "score" in name:
                parameter.mul_(10)
    return made


def update(made: Any, case: Mapping[str, Any], step: int) -> dict[str, float]:
    from trl_realloc.data import PromptBatch
    from trl_realloc.dataflow import Role
    from trl_realloc.rollout import Ragged, Rollouts

    draw = torch.Generator().manual_seed(1000 * case["seed"] + step)
    n = case["samples"]
    lengths = [1, 12, *torch.randint(1, 13, (n - 2,), generator=draw).tolist()]
    before = torch.randint(1, 9, (n,), generator=draw).tolist()
    prompts = Ragged.of([torch.randint(2, 100, (k,), generator=draw) for k in before], torch.long)
    responses = Ragged.of([torch.randint(2, 100, (k,), generator=draw) for k in lengths], torch.long)
    noise = torch.randn(sum(lengths), generator=draw)
    index = torch.arange(n)
    generated = Rollouts(
        index=index,
        responses=responses,
        logprobs=responses.like(-4.5 + 0.1 * noise),
        has_eos=torch.tensor([k < 12 for k in lengths]),
    )
    batch = PromptBatch(Rollouts(index=index, prompts=prompts), [{} for _ in range(n)])
    rates = {Role.ACTOR: 1e-2, Role.CRITIC: 2e-2}
    metrics: dict[str, float] = made.executor.run(batch, step, rates, known={"actor.generate": generated}).metrics
    return metrics


def weights(made: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The trained roles' parameters, whole on the first rank of their meshes; collective."""
    engines = {"policy": made.placement.actor, "critic": made.placement.critic}
    return {
        role: {name: tensor.clone() for bucket in engine.export(merged=False) for name, tensor in bucket}
        for role, engine in engines.items()
        if engine is not None
    }


# --- all of them ------------------------------------------------------------------------------------------------------


def differences(split: Path, whole: Path, seed: int) -> list[str]:
    """What is not as on one process, a sentence each."""
    found = []
    rows = zip(*(json.loads((folder / f"{seed}.json").read_text()) for folder in (split, whole)), strict=True)
    for at, (ours, expected) in enumerate(rows):
        for name, value in expected.items():
            here = ours.get(name, math.inf)
            if not (math.isnan(value) and math.isnan(here)) and not abs(here - value) <= STATISTICS * max(
                1, abs(value)
            ):
                found.append(f"{name} of update {at} is {here}, not {value}")
    for role in ("policy", "critic"):
        ours, expected = load_file(split / f"{seed}.{role}"), load_file(whole / f"{seed}.{role}")
        before = load_file(whole / f"{seed}.{role}.before")
        if ours.keys() != expected.keys():
            found.append(f"the {role}'s parameters are called {sorted(ours.keys() ^ expected.keys())}")
            continue
        moved = max(float((expected[name] - before[name]).abs().max()) for name in expected)
        gaps = {name: float((ours[name] - expected[name]).abs().max()) for name in expected}
        worst = max(gaps, key=lambda name: gaps[name])
        if not gaps[worst] <= PARAMETERS * moved:
            found.append(f"the {role}'s {worst} differs by {gaps[worst]:.2g} where parameters moved by {moved:.2g}")
    return found


def check(seeds: Sequence[int], limit_s: float, launch: Any) -> dict[int, list[str]]:
    """The failures of the cases, by seed.

    Args:
        limit_s: for one case, the start of its job included.
        launch: (script, processes, options, name) -> a started job, as `conftest.Job`.
    """
    failures: dict[int, list[str]] = {}

    def through(seeds: Sequence[int], processes: int, whole: bool) -> None:
        left = list(seeds)
        while left:
            part = left[:PER_LAUNCH]
            name = f"{'whole' if whole else 'split'}-{processes}-{part[0]}"
            job = launch(Path(__file__).name, processes, {"seeds": part, "whole": whole}, name)
            finished, end = -1, time.monotonic()
            while job.process.poll() is None and time.monotonic() < end + limit_s:
                if (count := len(list(job.folder.glob("*.json")))) > finished:
                    finished, end = count, time.monotonic()
                time.sleep(0.2)
            code = job.process.poll()
            job.kill()
            done = [seed for seed in part if (job.folder / f"{seed}.json").exists()]
            for seed in done:
                places.setdefault(seed, {})[whole] = job.folder
            if len(done) < len(part):  # the first that is not done ended the launch, or hung
                how = f"was not done after {limit_s:.0f} s" if code is None else f"ended with exit status {code}"
                failures[part[len(done)]] = [f"{name} {how}: {_cause(job.text())}"]
            left = [seed for seed in left if seed not in done and seed not in failures]

    places: dict[int, dict[bool, Path]] = {}
    through(seeds, 1, True)
    for processes in sorted({case_of(seed)["devices"] for seed in seeds}):
        through([s for s in seeds if case_of(s)["devices"] == processes and s not in failures], processes, False)
    for seed, folders in places.items():
        if len(folders) == 2 and (found := differences(folders[False], folders[True], seed)):
            failures[seed] = found
    return failures


def _cause(log: str) -> str:
    """The end of what the ranks wrote, less the launcher's account of which rank ended first."""
    return log.partition("torch/distributed/elastic/multiprocessing/api.py")[0][-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description="Random legal plans against one process.")
    parser.add_argument("--count", type=int, default=100, help="how many plans")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a plan, the start of its job included")
    arguments = parser.parse_args()
    from conftest import Job

    folder = Path(tempfile.mkdtemp(prefix="random_plans_"))

    def launch(script: str, processes: int, options: dict[str, Any], name: str) -> Any:
        (folder / name).mkdir()
        return Job(folder / name, script, processes, options, None)

    failures: dict[int, list[str]] = {}
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    for start in range(0, len(seeds), PER_LAUNCH):
        part = seeds[start : start + PER_LAUNCH]
        here = check(part, arguments.limit, launch)
        for seed, found in here.items():
            print(f"\nseed {seed}: {json.dumps(case_of(seed))}", *found, sep="\n  ", flush=True)
        failures |= here
        print(f"{start + len(part)} plans, {len(failures)} failed {sorted(failures)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return bool(failures)


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        options = json.loads(sys.argv[2])
        run(Path(sys.argv[1]), options["seeds"], options["whole"])
    else:
        sys.exit(main())
