"""Trainings of tiny models that a rank runs for a part of `make check-gpu` that is not a test file.

    python benchmarks/gpu_jobs.py NAME [JSON]      # one of the functions of JOBS, and its arguments

`check_gpu` starts the ranks. `TRL_REALLOC_TEST_DEVICE` says on what they train: `cuda`, `sim` (the stand-in device) or
`cpu`. What a job measures goes to numbers.json in `STANDIN_FOLDER`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = os.environ["TRL_REALLOC_TEST_DEVICE"]
FOLDER = Path(os.environ["STANDIN_FOLDER"])
if DEVICE != "cpu":  # before anything asks which accelerator there is
    import standin_device

    standin_device.rank_device()

import tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import trl_realloc  # noqa: E402
from trl_realloc.plan.algorithm_graphs import grpo_graph, ppo_graph  # noqa: E402
from trl_realloc.plan.cluster import Cluster  # noqa: E402
from trl_realloc.plan.dataflow import DataflowGraph  # noqa: E402
from trl_realloc.plan.presets import resolve_plan  # noqa: E402


SIZES = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
CACHE = 16 << 30  # bytes of an engine for keys and values: far more than all models here
SAME = {"float32": 2e-3, "bf16": 2e-2}  # differences of losses between plans, relative above 1
MISMATCH = {"float32": 5e-3, "bf16": 0.15}  # of log-probabilities between vLLM and the trainer


def note(**numbers: Any) -> None:
    """Write numbers that this job has measured, beside those that it has written before."""
    path = FOLDER / "numbers.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **numbers}))


def model_sizes() -> dict[str, int]:
    return {**SIZES, "num_hidden_layers": max(2, RANKS)}


@functools.cache
def saved_policy() -> str:
    """A folder of this rank with the policy. Once there is a process group, Transformers writes on one rank alone."""
    folder = tempfile.mkdtemp(dir=FOLDER)
    tiny.policy(**model_sizes()).save_pretrained(folder)
    return folder


def trainer(algorithm: str, plan: Any, reward: Any = tiny.short, **settings: Any) -> Any:
    """A trainer of tiny models, on this rank's device.

    Args:
        algorithm: ppo, grpo or rloo.
    """
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    settings = {"use_cpu": DEVICE == "cpu", "plan": plan, "learning_rate": 1e-3, "adam_epsilon": 1e-4, **settings}
    parts: dict[str, Any] = {"processing_class": tiny.tokenizer(), "train_dataset": tiny.prompts()}
    sizes = model_sizes()
    if algorithm == "ppo":
        args = tiny.arguments(folder, **settings)
        parts |= {"model": tiny.policy(**sizes), "value_model": tiny.classifier(**sizes), "reward_model": reward}
        parts["ref_model"] = None
    else:
        parts |= {"model": saved_policy(), "reward_funcs": reward}
        settings["use_vllm"] = settings.pop("generation_engine") == "vllm"
        groups = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "beta": 0.05}
        config = getattr(trl_realloc, f"{algorithm.upper()}Config")
        args = config(output_dir=str(folder), **{**tiny.BARE, **groups, **settings})
    if DEVICE == "cuda":
        # After the checks of the settings, which refuse the first: while vLLM measures how much memory is free, nothing
        # else may free any. The second saves the time of compiling.
        args.vllm_engine_kwargs = {"kv_cache_memory_bytes": CACHE, "enforce_eager": True}
    return getattr(trl_realloc, f"{algorithm.upper()}Trainer")(args=args, **parts)


def losses(made: Any) -> list[float]:
    """Every loss of each update."""
    names = ("loss/policy_avg", "loss/value_avg", "loss")
    found = [row[name] for row in made.state.log_history for name in names if name in row]
    assert found and all(abs(loss) < float("inf") for loss in found), made.state.log_history
    return found


def graph_of(algorithm: str) -> DataflowGraph:
    return ppo_graph() if algorithm == "ppo" else grpo_graph(reward_models=False)


def plan_of(name: str, algorithm: str) -> dict[str, Any]:
    """A plan for all ranks, without vLLM.

    Args:
        name: `flatten`, `zero 1` to `zero 3`, degrees like `tp 2 pp 2` for every training and scoring, or `fused`,
            which is actor and critic in fused pipelines of all ranks.
    """
    stage = int(name[-1]) if name.startswith("zero") else 0
    options: dict[str, Any] = {"generation_engine": "transformers", "zero_stage": stage, "graph": graph_of(algorithm)}
    plan = resolve_plan("flatten", Cluster(1, RANKS), **options).to_dict()
    degrees = {kind: int(number) for kind, number in re.findall(r"(tp|pp) (\d+)", name)}
    names = [call for call in plan["calls"] if not call.startswith(("actor.generate", "reward"))]
    if name == "fused":
        plan["fused"], degrees = ["actor.train", "critic.train"], {"pp": RANKS}
        names = ["actor.train", "critic.train", "critic.forward"]
    split = RANKS
    for degree in degrees.values():
        split //= degree
    for call in names if degrees else ():
        # of 16 tokens, so that a mini-batch has more micro-batches than a pipeline has stages
        layout = {"engine": "megatron", "dp": split, **degrees, "micro_batch_tokens": 16}
        plan["calls"][call] = {"mesh": plan["calls"][call]["mesh"], **layout}
    return plan


def compare(
    plans: Sequence[str], algorithm: str = "ppo", dtypes: Sequence[str] = ("float32",), updates: int = 3
) -> None:
    """Train under each plan. The losses of the first three updates are those under the first plan; later updates show
    that a run goes on."""
    for dtype in dtypes:
        found: dict[str, list[float]] = {}
        for plan in plans:
            settings = {"max_steps": updates, "bf16": dtype == "bf16", "generation_engine": "transformers"}
            made = trainer(algorithm, plan_of(plan, algorithm), **settings)
            made.train()
            found[plan] = losses(made)
            made.close()
            first, size = found[plans[0]], 3 * len(found[plan]) // updates
            pairs = zip(found[plan][:size], first[:size], strict=True)
            gap = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
            print(plan, dtype, [round(loss, 5) for loss in found[plan]], flush=True)
            assert gap < SAME[dtype], (plan, dtype, found)
            if RANK == 0:
                note(**{f"{plan}, {dtype}: largest difference": float(f"{gap:.1e}")} if plan != plans[0] else {})


def mismatch(made: Any) -> float:
    """The largest difference between an engine's log-probabilities and the trainer's: of a token, or of a response in
    RLOO, which logs the ratios of responses alone."""
    found = []
    for row in made.state.log_history:
        found += [value for name, value in row.items() if name.endswith("sampling_logp_difference/max")]
        ratios = [row.get(f"sampling/importance_sampling_ratio/{which}") for which in ("min", "max")]
        if "sampling/sampling_logp_difference/max" not in row:
            found += [abs(math.log(ratio)) if ratio else math.inf for ratio in ratios if ratio is not None]
    return max(found, default=math.inf)


def generate(
    algorithm: str,
    preset: str = "flatten",
    engine: str = "awake",
    dtype: str = "bf16",
    tp: int = 1,
    repeatable: bool = False,
    streams: bool = False,
    staleness: int = 0,
) -> None:
    """Train with vLLM engines.

    Args:
        engine: between its uses: awake, `offload` or `drop`.
        tp: of each engine.
        repeatable: by this package's sampler.
    """
    plan = resolve_plan(preset, Cluster(1, RANKS), graph=graph_of(algorithm)).to_dict()
    call = plan["calls"]["actor.generate"]
    call |= {} if engine == "awake" else {engine: True}
    call |= {"dp": call["dp"] // tp, "tp": tp} if tp > 1 else {}
    plan |= {"streams": True} if streams else {}
    plan |= {"staleness": staleness} if staleness else {}
    made = trainer(
        algorithm,
        plan,
        max_steps=4 if staleness else 3,
        bf16=dtype == "bf16",
        generation_engine="vllm",
        vllm_repeatable_sampling=repeatable,
        vllm_importance_sampling_correction=True,
        max_staleness=staleness,
    )
    free = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
    start = time.monotonic()
    made.train()
    numbers: dict[str, Any] = {"seconds with the engine's start": round(time.monotonic() - start, 1)}
    if DEVICE == "cuda" and engine != "awake":
        taken = free - torch.cuda.mem_get_info()[0]
        numbers["GB of a sleeping engine and its trainer"] = round(taken / 1e9, 1)
        # parts beside this one take some too
        assert taken < CACHE, f"{taken} bytes are taken by an engine that sleeps"
    losses(made)
    worst = mismatch(made)
    # vLLM drew the tokens by what the trainer has learned, or its weights are others. An older policy's differ more
    assert staleness or worst < MISMATCH[dtype], made.state.log_history
    if staleness:
        oldest = max(row.get("staleness/oldest", -1.0) for row in made.state.log_history)
        assert oldest == staleness, made.state.log_history
    numbers["largest difference of a log-probability"] = round(worst, 4)
    if RANK == 0:
        note(**numbers)
    made.close()


class OnSecondUpdate(TrainerCallback):
    """Calls a function when the second update begins."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.act()


