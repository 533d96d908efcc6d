"""What every engine promises: the same tests for all that score and train, on a mesh of one rank, and for all that
generate.

What is particular to one engine, and what several ranks do together, is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from generating import SAMPLING, buckets, llama, requests, tokens, worst_difference
from generating import samples as in_order
from group_optimizers import Counting
from peft import LoraConfig, get_peft_model
from replay import rollouts
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from whole_state import load_whole, whole_state

from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.base import EngineError, GenerationEngine, InPlaceEngine, ScoringEngine, TrainingEngine
from trl_realloc.engines.generation.transformers import TransformersEngine
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.mesh_group import MeshGroup, SplitGroups
from trl_realloc.engines.models import generated_config
from trl_realloc.engines.requests import GenerationRequest, Sampling
from trl_realloc.engines.training import heads, sliced_head
from trl_realloc.engines.training.heads import PolicyHead, RoleHead, ScoreHead, ValueHead
from trl_realloc.engines.training.megatron import MegatronEngine
from trl_realloc.engines.training.replicated import ReplicatedEngine
from trl_realloc.engines.training.zero import ZeroEngine


CPU, TEMPERATURE = torch.device("cpu"), 0.7
State = dict[str, Tensor]
ENGINES = ["replicated", "megatron", *(pytest.param(f"zero {n}", marks=pytest.mark.deepspeed) for n in (2, 3))]
FROZEN = ["replicated", "megatron", pytest.param("zero 3", marks=pytest.mark.deepspeed)]


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """DeepSpeed wants one, even of one process."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.0)


def build(kind: str, head: RoleHead | None = None, optimizer: Any = sgd, max_grad_norm: float = 0.0) -> Any:
    head = head or PolicyHead(tiny.policy(), TEMPERATURE)
    mesh = MeshGroup((0,), 0, dist.group.WORLD)
    options = {"make_optimizer": optimizer, "max_grad_norm": max_grad_norm}
    if kind == "replicated":
        return ReplicatedEngine(head, mesh, CPU, **options)
    if kind == "megatron":
        return MegatronEngine(head, SplitGroups(mesh, mesh, mesh, mesh, mesh), CPU, **options)
    stage = int(kind.split()[1])
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # small parameters are partitioned too
    return ZeroEngine(head, mesh, CPU, stage=stage, alone=dist.group.WORLD, config=config, **options)


