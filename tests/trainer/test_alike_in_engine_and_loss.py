"""Each setting that tokens are drawn with, for each algorithm: the parameters after two updates with a vLLM engine,
against the formulas over the whole vocabulary of 20 tokens.

The formulas take from the trainer the token ids of the completions alone. A token that could not have been another one
has neither a log-probability nor a gradient; of the other settings the trainer follows temperature, top-p, top-k and
min-p, and its log-probabilities are else those of the policy (docs/differences.md).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from naive_ppo import Batch, Settings, ppo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trl_realloc import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_realloc.engines.generation.vllm_support import is_vllm_available


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed"),
    pytest.mark.usefixtures("forked_engines"),
]
LETTERS, EOS, PAD, VOCABULARY = "abcdefghijklmnopqr", 18, 19, 20
LIMIT, GROUP, RATE, BETA = 7, 4, 0.02, 0.1
REWARDS = (0.0, 1.0, 0.25, 3.0, 2.0, 0.0, 0.5, 1.5)  # of the completions of an update, by their place
GRPO: dict[str, Any] = {"loss_type": "grpo", "scale_rewards": False, "use_bias_correction_kl": True}
Allowed = Callable[[int], str | None]  # the letters that may stand at a place, "." for eos; `None` for all tokens


def at_places(*letters: str) -> Allowed:
    return lambda place: letters[place] if place < len(letters) else "."


@dataclass(frozen=True)
class Case:
    """One setting.

    Args:
        given: arguments of the configuration.
        allowed: by a grammar.
        named: the setting in the warning that the engine alone follows it; empty where the trainer does too.
    """

    given: dict[str, Any] = field(default_factory=dict)
    allowed: Allowed = lambda place: None
    named: str = ""

    @property
    def is_full(self) -> bool:
        return bool(self.given.get("full_vocabulary_logprobs"))


def extra(**arguments: Any) -> dict[str, Any]:
    return {"generation_kwargs": arguments}


REGEX, PLACES = "ab(c|d)(e|f|g)h", ("a", "b", "cd", "efg", "h")
CASES: dict[str, Case] = {
    "nothing": Case(),
    "temperature": Case({"temperature": 0.6}),
    "top-p, which leaves single tokens": Case({"top_p": 0.5}),
    "top-k, hot": Case({"top_k": 3, "temperature": 1.5}),
    "top-k of one": Case({"top_k": 1}),
    "min-p": Case({"min_p": 0.4}),
    "top-k over the whole vocabulary": Case({"top_k": 3, "full_vocabulary_logprobs": True}, named="top_k with full_"),
    "a regular expression": Case(
        {"vllm_structured_outputs_regex": REGEX}, at_places(*PLACES), "vllm_structured_outputs_regex"
    ),
    "a regular expression and top-p": Case(
        {"vllm_structured_outputs_regex": REGEX, "top_p": 0.7}, at_places(*PLACES), "vllm_structured_outputs_regex"
    ),
    "a choice": Case(
        extra(structured_outputs={"choice": [f"{one}b{two}" for one in "afkp" for two in "cd"]}),
        at_places("afkp", "b", "cd"),
        "structured_outputs",
    ),
    "a repetition penalty": Case({"repetition_penalty": 1.5}, named="repetition_penalty"),
    "a frequency penalty": Case(extra(frequency_penalty=1.0), named="frequency_penalty"),
    "a bias": Case(extra(logit_bias={3: 4.0}), named="logit_bias"),
    "a list of tokens": Case(extra(allowed_token_ids=[0, 3, EOS]), lambda place: "ad.", "allowed_token_ids"),
    "a least length": Case(extra(min_tokens=4), named="min_tokens"),
    "a word that is left out": Case(extra(bad_words=["b"]), named="bad_words"),
    "a text that ends a completion": Case(extra(stop=["c"])),
}


def letters() -> PreTrainedTokenizerFast:
    """A token is a letter."""
    made = Tokenizer(
        models.WordLevel({letter: i for i, letter in enumerate(LETTERS)} | {"</s>": EOS, "<pad>": PAD}, "</s>")
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>", padding_side="left")


def policy() -> Any:
    """Its probabilities are far from equal."""
    return tiny.policy(vocab_size=VOCABULARY, eos_token_id=EOS, pad_token_id=PAD, initializer_range=0.4)


def recorded(trainer: type) -> type:
    """The class, which keeps what it makes of each generation."""

    class Recorded(trainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            self.generations = [*getattr(self, "generations", ()), made]
            return made

    return Recorded


class OwnLoss:
    """A user's trainer whose `compute_loss` is not TRL's."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return self._compute_loss(model, inputs)  # type: ignore[attr-defined]


