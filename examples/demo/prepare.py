"""What the demo needs, made from nothing: stories, a tokenizer, a small Llama really pre-trained on them, a reward
model trained on preferences, and prompts.

The policy learns from stories of which 3 in 10 end rightly and 5 in 10 repeat the last number (stories.py). The reward
model learns to prefer right ends to flawed ones.

python examples/demo/prepare.py --out runs/demo/assets
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from datasets.utils.logging import disable_progress_bar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from stories import FLAWS, Story, any_end, draw_story, flawed_end
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging


VOCABULARY = 1000
PRETRAIN_STEPS, PRETRAIN_BATCH = 500, 32  # batches are of stories
REWARD_STEPS, REWARD_BATCH = 200, 16  # of pairs of stories
TRAIN_PROMPTS, TEST_PROMPTS = 1000, 64
LINES_EVERY_S = 15.0
console = Console()


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 1,000 entries, with tokens of their own for padding and end of sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", model_max_length=256
    )


def llama_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """3.3 million parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def rectangle(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def fit(
    what: str,
    steps: int,
    model: torch.nn.Module,
    rate: float,
    batches: Iterator[object],
    loss_of: Callable[[object], tuple[torch.Tensor, int]],
) -> None:
    """AdamW for so many steps, the rate falling to zero; a bar with loss and tokens/s, or lines where the output is no
    terminal.

    Steps, not seconds: a slow machine makes the same models as a fast one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    start, tokens, smooth = time.monotonic(), 0, None
    next_line = 0.0  # seconds from the start
    columns = (TextColumn("{task.description:22}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=steps, now="")
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / (0.05 * steps)) * (1 - step / steps)
            loss, count = loss_of(next(batches))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens += count
            smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
            seconds = time.monotonic() - start
            now = f"loss {smooth:.3f}  {tokens / seconds:,.0f} tokens/s"
            progress.update(task, advance=1, now=now)
            if not console.is_terminal and (seconds >= next_line or step + 1 == steps):
                console.print(f"{what}: step {step + 1} of {steps} after {seconds:.0f} s, {now}", highlight=False)
                next_line = seconds + LINES_EVERY_S
    model.eval()


def encode(tokenizer: PreTrainedTokenizerFast, story: Story, end: str, stops: bool) -> list[int]:
    """A prompt and its end as token ids, tokenized apart as generation has them; with eos where the story `stops`."""
    ids: list[int] = tokenizer(story.prompt)["input_ids"] + tokenizer(end)["input_ids"]
    return ids + [tokenizer.eos_token_id] * stops


def pretrain(tokenizer: PreTrainedTokenizerFast, config: LlamaConfig, steps: int) -> LlamaForCausalLM:
    """Next-token prediction of the ends of stories, right and flawed, new ones in every batch.

    The beginnings are random draws, so a loss on them would teach nothing.
    """
    model = LlamaForCausalLM(config)
    draw = random.Random(0)

    def batches() -> Iterator[object]:
        while True:
            stories = [draw_story(draw) for _ in range(PRETRAIN_BATCH)]
            yield [(story.prompt, encode(tokenizer, story, *any_end(story, draw))) for story in stories]

    def loss_of(batch: object) -> tuple[torch.Tensor, int]:
        assert isinstance(batch, list)
        rows = [row for _, row in batch]
        ids, labels = rectangle(rows, config.pad_token_id), rectangle(rows, -100)
        mask = (labels != -100).long()
        for at, (prompt, _) in enumerate(batch):
            labels[at, : len(tokenizer(prompt)["input_ids"])] = -100
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss, sum(map(len, rows))

    fit("pre-training", steps, model, 1e-3, batches(), loss_of)
    return model


def train_reward(
    tokenizer: PreTrainedTokenizerFast, policy: LlamaForCausalLM, steps: int
) -> tuple[LlamaForSequenceClassification, float]:
    """Bradley-Terry on pairs (the right end, a flawed one), from the policy's weights.

    Returns the model, its scores scaled to a standard deviation of 1, and the share of new pairs it orders rightly.
    """
    names = {"id2label": {0: "reward"}, "label2id": {"reward": 0}}
    model = LlamaForSequenceClassification(LlamaConfig(**{**policy.config.to_dict(), **names}))
    model.model.load_state_dict(policy.model.state_dict())
    draw = random.Random(1)

    def scores(rows: Sequence[list[int]]) -> torch.Tensor:
        ids = rectangle(rows, model.config.pad_token_id)
        out: torch.Tensor = model(input_ids=ids, attention_mask=(rectangle(rows, -1) != -1).long()).logits[:, 0]
        return out

    def batches() -> Iterator[object]:
        while True:
            yield [row for _ in range(REWARD_BATCH) for row in make_pair(tokenizer, draw)]

    def loss_of(batch: object) -> tuple[torch.Tensor, int]:
        assert isinstance(batch, list)
        both = scores(batch)
        return -logsigmoid(both[0::2] - both[1::2]).mean(), sum(map(len, batch))

    fit("training the reward", steps, model, 5e-4, batches(), loss_of)
    with torch.no_grad():
        held_out = scores([row for _ in range(256) for row in make_pair(tokenizer, draw)])
        model.score.weight /= held_out.std()
    return model, float((held_out[0::2] > held_out[1::2]).float().mean())


def make_pair(tokenizer: PreTrainedTokenizerFast, draw: random.Random) -> tuple[list[int], list[int]]:
    """Token ids of one story with its right end, and with a flawed one."""
    story = draw_story(draw)
    flawed = flawed_end(story, draw.choice(FLAWS), draw)
    return encode(tokenizer, story, story.end, True), encode(tokenizer, story, *flawed)


def make_prompts(draw: random.Random) -> DatasetDict:
    """Beginnings of stories; none of the test's is in the training's."""
    prompts = list(dict.fromkeys(draw_story(draw).prompt for _ in range(2 * (TRAIN_PROMPTS + TEST_PROMPTS))))
    train, test = prompts[TEST_PROMPTS:][:TRAIN_PROMPTS], prompts[:TEST_PROMPTS]
    return DatasetDict(train=Dataset.from_dict({"prompt": train}), test=Dataset.from_dict({"prompt": test}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo/assets"))
    parser.add_argument("--force", action="store_true", help="make everything anew")
    parser.add_argument("--steps", type=float, default=1.0, help="training steps, as a multiple of the demo's")
    options = parser.parse_args()
    done = options.out / "complete"
    sources = [Path(__file__), Path(__file__).with_name("stories.py")]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    made_with = f"python {platform.python_version()}, {options.steps} of the training, code {code[:16]}\n"
    if done.is_file() and done.read_text() == made_with and not options.force:
        console.print(f"models and data are there already: {options.out} (--force makes them anew)")
        return
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    disable_progress_bar()
    hf_logging.disable_progress_bar()
    torch.manual_seed(0)
    draw = random.Random(2)
    examples = [(story, *any_end(story, draw)) for story in (draw_story(draw) for _ in range(5000))]
    tokenizer = make_tokenizer([text for story, end, _ in examples for text in (story.prompt, end)])
    console.print("the policy is pre-trained on counting stories; 3 in 10 end rightly, 5 in 10 repeat the last number:")
    for story, end, _ in examples[:6]:
        console.print(f"  {story.prompt}[dim]{end}[/dim]", "[green]right[/green]" if end == story.end else "flawed")
    policy = pretrain(tokenizer, llama_config(tokenizer), int(PRETRAIN_STEPS * options.steps))
    reward, accuracy = train_reward(tokenizer, policy, int(REWARD_STEPS * options.steps))
    console.print(f"reward model: prefers the right end in {accuracy:.0%} of 256 new pairs")
    for model, name in ((policy, "policy"), (reward, "reward")):
        model.save_pretrained(options.out / name)
        tokenizer.save_pretrained(options.out / name)
    make_prompts(draw).save_to_disk(options.out / "prompts")
    done.write_text(made_with)


if __name__ == "__main__":
    main()
