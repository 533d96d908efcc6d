"""Generation by plain `vllm.LLM.generate` and by this package's engine: the same requests, alternating.

    python benchmarks/generation.py [--json FILE] [--device cuda] [--samples 8 64] [--vocabularies 32000] [--pairs 3]

A request has a prompt of 8 tokens, a drawn number of tokens to generate and log-probabilities asked for. All requests
are decoded at the same time. `ours_ms` and `vllm_ms` are milliseconds of a decode step, medians of the pairs; `ratio`
is the median of theirs. `host_ms` is what our side takes beside vLLM's own decode step, and `draw_ms` what this
package's sampler takes inside it. Plain vLLM draws by its own sampler, without seeds. `sampler` is that of our side:
`vllm` (on the CPU with seeds left out, which a run cannot choose) or `repeatable`.

On the CPU the model is a Llama of one layer and 64 channels, so that the vocabulary and the host's work show. On a GPU
it is one of 1.07 billion parameters in bfloat16. `starts` has the seconds of each start by stage; the second one of our
side is a new process of the same engine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import result_file
from rich.console import Console
from rich.table import Table


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PROMPT = 8
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "head_dim": 64}


def model_config(vocabulary: int, device: str) -> Any:
    """A Llama's config."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **(LARGE if device == "cuda" else SMALL),
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16" if device == "cuda" else "float32",
    )


def requests(samples: int, vocabulary: int, longest: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts, and the number of tokens to generate for each: from a quarter of the longest to the longest."""
    draw = random.Random(seed)
    lengths = [longest, *(draw.randint(longest // 4, longest) for _ in range(samples - 1))]
    return [([draw.randrange(3, vocabulary) for _ in range(PROMPT)], length) for length in lengths]


class Times:
    """What a process writes by `in_vllm/sitecustomize.py`."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        lines = self.path.read_text(encoding="utf-8").splitlines()
        new, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in new]

    def start(self, whole: float) -> dict[str, float]:
        """Seconds by stage of a start that took `whole` seconds."""
        found = {row["stage"]: row["seconds"] for row in self.new() if "stage" in row}
        found["engine with config"] -= found["config"]
        stages = {name.removesuffix(" with config"): seconds for name, seconds in found.items()}
        return {**stages, "ready": whole - sum(stages.values()), "whole": whole}


# --- plain vLLM, in a process of its own ---