def trained(
    algorithm: str, folder: Path, case: Case, own: tuple[type, ...] = ()
) -> tuple[Any, list[tuple[Tensor, Tensor, Tensor]]]:
    """A trainer after two updates, and of each of them the prompts, the completions and their mask."""
    config, trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[algorithm]
    settings = {**tiny.BARE, "per_device_train_batch_size": len(REWARDS), "num_generations": GROUP, "max_steps": 2}
    settings |= {"max_completion_length": LIMIT, "use_vllm": True, "plan": "flatten", "beta": BETA}
    settings |= {"learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    settings |= {**(GRPO if algorithm == "grpo" else {}), **case.given}
    model = policy()
    made = type("Trainer", (*own, recorded(trainer)), {})(
        model,
        lambda completions, **_: list(REWARDS[: len(completions)]),
        config(str(folder), **settings),
        Dataset.from_dict({"prompt": ["abc", "def"] * 4}),
        processing_class=letters(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=RATE), None),
    )
    made.train()
    names = ("prompt_ids", "completion_ids", "completion_mask")
    return made, [tuple(of[name] for name in names) for of in made.generations]  # type: ignore[misc]


def rules(case: Case) -> LogitsProcessorList:
    """Transformers' own, in vLLM's order."""
    given = case.given
    found: list[Any] = [MinPLogitsWarper(given["min_p"])] if "min_p" in given else []
    found += [TopKLogitsWarper(given["top_k"])] if "top_k" in given else []
    found += [TopPLogitsWarper(given["top_p"])] if "top_p" in given else []
    return LogitsProcessorList(found)


def logits_of(model: Any, prompt: Tensor, completion: Sequence[int], case: Case) -> Tensor:
    """(tokens, vocabulary), after temperature."""
    logits: Tensor = model(torch.cat([prompt, torch.tensor(completion)])[None]).logits[0, len(prompt) - 1 : -1]
    return logits / case.given.get("temperature", 1.0)


def kept_by_rules(row: Tensor, case: Case) -> Tensor:
    kept: Tensor = rules(case)(torch.zeros(1, 0), row[None].clone())[0]
    return kept


@torch.no_grad()
def forced(model: Any, prompt: Tensor, completion: Sequence[int], case: Case) -> list[bool]:
    """True of the tokens that could not have been others when the model drew them."""
    found = []
    for place, row in enumerate(logits_of(model, prompt, completion, case)):
        may = case.allowed(place)
        if may is not None:
            kept = [EOS if letter == "." else LETTERS.index(letter) for letter in may]
            row = torch.full_like(row, -torch.inf).index_copy(0, torch.tensor(kept), row[kept])
        found.append(int(kept_by_rules(row, case).isfinite().sum()) == 1 and not case.is_full)
    return found


def logprobs(model: Any, prompt: Tensor, completion: Sequence[int], are_forced: Sequence[bool], case: Case) -> Tensor:
    """(tokens,): the log-probability of each token under the distribution that the loss is of."""
    places = []
    rows = logits_of(model, prompt, completion, case)
    for row, token, is_forced in zip(rows, completion, are_forced, strict=True):
        over = row if case.is_full else kept_by_rules(row, case)
        over = over.index_copy(0, torch.tensor([token]), row[token : token + 1])  # it was drawn, so it is among them
        places.append(row.new_zeros(()) if is_forced else over.log_softmax(0)[token])
    return torch.stack(places)


def loss(algorithm: str, new: list[Tensor], old: list[Tensor], ref: list[Tensor]) -> Tensor:
    """GRPO's of arXiv 2402.03300 without scaled rewards, the KL weighted by the ratio (arXiv 2512.02556); RLOO's of
    arXiv 2402.14740, with the KL in the rewards."""
    rewards = torch.tensor(REWARDS)
    if algorithm == "grpo":
        advantages = (rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)).flatten()
        of_rows = []
        for n, o, r, advantage in zip(new, old, ref, advantages, strict=True):
            of_rows.append((torch.exp(n - o) * (BETA * (torch.exp(r - n) - (r - n) - 1) - advantage)).mean())
        return torch.stack(of_rows).mean()
    rewards = rewards - BETA * torch.stack([(o - r).sum() for o, r in zip(old, ref, strict=True)])
    groups = rewards.view(-1, GROUP)
    advantages = (groups - (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)).flatten()
    ratios = torch.stack([(n - o).sum() for n, o in zip(new, old, strict=True)]).exp()
    return -(ratios * advantages).mean()