def mean_logprob(outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum over tokens, of a batch of a known number of them."""
    column = outputs["logprobs"]
    return -column.values.sum() / 100, {"tokens": column.lengths.float()}


def broken(outputs: Mapping[str, Ragged], samples: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
    value, _ = mean_logprob(outputs, samples)
    return value * math.nan, {"policy_loss": torch.full((len(samples),), math.nan)}


def exported(engine: ScoringEngine, **options: Any) -> State:
    return {name: tensor.clone() for bucket in engine.export(**options) for name, tensor in bucket}


def assembled(parts: Any, like: State) -> State:
    """Full parameters from one rank's parts, which on a mesh of one rank are all."""
    whole = {name: torch.full_like(tensor, math.nan) for name, tensor in like.items()}
    for name, boxes in parts.items():
        for box, cell in boxes:
            whole[name][tuple(slice(start, stop) for start, stop in box)] = cell
    return whole


def assert_same(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=tolerance, atol=tolerance, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("kind", ENGINES)
def test_it_has_every_method_refuses_another_models_state_and_may_be_closed_twice(kind: str) -> None:
    made = build(kind)
    assert isinstance(made, TrainingEngine) and made.version == 0 and not made.has_replicas
    specs = {name: (spec.shape, spec.dtype) for name, spec in made.parameter_specs.items()}
    assert list(specs.items()) == [(name, (p.shape, p.dtype)) for name, p in tiny.policy().named_parameters()]
    assert isinstance(made, InPlaceEngine) == (kind != "megatron")
    with pytest.raises(EngineError, match="the state to load has 1 parameters, the model trains"):
        load_whole(made, {"version": 3, "parameters": {"other.weight": {}}, "scalars": {}})
    assert made.version == 0
    made.close()
    made.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_forward_gives_log_probabilities_of_the_response_tokens_in_the_samples_order(kind: str) -> None:
    samples = rollouts(5)
    model = tiny.policy().eval()
    expected = []
    for prompt, response in zip(samples.ragged("prompts").rows(), samples.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected.append((logits / TEMPERATURE).log_softmax(-1).gather(-1, response[:, None])[:, 0])
    made = build(kind)
    for budget in (1, 15, 1000):
        column = made.forward(samples, budget)["logprobs"]
        assert column.lengths.tolist() == samples.ragged("responses").lengths.tolist()
        assert column.values.dtype is torch.float32 and column.values.device == CPU and not column.values.requires_grad
        torch.testing.assert_close(column.values, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert made.version == 0


@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_model_gives_values_and_scores_and_has_no_gradients(kind: str) -> None:
    samples = rollouts(4)
    for make_head, column, sizes in (
        (ValueHead, "values", samples.ragged("responses").lengths + 1),
        (ScoreHead, "scores", torch.ones(4)),
    ):
        made = build(kind, make_head(tiny.classifier()), optimizer=None)
        expected = make_head(tiny.classifier()).eval()(samples)[column]
        ours = made.forward(samples, 20)[column]
        assert ours.lengths.tolist() == sizes.tolist()
        torch.testing.assert_close(ours.values, expected.values.detach(), rtol=1e-5, atol=1e-5)
        assert not any(p.requires_grad for p in made.head.parameters())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_is_the_gradient_times_the_learning_rate_whatever_the_micro_batches_and_the_slices_of_the_head(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = rollouts(5)
    by_hand = PolicyHead(tiny.policy(), TEMPERATURE).train()
    mean_logprob(by_hand(samples), samples)[0].backward()
    expected = {n: (p - 0.5 * p.grad).detach() for n, p in by_hand.model.named_parameters() if p.grad is not None}
    sliced, calls = sliced_head.sliced, list[Any]()
    monkeypatch.setattr(heads, "sliced", lambda *args: calls.append(args) or sliced(*args))
    for budget in (1, 1000):
        made = build(kind)
        statistics = made.train(samples, mean_logprob, budget, 0.5)
        assert_same(exported(made), expected, 1e-5)
        assert len(calls) == (budget == 1000), "the head is computed in slices for the second budget alone"
        monkeypatch.setattr(heads, "MAX_WHOLE_ON_CPU", 0)  # of the second budget
        monkeypatch.setattr(sliced_head, "SLICE_ON_CPU", 3 * tiny.VOCABULARY)
        assert made.version == 1
        assert statistics["tokens"].tolist() == samples.ragged("responses").lengths.tolist()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_prompt_of_several_samples_is_computed_once(kind: str) -> None:
    samples = rollouts(5).plus(prompts=Ragged.of([torch.arange(3, 23)] * 5, torch.long))
    by_hand = PolicyHead(tiny.policy(), TEMPERATURE).train()
    outputs = by_hand(samples)  # each with a copy of the prompt
    mean_logprob(outputs, samples)[0].backward()
    expected = {n: (p - 0.5 * p.grad).detach() for n, p in by_hand.model.named_parameters() if p.grad is not None}
    made = build(kind)
    scored = made.forward(samples, 1000)["logprobs"].values
    torch.testing.assert_close(scored, outputs["logprobs"].values.detach(), rtol=1e-5, atol=1e-5)
    made.train(samples, mean_logprob, 1000, 0.5)
    assert_same(exported(made), expected, 1e-5)
    assert made.head.shared_tokens == 2 * 4 * 20


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("limit", [0.0, 1e-3, 1e3])
def test_the_norm_of_the_gradient_before_clipping_is_known_after_a_step(kind: str, limit: float) -> None:
    samples = rollouts(5)
    by_hand = PolicyHead(tiny.policy(), TEMPERATURE).train()
    mean_logprob(by_hand(samples), samples)[0].backward()
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in by_hand.parameters() if p.grad is not None))
    assert 1e-2 < expected < 1e2
    made = build(kind, max_grad_norm=limit)
    assert math.isnan(made.grad_norm)
    made.train(samples, mean_logprob, 20, 0.0)
    assert type(made.grad_norm) is float and made.grad_norm == pytest.approx(expected, rel=1e-5)
    with pytest.raises(NonFiniteError):
        made.train(samples, broken, 1000, 0.1)
    assert not math.isfinite(made.grad_norm)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_that_is_not_finite_is_refused_and_the_next_one_is_as_if_it_had_not_been(kind: str) -> None:
    samples, made, other = rollouts(4), build(kind, optimizer=adamw), build(kind, optimizer=adamw)
    before = exported(made)
    with pytest.raises(NonFiniteError, match="the loss of sample 0 of the batch is not finite"):
        made.train(samples, broken, 1000, 0.1)
    assert made.version == 0
    assert_same(exported(made), before, 0)
    for engine in (made, other):
        engine.train(samples, mean_logprob, 1000, 0.1)
    assert made.version == 1
    assert_same(exported(made), exported(other))


@pytest.mark.parametrize("kind", ENGINES)
def test_a_step_that_is_not_finite_is_refused_for_weights_of_16_bits_too(kind: str) -> None:
    made = build(kind, PolicyHead(tiny.policy().bfloat16(), TEMPERATURE))
    before = exported(made)
    with pytest.raises(NonFiniteError, match="the loss of sample 0 of the batch is not finite"):
        made.train(rollouts(4), broken, 1000, 0.1)
    assert made.version == 0
    assert_same(exported(made), before, 0)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_adapter_in_float32_trains_beside_a_whole_layer_in_16_bits(kind: str) -> None:
    def head() -> PolicyHead:
        adapters = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2)
        torch.manual_seed(0)
        return PolicyHead(get_peft_model(tiny.policy().bfloat16(), adapters), TEMPERATURE)

    made, alone = build(kind, head()), build("replicated", head())
    for engine in (made, alone):
        engine.train(rollouts(4), mean_logprob, 1000, 0.1)
    assert made.grad_norm == pytest.approx(alone.grad_norm, rel=0.02) and made.grad_norm > 0


ON_TIED_ENDS = {
    "the head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "both as one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "the embedding by lora": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [2, 3, 5]},
}


@pytest.mark.parametrize("adapters", ON_TIED_ENDS)
@pytest.mark.parametrize("kind", [kind for kind in ENGINES if kind != "megatron"])  # it does not merge its parts
def test_a_model_of_what_it_exports_scores_as_it_does_where_adapters_change_tied_ends(kind: str, adapters: str) -> None:
    def head() -> PolicyHead:
        lora = LoraConfig(**{"target_modules": ["q_proj"], "init_lora_weights": False, **ON_TIED_ENDS[adapters]})
        torch.manual_seed(0)
        return PolicyHead(get_peft_model(tiny.policy(tie_word_embeddings=True), lora), TEMPERATURE)

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in module.parameters() if p.requires_grad], eps=1e-4)

    samples, given = rollouts(4), head()
    config = generated_config(given.model.config, given.model)
    made, alone = build(kind, given, adam), build("replicated", head(), adam)
    for engine in (made, alone):
        engine.train(samples, mean_logprob, 1000, 0.05)
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(exported(made), strict=config.tie_word_embeddings is False)
    scores = [
        engine.forward(samples, 1000)["logprobs"].values
        for engine in (made, alone, build("replicated", PolicyHead(plain, TEMPERATURE), None))
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ENGINES)
def test_parts_are_the_live_parameters_that_training_changes(kind: str) -> None:
    model = tiny.policy()
    model.get_input_embeddings().requires_grad_(False)
    made = build(kind, PolicyHead(model, TEMPERATURE))
    parts = made.parts()
    embedding = "model.embed_tokens.weight"
    assert set(parts) == set(made.parameter_specs) - {embedding}
    made.train(rollouts(4), mean_logprob, 1000, 0.5)
    after = exported(made)
    changed = {name: tensor for name, tensor in after.items() if name != embedding}
    assert_same(assembled(parts, changed), changed, 0)


