"""A role replicated on every rank of its mesh: what it says and learns hangs on no micro-batch and no rank."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched_job import Job
from peft import LoraConfig, get_peft_model
from ranks import RankServers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig
from whole_state import load_whole, whole_state

from trl_realloc.algorithms import ppo
from trl_realloc.algorithms.ppo_settings import PPOSettings
from trl_realloc.algorithms.ppo_weights import sample_weights
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.mesh_group import MeshGroup
from trl_realloc.engines.training.heads import PolicyHead, RoleHead, ValueHead
from trl_realloc.engines.training.micro_batches import cut
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.plan.batching import balance


RULES = PPOSettings(response_length=9)
POLICY_LOSS, VALUE_LOSS = ppo.PolicyLoss(0.2), ppo.ValueLoss(0.2, 0.1)
ALONE, CPU = MeshGroup((0,), 0), torch.device("cpu")
State = dict[str, Tensor]


def config(**options: Any) -> LlamaConfig:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(**sizes, **heads, initializer_range=0.2, pad_token_id=0, **options)


def policy_head() -> PolicyHead:
    torch.manual_seed(0)
    return PolicyHead(AutoModelForCausalLM.from_config(config()), temperature=0.7)


def value_head() -> ValueHead:
    torch.manual_seed(1)
    return ValueHead(AutoModelForSequenceClassification.from_config(config(num_labels=1)))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Steps in proportion to gradients, so that parameters tell them apart."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])


def engine(head: RoleHead, group: MeshGroup = ALONE, optimizer: Any = sgd, **options: Any) -> ReplicatedEngine:
    return ReplicatedEngine(head, group, CPU, make_optimizer=optimizer, **options)


def mini_batch() -> Rollouts:
    """Eight samples of 3 to 14 tokens after `prepare`, with weights."""
    g = torch.Generator().manual_seed(0)
    lengths = [1, 9, 4, 2, 9, 6, 3, 5]

    def drawn(sizes: Sequence[int]) -> Ragged:
        return Ragged(torch.randn(sum(sizes), generator=g), torch.tensor(sizes))

    def tokens(sizes: Sequence[int]) -> Ragged:
        return Ragged(torch.randint(1, 50, (sum(sizes),), generator=g), torch.tensor(sizes))

    samples = Rollouts(
        index=torch.arange(8),
        prompts=tokens([2, 5, 3, 2, 4, 5, 2, 3]),
        responses=tokens(lengths),
        ref_logprobs=drawn(lengths),
        scores=torch.randn(8, generator=g),
        has_eos=torch.ones(8, dtype=torch.bool),
    )
    samples = samples.plus(
        logprobs=engine(policy_head(), optimizer=None).forward(samples, 100)["logprobs"],
        values=engine(value_head(), optimizer=None).forward(samples, 100)["values"],
    )
    samples = ppo.prepare(samples, RULES)
    weights = sample_weights(samples, RULES)
    return samples.plus(policy_weight=weights.policy, value_weight=weights.value)


@pytest.fixture(scope="module")
def samples() -> Rollouts:
    return mini_batch()


def state(of: ReplicatedEngine) -> State:
    return {name: parameter.detach().clone() for name, parameter in of.head.model.named_parameters()}


def assert_same(ours: State, expected: State, tolerance: float = 1e-6) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)


def furthest(ours: State, other: State) -> float:
    return max(float((ours[name] - other[name]).abs().max()) for name in other)


# --- scoring ------------------------------------------------------------------------------------------------------


def test_scoring_is_without_dropout_and_leaves_the_model_training(samples: Rollouts) -> None:
    torch.manual_seed(0)
    made = engine(PolicyHead(AutoModelForCausalLM.from_config(config(attention_dropout=0.5)), 0.7))
    made.head.train()
    one, other = (made.forward(samples, 30)["logprobs"].values for _ in range(2))
    assert torch.equal(one, other) and made.head.training
    with made.whole_model() as model:
        assert not model.training
    assert made.head.training


def test_a_frozen_role_has_no_gradients_and_is_not_trained(samples: Rollouts) -> None:
    frozen = engine(policy_head(), optimizer=None)
    assert not any(p.requires_grad for p in frozen.head.parameters())
    with pytest.raises(AssertionError, match="frozen role cannot be trained"):
        frozen.train(samples, POLICY_LOSS, 100, 0.1)


# --- training -----------------------------------------------------------------------------------------------------


def test_gradients_are_clipped_by_their_global_norm(samples: Rollouts) -> None:
    free, loose, tight = (engine(value_head(), max_grad_norm=norm) for norm in (0.0, 1e3, 1e-3))
    before = state(free)
    for made in (free, loose, tight):
        made.train(samples, VALUE_LOSS, 30, learning_rate=1.0)
    assert_same(state(loose), state(free))
    moved = torch.cat([(state(tight)[name] - before[name]).flatten() for name in before])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_gradients_that_no_optimizer_has_do_not_add_up_over_steps(samples: Rollouts, dtype: torch.dtype | None) -> None:
    """A user's optimizer may hold some of the trainable parameters."""

    def score_alone(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([module.get_parameter("score.weight")], lr=1.0)

    made = engine(value_head(), optimizer=score_alone, compute_dtype=dtype)
    norms = []
    for _ in range(3):
        made.train(samples, VALUE_LOSS, 30, learning_rate=0.0)
        norms.append(made.grad_norm)
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-3)
    assert all(parameter.grad is None for parameter in made.head.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_computes_roughly_and_keeps_float32_parameters(samples: Rollouts, dtype: torch.dtype) -> None:
    precise, rough = engine(value_head()), engine(value_head(), compute_dtype=dtype)
    values = rough.forward(samples, 30)["values"].values
    expected = precise.forward(samples, 30)["values"].values
    assert values.dtype == torch.float32 and not torch.equal(values, expected)
    torch.testing.assert_close(values, expected, rtol=0.1, atol=0.1)
    before = state(rough)
    for made in (precise, rough):
        made.train(samples, VALUE_LOSS, 30, learning_rate=1.0)
    assert all(p.dtype == torch.float32 for p in rough.head.parameters())
    assert furthest(state(rough), state(precise)) < 0.1 * furthest(state(precise), before)


def test_a_step_in_16_bits_keeps_no_weight_that_it_has_cast(samples: Rollouts) -> None:
    """Autocast's cache would keep all of them until the forward ends, also where activations are recomputed."""
    made, keeps = engine(policy_head(), compute_dtype=torch.bfloat16), list[bool]()
    made.head.register_forward_pre_hook(lambda *_: keeps.append(torch.is_autocast_cache_enabled()))
    made.train(samples, POLICY_LOSS, 30, learning_rate=1.0)
    made.forward(samples, 30)
    assert keeps and not any(keeps)
    with made.whole_model():
        assert torch.is_autocast_cache_enabled(), "a generation uses each weight for every token"


@pytest.mark.parametrize(
    "kept", [range(8), range(2, 8), [0, 1, 1, 2, 3, 4, 5, 6, 7], []], ids=["all", "some", "one twice", "none"]
)
@pytest.mark.parametrize("trained", [range(8), [6, 3, 1], [2, 2, 5]], ids=["all", "few, in another order", "twice"])
@pytest.mark.parametrize("budget", [1_000, 25], ids=["one micro-batch", "several"])
def test_a_training_from_a_kept_forward_is_the_training_alone(
    kept: Sequence[int], trained: Sequence[int], budget: int, samples: Rollouts
) -> None:
    alone, after = engine(value_head()), engine(value_head())
    expected = alone.train(samples.select(trained), VALUE_LOSS, budget, 0.1)
    scored = after.forward_to_train(samples.select(kept), budget, 1_000)
    statistics = after.train(samples.select(trained), VALUE_LOSS, budget, 0.1)
    if kept:
        plain = engine(value_head()).forward(samples.select(kept), budget)
        torch.testing.assert_close(scored["values"].values, plain["values"].values)
        assert not scored["values"].values.requires_grad
    torch.testing.assert_close(statistics, expected)
    torch.testing.assert_close(state(after), state(alone))


def test_the_kept_forward_of_other_parameters_is_not_trained_on(samples: Rollouts) -> None:
    alone, after = engine(policy_head()), engine(policy_head())
    for each in (alone, after):
        each.forward_to_train(samples, 1_000, 1_000) if each is after else None
        each.train(samples.select([0, 1]), POLICY_LOSS, 1_000, 0.1)
        each.train(samples, POLICY_LOSS, 1_000, 0.1)
    torch.testing.assert_close(state(after), state(alone))


@pytest.mark.parametrize(("most", "computed"), [(1_000, [3, 5, 8]), (40, [3, 5, 5, 8]), (0, [3, 5, 8, 8])])
def test_only_what_was_not_kept_is_computed_again(samples: Rollouts, most: int, computed: list[int]) -> None:
    trained = engine(policy_head())
    forwards = list[int]()
    trained.head.register_forward_pre_hook(lambda module, arguments: forwards.append(len(arguments[0])))
    for arrived in (range(3), range(3, 8)):
        trained.forward_to_train(samples.select(arrived), 1_000, most)
    for _ in range(2):
        trained.train(samples, POLICY_LOSS, 1_000, 0.0)
    assert forwards == computed


def test_adapters_learn_and_their_base_does_not(samples: Rollouts) -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    base = AutoModelForCausalLM.from_config(config())
    model = get_peft_model(copy.deepcopy(base), lora)
    made = engine(PolicyHead(model, 0.7))
    assert made.head.packed
    before = state(made)
    with model.disable_adapter():
        reference = made.forward(samples, 30)["logprobs"].values
    torch.testing.assert_close(reference, engine(PolicyHead(base, 0.7)).forward(samples, 30)["logprobs"].values)
    assert furthest({"": made.forward(samples, 30)["logprobs"].values}, {"": reference}) > 1e-2
    made.train(samples, POLICY_LOSS, 30, learning_rate=1.0)
    for name, tensor in state(made).items():
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name


# --- state --------------------------------------------------------------------------------------------------------


def test_a_bfloat16_role_goes_on_from_a_saved_state(samples: Rollouts) -> None:
    one, other = (engine(value_head().to(torch.bfloat16), optimizer=adamw) for _ in range(2))
    one.train(samples, VALUE_LOSS, 30, learning_rate=0.01)
    load_whole(other, whole_state(one))
    for made in (one, other):
        made.train(samples, VALUE_LOSS, 30, learning_rate=0.01)
    assert_same(state(other), state(one), tolerance=0)


def test_a_bfloat16_role_adds_up_steps_that_are_too_small_for_its_parameters(samples: Rollouts) -> None:
    made = engine(value_head().to(torch.bfloat16), optimizer=adamw)
    before = {name: p.detach().clone() for name, p in made.head.model.named_parameters()}
    for _ in range(3):
        made.train(samples, VALUE_LOSS, 30, learning_rate=1e-5)
    layer = "model.layers.0.self_attn.q_proj.weight"
    master = whole_state(made)["parameters"][layer]["master"]
    assert master.dtype is torch.float32 and made.head.model.get_parameter(layer).dtype is torch.bfloat16
    moved = (master - before[layer].float()).abs()
    assert 2e-5 < moved.max() < 4e-5 and moved.median() > 1e-6
    assert torch.equal(master.bfloat16(), made.head.model.get_parameter(layer))  # the parameter is the master rounded
    assert all(cell.dtype is torch.float32 for slots in made.optimizer.state.values() for cell in slots.values())


def test_gradients_of_a_bfloat16_role_are_added_up_in_float32(samples: Rollouts) -> None:
    masters = []
    for tokens in (1000, 12):  # one micro-batch, and one for each sample
        made = engine(value_head().to(torch.bfloat16), optimizer=lambda module: torch.optim.SGD(module.parameters()))
        made.train(samples, VALUE_LOSS, tokens, learning_rate=1.0)
        masters.append({name: cells["master"] for name, cells in whole_state(made)["parameters"].items()})
    begun = {name: p.detach().float() for name, p in value_head().to(torch.bfloat16).model.named_parameters()}
    moved = sum(float((masters[0][n] - begun[n]).square().sum()) for n in begun) ** 0.5
    apart = sum(float((masters[0][n] - masters[1][n]).square().sum()) for n in begun) ** 0.5
    assert apart < 2**-6 * moved


class _Quantised(torch.optim.SGD):
    """Keeps what bitsandbytes' 8-bit optimizers keep: bytes in the parameter's shape, and tables of other shapes."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            new = {"state1": torch.full(p.shape, 200, dtype=torch.uint8), "qmap1": torch.arange(256.0), "step": 0}
            slots = self.state[p] or new
            self.state[p] = {**slots, "step": slots["step"] + 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_8_bit_optimizers_state_is_saved_and_loaded_as_it_is(samples: Rollouts, dtype: torch.dtype) -> None:
    one, other = (
        engine(value_head().to(dtype), optimizer=lambda module: _Quantised(module.parameters())) for _ in range(2)
    )
    one.train(samples, VALUE_LOSS, 30, learning_rate=0.01)
    load_whole(other, whole_state(one))
    for slots in other.optimizer.state.values():
        assert slots["state1"].dtype is torch.uint8 and (slots["state1"] == 200).all()
        assert torch.equal(slots["qmap1"], torch.arange(256.0)) and slots["step"] == 1


# --- several ranks ------------------------------------------------------------------------------------------------


DEALS = {"even": None, "one rank has nothing": [list(range(8)), []], "unlike": [[1, 4], [0, 2, 3, 5, 6, 7]]}


def test_a_float16_role_goes_on_with_the_loss_scale_it_had(samples: Rollouts) -> None:
    one, other = (engine(policy_head(), compute_dtype=torch.float16) for _ in range(2))
    one.scaler.scale(torch.ones(()))  # it begins with its first use
    one.scaler.update(1024.0)
    load_whole(other, whole_state(one))
    assert other.scaler.get_scale() == 1024.0 != engine(policy_head(), compute_dtype=torch.float16).scaler.get_scale()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, servers: RankServers) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    job = Job(folder, __file__, 2, {}, None, servers=servers)
    try:
        assert job.wait(120) == 0, job.problem()
    finally:
        job.kill()
        job.log.close()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("deal", DEALS)
def test_two_ranks_learn_what_one_learns(deal: str, two_ranks: list[dict[str, Any]], samples: Rollouts) -> None:
    alone = engine(value_head(), max_grad_norm=0.5)
    expected = alone.train(samples, VALUE_LOSS, 1000, learning_rate=1.0)
    for rank in two_ranks:
        assert_same(rank[deal]["state"], state(alone))
        for name, sums in rank[deal]["statistics"].items():
            torch.testing.assert_close(sums, expected[name][rank[deal]["index"]], rtol=1e-5, atol=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("deal", DEALS)
def test_ranks_in_step_make_the_same_number_of_micro_batches(deal: str, two_ranks: list[dict[str, Any]]) -> None:
    most = max(len(rank[deal]["own"]) for rank in two_ranks)
    for rank in two_ranks:
        own, in_step = rank[deal]["own"], rank[deal]["in_step"]
        assert len(in_step) == most
        assert [batch for batch in in_step if batch] == own  # so the budget is kept


@pytest.mark.multiprocess
def test_a_rank_without_samples_in_its_first_step_steps_in_float16_too(two_ranks: list[dict[str, Any]]) -> None:
    """As where all groups of GRPO's completions on a rank have equal rewards."""
    first, second = (rank["without samples"]["state"] for rank in two_ranks)
    assert_same(second, first, tolerance=0.0)
    assert furthest(first, state(engine(value_head()))) > 1e-4


def _rank(folder: Path) -> None:
    """What a rank of `two_ranks` does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = MeshGroup((0, 1), rank, dist.group.WORLD)
    samples = mini_batch()
    out: dict[str, Any] = {}
    for name, deal in DEALS.items():
        mine = samples.select((deal or balance(samples.lengths.tolist(), 2))[rank])
        made = engine(value_head(), group, max_grad_norm=0.5)
        statistics = made.train(mine, VALUE_LOSS, 15, learning_rate=1.0)
        own = cut(mine, 15, ALONE, in_step=False)
        in_step = cut(mine, 15, group, in_step=True)
        out[name] = {
            "index": mine.tensor("index"),
            "state": state(made),
            "statistics": statistics,
            "own": own,
            "in_step": in_step,
        }
    uneven = engine(value_head(), group, compute_dtype=torch.float16)
    uneven.train(samples if rank == 0 else samples.select([]), VALUE_LOSS, 15, learning_rate=1.0)
    out["without samples"] = {"state": state(uneven)}
    torch.save(out, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