def plain(settings: dict[str, Any]) -> None:
    """Serve plain vLLM: a line of JSON with samples, longest and seed in, a line with the seconds out."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        settings["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=settings["context"],
        max_num_seqs=settings["most"],
        gpu_memory_utilization=settings["share"],
        enforce_eager=settings["device"] == "cpu",
        kv_cache_memory_bytes=settings["cache"] if settings["device"] == "cpu" else None,
        logprobs_mode="processed_logprobs",
    )
    common = {"temperature": 1.0, "detokenize": False, "logprobs": 0, "ignore_eos": True, "flat_logprobs": True}
    llm.generate([{"prompt_token_ids": [3]}], SamplingParams(**common, max_tokens=1), use_tqdm=False)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = requests(**json.loads(line))
        start = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        params = [SamplingParams(**common, max_tokens=length) for _, length in asked]
        made = llm.generate(prompts, params, use_tqdm=False)
        drawn = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in made]
        seconds = time.perf_counter() - start
        assert [len(tokens) for tokens, _ in drawn] == [length for _, length in asked]
        print(f"seconds {seconds}", flush=True)


class Plain:
    """The owner of a process of plain vLLM."""

    def __init__(self, settings: dict[str, Any], folder: Path, stack: ExitStack) -> None:
        self.times = Times(folder / f"plain-{settings['vocabulary']}.jsonl")
        # by default vLLM's engine core has a process of its own
        core = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        environment = {**environment_of(settings, self.times.path), "VLLM_ENABLE_V1_MULTIPROCESSING": core}
        start = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--plain", json.dumps(settings)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "plain.log").open("w"),
            text=True,
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.stdin.close)  # type: ignore[union-attr]
        self._answer("ready", folder)
        self.start, self._folder = self.times.start(time.perf_counter() - start), folder

    def _answer(self, word: str, folder: Path) -> list[str]:
        for line in self._process.stdout:  # type: ignore[union-attr]
            if line.startswith(word):
                return line.split()[1:]
        sys.exit(f"plain vLLM ended:\n{(folder / 'plain.log').read_text()[-4000:]}")

    def generate(self, **asked: int) -> float:
        """Seconds."""
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return float(self._answer("seconds", self._folder)[0])


# --- this package's engine ---


def environment_of(settings: dict[str, Any], times: Path) -> dict[str, str]:
    """The environment of an engine of this package: threads and settings of both sides are the same."""
    from trl_realloc.engines.generation.engine_process import engine_environment

    gpu = [0] if settings["device"] == "cuda" else None
    cores = None if gpu else sorted(os.sched_getaffinity(0))
    environment = engine_environment(1, cores, gpu)
    return with_times(environment, times, settings)


def with_times(environment: dict[str, str], times: Path, settings: dict[str, Any]) -> dict[str, str]:
    times.touch()
    hooks = str(ROOT / "benchmarks" / "in_vllm")
    path = os.pathsep.join([hooks, environment.get("PYTHONPATH", str(ROOT))])
    return {**environment, "PYTHONPATH": path, "GENERATION_TIMES": str(times)}


class Ours:
    """An engine of this package, with the parameters of a random model."""

    def __init__(self, settings: dict[str, Any], sampler: str, folder: Path, stack: ExitStack, name: str) -> None:
        from trl_realloc.engines.generation.vllm import VLLMEngine

        gpu = settings["device"] == "cuda"
        self.times = Times(folder / f"{name}-{settings['vocabulary']}.jsonl")
        before = dict(os.environ)
        os.environ.update(with_times(before, self.times.path, settings))
        if sampler == "vllm" and not gpu:
            os.environ["OWN_SAMPLER_OF_VLLM"] = "1"
        start = time.perf_counter()
        devices = {"cuda_devices": [0]} if gpu else {"cpu_cores": sorted(os.sched_getaffinity(0))}
        self.engine = VLLMEngine(
            settings["model"],
            max_model_len=settings["context"],
            max_num_seqs=settings["most"],
            dtype="bfloat16" if gpu else "float32",
            kv_cache_gib=None if gpu else settings["cache"] / 2**30,
            gpu_memory_utilization=settings["share"],
            repeatable_sampling=sampler == "repeatable",
            log_path=folder / f"{name}.log",
            **devices,
        )
        stack.callback(self.engine.close)
        os.environ.clear()
        os.environ.update(before)
        self.engine.wait_ready()
        self.start = self.times.start(time.perf_counter() - start)

    def load(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        config = model_config(settings["vocabulary"], settings["device"])
        with torch.device(settings["device"]):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, str(config.dtype).split(".")[-1]))
        self.engine.load(([named] for named in model.named_parameters()), 0)

    def generate(self, **asked: int) -> dict[str, float]:
        """Seconds, and of them those inside vLLM's decode steps and inside this package's draw."""
        from trl_realloc.engines.requests import GenerationRequest, Sampling

        made = requests(**asked)
        self.times.new()
        start = time.perf_counter()
        given = [
            GenerationRequest(i, tuple(prompt), seed=i, max_tokens=length) for i, (prompt, length) in enumerate(made)
        ]
        done = list(self.engine.generate(given, Sampling(max_tokens=asked["longest"], temperature=1.0)))
        seconds = time.perf_counter() - start
        assert {one.index: len(one.token_ids) for one in done} == {i: length for i, (_, length) in enumerate(made)}
        return {"seconds": seconds, **self.times.new()[-1]}


# --- the benchmark ---


def compared(settings: dict[str, Any], options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of one vocabulary."""
    with ExitStack() as stack:
        theirs = Plain(settings, folder, stack)
        yield start_row("plain vLLM", settings, theirs.start)
        ours = {}
        for name in options.samplers:
            ours[name] = Ours(settings, name, folder, stack, name)
            ours[name].load(settings)
            yield start_row(f"ours, {name}", settings, ours[name].start)
        for samples in options.samples:
            asked = {"samples": samples, "vocabulary": settings["vocabulary"], "longest": options.longest}
            pairs: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in ours}
            for pair in range(-1, options.pairs):  # the first is warm-up
                for name, engine in ours.items():
                    done = theirs.generate(**asked, seed=pair + 1), engine.generate(**asked, seed=pair + 1)
                    if pair >= 0:
                        pairs[name].append(done)
            for name, done in pairs.items():
                yield row_of(settings, samples, name, options.longest, done)


