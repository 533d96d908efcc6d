"""An algorithm of one's own on the executor: ReMax (Li et al. 2023, arXiv 2310.10505), REINFORCE with the score
of the greedy response to the same prompt as the baseline. No critic, no reference, two generations per iteration.

    python examples/custom_algorithm.py

trains a random policy of two layers on one process: it learns to write words that end in an even digit.
docs/algorithms.md goes through this file. The same algorithm runs under any plan, on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from trl_realloc import Cluster, ExecutionPlan
from trl_realloc.algorithms.algorithm import TrainingLoss
from trl_realloc.algorithms.prompt_batches import PromptBatch
from trl_realloc.algorithms.rewards import FunctionReward
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.models import shell
from trl_realloc.engines.requests import Sampling
from trl_realloc.plan.dataflow import Call, CallKind, DataflowGraph, Role
from trl_realloc.plan.presets import resolve_plan
from trl_realloc.runtime.calls.generate_and_score import CallSettings
from trl_realloc.runtime.executor import Executor, make_executor
from trl_realloc.runtime.placement.engine_options import EngineOptions
from trl_realloc.runtime.placement.placement import Placement
from trl_realloc.runtime.placement.roles import RoleModels, Roles


LENGTH = 10  # tokens of a response
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
    """An `algorithms.algorithm.Algorithm`."""

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
    """The share of a response's words that end in an even digit."""
    return [sum(word[-1] in "02468" for word in text.split()) / LENGTH for text in completions]


def one_device_plan() -> ExecutionPlan:
    """Every call on one device, generation by Transformers. The presets are for PPO's graph: a labelled call gets the
    assignment of the call without it."""
    preset = resolve_plan("flatten", Cluster(1, 1), generation_engine="transformers", zero_stage=0)
    assignments = {name: preset[name.removesuffix(".greedy")] for name in GRAPH.order}
    return ExecutionPlan(preset.cluster, assignments, GRAPH)


def options(pad_token_id: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> EngineOptions:
    return EngineOptions(
        device=torch.device("cpu"),
        temperature=1.0,  # of sampling, and so of every log-probability
        response_length=LENGTH,
        context_length=32,  # the longest prompt with the longest response, tokens
        forward_batch_size=4,
        train_batch_size=4,
        pad_token_id=pad_token_id,
        make_optimizer=make_optimizer,
    )


def executor_of(
    plan: ExecutionPlan, rank: int, policy: Any, tokenizer: Any, make_optimizer: Callable[[nn.Module], Any]
) -> Executor:
    """This rank's executor of ReMax under a plan of `GRAPH`. All ranks together."""
    actor = RoleModels("policy", [lambda: policy], config=policy.config, shell=lambda: shell(policy.config))
    reward = RoleModels("score", [])  # no reward model: reward functions alone
    engines = options(tokenizer.pad_token_id, make_optimizer)
    placement = Placement(plan, rank, Roles({Role.ACTOR: actor, Role.REWARD: reward}), engines)
    placement.start()  # loads the models and starts the engines
    settings = CallSettings(
        Sampling(LENGTH, 1.0, (tokenizer.eos_token_id,)),
        seed=3,
        eos_token_id=tokenizer.eos_token_id,
        processing_class=tokenizer,
        functions=[FunctionReward(even, "even")],
        reward_weights={"even": 1.0},
        sampling_of={GREEDY: Sampling(LENGTH, 1e-6, (tokenizer.eos_token_id,))},
    )
    return make_executor(placement, ReMax(), settings)


def small_policy(words: int) -> tuple[Any, PreTrainedTokenizerFast]:
    """A random Llama of two layers, and a tokenizer with a token for each of the words w2, w3 and so on."""
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, words)}}
    whole_words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    whole_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole_words, eos_token="<eos>", pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


def main(updates: int = 60, prompts: int = 32) -> tuple[float, float]:
    """Train, and return the mean score of the first and of the last update."""
    torch.manual_seed(0)
    policy, tokenizer = small_policy(words=40)
    executor = executor_of(
        one_device_plan(), 0, policy, tokenizer, lambda module: torch.optim.AdamW(module.parameters())
    )
    rows = [torch.tensor([2 + row, 3 + row]) for row in range(prompts)]
    batch = Rollouts(index=torch.arange(prompts), prompts=Ragged.of(rows, torch.long))
    columns = [{"prompt": tokenizer.decode(row)} for row in rows]  # for reward functions
    scores = []
    for step in range(updates):
        iteration = executor.run(PromptBatch(batch, columns), step, {Role.ACTOR: 3e-3})
        scores.append(iteration.metrics["objective/scores"])
        if step % 10 == 0 or step == updates - 1:
            print(f"update {step:>3}: score {scores[-1]:.3f}")
    return scores[0], scores[-1]


if __name__ == "__main__":
    main()