def killed() -> None:
    """The last rank is killed inside an all-reduce of the second update, which the others wait for."""
    made = trainer("ppo", plan_of("flatten", "ppo"), max_steps=4, generation_engine="transformers")
    all_reduce = dist.all_reduce

    def dies(tensor: Any, *arguments: Any, **named: Any) -> Any:
        all_reduce(tensor, *arguments, **{**named, "async_op": True})
        note(failed_at=time.time())
        os.kill(os.getpid(), signal.SIGKILL)

    def arm() -> None:
        dist.all_reduce = dies

    if RANK == RANKS - 1:
        made.add_callback(OnSecondUpdate(arm))
    made.train()


def late(algorithm: str, sleep_s: float = 40.0, timeout_s: int = 20) -> None:
    """In the second update the judge of the last rank takes longer than a collective may (`ddp_timeout`)."""
    calls = 0

    def judged(completions: list[str], **columns: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if RANK == RANKS - 1 and calls == 2:
            time.sleep(sleep_s)
        return tiny.short(completions)

    settings = {"max_steps": 3, "ddp_timeout": timeout_s, "generation_engine": "transformers"}
    made = trainer(algorithm, plan_of("flatten", algorithm), judged, **settings)
    made.train()
    assert calls >= 3, calls
    losses(made)
    made.close()


JOBS: dict[str, Callable[..., None]] = {job.__name__: job for job in (compare, generate, killed, late)}

if __name__ == "__main__":
    JOBS[sys.argv[1]](**json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
