"""What a user has put on a model object is followed by generation, log-probabilities and training, or refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_groups
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention
from trl.trainer import utils as trl_utils

from trl_realloc import Cluster, GRPOConfig, GRPOTrainer, RLOOTrainer
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.model_changes import model_changes
from trl_realloc.engines.models import frozen_copy
from trl_realloc.plan.presets import flatten
from trl_realloc.trainer.checks.model_checks import why_not_this_model


MOST = 12  # the masks below leave the tokens before this one


def masked(logits: Tensor) -> Tensor:
    return torch.where(torch.arange(logits.shape[-1]) < MOST, logits, -torch.inf)


def with_masked_logits(out: Any) -> Any:
    out.logits = masked(out.logits)
    return out


# --- what users put on a model ---------------------------------------------------------------------------------------


def closure(model: Any) -> Any:
    forward = model.forward
    model.forward = lambda *args, **kwargs: with_masked_logits(forward(*args, **kwargs))
    return model


def method(model: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return with_masked_logits(type(self).forward(self, *args, **kwargs))

    model.forward = types.MethodType(forward, model)
    return model


def method_of_head(model: Any) -> Any:
    model.lm_head.forward = types.MethodType(lambda self, x: masked(nn.Linear.forward(self, x)), model.lm_head)
    return model


def hook(model: Any) -> Any:
    model.register_forward_hook(lambda module, args, out: with_masked_logits(out))
    return model


def hook_of_head(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda module, args, out: masked(out))
    return model


def hook_by_place(model: Any) -> Any:
    """It changes the logits of the tenth token, which in a packed row is of another sample."""

    def of_place(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return masked(out) - 3.0 * torch.eye(out.shape[-1])[5] * (torch.arange(out.shape[1]) == 9)[:, None]

    model.lm_head.register_forward_hook(of_place)
    return model


def pre_hook(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return hook_of_head(model)


def bias(model: Any) -> Any:
    model.lm_head.bias = nn.Parameter(torch.where(torch.arange(tiny.VOCABULARY) < MOST, 0.0, -1e9))
    return model


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return masked(super().forward(x))


def head(model: Any) -> Any:
    made = Head(32, tiny.VOCABULARY, bias=False)
    made.weight = model.lm_head.weight
    model.lm_head = made
    return model


class Attention(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(hidden_states, *args, **kwargs)
        return 2 * out, weights


def attention(model: Any) -> Any:
    own = Attention(model.config, 0)
    own.load_state_dict(model.model.layers[0].self_attn.state_dict())
    model.model.layers[0].self_attn = own
    return hook_of_head(model)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrization(model: Any) -> Any:
    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())
    return hook_of_head(model)


def frequencies(model: Any) -> Any:
    model.model.rotary_emb.inv_freq *= 0.5
    return hook_of_head(model)


def scale(model: Any) -> Any:
    model.model.layers[1].self_attn.scaling *= 4.0
    return hook_of_head(model)


class Own(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return with_masked_logits(super().forward(*args, **kwargs))


def own_class(model: Any) -> Any:
    made = Own(model.config)
    made.load_state_dict(model.state_dict())
    return made


CHANGES = (closure, method, method_of_head, hook, hook_of_head, hook_by_place, pre_hook, bias, head, attention)
CHANGES += (parametrization, frequencies, scale, own_class)
FOLLOWED = [("grpo", change) for change in CHANGES]
FOLLOWED += [("ppo", change) for change in (closure, method_of_head, hook_by_place, bias, own_class)]
FOLLOWED += [("rloo", change) for change in (closure, hook)]


# --- trainers ---------------------------------------------------------------------------------------------------------


def trainer(algorithm: str, folder: Path, model: Any, reference: Any = None, **changes: Any) -> tuple[Any, list[str]]:
    """A trainer whose engine is left out, unless it is in `changes`, and what its policy will have drawn.

    Args:
        reference: of PPO; a copy of the policy by default.
    """
    drawn: list[str] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        drawn.extend(completions)
        return tiny.short(completions)

    if algorithm == "ppo":
        settings = {"generation_engine": None, "per_device_train_batch_size": 4, **changes}
        given = {"model": model, "ref_model": reference, "reward_model": reward}
        return tiny.trainer(folder, given=given, **settings), drawn
    kind, settings = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}[algorithm], {**tiny.BARE, "use_vllm": None}
    settings |= {"gradient_accumulation_steps": 1, "max_completion_length": 12, **changes}
    given = {"model": model, "reward_funcs": reward, "train_dataset": tiny.prompts()}
    return tiny_groups.trainer(folder, kind, given=given, **settings), drawn


def engine_logprobs(made: Any) -> list[Tensor]:
    """The log-probabilities of two samples by the engine that trains the policy."""
    samples = Rollouts(
        prompts=Ragged.of(PROMPTS, torch.long), responses=Ragged.of(RESPONSES, torch.long), index=torch.arange(2)
    )
    return list(made.placement.engine("actor.train").forward(samples, 1000)["logprobs"].rows())


PROMPTS = [[5, 6, 7], [9, 3, 4, 8, 2]]
RESPONSES = [[3, 4, 5, 6, 7, 8, 9], [2, 11, 7, 9]]


@torch.no_grad()
def own_logprobs(model: Any) -> list[Tensor]:
    """The same by the model's forward, each sample alone."""
    made = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        made.append(torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(response)[:, None])[:, 0])
    return made


