"""One rank of a launch of `random_plans`: runs its cases (`drawn`) under their plans, or on one process, and writes
their statistics and parameters. Started as a script with a folder, and with the seeds to run as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainer")]

import in_float64  # noqa: E402


in_float64.read_float32_as_float64()  # before anything that computes is imported

import json  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import tiny  # noqa: E402
import torch  # noqa: E402
from drawn import case_of, config_of  # noqa: E402
from replaying import replay  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402

from trl_realloc.algorithms.prompt_batches import PromptBatch  # noqa: E402
from trl_realloc.algorithms.rollout import Ragged, Rollouts  # noqa: E402
from trl_realloc.engines.requests import Completion  # noqa: E402
from trl_realloc.plan.dataflow import Role  # noqa: E402
from trl_realloc.planner.iteration.stream_dispatcher import Continue, Score  # noqa: E402
from trl_realloc.runtime.calls.generate_and_score import sample_seed  # noqa: E402


UPDATES = 2
SEED = 42
GENERATED = ("responses", "logprobs", "has_eos")


def run(folder: Path, seeds: Sequence[int], whole: bool) -> None:
    """Run each seed's case, under its plan or on one process, and write what it made of it."""
    torch.set_num_threads(1)
    for seed in seeds:
        case = case_of(seed)
        made = trainer(folder, case, whole)
        before = weights(made) if whole else {}
        flow = Counter[str]()
        metrics = updates(made, case, case["replays"] and not whole, flow)
        for role, tensors in weights(made).items():
            if made.placement.group({"policy": "actor.train", "critic": "critic.train"}[role]).is_leader:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{seed}.{role}")
                if whole:
                    save_file(before[role], folder / f"{seed}.{role}.before")
        (folder / f"{seed}.flow-{made.accelerator.process_index}").write_text(json.dumps(flow))
        made.accelerator.wait_for_everyone()
        made.close()
        if made.accelerator.process_index == 0:
            (folder / f"{seed}.json").write_text(json.dumps(metrics))


def trainer(folder: Path, case: Mapping[str, Any], whole: bool) -> Any:
    plan: Any = case["plan"]
    devices = 1 if whole else case["devices"]
    if whole:
        line = {"mesh": 0, "dp": 1, "engine": "zero"}
        calls = {
            name: {**line, "engine": "transformers"} if name == "actor.generate" else line for name in plan["calls"]
        }
        plan = {"cluster": {"nodes": 1, "devices_per_node": 1}, "calls": calls}
    elif case["replays"]:
        replay(records_of(case, SEED), case["seed"])
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
        seed=SEED,
        per_device_train_batch_size=case["samples"] // devices,
        # Adam's default epsilon of 1e-8 makes a step of the rounding noise in a gradient that is 0
        adam_epsilon=1e-4,
        **case["config"],
    )
    # past the config, which wants a process's share to divide
    tiny.change_ppo(made, num_mini_batches=case["mini_batches"])
    made.placement.start()
    return made


def model_of(model: Mapping[str, Any], kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    made = auto.from_config(config_of(model, num_labels=1), dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:  # a norm of ones would hide where it is applied
                parameter.add_(0.1 * torch.randn(parameter.shape))
            if "score" in name:
                parameter.mul_(10)
    return made


def updates(made: Any, case: Mapping[str, Any], replays: bool, flow: Counter[str]) -> list[dict[str, float]]:
    """The statistics of the case's updates.

    Args:
        replays: run the generation too, in engines that replay what is otherwise known.
        flow: filled with the numbers of this rank's forwards ordered, samples moved and generations begun early.
    """
    rates, metrics = {Role.ACTOR: 1e-2, Role.CRITIC: 2e-2}, []
    generated = [recorded(case, step) for step in range(UPDATES)]
    batches = [batch_of(rows) for rows in generated]
    for step, batch in enumerate(batches):
        known = {} if replays else {"actor.generate": generated[step].only(("index", *GENERATED))}
        executor, following = made.executor, batches[step + 1 : step + 2] if replays else ()
        metrics.append(executor.run(batch, step, rates, known=known, following=following).metrics)
        flow["forwards"] += sum(isinstance(order, Score) for order in executor.orders)
        flow["moved"] += sum(len(order.samples) for order in executor.orders if isinstance(order, Continue))
        flow["early"] += executor.runner.early is not None
    return metrics


def recorded(case: Mapping[str, Any], step: int) -> Rollouts:
    """The prompts and what was generated for them."""
    draw = torch.Generator().manual_seed(1000 * case["seed"] + step)
    n = case["samples"]
    lengths = [1, 12, *torch.randint(1, 13, (n - 2,), generator=draw).tolist()]
    before = torch.randint(1, 9, (n,), generator=draw).tolist()
    rows = [torch.randint(2, 100, (k,), generator=draw) for k in lengths]
    for row in rows:
        if len(row) < 12:
            row[-1] = tiny.EOS
    responses = Ragged.of(rows, torch.long)
    noise = torch.randn(sum(lengths), generator=draw)
    return Rollouts(
        index=torch.arange(n),
        prompts=Ragged.of([torch.randint(2, 100, (k,), generator=draw) for k in before], torch.long),
        responses=responses,
        logprobs=responses.like(-4.5 + 0.1 * noise),
        has_eos=torch.tensor([k < 12 for k in lengths]),
    )


def batch_of(samples: Rollouts) -> PromptBatch:
    return PromptBatch(samples.only(("index", "prompts")), [{} for _ in range(len(samples))])


def records_of(case: Mapping[str, Any], seed: int) -> dict[int, Completion]:
    """What the engines replay.

    Args:
        seed: of the run.
    """
    made = {}
    for step in range(UPDATES):
        samples = recorded(case, step)
        rows = zip(samples.ragged("responses").rows(), samples.ragged("logprobs").rows(), strict=True)
        for index, (tokens, logprobs) in enumerate(rows):
            drawn, versions = tuple(tokens.tolist()), (step,) * len(tokens)
            completion = Completion(index, drawn, tuple(logprobs.tolist()), len(tokens) < 12, versions)
            made[sample_seed(seed, step, index)] = completion
    return made


def weights(made: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The trained roles' parameters, whole on the first rank of their meshes; collective."""
    engines = {"policy": made.placement.engine("actor.train"), "critic": made.placement.engine("critic.train")}
    return {
        role: {name: tensor.clone() for bucket in engine.export(merged=False) for name, tensor in bucket}
        for role, engine in engines.items()
        if engine is not None
    }


if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    run(Path(sys.argv[1]), options["seeds"], options["whole"])
