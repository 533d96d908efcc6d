"""The parts of `make check-gpu`, as one table. One GPU is enough for all but those with `gpus`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpu_lanes import NUMBERS, ROOT, TESTS, Part


def tests(file: str) -> tuple[str, ...]:
    return "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(TESTS / "standin_device" / file)


def job(name: str, **options: Any) -> tuple[str, ...]:
    return str(ROOT / "benchmarks" / "gpu_jobs.py"), name, json.dumps(options)


def engine(algorithm: str, what: str, ranks: int = 1, gpus: int = 1, environment: Any = (), **options: Any) -> Part:
    """A training with vLLM engines. Starting one takes 63 to 90 s on a GPU, more beside other processes."""
    claim = "updates on tokens that an engine draws by the trainer's newest weights"
    if options.get("staleness"):
        claim = "tokens of the policy of the update before, and none older"
    command = job("generate", algorithm=algorithm, **options)
    return Part(
        f"{algorithm.upper()} with vLLM, {what}",
        claim,
        command,
        ranks,
        gpus,
        150,
        dict(environment),
        vllm=True,
        rehearsed_on="cpu",
    )


# Backend of a part's rehearsal. TRL gathers Python objects over the training backend, which the stand-in refuses.
REHEARSED_ON = {"ppo": "sim", "grpo": "cpu", "rloo": "cpu"}


def plans(name: str, ranks: int, algorithm: str, **options: Any) -> Part:
    command, claim = job("compare", algorithm=algorithm, **options), "the losses are the same under every plan"
    return Part(name, claim, command, ranks, limit_s=150, rehearsed_on=REHEARSED_ON[algorithm])


def fused(ranks: int, connections: int) -> Part:
    command = job("compare", plans=["flatten", "fused"], updates=12)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    claim = "actor and critic in fused pipelines: losses of replicas, and 12 updates without a deadlock"
    return Part(f"fused, {ranks} ranks, {connections} connections", claim, command, ranks, 1, 120, environment)


def run_of(algorithm: str, *engine: str) -> Part:
    command = str(ROOT / "benchmarks" / "gpu_run.py"), "--algorithm", algorithm, *engine, "--json", NUMBERS
    claim = "seconds and memory of updates, beside what the planner expects"
    more: dict[str, Any] = {"vllm": True, "alone": True, "rehearsed_on": "cpu", "rehearsal": ("--small",)}
    return Part(f"{algorithm.upper()} of 1.2 billion", claim, command, limit_s=180, **more)


APART = {"ranks": 2, "preset": "separate"}
PARTS: Sequence[Part] = (
    Part("one process", "the tests of one process give the host's numbers", tests("on_one_process.py"), limit_s=240),
    Part("two ranks", "the tests of two ranks give the host's numbers", tests("on_two_ranks.py"), 2, limit_s=240),
    # engines, one at a time: the lane that takes longest
    engine("ppo", "streams, float32", streams=True, dtype="float32", **APART),
    engine("rloo", "asleep without weights", engine="drop"),
    engine("grpo", "max_staleness 1", staleness=1, **APART),
    engine("ppo", "asleep without weights", engine="drop"),
    engine("grpo", "streams", streams=True, **APART),
    engine("ppo", "max_staleness 1", staleness=1, **APART),
    engine("grpo", "asleep with weights on the host", engine="offload"),
    engine("rloo", "max_staleness 1", staleness=1, **APART),
    engine("rloo", "streams, this package's sampler, weights by host memory", streams=True, repeatable=True,
           environment={"TRL_REALLOC_CUDA_IPC": "0"}, **APART),
    engine("ppo", "an engine on each of 2 GPUs", ranks=2, gpus=2, preset="interleave"),
    engine("ppo", "an engine of 2 GPUs", ranks=2, gpus=2, tp=2),
    # numbers alone
    plans("PPO, 4 ranks", 4, "ppo", plans=["flatten", "pp 4", "tp 2 pp 2"]),
    plans("GRPO, 2 ranks", 2, "grpo", plans=["flatten", "tp 2", "pp 2"]),
    plans("RLOO, 2 ranks", 2, "rloo", plans=["flatten", "tp 2", "pp 2"]),
    *(fused(ranks, connections) for ranks in (2, 4) for connections in (1, 8, 32)),
    Part("ZeRO", "DeepSpeed ZeRO 1 to 3 give the losses of ZeRO 0",
         job("compare", plans=["flatten", "zero 1", "zero 2", "zero 3"], dtypes=["float32", "bf16"]),
         2, limit_s=200, rehearsed_on="cpu"),
    Part("killed", "kill -9 of a rank inside an all-reduce ends the other, which says why",
         job("killed"), 2, says=r"rank 1 on host .*SIGKILL"),
    *(Part(f"late, {algorithm.upper()}", "a rank whose judge takes 40 s does not end a run with `ddp_timeout=20`",
           job("late", algorithm=algorithm), 2, limit_s=150, rehearsed_on=REHEARSED_ON[algorithm])
      for algorithm in ("ppo", "grpo")),
    run_of("ppo", "--sleep", "drop"),
    run_of("grpo"),
)  # fmt: skip