def row_of(
    settings: dict[str, Any], samples: int, sampler: str, steps: int, pairs: list[tuple[float, dict[str, float]]]
) -> dict[str, Any]:
    def ms(values: Iterator[float]) -> float:
        return round(1e3 * statistics.median(values) / steps, 3)

    return {
        "device": settings["device"],
        "samples": samples,
        "vocabulary": settings["vocabulary"],
        "sampler": sampler,
        "ours_ms": ms(own["seconds"] for _, own in pairs),
        "vllm_ms": ms(plain for plain, _ in pairs),
        "ratio": round(statistics.median(own["seconds"] / plain for plain, own in pairs), 3),
        "host_ms": ms(own["seconds"] - own["steps"] for _, own in pairs),
        "draw_ms": ms(own["draws"] for _, own in pairs),
    }


def start_row(side: str, settings: dict[str, Any], stages: dict[str, float]) -> dict[str, Any]:
    seconds = {name: round(s, 2) for name, s in stages.items()}
    return {"side": side, "vocabulary": settings["vocabulary"], **seconds}


def second_start(settings: dict[str, Any], sampler: str, folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        again = Ours(settings, sampler, folder, stack, f"{sampler}-again")
        return start_row(f"ours, {sampler}, again", settings, again.start)


def tables(rows: list[dict[str, Any]], starts: list[dict[str, Any]]) -> Iterator[Table]:
    for title, shown in (("decode steps", rows), ("starts, seconds", starts)):
        if shown:
            table = Table(*shown[0], title=title, title_justify="left")
            for row in shown:
                table.add_row(*map(str, row.values()))
            yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, nargs="+", help="8 and 64; on a GPU 8 to 512")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--samplers", nargs="+", choices=["vllm", "repeatable"], default=["vllm", "repeatable"])
    parser.add_argument("--longest", type=int, help="tokens of the longest response; 16, on a GPU 256")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain(json.loads(options.plain))
        return
    on_gpu = options.device == "cuda"
    options.longest = options.longest or (256 if on_gpu else 16)
    options.samples = options.samples or ([8, 64, 128, 256, 512] if on_gpu else [8, 64])
    rows, starts = list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        for vocabulary in options.vocabularies:
            folder = Path(temporary, str(vocabulary))
            config = model_config(vocabulary, options.device)
            config.save_pretrained(folder)
            context = 2 ** math.ceil(math.log2(PROMPT + options.longest))
            settings = {
                "model": str(folder),
                "vocabulary": vocabulary,
                "device": options.device,
                "context": max(256, context),
                "most": max(options.samples),
                "cache": 2**28,
                "share": 0.8 / (1 + len(options.samplers)),
            }
            for row in compared(settings, options, folder):
                (rows if "samples" in row else starts).append(row)
                print(row, flush=True)
            starts.append(second_start(settings, options.samplers[-1], folder))
            if options.json:
                result_file.write(options.json, {**result_file.about(), "rows": rows, "starts": starts})
    for table in tables(rows, starts):
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
