"""PPO of a policy and a critic of 1.2 billion parameters each, or GRPO of such a policy, on one GPU of 80 GB, beside
what the planner expects of it.

    python benchmarks/gpu_run.py [--algorithm grpo] [--sleep drop] [--updates 4] [--json FILE]

Llamas of 16 layers with random weights and a vocabulary of 128,256; 64 samples with prompts of 128 tokens and responses
of 512 (GRPO: 8 samples of each prompt); bf16; micro-batches of 16 samples without recomputation; vLLM beside the
trainer under the preset flatten. `measured_s` is the median of the updates after the first, `expected_s` is by the
device's data sheet. `actor.generate` includes the update's rest: waking the engine and giving it the parameters. The
memory is the most that torch had allocated, without the engine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import result_file
import torch
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "trainer")]
LARGE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# to try the script where there is no GPU
SMALL = {"vocab_size": 1000, "hidden_size": 64, "max_position_embeddings": 256, "tie_word_embeddings": True}
SAMPLES, PROMPT, GROUP = 64, 128, 8


def make_models(folder: Path, sizes: dict[str, Any], device: str) -> None:
    import tiny
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    with torch.device(device):
        config = tiny.config(**sizes, dtype=torch.bfloat16)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "policy")
        config = tiny.config(**sizes, dtype=torch.bfloat16, num_labels=1)
        AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "critic")


def train(
    algorithm: str, folder: Path, plan: dict[str, Any], response: int, updates: int, engine: str
) -> tuple[list[Any], float]:
    """The logged updates, and the most bytes that torch has allocated on the device."""
    import tiny
    from datasets import Dataset

    from trl_realloc import GRPOConfig, GRPOTrainer

    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(2, 100)}" for _ in range(PROMPT)) for _ in range(8 * SAMPLES)]
    data = Dataset.from_dict({"prompt": texts})
    settings = {
        "plan": plan,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": SAMPLES,
        "max_steps": updates,
        "learning_rate": 1e-5,
    }
    made: Any
    if algorithm == "grpo":
        groups = {"num_generations": GROUP, "max_completion_length": response, "use_vllm": engine == "vllm"}
        made = GRPOTrainer(
            model=str(folder / "policy"),
            reward_funcs=tiny.short,
            args=GRPOConfig(output_dir=str(folder / "run"), **{**tiny.BARE, **settings, **groups}),
            train_dataset=data,
            processing_class=tiny.tokenizer(),
        )
    else:
        models = {"model": str(folder / "policy"), "ref_model": str(folder / "policy")}
        made = tiny.trainer(
            folder / "run",
            given={**models, "value_model": str(folder / "critic"), "train_dataset": data},
            generation_engine=engine,
            num_ppo_epochs=1,
            num_mini_batches=1,
            response_length=response,
            **settings,
        )
    made.train()
    rows = [row for row in made.state.log_history if "time/step" in row]
    made.close()
    return rows, float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0


def expected(
    folder: Path, plan: dict[str, Any], graph: Any, response: int, hardware: str
) -> tuple[dict[str, float], float]:
    """Seconds of each call, and bytes of the training call that takes most with what else stays on the device."""
    from transformers import AutoConfig

    from trl_realloc.plan.cluster import Cluster
    from trl_realloc.plan.dataflow import Role
    from trl_realloc.plan.presets import resolve_plan
    from trl_realloc.planner.cost.pricing import Pricing
    from trl_realloc.planner.cost.profile import Profile
    from trl_realloc.planner.cost.specification import rates_of
    from trl_realloc.planner.cost.workload import Workload
    from trl_realloc.profiling.job_models import specs_of

    made = resolve_plan(plan, Cluster(1, 1), graph=graph)
    profile = Profile(hardware, {}, 1, None, False, (), is_accelerator=torch.cuda.is_available())
    work = Workload(SAMPLES, PROMPT, (response,), epochs=1)
    pricing = Pricing(made.cluster, work, rates_of(profile))
    configs = {
        Role.ACTOR: [AutoConfig.from_pretrained(folder / "policy", dtype=torch.float32)],
        Role.CRITIC: [AutoConfig.from_pretrained(folder / "critic", dtype=torch.float32)],
        Role.REFERENCE: [AutoConfig.from_pretrained(folder / "policy")],
    }
    specs = specs_of({role: configs[role] for role in made.graph.roles if role in configs}, made.graph, torch.bfloat16)
    seconds, held, most = {}, 0.0, 0.0
    for call in made.graph.calls:
        cost = pricing.price(call, specs[call.name], made[call.name])
        seconds[call.name] = cost.seconds
        if call.trains or call.role is Role.REFERENCE:
            held, most = held + cost.static, max(most, cost.transient)
    return seconds, held + most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="ppo", choices=["ppo", "grpo"])
    parser.add_argument("--micro-batch", type=int, default=16, metavar="SAMPLES", help="most of a scoring or training")
    parser.add_argument("--sleep", choices=["drop", "offload"], help="of the engine, while others use the GPU")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="tiny models, also without a GPU")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph
    from trl_realloc.plan.cluster import Cluster
    from trl_realloc.plan.presets import resolve_plan
    from trl_realloc.profiling.machine import hardware

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.small:
        sys.exit("There is no GPU that PyTorch can use on this machine.")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device = torch.device("cuda" if has_gpu else "cpu")
    name, response = hardware(device), 16 if options.small else 512
    graph = ppo_graph() if options.algorithm == "ppo" else grpo_graph(reference=False, reward_models=False)
    plan = resolve_plan("flatten", Cluster(1, 1), generation_engine=options.engine, graph=graph).to_dict()
    for call, assignment in plan["calls"].items():
        if not call.endswith("generate"):
            assignment["micro_batch_tokens"] = options.micro_batch * (PROMPT + response)
        elif options.sleep:
            assignment[options.sleep] = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder, SMALL if options.small else LARGE, device.type)
        seconds, planned = expected(folder, plan, graph, response, name)
        logged, peak = train(options.algorithm, folder, plan, response, options.updates, options.engine)
    rows = []
    for call, wanted in seconds.items():
        found = statistics.median(row[f"time/{call}"] for row in logged[1:])
        if call == "actor.generate":
            found += statistics.median(
                row["time/step"] - sum(row[f"time/{each}"] for each in seconds) for row in logged[1:]
            )
        rows.append({"call": call, "measured_s": round(found, 3), "expected_s": round(wanted, 3)})
    step = statistics.median(row["time/step"] for row in logged[1:])
    rows.append({"call": "update", "measured_s": round(step, 3), "expected_s": round(sum(seconds.values()), 3)})
    title = f"{name}, torch {torch.__version__}"
    table = Table("call", "measured, s", "expected, s", title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    memory = {"measured_gb": round(peak / 1e9, 1), "expected_gb": round(planned / 1e9, 1)}
    print(f"memory: {memory['measured_gb']} GB measured, {memory['expected_gb']} GB expected")
    if options.json is not None:
        about = {"hardware": name, "algorithm": options.algorithm, "sleep": options.sleep or ""}
        result_file.write(options.json, {**about, "rows": rows, "memory": memory})


if __name__ == "__main__":
    main()