@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_model_is_filled_through_its_parts(kind: str) -> None:
    samples, source = rollouts(4), PolicyHead(tiny.policy(seed=7), TEMPERATURE).eval()
    made = build(kind, optimizer=None)
    weights = dict(source.model.named_parameters())
    for name, boxes in made.parts().items():
        for box, cell in boxes:
            cell.copy_(weights[name].detach()[tuple(slice(start, stop) for start, stop in box)])
    expected = source(samples)["logprobs"].values.detach()
    torch.testing.assert_close(made.forward(samples, 100)["logprobs"].values, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ENGINES)
def test_what_is_exported_loads_into_a_new_model_and_its_buckets_keep_the_limit(kind: str) -> None:
    samples, made = rollouts(4), build(kind)
    made.train(samples, mean_logprob, 1000, 0.5)
    ours = made.forward(samples, 100)["logprobs"]
    for merged in (True, False):
        fresh = tiny.policy(seed=5)
        fresh.load_state_dict(exported(made, merged=merged, bucket_bytes=5000))
        expected = build("replicated", PolicyHead(fresh, TEMPERATURE)).forward(samples, 100)["logprobs"]
        torch.testing.assert_close(ours.values, expected.values, rtol=1e-5, atol=1e-5)
    for limit in (1, 5000):
        sizes = [[tensor.nbytes for _, tensor in bucket] for bucket in made.export(limit)]
        assert len(sizes) > 1
        assert all(len(bucket) == 1 or sum(bucket) <= limit for bucket in sizes)


