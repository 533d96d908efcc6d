"""A trainer whose tiny policy calls tools, by the tokens that a real vLLM engine draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_groups
from datasets import Dataset


TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} {% for c in m.get('tool_calls') or [] %}{{ c['function']['name'] }} "
    "{{ c['function']['arguments'] }} {% endfor %}{% endfor %}"
)
PROMPTS = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{a} w{a + 7}"}] for a in range(2, 34)]})
STOPS = list(range(2, 30))  # each token ends a turn with a probability of about 0.3


def message(_: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    """A message that calls a tool, or two, in most cases."""
    names = [[], ["look_up"], ["look_up", "wait_for"], ["wait_for"]][sum(ids) % 4] if len(ids) else []
    calls = [{"type": "function", "function": {"name": name, "arguments": {"word": ids[0]}}} for name in names]
    return {"role": "assistant", "content": " ".join(f"w{i}" for i in ids)} | ({"tool_calls": calls} if calls else {})


def scored(completions: list[Any], **columns: Any) -> list[float]:
    return [float(sum(len(message["content"].split()) for message in completion) % 5) for completion in completions]


def trainer(folder: Path, monkeypatch: pytest.MonkeyPatch, tools: list[Any], **changes: Any) -> Any:
    """A GRPO trainer with these tools."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.parse_response", message)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {"type": "object"}
    given = {"tools": tools, "processing_class": tokenizer, "train_dataset": PROMPTS, "reward_funcs": scored}
    given |= changes.pop("given", {})
    sizes = {"max_completion_length": 40, "use_vllm": True, "generation_kwargs": {"stop_token_ids": STOPS}}
    return tiny_groups.trainer(folder, given=given, **{**sizes, "max_steps": 1, **changes})
