"""A rank of a small training run, by options: what it trained and logged is written to the folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from trl_realloc.engines.torch_compat import memory_of


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    given: dict[str, Any] = {}
    if options.pop("lora", False):
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if bits := options.pop("quantized", None):
        given["model"] = tiny.quantized(folder / f"base-{os.environ.get('RANK', '0')}", **bits)
    if options.pop("by_path", False):
        given |= {"model": str(folder.parent / "policy"), "reward_model": str(folder.parent / "reward")}
        if (folder.parent / "critic").exists():
            given["value_model"] = str(folder.parent / "critic")
    resume = options.pop("resume", None)
    fails = options.pop("fails_on_rank", None)
    if fails is not None:
        given["reward_model"] = lambda completions, **columns: [
            float("nan") if torch.distributed.get_rank() == fails else 1.0 for _ in completions
        ]
    made = tiny.trainer(Path(options.pop("output_dir", folder)), given=given, **options)
    rank = made.accelerator.process_index
    before = {name: tensor.clone() for name, tensor in made.policy_model.named_parameters() if not tensor.is_meta}
    try:
        made.train(resume_from_checkpoint=resume)
    except RuntimeError:
        now = dict(made.policy_model.named_parameters())  # of a pipeline, those of the stage
        unchanged = bool(now) and all(torch.equal(tensor, before[name]) for name, tensor in now.items())
        (folder / f"failed-{rank}.json").write_text(json.dumps({"unchanged": unchanged}))
        raise
    made.save_model(str(folder / "final"))
    weights = tiny.weights(made)
    calls = {"actor": "actor.train", "critic": "critic.train", "reference": "reference.forward"}
    calls |= {"reward": "reward.forward"}
    here = {name: bool(made.placement.engines.get(call)) for name, call in calls.items()}
    here["generator"] = "actor.generate" in made.placement.generators
    models = [engine.head.model for engines in made.placement.engines.values() for engine in engines]
    storages = [memory_of(parameter).untyped_storage() for model in models for parameter in model.parameters()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    engine = getattr(made.placement.engine("actor.train"), "engine", None)
    settings = {}
    if engine is not None:
        settings = {
            "stage": engine.zero_optimization_stage(),
            "clipping": engine.gradient_clipping(),
            "offload": str(getattr(engine.zero_offload_optimizer(), "device", None)),
            "bf16": engine.bfloat16_enabled(),
        }
    sent = {call: getattr(engine, "sent_bytes", None) for call, engine in made.placement.generators.items()}
    record = {"here": here, "deepspeed": settings, "held": held, "sent": sent}
    (folder / f"rank-{rank}.json").write_text(json.dumps(record))
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
        (folder / "log.json").write_text(json.dumps(tiny.updates(made)))
    made.close()


if __name__ == "__main__":
    main()
