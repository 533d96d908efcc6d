"""Rewards as GRPO's users know them, and what a reward may not return."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from recorded_rollouts import make
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import trl_realloc
from trl_realloc.algorithms.rewards import (
    FunctionReward,
    ModelReward,
    RewardError,
    Texts,
    read_rewards,
    weighted_scores,
)
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.runtime.failures.alarm import JobFailed


def scores(made: Any) -> float:
    return tiny.updates(made)[0]["objective/scores"]


def train(folder: Path, reward: Any, given: dict[str, Any] | None = None, **changes: Any) -> Any:
    made = tiny.trained(folder, given={"reward_model": reward, **(given or {})}, max_steps=1, **changes)
    return made


def test_a_function_gets_prompts_completions_and_the_datasets_columns(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], completion_ids: Any, answer: list[int]) -> list[float]:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        return [float(number) for number in answer]

    data = tiny.prompts(64, answer=[7] * 64)
    made = train(tmp_path, reward, {"train_dataset": data})
    assert scores(made) == 7.0
    assert set(seen["prompts"]) <= set(data["prompt"]) and len(seen["completions"]) == 8
    assert all("<eos>" not in text for text in seen["completions"])
    words = [len([i for i in ids if i != tiny.EOS]) for ids in seen["ids"]]
    assert words == [len(text.split()) for text in seen["completions"]]


def test_a_function_may_be_async(tmp_path: Path) -> None:
    async def reward(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [2.5] * len(completions)

    assert scores(train(tmp_path, reward)) == 2.5


class Judge:
    """Notes the event loops that it runs in. A client would belong to the first."""

    def __init__(self) -> None:
        self.loops: list[Any] = []

    async def __call__(self, completions: list[str], by: float = 1.0, **columns: Any) -> list[float]:
        self.loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [by] * len(completions)

    async def judged(self, completions: list[str], **columns: Any) -> list[float]:
        return await self(completions, by=2.0)

    @property
    def functions(self) -> list[Any]:
        async def function(completions: list[str], **columns: Any) -> list[float]:
            return await self(completions, by=4.0)

        @functools.wraps(function)
        def decorated(**given: Any) -> Any:
            return function(**given)

        return [self, self.judged, function, decorated, partial(self, by=8.0), partial(function), partial(decorated)]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("PPO", {}), ("GRPO", {}), ("RLOO", {}), ("GRPO", {"score_groups_early": True})],
    ids=["PPO", "GRPO", "RLOO", "GRPO by groups"],
)
def test_async_functions_of_any_kind_are_awaited_in_a_loop(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    judge = Judge()
    if kind == "PPO":
        made = tiny.trainer(tmp_path, given={"reward_model": judge.functions})
    else:
        given = {"reward_funcs": judge.functions}
        made = make(trl_realloc, tmp_path, kind=kind, given=given, max_steps=2, **changes)
    made.train()
    made.close()
    rows = [row for row in made.state.log_history if {"objective/scores", "reward"} & row.keys()]
    assert [row.get("objective/scores", row.get("reward")) for row in rows] == [1 + 2 + 8 + 4 * 4] * 2
    assert len(judge.loops) >= 14 and len({*judge.loops}) == 1


def test_async_functions_run_at_the_same_time_and_in_a_notebook(tmp_path: Path) -> None:
    """A notebook runs its cells inside a loop. Each function waits until the other has begun."""
    begun = {name: asyncio.Event() for name in "ab"}

    def waits(own: str, other: str) -> Any:
        async def reward(completions: list[str], **columns: Any) -> list[float]:
            begun[own].set()
            await asyncio.wait_for(begun[other].wait(), 20)
            return [1.5] * len(completions)

        return reward

    async def cell() -> float:
        return scores(train(tmp_path, [waits("a", "b"), waits("b", "a")]))

    assert asyncio.run(cell()) == 3.0


def test_a_rank_without_samples_asks_no_function() -> None:
    """As in an evaluation of fewer prompts than ranks."""
    nothing = Rollouts(index=torch.zeros(0, dtype=torch.long), responses=Ragged.of([], torch.long))
    function = FunctionReward(lambda completions: 1 / 0, "never")
    total, table = weighted_scores([], [function], {"never": 1.0}, nothing, lambda: Texts([], [], {}))
    assert len(total) == 0 and table == {}


def test_every_reward_function_has_its_own_span_and_time(tmp_path: Path) -> None:
    def slow(completions: list[str], **columns: Any) -> list[float]:
        time.sleep(0.05)
        return tiny.short(completions)

    async def judge(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0.08)
        return tiny.short(completions)

    made = train(tmp_path, [slow, judge])
    (scored,) = (span for span in made.timeline.spans if span.call == "reward.forward")
    row = next(row for row in made.state.log_history if "time/reward/slow" in row)
    for name, least in (("slow", 0.05), ("judge", 0.08)):
        (span,) = (span for span in made.timeline.spans if span.call == f"reward: {name}")
        assert least <= span.seconds == row[f"time/reward/{name}"]
        assert scored.start <= span.start and span.end <= scored.end and span.device == 0
    loop = [span for span in made.timeline.spans if span.call == "training loop"]
    assert sum(span.seconds for span in loop) == pytest.approx(row["time/training_loop"])
    assert loop[-1].end - loop[0].start == pytest.approx(row["time/step"])


def test_several_rewards_are_weighted_and_one_may_not_apply(tmp_path: Path) -> None:
    def sometimes(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if at % 2 else 4.0 for at in range(len(completions))]

    def always(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    made = train(tmp_path, [sometimes, always], reward_weights=[0.5, 3.0])
    row = tiny.updates(made)[0]
    assert row["objective/scores"] == pytest.approx((0.5 * 4.0) / 2 + 3.0)
    assert row["rewards/sometimes"] == 4.0 and row["rewards/always"] == 1.0


def test_a_model_a_path_and_a_function_together(tmp_path: Path) -> None:
    model = tiny.classifier(3)
    model.save_pretrained(tmp_path / "reward")
    both = train(tmp_path, [model, str(tmp_path / "reward"), tiny.short], reward_weights=[1.0, -1.0, 1.0])
    assert scores(both) == pytest.approx(scores(train(tmp_path, tiny.short)), abs=1e-5)


def test_a_model_with_a_tokenizer_of_its_own_reads_the_text(tmp_path: Path) -> None:
    """Its vocabulary is shifted by one, and has no end of sequence."""
    words = {"<none>": 0, **{f"w{i}": i + 1 for i in range(2, 99)}, "w99": 99}
    shifted = Tokenizer(models.WordLevel(words, unk_token="<none>"))
    shifted.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=shifted, pad_token="<none>")
    seen: list[list[int]] = []
    model = tiny.classifier(3)
    forward = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: seen.append(ids.flatten().tolist()) or forward(ids)
    train(tmp_path, model, {"reward_processing_classes": own})
    scored = seen  # all of them: a model with a forward of the user's is not tried with packed samples
    assert scored and all(token == 0 or token >= 3 for call in scored for token in call), "read with the policy's ids"


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda n: [float("nan")] * n, "returned nan for sample 0"),
        (lambda n: [1.0] * (n - 1), "returned 7 scores for 8 completions"),
        (lambda n: [None] * n, r"'odd' returned None for sample 0 of the batch \(prompt 'w.*skip_nonfinite_updates"),
        (lambda n: "good", "must return a list of numbers"),
        (lambda n: 1 / 0, "reward function 'odd' raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_reward_that_cannot_be_trained_on_is_named_untrained(tmp_path: Path, returned: Any, sentence: str) -> None:
    def odd(completions: list[str], **columns: Any) -> Any:
        return returned(len(completions))

    made = tiny.trainer(tmp_path, given={"reward_model": odd})
    before = {name: tensor.clone() for name, tensor in made.policy_model.named_parameters()}
    with pytest.raises(JobFailed, match=sentence):
        made.train()
    assert all(torch.equal(tensor, made.policy_model.get_parameter(name)) for name, tensor in before.items())


def test_a_text_that_a_reward_model_cannot_read_is_named_before_the_model_runs() -> None:
    """Its own tokenizer may make more tokens of a sample than the policy's."""
    samples = Rollouts(index=torch.tensor([4, 7]), responses=Ragged.of([[2], [3]], torch.long))
    scored: list[Rollouts] = []
    tokens = Ragged.of([[5] * 9, [5] * 8], torch.long)
    for positions in (8, 9):
        model = ModelReward("judge", lambda given: scored.append(given) or {}, tokens=tokens, positions=positions)
        refused = pytest.raises(RewardError, match="'judge' can read 8 tokens, and sample 4 of the batch has 9 by its")
        with refused if positions == 8 else contextlib.nullcontext():
            model.score(samples, lambda: Texts([], [], {}))
    assert len(scored) == 1


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids"])
def test_a_column_by_the_name_of_another_argument_is_refused(tmp_path: Path, column: str) -> None:
    data = tiny.prompts(**{column: ["w2"] * 64})
    with pytest.raises(RewardError, match=f"train_dataset has the column '{column}', .*rename_column"):
        tiny.trainer(tmp_path, given={"train_dataset": data})
    tiny.trainer(tmp_path, given={"train_dataset": data, "reward_model": tiny.classifier(2)})


