"""Short runs of the executor, which measure the seconds of a job's calls. Their plans are in `measured_plans`.

The models have random weights. The prompts have random tokens and the mean length of the data. `measured_rates` fits
unit costs to the observations.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from ..algorithms.algorithm import Algorithm
from ..algorithms.nonfinite import NonFiniteError
from ..algorithms.ppo import PPO
from ..algorithms.ppo_settings import PPOSettings
from ..algorithms.prompt_batches import PromptBatch
from ..algorithms.rewards import FunctionReward
from ..algorithms.rollout import Ragged, Rollouts
from ..algorithms.trainer_loss import LOGPROB_GRADS, TrainerLoss
from ..engines.dropout import without_dropout
from ..engines.model_configs import untied
from ..engines.models import frozen_copy, shell, with_adapters
from ..engines.requests import Sampling
from ..engines.training.heads import autocast
from ..plan.dataflow import CallKind, Role
from ..plan.execution_plan import ExecutionPlan
from ..plan.timeline import Timeline
from ..planner.cost.profile import Observation, model_key
from ..planner.cost.workload import Workload
from ..runtime.calls.generate_and_score import CallSettings
from ..runtime.calls.results import Iteration
from ..runtime.executor import make_executor
from ..runtime.failures.alarm import JobFailed, is_known_everywhere
from ..runtime.placement.engine_options import EngineOptions
from ..runtime.placement.placement import Placement
from ..runtime.placement.roles import RoleModels, Roles
from ..runtime.process_groups import from_first_rank
from .job import Job
from .job_models import POLICIES


EPISODES = 64  # largest number of samples of a device in a run
RESPONSE = 128  # largest number of tokens of a response in a run


@dataclass(frozen=True)
class PolicyTraining(TrainerLoss):
    """One optimizer step on all samples, with the same gradient dL/dlogp for every token: the algorithm of a job
    without a critic."""

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        """A single mini-batch of all samples, with the gradients of their log-probabilities."""
        logprobs = samples.ragged("logprobs")
        gradient = -1.0 / max(1, len(logprobs.values))
        yield samples.plus(**{LOGPROB_GRADS: logprobs.like(torch.full_like(logprobs.values, gradient))})


class Runs:
    """The sample counts and lengths of the short runs, and their observations."""

    def __init__(self, job: Job) -> None:
        self.job, self.models, self.cluster, self.rank = job, job.models, job.cluster, job.rank
        self.graph = job.measured_graph
        workload, options = job.workload, job.options
        self.prompt = max(1, round(workload.prompt_tokens))
        self.response = max(2, min(RESPONSE, workload.response_tokens[-1]))
        share = max(2, min(EPISODES, workload.episodes // self.cluster.size))
        self.episodes = share * self.cluster.size
        length = max(options.context_length, self.prompt + self.response)
        # random models are sampled at temperature 1, not at the job's
        self.options = replace(options, context_length=length, temperature=1.0)
        self.slots = max(workload.episodes, self.episodes)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(episodes, response tokens) of the runs. The first one warms up; the others run twice, and the faster of the
        two counts (`MeasuredRates`)."""
        n, r = self.episodes, self.response
        half, short = max(self.cluster.size, n // 2), max(1, r // 4)
        return [(n, r), *2 * [(n, r), (half, r), (n, short), (n, max(1, r // 2)), (half, short)]]

    @property
    def workload(self) -> Workload:
        """The work of the largest run."""
        return self.job.workload.once(self.episodes, self.response)

    def observe(self, plan: ExecutionPlan, samples: Rollouts | None) -> tuple[list[Observation], Rollouts | None]:
        """Runs a plan a few times. Returns its observations, on rank 0, and samples for later plans.

        Args:
            samples: samples of an earlier plan for scoring and training. Generation then runs only if the plan splits
                it.

        Raises:
            JobFailed, NonFiniteError: a call failed. If every rank knows it (`is_known_everywhere`), all engines and
                groups of the short runs have been discarded.
        """
        observations: list[Observation] = []
        splits_generation = plan["actor.generate"].strategy.tp > 1
        reuses_samples = samples is not None and not splits_generation
        options = self.options.for_plan(plan, self.slots)
        placement = Placement(plan, self.rank, self.roles(), options)
        try:
            placement.start()
            executor = make_executor(placement, self._algorithm(), self._call_settings())
            rates = dict.fromkeys(Role, 0.0)
            half = max(self.cluster.size, self.episodes // 2)
            sizes = [(n, 0) for n in (self.episodes, *2 * (self.episodes, half))] if reuses_samples else self.sizes
            for step, (episodes, response) in enumerate(sizes):
                batch = self._prompts(episodes)
                start = time.perf_counter()
                if reuses_samples:
                    assert samples is not None, "the first plan generates them"
                    per_call = {"actor.generate": samples.select(list(range(episodes)))}
                    iteration = executor.run(batch, step, rates, known=per_call)
                else:
                    iteration = executor.run(batch, step, rates, sampling=Sampling(response, 1.0))
                if step and "responses" in iteration.samples:
                    observations += self._observations(plan, iteration, time.perf_counter() - start)
            generated = from_first_rank(iteration.samples, options.collective_timeout_s) if samples is None else samples
            executor.channels.flush()
            _barrier()
        except (JobFailed, NonFiniteError) as error:
            placement.close()
            if is_known_everywhere(error):
                executor.channels.flush()
                _barrier()
                placement.discard()
            raise
        finally:
            placement.close()
        placement.discard()
        if samples is None:  # as many as in the largest run, for the plans that do not generate
            generated = generated.only(("index", "responses", "logprobs", "has_eos"))
            twice = [generated, generated.plus(index=generated.tensor("index") + len(generated))]
            generated = Rollouts.cat(twice).select(list(range(self.episodes)))
        return observations, generated

    def _observations(self, plan: ExecutionPlan, iteration: Iteration, whole: float) -> Iterator[Observation]:
        samples = iteration.samples
        prompts, responses = samples.ragged("prompts").lengths, samples.ragged("responses").lengths
        lengths = (prompts + responses).double()
        busy = Timeline(span for span in iteration.spans if not span.is_host_work).by_call()
        is_zero = plan["actor.train"].strategy.zero_stage > 0
        for name, seconds in busy.items():
            if name not in plan.assignments:
                continue
            strategy, kind = plan[name].strategy, plan.graph.call(name).kind
            if plan["actor.generate"].strategy.tp > 1 and kind is not CallKind.GENERATE:
                continue  # observed under an earlier plan
            if is_zero and not strategy.zero_stage:
                continue
            specs = self.models.specs.get(name, ())
            all_elements = sum(spec.elements for spec in specs)
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
                    if strategy.pp > 1 or is_zero:
                        budget = self.options.budget(trains=kind is CallKind.TRAIN)
                        counts["micro"] = float(max(strategy.pp, math.ceil(counts["tokens"] / budget)))
                    if is_zero:
                        counts |= {"bytes": float(spec.bytes), "zero_stage": strategy.zero_stage}
                share = seconds * spec.elements / all_elements
                measured: dict[str, Any] = {"layers": spec.layers, "elements": float(spec.elements), **counts}
                yield Observation(
                    str(kind), model_key(spec), share, plan.cluster.size, strategy.tp, strategy.pp, **measured
                )
        for name in (name for name in busy if " -> " in name and not is_zero):
            spans = [span for span in iteration.spans if span.call == name]
            # ranks that arrive early wait for the others; a rank receives its share of all bytes
            took, size = statistics.median(span.seconds for span in spans), spans[0].bytes / len(spans)
            yield Observation("move", "", took, plan.cluster.size, bytes=size)
        if "actor.generate" in busy and plan["actor.generate"].strategy.tp == 1:
            yield Observation("iteration", "", max(1e-6, whole - sum(busy.values())), plan.cluster.size)

    def arithmetic(self) -> Callable[[], None]:
        """Makes a function that runs a forward and a backward of the actor."""
        model = self._model(self.models.configs[Role.ACTOR][0], is_policy=True)
        tokens = torch.zeros((4, min(256, self.options.context_length)), dtype=torch.long)

        def work() -> None:
            model(input_ids=tokens).logits.mean().backward()
            model.zero_grad(set_to_none=True)

        return work

    def activations(self) -> list[Observation]:
        """Bytes that forwards of two lengths save for their backwards, for each trained role, counted from the saved
        tensors and not from the device's memory statistics."""
        observations = []
        for role in self.graph.trained_roles:
            spec = self.models.specs[f"{role}.train"][0]
            model = self._model(self.models.configs[role][0], is_policy=role in POLICIES).to(self.options.device)
            backbone = getattr(model, "base_model", model)
            for length in (max(2, self.prompt // 2), self.prompt + self.response):
                saved = _saved_bytes(backbone, length, self.options)
                counts: dict[str, Any] = {"tokens": float(length), "squared": float(length**2), "bytes": saved}
                observations.append(
                    Observation(
                        "activations", model_key(spec), 0.0, 1, layers=spec.layers, elements=spec.elements, **counts
                    )
                )
        return observations

    # --- models, prompts and settings of the runs -------------------------------------------------------------------

    def roles(self) -> Roles:
        """The models of the runs by role, none of them loaded yet."""
        configs, peft = self.models.configs, self.models.peft_config
        (actor,) = configs[Role.ACTOR]
        models = {
            Role.ACTOR: RoleModels(
                "policy",
                [lambda: with_adapters(self._model(actor, is_policy=True), peft, None)],
                config=untied(actor) if self.models.own_head else actor,
                shell=partial(shell, actor),
                adapted=peft is not None,
            )
        }
        if Role.REFERENCE in self.graph.roles:
            (reference,) = configs[Role.REFERENCE]
            load = [lambda: frozen_copy(self._model(reference, is_policy=True))]
            models[Role.REFERENCE] = RoleModels("policy", load)
        if Role.CRITIC in self.graph.roles:
            (critic,) = configs[Role.CRITIC]
            models[Role.CRITIC] = RoleModels("value", [partial(self._model, critic, is_policy=False)])
        if Role.REWARD in self.graph.roles:
            scorers = configs[Role.REWARD]
            models[Role.REWARD] = RoleModels(
                "score",
                [partial(self._model, config, is_policy=False) for config in scorers],
                [f"model {index}" for index in range(len(scorers))],
                [None] * len(scorers),
            )
        return Roles(models)

    def _model(self, config: PretrainedConfig, *, is_policy: bool) -> PreTrainedModel:
        kind = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
        random = torch.random.get_rng_state()
        torch.manual_seed(0)
        model = kind.from_config(config)
        torch.random.set_rng_state(random)
        return without_dropout(model)

    def _call_settings(self) -> CallSettings:
        scorers = self.models.configs.get(Role.REWARD, ())
        functions = [] if scorers else [FunctionReward(_nothing, "nothing")]
        names = [f"model {index}" for index in range(len(scorers))] or ["nothing"]
        weights = dict.fromkeys(names, 1.0)
        sampling = Sampling(self.response, 1.0)
        return CallSettings(sampling, 0, None, self.models.processing_class, functions, weights)

    def _algorithm(self) -> Algorithm:
        """An algorithm with one optimizer step per iteration: PPO, or training of the policy alone without a critic."""
        if Role.CRITIC in self.graph.roles:
            return PPO(PPOSettings(self.response, num_ppo_epochs=1, num_mini_batches=1))
        return PolicyTraining(self.graph)

    def _prompts(self, episodes: int) -> PromptBatch:
        vocabulary = self.models.configs[Role.ACTOR][0].get_text_config().vocab_size
        draw = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, vocabulary, (self.prompt,), generator=draw) for _ in range(episodes)]
        return PromptBatch(Rollouts(index=torch.arange(episodes), prompts=Ragged.of(rows, torch.long)), [{}] * episodes)


def _barrier() -> None:
    """Wait for all ranks, because a rank that destroys its groups closes them for ranks that still read."""
    if dist.is_initialized():
        dist.barrier()


def _nothing(completions: Sequence[object]) -> list[float]:
    return [0.0] * len(completions)


def _saved_bytes(model: torch.nn.Module, length: int, options: EngineOptions) -> float:
    """Bytes of the tensors that a forward of one sample of `length` tokens saves for its backward, without parameters
    and their casts, which do not depend on the tokens (`activation_memory` counts the casts)."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    matrices = {tuple(sorted(parameter.shape)) for parameter in model.parameters() if parameter.dim() == 2}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_cast = tensor.dtype is options.compute_dtype and tuple(sorted(tensor.shape)) in matrices
        if storage.data_ptr() not in parameters and not is_cast:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros((1, length), dtype=torch.long, device=options.device)
    mixed = autocast(options.device, options.compute_dtype)
    with mixed, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(input_ids=tokens, use_cache=False)  # the reference keeps storages from being reused
    del output
    return float(sum(saved.values()))