@pytest.mark.parametrize("kind", ENGINES)
def test_training_goes_on_from_a_state_in_any_engine_as_if_never_stopped(kind: str) -> None:
    samples, made = rollouts(4), build(kind, optimizer=adamw)
    for _ in range(2):
        made.train(samples, mean_logprob, 1000, 0.01)
    state = whole_state(made)
    made.train(samples, mean_logprob, 1000, 0.01)
    kept = whole_state(made)["parameters"]
    for name, tensors in state["parameters"].items():
        assert set(tensors) == {"master", "exp_avg", "exp_avg_sq"}
        assert all(t.device == CPU and t.dtype is torch.float32 for t in tensors.values())
        assert all(t.shape == tensors["master"].shape for t in tensors.values())
        assert not torch.equal(tensors["master"], kept[name]["master"]), "the parts are live"
    for other in {kind, "replicated", "megatron"}:
        fresh = build(other, PolicyHead(tiny.policy(seed=5), TEMPERATURE), optimizer=adamw)
        load_whole(fresh, state)
        assert fresh.version == 2
        fresh.train(samples, mean_logprob, 1000, 0.01)
        assert_same(exported(fresh), exported(made), 1e-5)


KEEPS_NUMBERS = ["replicated", "megatron", pytest.param("zero 2", marks=pytest.mark.deepspeed)]


