"""A rank that feeds one set of rollouts through several plans and writes what each made of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from whole_state import whole_state

from trl_realloc import PPOTrainer
from trl_realloc.algorithms.prompt_batches import PromptBatch
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.dataflow import Role
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.realloc.layout import layout_of


# by which some of the recorded rollouts are truncated on either side
CORRECTED: dict[str, Any] = {"vllm_importance_sampling_correction": True}
CORRECTED |= {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 0.8}
CORRECTED |= {"vllm_importance_sampling_clip_min": 0.3}


def rollouts(n: int) -> Rollouts:
    """The same on every rank: ragged prompts and responses, two that ended at once, one at the limit."""
    draw = torch.Generator().manual_seed(3)
    lengths = [1, 12, 1, *torch.randint(2, 12, (n - 3,), generator=draw).tolist()]
    prompts = [
        torch.randint(2, 100, (int(torch.randint(1, 9, (1,), generator=draw)),), generator=draw) for _ in lengths
    ]
    responses = [torch.randint(2, 100, (length,), generator=draw) for length in lengths]
    return Rollouts(
        index=torch.arange(n), prompts=Ragged.of(prompts, torch.long), responses=Ragged.of(responses, torch.long)
    )


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    batch = rollouts(options["samples"])
    for name, plan in options["plans"].items():
        kind = options.get("kinds", {}).get(name, "float32")
        models = {"model": tiny.policy(), "value_model": tiny.classifier()}
        models |= {"reward_model": tiny.classifier(4), "ref_model": tiny.policy(seed=5)}
        made = tiny.trainer(
            folder,
            given={key: model.bfloat16() if kind == "bfloat16" else model for key, model in models.items()},
            plan=plan,
            bf16=kind == "autocast",
            per_device_train_batch_size=options["samples"] // torch_world(),
            num_mini_batches=1,
            # Adam's default epsilon of 1e-8 makes a step of the rounding noise in a gradient that is 0
            adam_epsilon=1e-4,
            max_grad_norm=0.5,
            whiten_rewards=True,
            **(CORRECTED if kind == "corrected" else {}),
        )
        # past the config, which wants a process's share to divide
        tiny.change_ppo(made, num_mini_batches=options["mini_batches"])
        made.placement.start()
        check_layouts(made)
        generated = batch.plus(
            logprobs=batch.ragged("responses").like(-4.5 + 0.1 * torch.sin(batch.ragged("responses").values.float())),
            has_eos=batch.ragged("responses").lengths < 12,
        ).only(("index", "responses", "logprobs", "has_eos"))
        prompts = PromptBatch(batch.only(("index", "prompts")), [{} for _ in range(len(batch))])
        rates = {Role.ACTOR: 1e-2, Role.CRITIC: 2e-2}
        iteration = made.executor.run(prompts, 0, rates, known={"actor.generate": generated})
        weights = tiny.weights(made) if kind == "float32" else masters(made)
        speaks = made.placement.group("actor.train").is_leader
        roles = {key.split(".")[0] for key in weights}
        if speaks or made.placement.group("critic.train").is_leader:
            for role in roles:
                part = {key: value.contiguous() for key, value in weights.items() if key.startswith(role)}
                save_file(part, folder / f"{name}.{role}.safetensors")
        if made.accelerator.process_index == 0:
            (folder / f"{name}.json").write_text(json.dumps(iteration.metrics))
        made.accelerator.wait_for_everyone()
        made.close()


def masters(made: PPOTrainer) -> dict[str, torch.Tensor]:
    """The float32 weights of policy and critic."""
    engines = {"policy": made.placement.engine("actor.train"), "critic": made.placement.engine("critic.train")}
    return {
        f"{role}.{name}": cells["master"]
        for role, engine in engines.items()
        if engine is not None
        for name, cells in whole_state(engine)["parameters"].items()
    }


def check_layouts(made: PPOTrainer) -> None:
    """What every engine that trains holds is what the layout says that is made from config and strategy alone."""
    for call, engine, head in (
        ("actor.train", made.placement.engine("actor.train"), "lm"),
        ("critic.train", made.placement.engine("critic.train"), "score"),
    ):
        if engine is not None:
            spec = ModelSpec.from_config(tiny.config(num_labels=1), head, bytes_per_element=4)
            held = {name: tuple(box for box, _ in parts) for name, parts in engine.parts().items()}
            layout = layout_of(made.plan[call], spec, is_reversed=made.plan.is_reversed(call))
            expected = layout.parts(made.accelerator.process_index)
            assert {name: boxes for name, boxes in held.items() if boxes} == expected


def torch_world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


if __name__ == "__main__":
    main()
