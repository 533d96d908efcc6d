"""Samples through models of many families: packed, padded or one at a time, they say and learn the same."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.training.packed_attention import packs
from trl_realloc.engines.training.packed_forward import PolicyHead, ScoreHead, ValueHead
from trl_realloc.engines.training.token_logprobs import TokenLogprobs


VOCABULARY, TEMPERATURE = 96, 0.7
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED: dict[str, Any] = {**SHAPE, **SPECIAL, "intermediate_size": 48, "num_key_value_heads": 2}

# whether samples are packed, by family; where not, the model would mix them (Mamba) or has an attention of its own
FAMILIES: dict[str, tuple[PretrainedConfig, bool]] = {
    "llama": (LlamaConfig(**GROUPED), True),
    "qwen2": (Qwen2Config(**GROUPED), True),
    "qwen3": (Qwen3Config(**GROUPED, head_dim=8), True),
    "mistral, window 5": (MistralConfig(**GROUPED, sliding_window=5), True),
    "gemma": (GemmaConfig(**GROUPED, head_dim=8), True),
    "gemma2": (Gemma2Config(**GROUPED, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0), False),
    "gemma3, window 4": (Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4, layer_types=None), True),
    # its window is in the mask alone, and shows only in samples that are longer
    "qwen2-moe, window 7": (
        Qwen2MoeConfig(
            **GROUPED,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=4,
            use_sliding_window=True,
            sliding_window=7,
            max_window_layers=0,
        ),
        False,
    ),
    "gpt-neox": (GPTNeoXConfig(**SHAPE, **SPECIAL, intermediate_size=48), True),
    "gpt2": (GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **SPECIAL), True),
    "opt": (OPTConfig(**SHAPE, **SPECIAL, ffn_dim=48, word_embed_proj_dim=32), True),
    "bloom": (BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **SPECIAL), False),
    "mamba": (MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **SPECIAL), False),
}
CLASSIFIERS = [name for name in FAMILIES if name != "mamba"]


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


def causal(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family][0])).eval()


def classifier(family: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family][0])
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config).eval()


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


# --- families -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("family", [name for name, (_, packed) in FAMILIES.items() if packed])
def test_a_model_that_packs_still_generates_as_before(family: str) -> None:
    model = causal(family)
    plain = copy.deepcopy(model)
    assert packs(model)
    prompts = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 7, 6, 5, 4], [0, 0, 0, 0, 0, 11]])  # left-padded
    options = {"attention_mask": (prompts != 0).long(), "max_new_tokens": 9, "do_sample": False, "output_scores": True}
    ours, expected = (m.generate(prompts, **options, return_dict_in_generate=True) for m in (model, plain))
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_close(torch.stack(ours.scores), torch.stack(expected.scores))


def test_a_model_that_packs_saves_as_before(tmp_path: Path) -> None:
    plain, model = causal("llama"), causal("llama")
    assert packs(model)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packs")
    assert (tmp_path / "plain/config.json").read_text() == (tmp_path / "packs/config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "packs").config._attn_implementation == "sdpa"


def test_a_model_that_cannot_pack_keeps_its_attention() -> None:
    model = causal("gemma2")
    before = model.config._attn_implementation
    assert not packs(model) and model.config._attn_implementation == before
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["llama"][0]), attn_implementation="eager")
    assert not packs(eager) and eager.config._attn_implementation == "eager"


@pytest.mark.parametrize("training", [True, False])
def test_trying_whether_a_model_packs_leaves_its_mode(training: bool) -> None:
    model = causal("llama").train(training)
    packs(model)
    assert all(module.training == training for module in model.modules())


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


# --- log-probabilities of tokens ----------------------------------------------------------------------------------


def reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    p = torch.log_softmax(logits.double() / temperature, -1)
    return p.gather(-1, targets[:, None])[:, 0], -(p.exp() * p).nan_to_num(0).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_token_logprobs_are_log_softmax(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(50, 300)).to(dtype)
    targets = torch.randint(300, (50,))
    logprobs, entropy = TokenLogprobs.apply(logits, targets, temperature)
    expected, expected_entropy = reference(logits, targets, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-13), (torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("terms", [lambda o: o[0], lambda o: o[1], lambda o: 2 * o[0] - o[1]], ids=["l", "H", "l, H"])
def test_the_gradients_of_token_logprobs_and_entropies_are_autograds(
    dtype: torch.dtype, tolerance: float, terms: Callable[[Any], Tensor]
) -> None:
    torch.manual_seed(0)
    leaf = (4 * torch.randn(50, 300)).to(dtype).requires_grad_()
    targets, weights = torch.randint(300, (50,)), torch.randn(50)
    (terms(TokenLogprobs.apply(leaf * 1, targets, 0.7)) * weights).sum().backward()
    precise = leaf.detach().double().requires_grad_()
    (terms(reference(precise, targets, 0.7)) * weights).sum().backward()
    assert leaf.grad is not None and precise.grad is not None and leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad.double(), precise.grad, rtol=tolerance, atol=tolerance)


def test_token_logprobs_work_in_slices() -> None:
    """More rows than one slice holds, and rows longer than a slice."""
    torch.manual_seed(0)
    vocabulary = TokenLogprobs._SLICE // 3
    leaf = torch.randn(8, vocabulary, requires_grad=True)
    targets = torch.randint(vocabulary, (8,))
    assert len(list(TokenLogprobs._slices(leaf))) == 3
    logprobs, entropy = TokenLogprobs.apply(leaf * 1, targets, 1.0)
    expected, expected_entropy = reference(leaf.detach(), targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-4)
    logprobs.sum().backward()
    assert leaf.grad is not None
    assert_close(leaf.grad.sum(-1), torch.zeros(8))
    assert list(TokenLogprobs._slices(torch.empty(2, 2 * TokenLogprobs._SLICE, device="meta"))) == [
        slice(0, 1),
        slice(1, 2),
    ]


def test_forbidden_tokens_add_nothing() -> None:
    leaf = torch.tensor([[1.0, float("-inf"), 2.0], [0.0, 0.0, float("-inf")]], requires_grad=True)
    logprobs, entropy = TokenLogprobs.apply(leaf * 1, torch.tensor([2, 0]), 1.0)
    expected, expected_entropy = reference(leaf.detach(), torch.tensor([2, 0]), 1.0)
    assert_close(logprobs.double(), expected)
    assert_close(entropy.double(), expected_entropy)
    logprobs.sum().backward()
    assert leaf.grad is not None
    expected_gradient = torch.tensor([[-0.2689, 0.0, 0.2689], [0.5, -0.5, 0.0]])
    torch.testing.assert_close(leaf.grad, expected_gradient, rtol=0, atol=1e-4)
    leaf.grad = None
    TokenLogprobs.apply(leaf * 1, torch.tensor([2, 0]), 1.0)[1].sum().backward()
    # of two tokens with the odds e: dH/dx = -p (1 - p) for the likelier one
    expected_gradient = torch.tensor([[0.1966, 0.0, -0.1966], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(leaf.grad, expected_gradient, rtol=0, atol=1e-4)


def test_a_gradient_of_an_entropy_that_is_not_finite_stays_so() -> None:
    leaf = torch.tensor([[1.0, float("-inf"), 2.0]], requires_grad=True)
    entropy = TokenLogprobs.apply(leaf * 1, torch.tensor([2]), 1.0)[1]
    (entropy * torch.nan).sum().backward()
    assert leaf.grad is not None and not bool(leaf.grad.isfinite().any())


def test_logprobs_and_entropies_are_those_of_trl_under_its_temperature() -> None:
    """As in its GRPOTrainer: both of the logits divided by the temperature."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    torch.manual_seed(0)
    logits = 3 * torch.randn(12, 40)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    targets, weights = torch.randint(40, (12,)), torch.linspace(-1, 2, 12)
    tempered = leaves[0] / 0.6
    theirs = selective_log_softmax(tempered, targets), entropy_from_logits(tempered)
    ours = TokenLogprobs.apply(leaves[1] * 1, targets, 0.6)
    for column, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(column, other)
    for columns in (theirs, ours):
        ((columns[0] + 0.3 * columns[1]) * weights).sum().backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_no_tokens_have_no_logprobs() -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    logprobs, entropy = TokenLogprobs.apply(logits * 1, torch.zeros(0, dtype=torch.long), 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


def test_spent_logits_are_not_used_twice() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    logprobs, _ = TokenLogprobs.apply(logits * 1, torch.tensor([0, 1, 2]), 1.0)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


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