def test_a_function_that_asks_for_a_column_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    def reward(completions: list[str], answers: list[int]) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="takes 'answers'.*available are prompts, .*, completion_ids, answer"):
        tiny.trainer(tmp_path, given={"reward_model": reward, "train_dataset": tiny.prompts(64, answer=[1] * 64)})
    given = {"reward_model": reward, "train_dataset": tiny.prompts(64, answers=[1] * 64)}
    with pytest.raises(RewardError, match="takes 'answers', which is no column of eval_dataset; available are"):
        tiny.trainer(tmp_path, given={**given, "eval_dataset": tiny.prompts(4)})
    evaluation = {"a": tiny.prompts(4, answers=[1] * 4), "b": tiny.prompts(4)}
    with pytest.raises(RewardError, match="takes 'answers', which is no column of eval_dataset 'b'; available are"):
        tiny.trainer(tmp_path, given={**given, "eval_dataset": evaluation})


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/rm", "b/rm", "c/rm"], ["rm", "rm_2", "rm_3"]),
        (["a/rm", "b/rm_3", "c/rm"], ["rm", "rm_3", "rm_4"]),
        (["a/rm", "b/rm_2", "c/rm", "d/rm_2"], ["rm", "rm_2", "rm_3", "rm_2_2"]),
        (["a/rm", "b/rm_large", "c/rm"], ["rm", "rm_large", "rm_3"]),
    ],
)
def test_no_two_rewards_have_the_same_name(paths: list[str], names: list[str]) -> None:
    rewards = read_rewards(paths, lambda path: path, weights=range(len(paths)))
    assert [model.name for model in rewards.models] == names
    assert rewards.weights == {name: float(weight) for weight, name in enumerate(names)}


def test_weights_of_another_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="reward_weights has 1 entries for 2 rewards"):
        tiny.trainer(tmp_path, given={"reward_model": [tiny.short, tiny.short]}, reward_weights=[1.0])
