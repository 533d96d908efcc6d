"""Samples that begin with the same tokens learn and say the same, whether these are computed once or for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, causal, classifier
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_heads import assert_same_gradients, gradients
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trl_realloc.algorithms.rollout import Ragged, Rollouts, token_keys
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training import heads, packed_attention, sliced_head
from trl_realloc.engines.training.heads import PolicyHead, RoleHead, ScoreHead, ValueHead
from trl_realloc.engines.training.packed_row import PackedRow
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.plan.batching import PrefixTree


PACKED = [name for name, (_, packed) in FAMILIES.items() if packed]


def rollouts(prompts: list[list[int]], responses: list[list[int]]) -> Rollouts:
    columns = {"prompts": prompts, "responses": responses}
    ragged = {name: Ragged.of(rows, torch.long) for name, rows in columns.items()}
    return Rollouts(index=torch.arange(len(prompts)), **ragged)


@st.composite
def conversations(draw: st.DrawFn) -> Rollouts:
    """Samples of few prompts, with responses of two letters, so that these begin alike too; some continue another one,
    some are equal, some responses are empty."""
    word = st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=9)
    stems = draw(st.lists(word, min_size=1, max_size=2))
    prompts, responses = list[list[int]](), list[list[int]]()
    for at in range(draw(st.integers(2, 7))):
        of = draw(st.integers(0, at))
        continues = of < at and draw(st.booleans())
        prompts.append([*prompts[of], *responses[of], 5] if continues else draw(st.sampled_from(stems)))
        responses.append(draw(st.lists(st.sampled_from([3, 4]), max_size=7)))
    responses[0] = responses[0] or [3]
    return rollouts(prompts, responses)


def row_of(samples: Rollouts, least: int = 1) -> PackedRow:
    keys = [prompt + response for prompt, response in token_keys(samples)]
    return PackedRow.of(PrefixTree.of(keys, samples.ragged("prompts").lengths.tolist(), 8, least))


def learned(head: RoleHead, samples: Rollouts, row: PackedRow | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The head's outputs, and the gradients of a loss that weighs every one differently."""
    values = torch.cat([column.values for column in head(samples, row).values()])
    return values.detach(), gradients(head.model, (values * torch.linspace(-1, 2, len(values))).sum())


def assert_shares(head: RoleHead, samples: Rollouts, row: PackedRow) -> None:
    (alone, expected), (together, ours) = learned(head, samples, None), learned(head, samples, row)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert_same_gradients(ours, expected)


@cache
def head_of(family: str, kind: str) -> RoleHead:
    if kind == "policy":
        return PolicyHead(causal(family), 0.7)
    return (ValueHead if kind == "values" else ScoreHead)(classifier(family))


@pytest.mark.parametrize("kind", ["policy", "values", "scores"])
@settings(max_examples=15, deadline=None)
@given(conversations(), st.sampled_from(PACKED), st.integers(1, 8))
def test_shared_tokens_change_no_output_and_no_gradient(kind: str, samples: Rollouts, family: str, least: int) -> None:
    head = head_of(family, kind)
    assert head.shares
    assert_shares(head, samples, row_of(samples, least))


def group(completions: int = 4) -> Rollouts:
    """Two prompts of 20 tokens that begin alike, with completions of different lengths each."""
    prompts = [[*range(10, 26), 6 + at % 2, 7, 8, 9] for at in range(2 * completions)]
    return rollouts(prompts, [[30 + at, *range(40, 40 + at)] for at in range(2 * completions)])


def recomputed(reentrant: bool) -> RoleHead:
    model = causal("mistral, window 5").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return PolicyHead(model, 0.7)


def adapted() -> RoleHead:
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return PolicyHead(get_peft_model(causal("llama"), lora).eval(), 0.7)


@pytest.mark.parametrize(
    "made", [lambda: recomputed(True), lambda: recomputed(False), adapted], ids=["reentrant", "recomputed", "adapters"]
)
def test_tokens_are_shared_where_activations_are_recomputed_and_with_adapters(made: Callable[[], RoleHead]) -> None:
    samples = group()
    assert_shares(made(), samples, row_of(samples))


def test_tokens_are_shared_where_logits_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_WHOLE_ON_CPU", 0)
    monkeypatch.setattr(sliced_head, "SLICE_ON_CPU", 2 * VOCABULARY)
    samples = group()
    assert_shares(head_of("qwen3", "policy"), samples, row_of(samples))


def test_tokens_are_shared_under_autocast() -> None:
    samples, outputs = group(), []
    for row in (None, row_of(samples)):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(head_of("llama", "policy")(samples, row)["logprobs"].values)
    torch.testing.assert_close(*outputs, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("family", ["llama", "mistral, window 5"])
def test_attention_by_sdpa_alone_shares_tokens_without_a_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without the kernel for packed rows. A mask would have the sample's queries times its keys."""
    masks: list[Tensor | None] = []

    def recorded(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        masks.append(mask)
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)

    monkeypatch.setattr(packed_attention, "sdpa_attention_forward", recorded)
    monkeypatch.setattr(packed_attention, "keeps_scores", lambda arguments: False)
    samples = group()
    assert_shares(head_of(family, "policy"), samples, row_of(samples))
    assert masks and ("window" in family or all(mask is None for mask in masks))


def test_dropout_shares_nothing() -> None:
    """One mask would be drawn for the tokens of all samples."""
    samples, head = group(), PolicyHead(causal("gpt2"), 0.7)
    assert head.tree(samples) is not None
    head.train()
    assert head.tree(samples) is None


def test_a_model_that_is_padded_and_one_with_flash_attention_share_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    padded = PolicyHead(causal("bloom"), 0.7)
    assert padded.tree(group()) is None and "are padded" in capfd.readouterr().err


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("budget", [10, 50, 1 << 20])
@pytest.mark.parametrize("keeps", [False, True])
def test_prompts_are_computed_once_for_equal_steps(budget: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a prompt is longer than a micro-batch, and where the training begins with the graphs of the scoring
    forward."""
    samples = group()
    seen: list[int] = []

    def counted(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        seen.append(keywords["input_ids"].numel())

    def loss(outputs: Any, micro: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        weights = micro.ragged("responses").values.float()
        return (outputs["logprobs"].values * weights).sum(), {}

    results, tokens = [], []
    for shares in (False, True):
        head = PolicyHead(causal("llama"), 0.7)
        head.model.register_forward_pre_hook(counted, with_kwargs=True)
        with monkeypatch.context() as patch:
            if not shares:
                patch.setattr(PolicyHead, "tree", lambda *_: None)
            engine = ReplicatedEngine(head, MeshGroup((0,), 0), torch.device("cpu"), make_optimizer=sgd)
            seen.clear()
            scored = engine.forward_to_train(samples, budget, 1 << 20) if keeps else engine.forward(samples, budget)
            engine.train(samples, loss, budget, 1e-3)
        tokens.append(sum(seen))
        results.append({**dict(head.model.named_parameters()), "scored": scored["logprobs"].values})
    for name, result in results[0].items():
        torch.testing.assert_close(results[1][name], result, rtol=1e-5, atol=1e-5)
    passes = 1 if keeps else 2
    own = int(samples.ragged("responses").lengths.sum())
    assert tokens[0] == passes * samples.tokens
    if budget == 1 << 20:
        assert tokens[1] == passes * (16 + 2 * 4 + own)
    elif budget == 50:
        assert tokens[1] < 0.6 * tokens[0]
