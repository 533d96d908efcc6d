"""Samples through models of many families: packed, padded or one at a time, they say and learn the same."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import CLASSIFIERS, FAMILIES, SHAPE, VOCABULARY, causal, classifier
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.training.heads import PolicyHead, ScoreHead, ValueHead


TEMPERATURE = 0.7


@pytest.fixture
def samples() -> Rollouts:
    g = torch.Generator().manual_seed(0)

    def rows(shortest: int, longest: int) -> list[Tensor]:
        lengths = torch.randint(shortest, longest + 1, (6,), generator=g).tolist()
        return [torch.randint(3, VOCABULARY, (n,), generator=g) for n in lengths]

    prompts, responses = rows(2, 8), rows(1, 12)
    responses[2] = responses[2][:1]
    prompts[3], responses[3] = prompts[3][:1], torch.arange(10, 22)
    return Rollouts(
        index=torch.arange(6), prompts=Ragged.of(prompts, torch.long), responses=Ragged.of(responses, torch.long)
    )


def one_by_one(samples: Rollouts) -> Iterator[tuple[int, Tensor]]:
    """Each sample's prompt length, and its tokens (1, length)."""
    pairs = zip(samples.ragged("prompts").rows(), samples.ragged("responses").rows(), strict=True)
    for prompt, response in pairs:
        yield len(prompt), torch.cat([prompt, response])[None]


def plain_logprobs(model: nn.Module, samples: Rollouts) -> tuple[Tensor, Tensor]:
    logprobs, entropy = [], []
    for start, tokens in one_by_one(samples):
        logits = model(input_ids=tokens).logits[0, start - 1 : -1].float() / TEMPERATURE
        p = logits.log_softmax(-1)
        logprobs.append(p.gather(-1, tokens[0, start:, None])[:, 0])
        entropy.append(-(p.exp() * p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropy)


def plain_values(model: Any, samples: Rollouts) -> Tensor:
    values = []
    for start, tokens in one_by_one(samples):
        hidden = getattr(model, model.base_model_prefix)(input_ids=tokens).last_hidden_state[0]
        values.append(model.score(hidden)[start - 1 :, 0])
    return torch.cat(values)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6 * largest, msg=f"{name}: {{}}".format)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_policies_say_and_learn_what_they_do_one_sample_at_a_time(family: str, samples: Rollouts) -> None:
    model = causal(family)
    plain = copy.deepcopy(model)
    head = PolicyHead(model, TEMPERATURE)
    assert head.packed == FAMILIES[family][1]
    out, (logprobs, entropy) = head(samples), plain_logprobs(plain, samples)
    assert out["logprobs"].lengths.tolist() == samples.ragged("responses").lengths.tolist()
    assert_close(out["logprobs"].values, logprobs)
    assert_close(out["entropy"].values, entropy)
    weights = torch.linspace(-1, 1, len(logprobs))
    ours = gradients(model, (out["logprobs"].values * weights).sum())
    assert_same_gradients(ours, gradients(plain, (logprobs * weights).sum()))


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_critics_and_rewards_say_and_learn_what_they_do_one_sample_at_a_time(family: str, samples: Rollouts) -> None:
    model = classifier(family)
    plain = copy.deepcopy(model)
    head = ValueHead(model)
    assert head.packed == FAMILIES[family][1]
    values, expected = head(samples)["values"], plain_values(plain, samples)
    assert values.lengths.tolist() == (samples.ragged("responses").lengths + 1).tolist()
    assert_close(values.values, expected)
    weights = torch.linspace(-1, 1, len(expected))
    ours = gradients(model, (values.values * weights).sum())
    assert_same_gradients(ours, gradients(plain, (expected * weights).sum()))

    scores = ScoreHead(model)(samples)["scores"]
    assert_close(scores.values, torch.cat([plain(input_ids=tokens).logits[0] for _, tokens in one_by_one(samples)]))


@pytest.mark.parametrize("family", ["llama", "gemma3, window 4", "gpt2", "bloom"])
def test_the_other_samples_of_a_micro_batch_do_not_matter(family: str, samples: Rollouts) -> None:
    for head, name in (
        (PolicyHead(causal(family), TEMPERATURE), "logprobs"),
        (ValueHead(classifier(family)), "values"),
    ):
        together = head(samples)[name]
        for cut_up in ([[0], [1], [2], [3], [4], [5]], [[3, 0], [5, 4, 2, 1]]):
            for part in cut_up:
                assert_close(head(samples.select(part))[name].values, together.select(part).values)


def test_a_reward_model_may_be_an_encoder(samples: Rollouts) -> None:
    torch.manual_seed(0)
    config = BertConfig(**SHAPE, pad_token_id=0, intermediate_size=48, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    head = ScoreHead(model)
    assert not head.packed
    expected = [model(input_ids=tokens).logits[0] for _, tokens in one_by_one(samples)]
    assert_close(head(samples)["scores"].values, torch.cat(expected))


def test_a_critic_may_have_adapters(samples: Rollouts) -> None:
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(classifier("llama"), lora).eval()
    head = ValueHead(model)
    assert head.packed
    values = head(samples)["values"].values
    merged = copy.deepcopy(model).merge_and_unload()
    assert_close(values, plain_values(merged, samples))
    learned = gradients(model, values.sum())
    assert all("lora_" in name or "modules_to_save" in name for name in learned) and len(learned) == 2 * 2 + 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool, samples: Rollouts) -> None:
    grown = []
    for checkpointing in (False, True):
        model = causal("mistral, window 5").train()
        head = PolicyHead(model, TEMPERATURE)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        grown.append(gradients(model, head(samples)["logprobs"].values.sum()))
    assert_same_gradients(grown[1], grown[0])


def test_in_bfloat16_results_are_float32_and_near(samples: Rollouts) -> None:
    model = causal("llama")
    precise = PolicyHead(copy.deepcopy(model), TEMPERATURE)(samples)["logprobs"].values
    rough = PolicyHead(model.to(torch.bfloat16), TEMPERATURE)(samples)["logprobs"].values
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, precise, rtol=0.1, atol=0.1)
    critic = ValueHead(classifier("llama").to(torch.bfloat16))
    assert critic.packed and critic(samples)["values"].values.dtype == torch.float32


class LargeStorages(TorchDispatchMode):
    """Watches how many storages of at least `size` bytes made under it are alive at a time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.most = size, 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.size:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive.add(storage._cdata)
                    weakref.finalize(storage, self.alive.discard, storage._cdata)
        self.most = max(self.most, len(self.alive))
        return out


@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_one_training_step_holds_one_copy_of_the_logits(family: str) -> None:
    vocabulary, tokens = 16_384, 600
    config = copy.deepcopy(FAMILIES[family][0])
    config.vocab_size, config.tie_word_embeddings = vocabulary, False
    head = PolicyHead(AutoModelForCausalLM.from_config(config), 1.0)
    samples = Rollouts(
        index=torch.arange(3),
        prompts=Ragged.of([[5, 6, 7]] * 3, torch.long),
        responses=Ragged.of(torch.randint(vocabulary, (3, tokens // 3)), torch.long),
    )
    with LargeStorages(tokens * vocabulary * 4) as large:
        head(samples)["logprobs"].values.sum().backward()
    assert large.most == 1
    with LargeStorages(tokens * vocabulary * 4) as large:  # and the watch sees what log_softmax holds
        logits = head.model(input_ids=torch.randint(vocabulary, (1, tokens))).logits
        logits.log_softmax(-1)[..., 0].sum().backward()
    assert large.most > 1
