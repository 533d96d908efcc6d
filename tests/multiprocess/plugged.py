"""A rank of TRL's own GRPOTrainer with planned generation, of which one rank takes more turns with a tool."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tiny
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_realloc import plug
from trl_realloc.engines.training.deepspeed_compat import leave_out_shared_memory_op
from trl_realloc.runtime.failures.alarm import JobFailed


# what TRL asks of a template: tool calls, tool messages, and what came before stays as it was
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} "
    "{% for c in m.tool_calls or [] %}{{ c['function'] | tojson }} {% endfor %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "w7"}}}


def look_up(word: str) -> str:
    """Looks a word up.

    Args:
        word: to look up.
    """
    return f"{word} w8 w9"


class Trainer(GRPOTrainer):
    """TRL's trainer with a policy that asks for the tool: in `caller`'s first sample, at the start of each generation.
    What follows is TRL's."""

    caller = 0

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any) -> Any:
        logprobs = rest[0]
        if self.accelerator.process_index == self.caller:
            completion_ids[0], logprobs[0] = completion_ids[0][:3], logprobs[0][:3]
            completions[0][-1]["tool_calls"] = [CALL]
        return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest)


class KillEngine(TrainerCallback):
    """Kills this rank's engine after the first optimizer step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        os.kill(generation.engine._process.pid, signal.SIGKILL)


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    made.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    return made


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(messages[0]["content"]) % 5) for messages in completions]


folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
leave_out_shared_memory_op()  # which TRL's arguments would compile under a launcher's config of DeepSpeed
args = GRPOConfig(
    output_dir=str(folder / "out"),
    **{**tiny.BARE, "use_cpu": given["use_cpu"]},
    ddp_backend="gloo",  # without it Accelerate takes DeepSpeed's processes on CPUs for unrelated ones
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=16,
    max_steps=2,
    learning_rate=1e-2,
    temperature=0.9,
    ddp_timeout=120,
)
Trainer.caller = given["caller"]
made = Trainer(
    model=tiny.policy(),
    reward_funcs=reward,
    args=args,
    train_dataset=Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(2, 34)]}
    ),
    processing_class=tokenizer(),
    tools=[look_up],
)
rank = made.accelerator.process_index
generation = plug(made, given["plan"])
turns: list[int] = []
generate = generation.generate


def counted(prompts: Any, *rest: Any, **more: Any) -> Any:
    turns.append(len(prompts))
    return generate(prompts, *rest, **more)


generation.generate = counted  # type: ignore[method-assign]
if given.get("killed") == rank:
    made.add_callback(KillEngine())
failure = ""
try:
    made.train()
except (JobFailed, RuntimeError) as error:
    failure = str(error)
    raise
finally:
    has_engine = generation.engine is not None
    found = {"turns": turns, "engine": has_engine, "failure": failure, "logs": made.state.log_history}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
generation.close()
