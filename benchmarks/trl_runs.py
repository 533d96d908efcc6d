"""What the comparisons with TRL's trainers have in common: models, tokenizer, a run in a process of its own with its
memory and times, speed of the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import result_file
import torch
from packaging.version import Version


ROOT = Path(__file__).resolve().parents[1]
PROMPT, VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS = 16, 1000, 256, 704, 4
EOS, PAD = 1, 0


def models(limit: int, mean_share: float = 1 / 4) -> tuple[Any, Any, Any]:
    """Policy, critic and reward model of 3.5 million parameters. The policy ends a response at each token with the same
    probability.

    Args:
        limit: the most tokens of a response.
        mean_share: the mean length of a response without the limit, as a share of it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(0)
    policy = LlamaForCausalLM(config)
    end_by_chance(policy, 1 / (mean_share * limit))
    return policy, LlamaForSequenceClassification(config), LlamaForSequenceClassification(config)


def end_by_chance(policy: Any, chance: float) -> None:
    """Let a random Llama draw the eos token with the same probability everywhere. Channel 0 of the residual stream is
    made a constant, by which the token's logit is set."""
    config = policy.config
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 10.0
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        policy.lm_head.weight[:, 0] = 0
        logit = math.log(chance / (1 - chance) * (config.vocab_size - 1))
        policy.lm_head.weight[EOS, 0] = logit / math.sqrt(config.hidden_size)
        policy.lm_head.weight[PAD, 0] = -1.0  # never: TRL takes a sampled pad token for the end


def tokenizer(vocabulary: int = VOCABULARY) -> Any:
    """Of words w2, w3 and so on, separated by spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{i}": i for i in range(2, vocabulary)}}
    by_words = Tokenizer(WordLevel(words, unk_token="<pad>"))
    by_words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_words,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )


def memory_mb(session: int) -> tuple[float, float]:
    """Proportional set size of every process that carries this run's mark, and of those that are vLLM engines."""
    total = engines = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"VS_TRL={session}\0".encode() in (entry / "environ").read_bytes():
                    is_engine = b"vllm_host" in (entry / "cmdline").read_bytes()
                    for line in (entry / "smaps_rollup").read_text().splitlines():
                        if line.startswith("Pss:"):
                            total += int(line.split()[1])
                            engines += is_engine * int(line.split()[1])
            except OSError:
                continue
    return total / 1024, engines / 1024


def environment_of(mark: int, processes: int = 1) -> dict[str, str]:
    """The environment of a run on a CPU.

    Args:
        mark: by which its processes are found (`memory_mb`).
        processes: among which the cores are divided.
    """
    return {
        **os.environ,
        "VS_TRL": str(mark),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "DS_ACCELERATOR": "cpu",
    }


def watched(process: subprocess.Popen[Any], mark: int, limit_s: float | None = None) -> tuple[int, tuple[float, float]]:
    """Wait for a run. Returns its exit code, and the most memory that it had (`memory_mb`).

    Args:
        process: the first of a session, whose processes are ended at the limit.
        mark: of the processes of the run, as for `memory_mb`.
    """
    peak, stop = (0.0, 0.0), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(3.0):  # walking the pages of a process holds it up
            peak = max(peak, memory_mb(mark))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    finally:
        stop.set()
        thread.join()
    return code, peak


def trl_ppo_python() -> str:
    """An interpreter with TRL's PPO, which TRL has removed after 1.12: this one, or that of the oldest releases in
    `.venv-oldest`, or in the folder that the environment variable OLDEST names."""
    if Version(version("trl")) < Version("1.13"):
        return sys.executable
    python = Path(os.environ.get("OLDEST", ROOT / ".venv-oldest")) / "bin" / "python"
    if not python.is_file():
        sys.exit(f"TRL's PPO needs TRL 1.12, and there is no {python}; `make setup-oldest` makes .venv-oldest.")
    return str(python)


class RunFailed(Exception):
    """A run ended without a result. The message has the end of its log."""


def run_worker(
    arguments: Sequence[str],
    mark: int,
    processes: int = 1,
    limit_s: float | None = None,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Start `vs_trl.py` with these arguments and `--out`, and wait for it. Returns what it wrote, and its peak memory.

    Args:
        mark: by which its processes are found (`memory_mb`).
        limit_s: after so many seconds the run is ended.
        python: the interpreter (`trl_ppo_python`).

    Raises:
        RunFailed: there is no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log_path = Path(folder) / "result.json", Path(folder) / "log"
        command = [python]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [str(ROOT / "benchmarks" / "vs_trl.py"), *arguments, "--out", str(out)]
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, env=environment_of(mark, processes), stdout=log, stderr=log, start_new_session=True
            )
            code, peak = watched(process, mark, limit_s)
        if not out.is_file() or code not in (0, -signal.SIGKILL):
            ended = f"no result within {limit_s:.0f} s" if limit_s and code == -signal.SIGKILL else f"exit code {code}"
            raise RunFailed(f"{' '.join(arguments)}: {ended}\n{log_path.read_text()[-4000:]}")
        return {**json.loads(out.read_text()), "peak_mb": peak[0], "engines_mb": peak[1]}


def step_clock(ends: list[float]) -> Any:
    """A callback that appends the time at which each optimizer step has ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    return Clock()


def call_seconds(logs: Iterable[Mapping[str, float]], average: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """The seconds of each call in the logs of this project's trainers."""
    rows = list(logs)
    names = sorted({key for row in rows for key in row if key.startswith("time/")})
    return {name.removeprefix("time/"): average([row.get(name, 0.0) for row in rows]) for name in names}


def about_the_run(device: str = "no GPU") -> dict[str, str]:
    """What a result's file says of the machine and the code."""
    return {
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, {device}",
        "torch": torch.__version__,
        "commit": result_file.commit(),
    }


def gemm_flops() -> float:
    """This machine's float32 matrix multiplication at the models' shapes, all cores, FLOP/s."""
    torch.set_num_threads(os.cpu_count() or 1)
    left, right = torch.randn(2048, HIDDEN), torch.randn(HIDDEN, INTERMEDIATE)
    best = math.inf
    for _ in range(30):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * 2048 * HIDDEN * INTERMEDIATE / best
