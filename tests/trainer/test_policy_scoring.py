"""Reward models of GRPO and RLOO that score completions while others are generated, by the texts that TRL will make."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from recorded_rollouts import make, result
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import trl_realloc
from trl_realloc.algorithms.async_functions import is_async
from trl_realloc.algorithms.rollout import Rollouts
from trl_realloc.plan.cluster import Cluster
from trl_realloc.plan.presets import resolve_plan
from trl_realloc.plan.streams import Streams
from trl_realloc.runtime.call_server import CallServer


# "assistant" and other names of the template are no words of the tokenizer
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if loud %}w9{% endif %}"


def other_tokenizer() -> PreTrainedTokenizerFast:
    """The words of `tiny.tokenizer` with ids that it does not have."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{at}": 3 * tiny.VOCABULARY - at for at in range(2, tiny.VOCABULARY)}}
    whole_words = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    whole_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=whole_words, eos_token="<eos>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


def reward_models() -> dict[str, Any]:
    """Two, the second with a larger vocabulary and a tokenizer of its own; and a function between them."""
    first, second = tiny.classifier(1), tiny.classifier(2, vocab_size=3 * tiny.VOCABULARY)
    for model in (first, second):
        torch.nn.init.normal_(model.score.weight)
    return {
        "reward_funcs": [first, lambda completions, **_: [float(len(of)) for of in completions], second],
        "reward_processing_classes": [tiny.tokenizer(), None, other_tokenizer()],
    }


def conversations() -> Any:
    return tiny.prompts(32).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("is_conversation", [False, True], ids=["texts", "conversations"])
def test_what_was_scored_with_the_generation_is_what_trl_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_conversation: bool
) -> None:
    later: list[int] = []
    perform = CallServer._perform

    def counted(self: CallServer, name: str, own: Rollouts, *args: Any, **options: Any) -> Rollouts:
        if name == "reward.forward":
            later.append(len(own))
        return perform(self, name, own, *args, **options)

    monkeypatch.setattr(CallServer, "_perform", counted)

    def trained(plan: Any) -> Any:
        data = {"train_dataset": conversations()} if is_conversation else {}
        settings: dict[str, Any] = {"chat_template_kwargs": {"loud": True}} if is_conversation else {}
        given = {**reward_models(), **data}
        made = make(trl_realloc, tmp_path, kind=kind, base=lambda own: own, given=given, plan=plan, **settings)
        made.train()
        made.close()
        return result(made)

    graph = trl_realloc.plan.algorithm_graphs.grpo_graph(reference=kind == "RLOO")
    plan = resolve_plan("flatten", Cluster(1, 1), generation_engine="transformers", graph=graph).to_dict()
    expected = trained(plan)
    assert any(later), "the models are asked"
    later.clear()
    streamed = trained({**plan, "streams": Streams().to_dict() or True})
    assert later and not any(later), "and have been asked before"
    assert len(streamed.logs) == len(expected.logs)
    for row, other in zip(streamed.logs, expected.logs, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5, nan_ok=True)
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(streamed.weights[name], tensor, rtol=1e-6, atol=1e-6)


def test_objects_and_partial_functions_may_be_async() -> None:
    class Judge:
        async def __call__(self, **given: Any) -> list[float]:
            return []

    async def judge(**given: Any) -> list[float]:
        return []

    assert all(map(is_async, (judge, partial(judge, by=3), Judge(), partial(Judge(), by=3))))
    assert not any(map(is_async, (other_tokenizer, partial(other_tokenizer), dict)))