@pytest.mark.parametrize(("algorithm", "change"), FOLLOWED)
def test_what_is_on_the_policy_is_followed(tmp_path: Path, algorithm: str, change: Callable[[Any], Any]) -> None:
    model, reference = change(tiny.policy()), closure(tiny.policy()) if change is closure else None
    settings = {"beta": 0.0} if algorithm != "ppo" and change is closure else {}  # a closure has no copies
    made, drawn = trainer(algorithm, tmp_path, model, reference, **settings)
    made.train()
    words = {word for text in drawn for word in text.split()}
    assert words and words <= {"<pad>", *(f"w{token}" for token in range(2, MOST))}
    if algorithm != "ppo" and made.run is None:  # Accelerate trains the model itself
        assert change is own_class
        return
    policy = made.model.policy if algorithm == "ppo" else made.model
    assert policy is model
    torch.testing.assert_close(engine_logprobs(made), own_logprobs(model), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not is_vllm_available(), reason="without vLLM there is no choice")
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (closure, "a replaced forward on the model itself"),
        (hook_of_head, "a forward hook on lm_head"),
        (bias, "a parameter 'bias' that the class does not have on lm_head"),
        (attention, "an? Attention in place of LlamaAttention on model.layers.0.self_attn and 1 more"),
        (parametrization, "a parametrization on model.layers.0.mlp.up_proj"),
    ],
)
def test_vllm_is_refused_where_it_would_not_have_what_is_on_the_policy(
    tmp_path: Path, algorithm: str, change: Callable[[Any], Any], what: str
) -> None:
    asked: dict[str, Any] = {"generation_engine": "vllm"} if algorithm == "ppo" else {"use_vllm": True}
    with pytest.raises(ValueError, match=f"config and weights alone, and the policy has {what}.*; "):
        trainer(algorithm, tmp_path, change(tiny.policy()), **asked)


@pytest.mark.skipif(not is_vllm_available(), reason="without vLLM there is no choice")
def test_a_hook_that_comes_after_the_choice_of_vllm_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, given={"model": saved(tmp_path / "policy")}, generation_engine="vllm")
    made.model.policy.register_forward_hook(lambda module, args, out: with_masked_logits(out))
    with pytest.raises(ValueError, match=r"model has a forward hook on the model itself, and vLLM.*before the trainer"):
        made.train()


def saved(folder: Path) -> str:
    tiny.policy().save_pretrained(folder)
    return str(folder)


