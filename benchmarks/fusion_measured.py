"""Measured part of `fusion`: generation and scoring with real vLLM engines, serial, streamed and migrated.

`measure` starts the processes; this file is also their program. All modes run in one job, on the same engines, models
and prompts. They differ in the plan's `streams` alone. A run that other processes of the machine have disturbed is
repeated (`disturbance`). The table and the command are in `fusion`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fusion_figures
import torch
import torch.distributed as dist
from disturbance import Disturbance, is_disturbed
from fusion_figures import MODES, STAGE
from skewed import Skewed, tokenizer


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ATTEMPTS = 4  # most runs of a mode on a batch; the least disturbed one counts
TRIALS, TRIAL_TOKENS, TRIAL_S = 5, 256, 1.0  # of the slowdown: repeats, tokens that are decoded, seconds of scoring


# --- one rank -------------------------------------------------------------------------------------------------------


def _plans(processes: int, threshold: float) -> dict[str, Any]:
    """By mode, the same assignments with other streams."""
    from trl_realloc.plan.cluster import Cluster
    from trl_realloc.plan.presets import flatten
    from trl_realloc.plan.streams import Migration, Streams

    plan = flatten(Cluster(1, processes))
    migration = Migration(threshold, engines=max(1, processes // 2))
    return {
        "serial": plan,
        "streamed": replace(plan, streams=Streams()),
        "migrated": replace(plan, streams=Streams(migration=migration)),
    }


def _trainer(plan: Any, skewed: Skewed, samples: int, processes: int, folder: Path) -> Any:
    from datasets import Dataset

    from trl_realloc import PPOConfig, PPOTrainer

    episodes = samples * processes
    arguments = PPOConfig(
        output_dir=str(folder),
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=samples,
        total_episodes=episodes,
        num_ppo_epochs=1,
        response_length=skewed.limit,
        stop_token="eos",
        temperature=1.0,
        learning_rate=0.0,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        generation_engine="vllm",
        plan=plan,
    )
    policy, critic, reward = skewed.models()
    return PPOTrainer(
        args=arguments,
        processing_class=tokenizer(),
        model=policy,
        ref_model=skewed.models()[0],
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": skewed.prompts(episodes, 0)}),
    )


class Rank:
    """One rank with its engines, which runs iterations under plans that differ in their streams.

    Args:
        samples: of each engine.
        threshold: share of the batch; the unfinished samples move when there are fewer.
    """

    def __init__(self, processes: int, skewed: Skewed, samples: int, threshold: float, folder: Path) -> None:
        self.skewed, self.plans = skewed, _plans(processes, threshold)
        self.episodes = samples * processes
        # with slots for samples that are moved
        self.trainer = _trainer(self.plans["migrated"], skewed, samples, processes, folder)
        self.trainer.run.placed.start()
        self.rank: int = self.trainer.accelerator.process_index

    def least_disturbed(self, mode: str, step: int, *, trains: bool) -> dict[str, Any]:
        """The figures of an iteration, which is repeated while other processes disturb it."""
        runs: list[dict[str, Any]] = []
        while True:
            runs.append(self.run(mode, step, trains=trains))
            is_over = [not self.rank and not is_disturbed(runs[-1]["others_core_s"], runs[-1]["wall_s"])]
            dist.broadcast_object_list(is_over)
            if is_over[0] or len(runs) == ATTEMPTS:
                return {} if self.rank else min(runs, key=lambda run: run["others_core_s"] / run["wall_s"])

    def run(self, mode: str, step: int, *, trains: bool = False) -> dict[str, Any]:
        """One iteration: without training unless `trains`. Returns its figures."""
        from trl_realloc.algorithms.prompt_batches import PromptBatch
        from trl_realloc.algorithms.rollout import Ragged, Rollouts
        from trl_realloc.plan.dataflow import Role

        executor, plan = self.trainer.executor, self.plans[mode]
        executor.plan = executor.placement.plan = executor.exchange.plan = plan
        rows = self.skewed.prompts(self.episodes, 1 + step)
        prompts = Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))
        executor.orders = ()
        given_out = self._given_out()
        others = None if self.rank else Disturbance(os.getppid())  # the launcher's descendants are the job
        self.trainer.accelerator.wait_for_everyone()
        start = time.perf_counter()
        rates = dict.fromkeys((Role.ACTOR, Role.CRITIC), 0.0) if trains else {}
        batch = PromptBatch(prompts, [{}] * len(rows))
        iteration = executor.run(batch, step, rates, only=None if trains else STAGE)
        wall = time.perf_counter() - start
        others_core_s = 0.0 if others is None else others.core_seconds()
        decoded = torch.tensor(self._given_out() - given_out)
        dist.all_reduce(decoded)
        if others is None:
            return {}
        figures = self._figures(iteration, wall, trains=trains)
        return {"others_core_s": others_core_s, "decoded": int(decoded), **figures}

    def _given_out(self) -> int:
        """The tokens that this rank's engine has given out, by vLLM's own count."""
        count: int = self.trainer.executor.placement.generators[STAGE[0]].tokens_given_out()
        return count

    def seconds_a_move(self) -> float:
        """Seconds by which a response takes longer if its sample is withdrawn half-way and goes on in the same engine:
        the messages, and the tokens that are read again. Of rank 0's engine while no other rank computes; all ranks
        call this together."""
        still, moved = [], []
        for _ in range(TRIALS):
            dist.barrier()
            if not self.rank:
                still.append(self._decode())
                moved.append(self._decode(withdrawn_after=still[-1] / 2))
        return statistics.median(moved) - statistics.median(still) if not self.rank else 0.0

    def slowdowns(self) -> list[tuple[int, float]]:
        """The factor by which rank 0's engine decodes more slowly while some of the other ranks score, on the same
        machine: for 2 devices that compute, 3, and so on. Measured with one sample; all ranks call this together."""
        seconds: dict[int, list[float]] = defaultdict(list)
        for busy in [number for _ in range(TRIALS) for number in range(dist.get_world_size())]:
            dist.barrier()
            if not self.rank:
                seconds[busy].append(self._decode())
            elif self.rank <= busy:
                self._score()
        alone = statistics.median(seconds[0]) if seconds else 1.0
        return [(1 + busy, statistics.median(seconds[busy]) / alone) for busy in sorted(seconds) if busy]

    def _decode(self, *, withdrawn_after: float | None = None) -> float:
        """Seconds of a response of `TRIAL_TOKENS` tokens.

        Args:
            withdrawn_after: seconds after which the sample is withdrawn and given back.
        """
        from trl_realloc.engines.base import GenerationRequest

        executor = self.trainer.executor
        prompt = tuple(self.skewed.prompts(1, 0)[0])
        request, completions = GenerationRequest(0, prompt, 0, max_tokens=TRIAL_TOKENS), []
        endless = replace(executor.settings.sampling, stop_token_ids=())
        start = time.perf_counter()
        generation = executor.placement.generators[STAGE[0]].start([request], endless)
        if withdrawn_after is not None:
            time.sleep(withdrawn_after)
            generation.add([replace(request, begun=begun) for begun in generation.withdraw([request.index])])
        while generation.unfinished:
            completions += generation.poll(1.0)
        seconds = time.perf_counter() - start
        generation.close()
        assert [len(completion.token_ids) for completion in completions] == [TRIAL_TOKENS]
        return seconds

    def _score(self) -> None:
        """Score samples of median length for `TRIAL_S` seconds."""
        from trl_realloc.algorithms.rollout import Ragged, Rollouts
        from trl_realloc.plan.assignment import CACHED_TOKENS
        from trl_realloc.runtime.calls import generate_and_score as calls

        executor, response = self.trainer.executor, [2] * self.skewed.short_mean
        count = CACHED_TOKENS // (self.skewed.prompt + len(response))
        prompts, responses = ([[2] * self.skewed.prompt] * count, [response] * count)
        samples = Rollouts(
            index=torch.arange(count),
            prompts=Ragged.of(prompts, torch.long),
            responses=Ragged.of(responses, torch.long),
        )
        end = time.perf_counter() + TRIAL_S
        while time.perf_counter() < end:
            for name in STAGE[1:]:
                call = executor.plan.graph.call(name)
                calls.forward(executor.placement, executor.settings, call, samples, calls.Step(0))

    def _figures(self, iteration: Any, wall: float, *, trains: bool) -> dict[str, Any]:
        from trl_realloc.planner.iteration.stream_dispatcher import Continue, Score

        spans = [span for span in iteration.spans if trains or span.call in STAGE]
        first = min(span.start for span in spans)
        by_call = {call: [span for span in spans if span.call == call] for call in STAGE}
        orders = self.trainer.executor.orders
        return {
            "seconds": max(span.end for span in spans) - first,
            "wall_s": wall,
            "generate_s": max(span.end for span in by_call["actor.generate"]) - first,
            "engines_s": sorted(span.end - first for span in by_call["actor.generate"]),
            "scoring_core_s": sum(span.seconds for call in STAGE[1:] for span in by_call[call]),
            "forwards": sum(isinstance(order, Score) for order in orders),
            "moved": sum(len(order.samples) for order in orders if isinstance(order, Continue)),
            "responses": [row.tolist() for row in iteration.samples.ragged("responses").rows()],
            "spans": [(s.call, s.device, s.start - first, s.end - first) for s in spans],
        }


def _rank(
    processes: int, skewed: Skewed, samples: int, threshold: float, repeats: int, iterations: int, out: Path
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    done: list[dict[str, Any]] = []
    slowdowns: list[tuple[int, float]] = []
    move_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        rank = Rank(processes, skewed, samples, threshold, Path(folder))
        for trains, count in ((False, repeats), (True, iterations)):
            for step in range(-1 if count else 0, count):  # the first warms up
                order = [MODES[(step + at) % len(MODES)] for at in range(len(MODES))]
                for mode in order:
                    at = step + 1 + 1000 * trains
                    if step < 0:
                        rank.run(mode, at, trains=trains)
                        continue
                    figures = rank.least_disturbed(mode, at, trains=trains)
                    if not rank.rank:
                        done.append({"mode": mode, "repeat": step, "trains": trains, **figures})
            if not trains:
                slowdowns, move_s = rank.slowdowns(), rank.seconds_a_move()
        if not rank.rank:
            out.write_text(json.dumps({"slowdowns": slowdowns, "move_s": move_s, "runs": done}))
        rank.trainer.run.placed.end_together()
        rank.trainer.close()


# --- the job ----------------------------------------------------------------------------------------


def measure(
    processes: int,
    skewed: Skewed,
    samples: int,
    threshold: float,
    repeats: int,
    iterations: int,
    runs: Path | None = None,
) -> dict[str, Any]:
    """Run the job and return its figures.

    Args:
        skewed: sizes of the models and of their samples.
        samples: of each engine.
        threshold: share of the batch; the unfinished samples move when there are fewer.
        repeats: batches of generation and scoring, each in every mode.
        iterations: the same of whole iterations.
        runs: a folder for the figures, lengths and spans of every run.

    Raises:
        SystemExit: the job failed, or two modes drew other tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "runs.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += [__file__, "--processes", str(processes), "--samples", str(samples), "--repeats", str(repeats)]
        command += [
            "--threshold",
            str(threshold),
            "--iterations",
            str(iterations),
            "--out",
            str(out),
            "--skewed",
            json.dumps(asdict(skewed)),
        ]
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        with log.open("w") as written:
            code = subprocess.run(command, env=environment, stdout=written, stderr=written, check=False).returncode
        if code:
            sys.exit(f"the job of {processes} processes failed:\n{log.read_text()[-4000:]}")
        if runs is not None:
            runs.mkdir(parents=True, exist_ok=True)
            (runs / f"fusion-{processes}.json").write_text(out.read_text())
        return fusion_figures.summary(_plans(processes, threshold), skewed, threshold, **json.loads(out.read_text()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--threshold", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skewed", type=json.loads, required=True)
    given = parser.parse_args()
    _rank(
        given.processes,
        Skewed(**given.skewed),
        given.samples,
        given.threshold,
        given.repeats,
        given.iterations,
        given.out,
    )