# One way gives both algorithms their tokens and log-probabilities: each setting is of one of them, and of both are one
# that nothing follows but the engine, one that the trainer follows, a grammar, and none.
BOTH = ("nothing", "top-p, which leaves single tokens", "a regular expression", "a repetition penalty")
SETTINGS = [
    (algorithm, name)
    for number, name in enumerate(CASES)
    for place, algorithm in enumerate(("grpo", "rloo"))
    if name in BOTH or number % 2 == place
]


@pytest.mark.parametrize(("algorithm", "name"), SETTINGS)
def test_the_parameters_after_two_updates_are_those_of_the_formulas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str, name: str
) -> None:
    check(tmp_path, caplog, algorithm, name)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_with_a_compute_loss_of_the_users_too(tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str) -> None:
    check(tmp_path, caplog, algorithm, "a regular expression", (OwnLoss,))


def check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str, name: str, own: tuple[type, ...] = ()
) -> None:
    """The parameters after two updates are those of the formulas."""
    case, expected = CASES[name], policy()
    reference = copy.deepcopy(expected)
    with caplog.at_level(logging.WARNING):
        made, generations = trained(algorithm, tmp_path, case, own)
    for prompts, completions, mask in generations:
        rows = [
            (prompt[prompt != PAD], completion[: int(kept.sum())].tolist())
            for prompt, completion, kept in zip(prompts, completions, mask, strict=True)
        ]
        assert len({tuple(completion) for _, completion in rows}) > 1 or name == "top-k of one"
        are_forced = [forced(expected, *row, case) for row in rows]
        new = [logprobs(expected, *row, of, case) for row, of in zip(rows, are_forced, strict=True)]
        with torch.no_grad():
            ref = [logprobs(reference, *row, of, case) for row, of in zip(rows, are_forced, strict=True)]
        expected.zero_grad()
        whole = loss(algorithm, new, [of.detach() for of in new], ref)
        if whole.requires_grad:
            whole.backward()
        with torch.no_grad():
            for parameter in expected.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    got = {key: value for bucket in made.placement.engine("actor.train").export(merged=False) for key, value in bucket}
    start = dict(reference.named_parameters())
    moved = max(float((value - start[key]).detach().abs().max()) for key, value in expected.named_parameters())
    assert (moved > 1e-5) == (name != "top-k of one"), "of one candidate the policy learns nothing"
    for key, value in expected.named_parameters():
        torch.testing.assert_close(got[key], value.detach(), rtol=0, atol=max(1e-3 * moved, 1e-7))
    warnings = [record.message for record in caplog.records if "another distribution" in record.message]
    assert len(warnings) == bool(case.named) and all(case.named in warning for warning in warnings)
    judged = [log for log in made.state.log_history if "sampling/token_mult_prob_error" in log]
    assert len(judged) == (0 if case.named else 2)
    assert all(log["sampling/token_mult_prob_error"] < 1.001 for log in judged)
    made.close()


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_ppo_with_an_engine_is_that_of_the_formulas(tmp_path: Path, temperature: float) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "pad_token_id": PAD}
    model, critic = policy(), tiny.classifier(**sizes)
    naive = [copy.deepcopy(part) for part in (model, model, critic)]
    prompts = Dataset.from_dict({"prompt": ["abc", "def", "g", "hi"] * 4})
    made = tiny.trainer(
        tmp_path,
        given={
            **{"model": model, "value_model": critic, "processing_class": letters(), "train_dataset": prompts},
            "reward_model": lambda completions, **_: list(REWARDS[: len(completions)]),
        },
        **{"temperature": temperature, "generation_engine": "vllm", "response_length": LIMIT, "adam_epsilon": 1e-4},
        **{"plan": "flatten", "learning_rate": 1e-3, "lr_scheduler_type": "constant"},
    )
    batches: list[Batch] = []
    run = made.executor.run

    def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
        iteration = run(batch, *args, **kwargs)
        tokens, told = (iteration.samples.ragged(name).rows() for name in ("responses", "logprobs"))
        rows = batch.prompts.ragged("prompts").rows()
        batches.append(Batch(rows, tokens, told, torch.tensor(REWARDS), EOS))
        return iteration

    made.executor.run = watched  # type: ignore[method-assign]
    made.train()
    settings = Settings(limit=LIMIT, temperature=temperature + 1e-7, rates=(1e-3, 1e-3), eps=1e-4)
    expected = ppo(*naive, batches, settings)
    for ours, row in zip(tiny.updates(made), expected, strict=True):
        assert {name: ours[name] for name in row} == pytest.approx(row, rel=1e-3, abs=1e-4)
    weights = tiny.weights(made)
    for key, value in naive[0].named_parameters():
        assert (weights[f"policy.{key}"] - value).abs().max() < 1e-4, key
    made.close()