@pytest.mark.parametrize("kind", KEEPS_NUMBERS)
def test_numbers_that_an_optimizer_keeps_in_its_groups_are_part_of_the_state(kind: str) -> None:
    def counting(module: nn.Module) -> torch.optim.Optimizer:
        named = list(module.named_parameters())
        groups = [[p for name, p in named if ("norm" in name) is is_norm] for is_norm in (False, True)]
        return Counting([{"params": group} for group in groups])

    samples, made = rollouts(4), build(kind, optimizer=counting)
    for _ in range(2):
        made.train(samples, mean_logprob, 1000, 0.01)
    state = whole_state(made)
    assert state["group_numbers"] == {0: {"step": 2}, 1: {"step": 2}}
    made.train(samples, mean_logprob, 1000, 0.01)
    for other in {kind, "replicated", "megatron"}:
        fresh = build(other, PolicyHead(tiny.policy(seed=5), TEMPERATURE), optimizer=counting)
        load_whole(fresh, state)
        fresh.train(samples, mean_logprob, 1000, 0.01)
        assert_same(exported(fresh), exported(made), 1e-5)


# --- generation ---------------------------------------------------------------------------------------------------


VLLM = [pytest.mark.vllm, pytest.mark.multiprocess, pytest.mark.skipif(not is_vllm_available(), reason="needs vLLM")]


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=VLLM)])
def generator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine that has the parameters of `llama(1)` as version 4, and that model."""
    model = llama(1)
    if request.param == "transformers":
        engine: Any = TransformersEngine(lambda: contextlib.nullcontext(model), CPU, batch_size=8)
        assert engine.version == -1
    else:
        engine = request.getfixturevalue("vllm_engine")
    engine.load(buckets(model), 4)
    yield engine, model
    if request.param == "transformers":  # of vLLM in test_vllm: this engine goes on
        engine.close()
        engine.close()


def test_every_request_has_one_completion_with_the_log_probabilities_of_its_model(generator: Any) -> None:
    engine, model = generator
    assert isinstance(engine, GenerationEngine) and engine.version == 4
    for temperature in (0.7, 1.0):
        asked = requests(16)
        got = in_order(engine, asked, Sampling(max_tokens=24, temperature=temperature))
        assert all(len(completion.token_ids) == len(completion.logprobs) == 24 for completion in got)
        assert not any(completion.stopped for completion in got)
        assert worst_difference(model, asked, got, temperature) < 1e-4
    assert list(engine.generate([], SAMPLING)) == []


def test_an_empty_prompt_is_refused(generator: Any) -> None:
    engine, _ = generator
    asked = [*requests(2), GenerationRequest(102, (), 7)]
    with pytest.raises(EngineError, match="the prompt of request 102 is empty"):
        list(engine.generate(asked, SAMPLING))


def test_tokens_of_a_users_own_generate_have_the_models_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(1)
    engine = TransformersEngine(lambda: contextlib.nullcontext(model), CPU, batch_size=8)
    own = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: own(**{**given, "logits_processor": None}))
    asked = requests(16)
    got = in_order(engine, asked)
    assert all(len(completion.token_ids) == len(completion.logprobs) == 24 for completion in got)
    assert worst_difference(model, asked, got, SAMPLING.temperature) < 1e-4


def test_a_seed_repeats_its_sample_whatever_its_neighbours(generator: Any) -> None:
    engine, _ = generator
    asked = requests(24)
    first = tokens(in_order(engine, asked))
    assert tokens(in_order(engine, asked)) == first
    assert tokens(in_order(engine, asked[20:] + asked[3:5])) == first[20:] + first[3:5]
    others = tokens(in_order(engine, requests(24, seed=1000)))
    assert all(one != other for one, other in zip(first, others, strict=True))


def test_a_stop_token_ends_its_sample_and_is_part_of_it(generator: Any) -> None:
    engine, model = generator
    asked = requests(24)
    free = in_order(engine, asked)
    stop = free[0].token_ids[5]
    got = in_order(engine, asked, Sampling(max_tokens=24, temperature=0.7, stop_token_ids=(stop,)))
    for whole, cut in zip(free, got, strict=True):
        length = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else 24
        assert (cut.token_ids, cut.stopped) == (whole.token_ids[:length], stop in whole.token_ids)
    assert {completion.stopped for completion in got} == {True, False}
    assert worst_difference(model, asked, got, 0.7) < 1e-4
