"""Runs TRL's own PPOTrainer on models of some 20,000 parameters and records what went in and what came out.

The recorders stand around TRL's real functions, which do their work as ever; nothing is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


PAD, BOS, EOS, VOCABULARY = 0, 1, 2, 64
State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One configuration to run TRL under.

    Args:
        stop_pull: how strongly the policy is drawn to end a response: at 1.5 after some ten tokens, at 3 after four.
        lora: train adapters; the reference is the policy without them.
        updates: PPO iterations, one after the other.
        options: fields of `PPOConfig`.
    """

    stop_pull: float = -3.0
    lora: bool = False
    updates: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Models:
    policy: Any
    reference: Any
    critic: Any
    reward: Any


@dataclass
class Update:
    """One PPO iteration of TRL.

    Args:
        queries: (batch, context) int64, left-padded.
        responses: (batch, longest) int64 as sampled: after EOS, padding.
        logits: (batch, longest, vocabulary) float32 from generation, already divided by the temperature.
        orders: the permutation of each PPO epoch.
        metrics: what was logged.
        policy, critic: the parameters afterwards.
        moments: Adam's first moments afterwards, `policy.…` and `value_model.…`.
    """

    queries: Tensor
    responses: Tensor
    logits: Tensor
    orders: list[np.ndarray] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    policy: State = field(default_factory=dict)
    critic: State = field(default_factory=dict)
    moments: State = field(default_factory=dict)


@dataclass
class Recording:
    """`before` are copies of the models as they were before the first update."""

    args: PPOConfig
    stop_token_id: int | None
    before: Models
    updates: list[Update]


def run_trl(case: Case) -> Recording:
    """TRL's `PPOTrainer.train()` under this case, in this process, on the CPU."""
    models = _models(case)
    with tempfile.TemporaryDirectory() as folder, _fresh_accelerate():
        args = PPOConfig(
            output_dir=folder,
            **{
                "bf16": False,
                "use_cpu": True,
                "report_to": [],
                "gradient_checkpointing": False,
                "num_sample_generations": 0,
                "save_strategy": "no",
                "disable_tqdm": True,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "constant",
                # An element whose gradient is rounding noise (1 in 2,000 here) moves by lr * noise / (|noise| + this):
                # at the default 1e-8 two right answers lie up to 1e-4 apart in it, at 1e-5 all agree to 5e-6.
                "adam_epsilon": 1e-5,
                "per_device_train_batch_size": 8,
                "num_ppo_epochs": 1,
                "response_length": 12,
                "kl_coef": 0.1,
                **case.options,
            },
        )
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        args.total_episodes = batch * case.updates
        np.random.seed(0)  # TRL's mini-batch order is not seeded otherwise
        recorder = _Recorder()
        trainer = PPOTrainer(
            args=args,
            processing_class=_tokenizer(),
            model=models.policy,
            ref_model=models.reference,
            reward_model=models.reward,
            value_model=models.critic,
            # one batch more than is used: TRL's last batch of a pass forces an optimizer step of its own
            train_dataset=_prompts(batch * (case.updates + 1)),
            callbacks=[recorder],
            peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if case.lora else None,
        )
        before = copy.deepcopy(Models(trainer.policy_model, models.reference, models.critic, models.reward))
        with (
            _recorded(ppo_trainer, "batch_generation", recorder.generated),
            _recorded(np.random, "permutation", recorder.shuffled),
        ):
            trainer.train()
    return Recording(args, trainer.stop_token_id, before, recorder.updates)


class _Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.updates: list[Update] = []

    def generated(self, result: tuple[Tensor, Tensor], model: Any, queries: Tensor, *args: Any) -> None:
        joined, logits = result
        self.updates.append(Update(queries.clone(), joined[:, queries.shape[1] :].clone(), logits.clone()))

    def shuffled(self, result: np.ndarray, n: int) -> None:
        self.updates[-1].orders.append(result.copy())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.updates[-1].metrics = dict(logs)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        update = self.updates[-1]
        update.policy = _parameters(model.policy)
        update.critic = _parameters(model.value_model)
        moments = kwargs["optimizer"].state
        update.moments = {
            name: moments[parameter]["exp_avg"].clone()
            for name, parameter in model.named_parameters()
            if parameter in moments
        }


@contextlib.contextmanager
def _recorded(owner: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    """While open, `note(result, *arguments)` follows every call of `owner.name`."""
    real = getattr(owner, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    setattr(owner, name, recording)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextlib.contextmanager
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in class attributes: a trainer must not inherit the one before it."""
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()


def _parameters(model: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _models(case: Case) -> Models:
    def config(**options: Any) -> LlamaConfig:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
        return LlamaConfig(**sizes, **special, initializer_range=0.15, **options)

    torch.manual_seed(1)
    policy = AutoModelForCausalLM.from_config(config())
    with torch.no_grad():  # coordinate 0 is 1 in every token and layer, so a column of the head is a bias
        policy.model.embed_tokens.weight[:, 0] = 1.0
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        policy.lm_head.weight[:, 0] = 0.0
        stop = case.options.get("stop_token_id", EOS)
        policy.lm_head.weight[[PAD, stop], 1:] = 0.0
        policy.lm_head.weight[PAD, 0] = -40.0  # TRL takes a sampled pad token for the end of the response
        policy.lm_head.weight[stop, 0] = case.stop_pull
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    critic = AutoModelForSequenceClassification.from_config(config(num_labels=1))
    reward = AutoModelForSequenceClassification.from_config(config(num_labels=1))
    return Models(policy, None if case.lora else reference, critic, reward)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )


def _prompts(count: int) -> Dataset:
    draw = np.random.default_rng(0)
    return Dataset.from_dict(
        {"input_ids": [draw.integers(3, VOCABULARY, size=draw.integers(2, 9)).tolist() for _ in range(count)]}
    )
