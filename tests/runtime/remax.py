"""ReMax (Li et al. 2023, arXiv 2310.10505) as an algorithm of the executor's: no critic, no reference, and two calls of
one role and kind, the sampled and the greedy response of each prompt.

It is here to hold that the runtime knows no algorithm; `docs/algorithms.md` goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tiny
import torch
from torch import Tensor, nn

from trl_realloc.algorithms.base import TrainingLoss
from trl_realloc.algorithms.prompt_batches import PromptBatch
from trl_realloc.algorithms.rewards import FunctionReward
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.base import Sampling
from trl_realloc.engines.models import shell
from trl_realloc.plan import ExecutionPlan
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.runtime.calls import CallSettings, Step
from trl_realloc.runtime.engine_options import EngineOptions
from trl_realloc.runtime.executor import Executor, make_executor
from trl_realloc.runtime.placement import Placement
from trl_realloc.runtime.roles import RoleModels, Roles


LENGTH = 10
GREEDY = "actor.generate.greedy"
GRAPH = DataflowGraph(
    (
        Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("responses", "logprobs")),
        Call(Role.ACTOR, CallKind.GENERATE, ("prompts",), ("greedy_responses", "greedy_logprobs"), label="greedy"),
        Call(Role.REWARD, CallKind.FORWARD, ("prompts", "responses"), ("scores",)),
        Call(Role.REWARD, CallKind.FORWARD, ("prompts", "greedy_responses"), ("baselines",), label="greedy"),
        Call(Role.ACTOR, CallKind.TRAIN, ("prompts", "responses", "logprobs", "scores", "baselines")),
    )
)


@dataclass(frozen=True)
class PolicyGradientLoss:
    """-(r(y) - r(greedy)) Σ log π(y_t), mean over samples. Reads `advantages` and `weight`, (n,) each."""

    def __call__(self, outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        per_sample = -samples.tensor("advantages") * outputs["logprobs"].sum()
        return (per_sample * samples.tensor("weight")).sum(), {"policy_loss": per_sample.detach()}


@dataclass(frozen=True)
class ReMax:
    """An `algorithms.base.Algorithm`."""

    graph: DataflowGraph = GRAPH

    def prepare(self, samples: Rollouts) -> Rollouts:
        return samples.plus(advantages=samples.tensor("scores") - samples.tensor("baselines"))

    def mini_batches(self, samples: Rollouts, step: int) -> Iterator[Rollouts]:
        yield samples.plus(weight=torch.full((len(samples),), 1 / len(samples)))

    def loss(self, call: str) -> TrainingLoss:
        return TrainingLoss("policy", "policy_loss", PolicyGradientLoss())

    def sample_metrics(self, samples: Rollouts) -> dict[str, float]:
        return {"objective/scores": float(samples.tensor("scores").mean())}

    def update_metrics(self, steps: Sequence[tuple[Rollouts, Mapping[str, Tensor]]]) -> dict[str, float]:
        return {"loss/policy_avg": float(sum(float(sums["policy_loss"].mean()) for _, sums in steps)) / len(steps)}


def even(completions: list[str], **columns: object) -> list[float]:
    """A reward that wants words of an even number."""
    return [sum(word[-1] in "02468" for word in text.split()) / LENGTH for text in completions]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def options(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> EngineOptions:
    """Of engines of tiny models."""
    return EngineOptions(
        device=torch.device("cpu"),
        temperature=1.0,
        response_length=LENGTH,
        context_length=32,
        forward_batch_size=4,
        train_batch_size=4,
        pad_token_id=tiny.PAD,
        make_optimizer=make_optimizer,
    )


def place(plan: ExecutionPlan, rank: int) -> Executor:
    """An executor of ReMax on a tiny policy. All ranks together; the plan's graph is `GRAPH`."""
    tokenizer = tiny.tokenizer()
    policy = tiny.policy()
    actor = RoleModels("policy", [lambda: policy], config=policy.config, shell=lambda: shell(policy.config))
    placement = Placement(plan, rank, Roles({Role.ACTOR: actor, Role.REWARD: RoleModels("score", [])}), options(sgd))
    placement.start()
    rules = CallSettings(
        Sampling(LENGTH, 1.0, (tokenizer.eos_token_id,)),
        seed=3,
        eos_token_id=tokenizer.eos_token_id,
        processing_class=tokenizer,
        functions=[FunctionReward(even, "even")],
        reward_weights={"even": 1.0},
        sampling_of={GREEDY: Sampling(LENGTH, 1e-6, (tokenizer.eos_token_id,))},
    )
    return make_executor(placement, ReMax(), rules)


def prompts() -> PromptBatch:
    rows = [torch.tensor(ids) for ids in ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16])]
    batch = Rollouts(index=torch.arange(len(rows)), prompts=Ragged.of(rows, torch.long))
    return PromptBatch(batch, [{"prompt": f"prompt {at}"} for at in range(len(rows))])


def whole_run(executor: Executor) -> Rollouts:
    return executor.run(prompts(), 0, {Role.ACTOR: 0.1}).samples


def call_by_call(executor: Executor) -> Rollouts:
    """The same iteration driven from outside, in another order than the graph's, the sampled responses in two parts."""
    batch = prompts()
    samples = batch.prompts
    executor.begin(Step(0, batch.rows, {Role.ACTOR: 0.1}))
    samples = samples.plus(**executor.perform(GREEDY, samples))
    samples = samples.plus(**executor.perform("reward.forward.greedy", samples))
    parts = [executor.perform("actor.generate", samples.select(at)) for at in ([0, 1, 2], [3, 4])]
    samples = samples.plus(**Rollouts.cat(parts))
    samples = samples.plus(**executor.perform("reward.forward", samples))
    return samples.plus(**executor.perform("actor.train", samples).only(["grad_norm"]))


def learned(executor: Executor) -> dict[str, Tensor]:
    engine = executor.placement.trained(Role.ACTOR)
    return {} if engine is None else {n: p.detach().clone() for n, p in engine.head.model.named_parameters()}