def checkpointed() -> Any:
    model = get_peft_model(tiny.policy(), LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"]))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model


def resized() -> Any:
    model = tiny.policy()
    model.config.pad_token_id = 7
    model.resize_token_embeddings(tiny.VOCABULARY + 20)
    return model


def by_accelerate() -> Any:
    tiny.forget_accelerate()
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(tiny.policy())


def by_trl() -> Any:
    model = tiny.policy()
    if hasattr(trl_utils, "add_fused_lm_head"):  # of TRL 1.16
        trl_utils.add_fused_lm_head(model, temperature=1.0)
    return model


def compiled() -> Any:
    model = tiny.policy()
    model.forward = torch.compile(model.forward)
    return model


def watched_in_backward() -> Any:
    model = tiny.policy()
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
    model.model.layers[0].register_full_backward_hook(lambda *_: None)
    return model


NONE = (tiny.policy, tiny.classifier, checkpointed, resized, by_accelerate, by_trl, compiled, watched_in_backward)


@pytest.mark.parametrize("make", NONE)
def test_what_libraries_put_on_a_model_does_not_change_its_forward(make: Callable[[], Any]) -> None:
    model = make()
    assert [change for change in model_changes(model) if change.in_forward] == []
    assert bool(model_changes(model)) == (make is watched_in_backward)
    assert why_not_this_model(model) is None


def test_a_users_forward_is_seen_under_the_wrappers_of_libraries() -> None:
    for wrap in (by_trl, by_accelerate):
        tiny.forget_accelerate()
        model = closure(tiny.policy())
        if wrap is by_accelerate:
            model = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
        elif hasattr(trl_utils, "add_fused_lm_head"):
            trl_utils.add_fused_lm_head(model, temperature=1.0)
        assert [str(change) for change in model_changes(model)] == ["a replaced forward on the model itself"]


def test_seeing_what_is_on_a_model_draws_no_random_numbers() -> None:
    model, before = tiny.policy(), torch.get_rng_state()
    model_changes(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [closure, by_trl])
def test_a_copy_computes_with_its_own_weights_or_is_refused(make: Callable[..., Any]) -> None:
    """Of a closure over the policy the reference would be the policy in training, and every KL 0."""
    model, ids = make(tiny.policy()) if make is closure else make(), torch.tensor([[5, 6, 7]])
    if make is closure:
        with pytest.raises(ValueError, match="a replaced forward on the model itself, which calls the model .* give"):
            frozen_copy(model)
        return
    copied = frozen_copy(model)
    before = copied(input_ids=ids).logits
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch.testing.assert_close(copied(input_ids=ids).logits, before)


def mirrored(model: Any) -> Any:
    model.register_forward_hook(lambda module, args, out: out)
    return model


@pytest.mark.parametrize(
    ("algorithm", "argument"), [("ppo", "value_model"), ("ppo", "reward_model"), ("grpo", "reward_funcs")]
)
def test_a_hook_on_a_classifier_that_is_read_in_parts_is_refused(tmp_path: Path, algorithm: str, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument} has a forward hook on the model itself, which is not called"):
        if algorithm == "ppo":
            tiny.trainer(tmp_path, given={argument: mirrored(tiny.classifier())})
        else:
            args = GRPOConfig(output_dir=str(tmp_path), **tiny.BARE, num_generations=4, use_vllm=False)
            GRPOTrainer(
                tiny.policy(), mirrored(tiny.classifier()), args, tiny.prompts(), processing_class=tiny.tokenizer()
            )


def test_a_hook_on_the_score_layer_is_followed(tmp_path: Path) -> None:
    critic = tiny.classifier()
    critic.score.register_forward_hook(lambda module, args, out: out + 3.0)
    made = tiny.trained(tmp_path, given={"value_model": critic}, max_steps=1)
    sample = Rollouts(
        prompts=Ragged.of(PROMPTS[:1], torch.long),
        responses=Ragged.of(RESPONSES[:1], torch.long),
        index=torch.arange(1),
    )
    values = made.placement.engine("critic.train").forward(sample, 1000)["values"].values
    with torch.no_grad():
        hidden = critic.model(torch.tensor([PROMPTS[0] + RESPONSES[0]])).last_hidden_state[0, len(PROMPTS[0]) - 1 :]
        torch.testing.assert_close(values, critic.score(hidden)[:, 0], rtol=1e-5, atol=1e-5)


def test_a_plan_that_splits_a_model_with_something_on_it_is_refused(tmp_path: Path) -> None:
    plan = flatten(Cluster(1, 1)).to_dict()
    plan["calls"]["critic.train"]["engine"] = "megatron"
    critic = tiny.classifier()
    critic.score.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"critic.train has engine megatron, .* a gradient hook of 'weight' on score"):
        tiny.trainer(tmp_path, given={"value_model": critic}, plan=plan)
