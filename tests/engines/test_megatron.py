"""What the engine of split models does by itself; what it learns in groups is held in tests/multiprocess."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from replay import rollouts
from torch import nn
from whole_state import whole_state

from trl_realloc.algorithms.algorithm import TokenLoss
from trl_realloc.engines.base import EngineError
from trl_realloc.engines.mesh_group import MeshGroup, SplitGroups, split_ranks
from trl_realloc.engines.training.heads import PolicyHead
from trl_realloc.engines.training.megatron import MegatronEngine, check_model
from trl_realloc.engines.training.split_masters import _owners
from trl_realloc.engines.training.token_logprobs import TokenLogprobs


CPU, ALONE = torch.device("cpu"), MeshGroup((0,), 0)
GROUPS = SplitGroups(ALONE, ALONE, ALONE, ALONE, ALONE)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0)


def mean_logprob(outputs: Any, samples: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return outputs["logprobs"].values.mean(), {}


LOSS: TokenLoss = mean_logprob  # type: ignore[assignment]


def test_steps_too_small_for_bfloat16_add_up_in_the_masters() -> None:
    """A step that rounds away in bfloat16 is kept in float32, for the next ones to add to."""
    made = MegatronEngine(PolicyHead(tiny.policy().to(torch.bfloat16), 1.0), GROUPS, CPU, make_optimizer=sgd)
    name = "model.norm.weight"
    before = made.head.model.get_parameter(name).detach().clone()
    made.train(rollouts(4), LOSS, 100, learning_rate=1e-3)
    state = whole_state(made)["parameters"][name]["master"]
    assert torch.equal(made.head.model.get_parameter(name), before), "too small a step to be seen"
    assert not torch.equal(state, before.float()), "but the master has it"
    assert made.head.model.get_parameter(name).dtype is torch.bfloat16 and state.dtype is torch.float32


def test_adapters_that_cannot_be_split_are_refused_by_name() -> None:
    names = ["q_proj", "o_proj"]
    lora = get_peft_model(tiny.policy(), LoraConfig(target_modules=names))
    check_model(lora, 2, 2)
    for config in (
        IA3Config(target_modules=names, feedforward_modules=[]),
        LoraConfig(target_modules=names, use_dora=True),
    ):
        model = get_peft_model(tiny.policy(), config)
        check_model(model, 1, 2)
        with pytest.raises(EngineError, match="cannot split the adapter 'default' by tp; use plain LoRA"):
            check_model(model, 2, 1)


def test_a_pipeline_wants_attention_that_keeps_packed_samples_apart() -> None:
    model = tiny.policy()
    model.set_attn_implementation("eager")
    line = MeshGroup((0, 1), 0)
    groups = SplitGroups(line, ALONE, ALONE, line, line)
    with pytest.raises(EngineError, match="its attention is eager.*attn_implementation='sdpa', or use pp: 1"):
        MegatronEngine(PolicyHead(model, 1.0), groups, CPU)


def test_groups_are_tensor_ranks_inside_stages_inside_replicas() -> None:
    groups = split_ranks(tuple(range(8, 20)), tp=2, pp=3)
    assert groups["tp"] == [(8, 9), (10, 11), (12, 13), (14, 15), (16, 17), (18, 19)]
    assert groups["pp"] == [(8, 10, 12), (9, 11, 13), (14, 16, 18), (15, 17, 19)]
    assert groups["dp"] == [(8, 14), (9, 15), (10, 16), (11, 17), (12, 18), (13, 19)]
    assert groups["ends"] == [(8, 12), (9, 13), (14, 18), (15, 19)]


def test_optimizer_state_is_dealt_out_evenly() -> None:
    sizes = [100, 90, 30, 30, 30, 20, 1, 1]
    owners = _owners(sizes, 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) - min(loads) <= 20 and owners == _owners(sizes, 3)


def test_logprobs_of_a_vocabulary_on_one_rank_are_those_of_the_whole() -> None:
    import torch.distributed as dist

    from trl_realloc.engines.training.vocab_parallel import SplitLogprobs

    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    targets = torch.randint(0, 13, (7,))
    logits = torch.randn(7, 13)
    logits[0, 3] = float("-inf")
    ours, whole = (logits.clone().requires_grad_() for _ in range(2))
    split = SplitLogprobs.apply(ours * 1, targets, 0.7, 0, MeshGroup((0,), 0, dist.group.WORLD))
    plain = TokenLogprobs.apply(whole * 1, targets, 0.7)
    for one, other in zip(split, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    for logprobs, entropy in (split, plain):
        (logprobs.sum() + (entropy * targets).sum()).backward()
    assert ours.grad is not None and torch.allclose(ours.grad, whole.grad, atol=1e-6)
    if made_here:
        dist.destroy_process_group()
