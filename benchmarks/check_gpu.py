"""Runs on a machine with GPUs what this project's own tests cannot run, and prints what holds.

    python benchmarks/check_gpu.py            # or: make check-gpu

Some 20 minutes. Each part is a process of its own with a time limit, so that one that fails or hangs does not hide the
others. On a machine without a GPU it says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trl_realloc.common.ports import reserve_port


ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
# of the tiny policies that vLLM serves
SIZES = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Part:
    """One thing to check.

    Args:
        claim: what holds if it passes.
        command: what is run, without the interpreter.
        processes: how many, as ranks of one job.
        limit_s: time limit.
        environment: additional variables.
        prints: show the end of what it printed also where it passes.
    """

    claim: str
    command: tuple[str, ...]
    processes: int = 1
    limit_s: float = 240.0
    environment: dict[str, str] = field(default_factory=dict)
    prints: bool = False


def parts(gpus: int) -> Iterator[Part]:
    """The parts that a machine with so many GPUs can run."""
    script = str(ROOT / "benchmarks" / "check_gpu.py")
    tests = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
    yield Part(
        "heads, losses, replicas, offload, memory and one PPO run on the GPU give the CPU's numbers",
        (*tests, str(TESTS / "standin_device" / "on_one_process.py")),
    )
    if gpus > 1:
        yield Part(
            "two ranks over NCCL: engines, transfers, plans and a change of plan give the CPU's numbers",
            (*tests, str(TESTS / "standin_device" / "on_two_ranks.py")),
            processes=2,
        )
    yield Part(
        "the head's logits in slices, and packed rows by variable-length attention, give the numbers of the host's",
        (script, "--heads"),
    )
    ranks = 1 << min(gpus, 4).bit_length() - 1
    for preset in ("flatten", "interleave", "separate") if ranks > 1 else ("flatten",):
        for dtype in ("float32", "bf16"):
            yield Part(
                f"PPO with vLLM beside the trainer on {ranks} GPU{'s' if ranks > 1 else ''}, plan {preset}, {dtype}",
                (script, "--ppo", preset, "--dtype", dtype),
                processes=ranks,
                limit_s=300.0,
            )
    if ranks > 1:
        yield Part(
            f"PPO whose actor and critic train in fused pipelines of {ranks} stages (`fused_training: true`)",
            (script, "--ppo", "fused"),
            processes=ranks,
            limit_s=300.0,
        )
    for claim, options, environment in (
        ("vLLM engines sleep while others use the GPU, and give its memory back", ("--engine", "sleep"), {}),
        ("vLLM engines keep their weights in host memory while they sleep", ("--engine", "offload"), {}),
        ("this package's sampler draws in vLLM's older model runner", ("--engine", "repeatable"), {}),
        ("weights go through host memory", (), {"TRL_REALLOC_CUDA_IPC": "0"}),
    ):
        command = (script, "--ppo", "flatten", "--dtype", "bf16", *options)
        yield Part(claim, command, processes=ranks, limit_s=300.0, environment=environment)
    yield Part(f"GRPO with vLLM on {ranks} GPU{'s' if ranks > 1 else ''}", (script, "--grpo"), ranks, 300.0)
    yield Part("DeepSpeed ZeRO 1 to 3 give the losses of ZeRO 0", (script, "--zero"), ranks)
    yield Part(
        "PPO of 1.2 billion parameters on one GPU, beside what the planner expects (printed)",
        (str(ROOT / "benchmarks" / "gpu_run.py"), "--sleep", "drop"),
        limit_s=300.0,
        prints=True,
    )


def run(part: Part, log: Path) -> tuple[bool, float, str]:
    """(whether the part passed, seconds, the last lines of what it printed)."""
    port, _ = reserve_port()
    folders = [ROOT, TESTS, TESTS / "trainer", TESTS / "multiprocess"]
    environment = {
        **os.environ,
        **part.environment,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "TRL_REALLOC_TEST_DEVICE": "cuda",
    }
    start, processes = time.monotonic(), []
    with log.open("w") as output:
        for rank in range(part.processes):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": part.processes, "LOCAL_WORLD_SIZE": part.processes}
            own = {name: str(value) for name, value in ranks.items()}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *part.command],
                    env={**environment, **(own if part.processes > 1 else {}), "STANDIN_FOLDER": str(log.parent)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        try:
            codes = [process.wait(max(1.0, start + part.limit_s - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    lines = log.read_text(errors="replace").splitlines()
    return not any(codes), time.monotonic() - start, "\n".join(lines[-12:])


def ppo(preset: str, dtype: str, engine: str) -> None:
    """A rank of updates of PPO on tiny models, with vLLM engines on the GPUs that train: three, or twenty where actor
    and critic train in fused pipelines, which a message that comes at the wrong time would stop."""
    import tiny

    from trl_realloc.plan.cluster import Cluster
    from trl_realloc.plan.presets import resolve_plan

    plan: Any = preset
    cluster = Cluster(1, int(os.environ.get("WORLD_SIZE", "1")))
    if engine == "offload":
        plan = resolve_plan(preset, cluster).to_dict()
        plan["calls"]["actor.generate"]["offload"] = True
    sizes, updates = SIZES, 3
    if preset == "fused":
        sizes, updates = {**SIZES, "num_hidden_layers": cluster.size}, 20
        plan = resolve_plan("flatten", cluster).to_dict()
        plan["fused"] = ["actor.train", "critic.train"]
        for call in ("actor.train", "critic.train", "critic.forward"):
            # of 16 tokens, so that a mini-batch has more micro-batches than stages
            layout = {"engine": "megatron", "dp": 1, "pp": cluster.size, "micro_batch_tokens": 16}
            plan["calls"][call] = {"mesh": plan["calls"][call]["mesh"], **layout}
    folder = Path(tempfile.mkdtemp())
    made = tiny.trainer(
        folder,
        given={"model": tiny.policy(**sizes), "value_model": tiny.classifier(**sizes)},
        plan=plan,
        max_steps=updates,
        vllm_enable_sleep_mode=engine == "sleep",
        vllm_repeatable_sampling=engine == "repeatable",
        vllm_importance_sampling_correction=True,
        use_cpu=False,
        bf16=dtype == "bf16",
        generation_engine="vllm",
    )
    before = torch.cuda.mem_get_info()[0]
    made.train()
    if engine in ("sleep", "offload"):
        taken = before - torch.cuda.mem_get_info()[0]
        assert taken < 0.25 * torch.cuda.mem_get_info()[1], f"{taken} bytes are taken by an engine that sleeps"
    for row in tiny.updates(made):
        print({name: round(value, 4) for name, value in row.items()})
        # vLLM drew the tokens by what the trainer has learned, or its weights are others
        limit = 5e-3 if dtype == "float32" else 0.15
        assert row["sampling/sampling_logp_difference/max"] < limit, row
    made.close()


def grpo() -> None:
    """A rank of three updates of GRPO on a tiny model, with vLLM engines on the GPUs that train."""
    import tiny

    from trl_realloc import GRPOConfig, GRPOTrainer

    folder = Path(tempfile.mkdtemp())
    tiny.policy(**SIZES).save_pretrained(folder / "policy")
    tiny.tokenizer().save_pretrained(folder / "policy")
    settings = {**tiny.BARE, "use_cpu": False, "bf16": True, "max_steps": 3, "learning_rate": 1e-3}
    made = GRPOTrainer(
        model=str(folder / "policy"),
        reward_funcs=tiny.short,
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            **settings,
        ),
        train_dataset=tiny.prompts(),
    )
    made.train()
    losses = [row["loss"] for row in made.state.log_history if "loss" in row]
    assert len(losses) == 3, made.state.log_history


def zero() -> None:
    """A rank of three updates of PPO under each ZeRO stage, in float32 and bf16."""
    import tiny

    from trl_realloc.plan.cluster import Cluster
    from trl_realloc.plan.presets import resolve_plan

    cluster = Cluster(1, int(os.environ.get("WORLD_SIZE", "1")))
    for bf16 in (False, True):
        found = []
        for stage in range(4):
            plan = resolve_plan("flatten", cluster, generation_engine="transformers", zero_stage=stage).to_dict()
            settings = {"plan": plan, "use_cpu": False, "bf16": bf16, "max_steps": 3, "learning_rate": 1e-3}
            made = tiny.trainer(Path(tempfile.mkdtemp()), **settings)
            made.train()
            found.append([row[name] for row in tiny.updates(made) for name in ("loss/policy_avg", "loss/value_avg")])
            made.close()
        limit = 5e-3 if bf16 else 1e-4
        for stage, losses in enumerate(found):
            assert all(abs(a - b) < limit for a, b in zip(losses, found[0], strict=True)), (bf16, stage, found)


def heads() -> None:
    """Log-probabilities and gradients of a packed policy in bfloat16 on the GPU, against float32 on the host."""
    from copy import deepcopy

    import tiny

    from trl_realloc.algorithms.rollout import Ragged, Rollouts
    from trl_realloc.engines.training import packed_attention, sliced_head
    from trl_realloc.engines.training.packed_forward import PolicyHead

    lengths = torch.tensor([7, 40, 3, 21])

    def ragged() -> Ragged:
        return Ragged(torch.randint(2, tiny.VOCABULARY, (int(lengths.sum()),)), lengths)

    torch.manual_seed(0)
    samples = Rollouts(index=torch.arange(len(lengths)), prompts=ragged(), responses=ragged())
    model = tiny.policy(head_dim=64)
    calls: list[int] = []
    varlen = packed_attention.varlen_attention

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return varlen(*arguments)

    packed_attention.varlen_attention = counted
    expected = learned(PolicyHead(deepcopy(model), 1.0), samples)
    for most in (1 << 40, 0):  # whole, and in slices
        sliced_head.MOST_LOGITS, sliced_head.LOGITS_SLICE = most, 16 * tiny.VOCABULARY
        head = PolicyHead(deepcopy(model), 1.0).cuda()
        for found, wanted in zip(learned(head, samples.to(torch.device("cuda"))), expected, strict=True):
            assert torch.allclose(found.float().cpu(), wanted, rtol=5e-2, atol=5e-2), (
                most,
                (found.cpu() - wanted).abs().max(),
            )
        assert head._may_slice
    assert calls, "torch's variable-length attention was not used"
    print("the largest memory of a head in slices:", torch.cuda.max_memory_allocated())


def learned(head: Any, samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of the responses, and the gradient of their sum by the head's weight."""
    on_gpu = next(head.parameters()).is_cuda
    with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
        logprobs = head(samples)["logprobs"].values
    logprobs.sum().backward()
    return logprobs.detach(), head.model.lm_head.weight.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ppo", metavar="PRESET", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    for name in ("--heads", "--grpo", "--zero"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        print("There is no GPU that PyTorch can use on this machine, so there is nothing to check.")
        sys.exit(2)
    for act in (heads, grpo, zero):
        if getattr(options, act.__name__):
            act()
            return
    if options.ppo:
        ppo(options.ppo, options.dtype, options.engine)
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(gpus)})
    print(f"{gpus} x {', '.join(names)}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts(gpus)):
            passed, seconds, tail = run(part, Path(folder) / f"{number}.txt")
            failed += not passed
            print(f"{'holds ' if passed else 'FAILED'} {seconds:6.0f} s  {part.claim}", flush=True)
            if not passed or part.prints:
                print(tail, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
