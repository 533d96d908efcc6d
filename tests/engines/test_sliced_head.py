"""The language head in slices: the numbers and the gradients of logits in memory, without these."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config

from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.training import heads, sliced_head
from trl_realloc.engines.training.heads import PolicyHead, works_in_slices
from trl_realloc.engines.training.sliced_head import SlicedLogprobs, logits_are_of_head, row_slices
from trl_realloc.engines.training.token_logprobs import TokenLogprobs
from trl_realloc.plan.assignment import LOGITS_SLICE
from trl_realloc.planner.cost.activation_memory import slice_bytes


@pytest.fixture
def in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of two rows or less, however few the logits."""
    monkeypatch.setattr(heads, "MAX_WHOLE_ON_CPU", 0)
    monkeypatch.setattr(sliced_head, "SLICE_ON_CPU", 2 * tiny.VOCABULARY)


def rollouts(count: int = 5) -> Rollouts:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 7, (2, count), generator=draw)

    def ragged(sizes: Tensor) -> Ragged:
        return Ragged(torch.randint(2, tiny.VOCABULARY, (int(sizes.sum()),), generator=draw), sizes)

    return Rollouts(index=torch.arange(count), prompts=ragged(lengths[0]), responses=ragged(lengths[1]))


def learned(
    head: PolicyHead, samples: Rollouts, autocast: bool = False, entropy: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A head's outputs, and the gradients of a loss that weighs every token differently.

    Args:
        entropy: the loss depends on the entropies too.
    """
    head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        outputs = {name: column.values for name, column in head(samples).items()}
    weights = torch.linspace(-1, 2, len(outputs["logprobs"]))
    loss = (outputs["logprobs"] * weights).sum()
    (loss + (outputs["entropy"] * weights.flip(0)).sum() if entropy else loss).backward()
    return outputs, {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


def assert_same(
    head: PolicyHead, samples: Rollouts, monkeypatch: Any, autocast: bool = False, entropy: bool = True
) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-5, "atol": 5e-6}
    sliced = learned(head, samples, autocast, entropy)
    assert head.may_slice
    with monkeypatch.context() as patched:
        patched.setattr(heads, "MAX_WHOLE_ON_CPU", 1 << 40)
        whole = learned(head, samples, autocast, entropy)
    for ours, theirs in zip(sliced, whole, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], msg=name, **tolerance)


@pytest.mark.usefixtures("in_slices")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_slices_give_the_numbers_and_gradients_of_whole_logits(
    tied: bool, packed: bool, keeps: bool, autocast: bool, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = PolicyHead(tiny.policy(tie_word_embeddings=tied), 0.7)
    assert head.packed and head.takes_logits_to_keep
    head.packed, head.takes_logits_to_keep = packed, keeps
    assert_same(head, rollouts(), monkeypatch, autocast, entropy)


@pytest.mark.usefixtures("in_slices")
def test_an_adapted_policy_learns_in_slices_its_frozen_head_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    head = PolicyHead(get_peft_model(tiny.policy(), LoraConfig(task_type="CAUSAL_LM")), 1.0)
    assert_same(head, rollouts(), monkeypatch)
    assert all("lora_" in name for name in learned(head, rollouts())[1])


@pytest.mark.usefixtures("in_slices")
def test_a_head_with_an_adapter_is_computed_whole() -> None:
    model = get_peft_model(tiny.policy(), LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))
    assert not works_in_slices(model.get_base_model(), 1000)
    assert torch.isfinite(PolicyHead(model, 1.0)(rollouts())["logprobs"].values).all()


@pytest.mark.usefixtures("in_slices")
def test_a_model_that_changes_its_logits_after_the_head_is_computed_whole() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=tiny.VOCABULARY, num_key_value_heads=1, head_dim=16, **sizes)
    assert config.final_logit_softcapping
    torch.manual_seed(0)
    head, samples = PolicyHead(AutoModelForCausalLM.from_config(config), 1.0), rollouts(1)
    found = head(samples)["logprobs"].values
    assert not head.may_slice
    ids = torch.cat([samples.ragged("prompts").values, samples.ragged("responses").values])
    logprobs = head.model(input_ids=ids[None]).logits[0].log_softmax(-1)
    first = int(samples.ragged("prompts").lengths[0])
    expected = logprobs[first - 1 : -1].gather(-1, ids[first:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        *((family, True) for family in ("llama", "qwen2", "qwen3_moe", "mixtral", "gpt2", "gpt_neox", "gemma", "opt")),
        *((family, False) for family in ("gemma2", "cohere", "granite")),
    ],
)
def test_whether_a_model_changes_logits_is_known_before_weights(family: str, expected: bool, is_meta: bool) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 60}
    if family not in ("gpt2", "gpt_neox", "opt"):
        sizes |= {"num_key_value_heads": 1, "intermediate_size": 48, "head_dim": 16}
    if family == "granite":
        sizes["logits_scaling"] = 4.0
    if family == "opt":
        sizes |= {"ffn_dim": 48, "word_embed_proj_dim": 32}
    with torch.device("meta" if is_meta else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    assert logits_are_of_head(model) is expected
    assert "forward" not in vars(model.get_output_embeddings())


def test_few_logits_are_computed_whole_and_many_in_slices() -> None:
    model = tiny.policy()
    assert not works_in_slices(model, heads.MAX_WHOLE_ON_CPU // tiny.VOCABULARY)
    assert works_in_slices(model, heads.MAX_WHOLE_ON_CPU // tiny.VOCABULARY + 1)


@pytest.mark.usefixtures("in_slices")
def test_a_head_with_a_bias_and_a_logit_of_minus_infinity() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, requires_grad=True)
    linear, targets = nn.Linear(8, tiny.VOCABULARY), torch.arange(5)
    with torch.no_grad():
        linear.bias[7] = float("-inf")
    assert len(list(row_slices(hidden, linear.weight))) == 3
    arguments = (linear.weight, linear.bias, targets, 0.5, torch.float32, 0, None, None)
    logprobs, entropy = SlicedLogprobs.apply(hidden, *arguments)
    (logprobs.sum() + (entropy * targets).sum()).backward()
    found = hidden.grad, linear.weight.grad, linear.bias.grad
    leaf = hidden.detach().requires_grad_()
    linear.zero_grad()
    whole, whole_entropy = TokenLogprobs.apply(linear(leaf), targets, 0.5)
    (whole.sum() + (whole_entropy * targets).sum()).backward()
    torch.testing.assert_close((logprobs, entropy), (whole, whole_entropy))
    torch.testing.assert_close(found, (leaf.grad, linear.weight.grad, linear.bias.grad))
    assert all(bool(gradient.isfinite().all()) for gradient in found)


@pytest.mark.usefixtures("in_slices")
@pytest.mark.parametrize("has_bias", [False, True])
def test_in_float64_the_gradients_of_logprobs_and_entropies_are_differences_of_them(has_bias: bool) -> None:
    draw = torch.Generator().manual_seed(5)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (9, 4), (9,))
    )
    targets = torch.tensor([0, 8, 3, 3, 1])

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return SlicedLogprobs.apply(hidden, weight, bias, targets, 0.7, torch.float64, 0, None, None)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sliced_head, "SLICE_ON_CPU", 2 * 9)
        assert len(list(row_slices(hidden, weight))) == 3
        assert torch.autograd.gradcheck(outputs, (hidden, weight, bias if has_bias else None))


@pytest.mark.usefixtures("in_slices")
@pytest.mark.parametrize(("terms", "expected"), [("logprobs", False), ("entropy", True), ("both", True)])
def test_the_entropies_gradient_is_computed_only_for_a_loss_that_depends_on_them(
    terms: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, gradient = list[bool](), sliced_head.logits_gradient

    def noted(*arguments: Any) -> Tensor:
        computed.append(arguments[3] is not None)
        return gradient(*arguments)

    monkeypatch.setattr(sliced_head, "logits_gradient", noted)
    outputs = PolicyHead(tiny.policy(), 0.7)(rollouts())
    columns = [outputs[name].values.sum() for name in ("logprobs", "entropy") if terms in (name, "both")]
    torch.stack(columns).sum().backward()
    assert set(computed) == {expected}


@pytest.mark.usefixtures("in_slices")
def test_no_more_logits_than_a_slices_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    logits = sliced_head.logits_of_rows

    def noted(hidden: Tensor, *rest: Any) -> Tensor:
        rows.append(len(hidden))
        return logits(hidden, *rest)

    monkeypatch.setattr(sliced_head, "logits_of_rows", noted)
    head = PolicyHead(tiny.policy(), 1.0)
    samples = rollouts()
    learned(head, samples)
    assert max(rows) == 2 and sum(rows) == 2 * samples.ragged("responses").lengths.sum(), "once in each direction"


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def _freed(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.now -= size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_slice_takes_the_memory_that_the_planner_counts(dtype: torch.dtype, entropy: bool) -> None:
    """Counted on the device meta, with slices of the size of a GPU's."""
    ids = 1 << 15
    rows = 3 * LOGITS_SLICE // ids
    hidden, weight = (torch.empty(n, 8, dtype=dtype, device="meta", requires_grad=True) for n in (rows, ids))
    targets = torch.empty(rows, dtype=torch.int64, device="meta")
    with Memory() as memory:
        columns = SlicedLogprobs.apply(hidden, weight, None, targets, 1.0, dtype, 0, None, None)
        forward, memory.most = memory.most / LOGITS_SLICE, memory.now
        sum(column.sum() for column in columns[: 1 + entropy]).backward()
    counted = [slice_bytes(dtype.itemsize, backward=backward) for backward in (False, True)]
    assert forward == pytest.approx(counted[0], abs=0.1)
    if dtype == torch.float32 and not entropy:
        assert memory.most / LOGITS_SLICE < counted[1]
    else:
        assert memory.most / LOGITS_SLICE == pytest.approx(counted[1], abs=0.1)
