"""What the demo needs, made from nothing: text, a tokenizer, a small Llama really pre-trained on it, a reward model
trained on preferences derived from it, and prompts.

The text is what every CPython carries: the reference documentation (`pydoc_data.topics`) and the docstrings of the
standard library, some 480 kB of prose, under the PSF licence.

python examples/demo/prepare.py --out runs/demo/assets
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import platform
import random
import re
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data import topics

import torch
from datasets import Dataset, DatasetDict
from datasets.utils.logging import disable_progress_bar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging


VOCABULARY = 1000
LONGEST = 64  # tokens of a sentence
PRETRAIN_SECONDS, REWARD_SECONDS = 70.0, 35.0
console = Console()


def sentences() -> list[str]:
    """The prose of the reference documentation and of the standard library's docstrings, sentence by sentence: no
    code, grammar or tables."""
    found: dict[str, None] = {}
    for text in [*topics.topics.values(), *docstrings()]:
        for paragraph in re.split(r"\n\s*\n", text):
            prose = re.sub(r"[“”\"*`]|\[\d+\]", "", " ".join(paragraph.split())).replace("’", "'").replace("…", "...")
            for sentence in re.split(r"(?<=[a-z)]\.)\s+(?=[A-Z])", prose):
                like_prose = re.match(r"[A-Z].*[a-z)]\.$", sentence) and not re.search(r">>>|[|{}<>=\\_]", sentence)
                if 40 <= len(sentence) <= 180 and sentence.isascii() and like_prose:
                    found[sentence] = None
    return list(found)


def docstrings() -> Iterator[str]:
    """Those of the standard library's modules, read without importing them."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 1,000 entries, with tokens of their own for padding and end of sequence."""
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


def train_for(
    what: str,
    seconds: float,
    model: torch.nn.Module,
    rate: float,
    batches: Iterator[object],
    loss_of: Callable[[object], tuple[torch.Tensor, int]],
) -> None:
    """AdamW on `batches` for so many seconds, the rate falling to zero by the clock; a bar with loss and tokens/s."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    model.train()
    start, tokens, smooth = time.monotonic(), 0, None
    columns = (TextColumn("{task.description:22}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=seconds, now="")
        while (elapsed := time.monotonic() - start) < seconds:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, elapsed / (0.05 * seconds)) * (1 - elapsed / seconds)
            loss, count = loss_of(next(batches))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens += count
            smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
            now = f"loss {smooth:.3f}  {tokens / (time.monotonic() - start):,.0f} tokens/s"
            progress.update(task, completed=min(seconds, elapsed), now=now)
        progress.update(task, completed=seconds)
    model.eval()


def pretrain(rows: Sequence[Sequence[int]], config: LlamaConfig, seconds: float) -> LlamaForCausalLM:
    """Next-token prediction on single sentences, each ended by eos: so the model learns to end."""
    model = LlamaForCausalLM(config)
    draw = random.Random(0)

    def batches() -> Iterator[object]:
        while True:
            order = sorted(draw.sample(range(len(rows)), 512), key=lambda at: len(rows[at]))  # like lengths together
            for start in draw.sample(range(0, 512, 32), 16):
                yield [rows[at] for at in order[start : start + 32]]

    def loss_of(batch: object) -> tuple[torch.Tensor, int]:
        assert isinstance(batch, list)
        ids, labels = rectangle(batch, config.pad_token_id), rectangle(batch, -100)
        loss = model(input_ids=ids, attention_mask=(labels != -100).long(), labels=labels).loss
        return loss, sum(map(len, batch))

    train_for("pre-training", seconds, model, 3e-3, batches(), loss_of)
    return model


def spoil(words: list[str], draw: random.Random) -> tuple[str, bool]:
    """The end of a sentence made worse, and whether the end token follows: shuffled, broken off, or never ended."""
    kind = draw.choices(("shuffled", "broken off", "unended"), (4, 3, 3))[0]
    if kind == "shuffled":
        return " ".join(draw.sample(words, len(words))), True
    return " ".join(words[: draw.randrange(1, max(2, len(words)))]), kind == "broken off"


def train_reward(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, policy: LlamaForCausalLM, seconds: float
) -> tuple[LlamaForSequenceClassification, float]:
    """Bradley-Terry on pairs (the real end of a sentence, a worse one): spoiled, or babbled by the policy itself.

    Scores are then scaled so that what the policy writes at temperature 1 has a standard deviation of 1.

    Returns the model and the share of held-out pairs that it orders rightly.
    """
    names = {"id2label": {0: "reward"}, "label2id": {"reward": 0}}
    model = LlamaForSequenceClassification(LlamaConfig(**{**policy.config.to_dict(), **names}))
    model.model.load_state_dict(policy.model.state_dict())
    draw = random.Random(1)
    pairs, held_out = (make_pairs(part, tokenizer, policy, draw) for part in (texts[400:3400], texts[:400]))

    def margin(batch: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
        both = [row for pair in batch for row in pair]
        ids = rectangle(both, model.config.pad_token_id)
        scores = model(input_ids=ids, attention_mask=(rectangle(both, -1) != -1).long()).logits[:, 0]
        return scores[0::2] - scores[1::2]

    def batches() -> Iterator[object]:
        while True:
            order = sorted(draw.sample(pairs, min(256, len(pairs))), key=lambda pair: max(map(len, pair)))
            for start in draw.sample(range(0, len(order), 16), -(-len(order) // 16)):
                yield order[start : start + 16]

    def loss_of(batch: object) -> tuple[torch.Tensor, int]:
        assert isinstance(batch, list)
        return -logsigmoid(margin(batch)).mean(), sum(len(a) + len(b) for a, b in batch)

    train_for("training the reward", seconds, model, 1e-3, batches(), loss_of)
    with torch.no_grad():
        right = sum(int((margin(held_out[at : at + 64]) > 0).sum()) for at in range(0, len(held_out), 64))
        own = babble(policy, tokenizer, [" ".join(text.split()[:4]) for text in texts[:256]], 1.0)
        ids = rectangle(own, model.config.pad_token_id)
        model.score.weight /= model(input_ids=ids, attention_mask=(rectangle(own, -1) != -1).long()).logits.std()
    return model, right / len(held_out)


def make_pairs(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, policy: LlamaForCausalLM, draw: random.Random
) -> list[tuple[list[int], list[int]]]:
    """(better, worse) token ids, one pair for each text: half of the worse ends are spoiled, half the policy's own at
    temperature 1.4: made-up words, which the reward must dislike more than anything, for PPO will offer them first."""
    eos = tokenizer.eos_token_id
    pairs, starts = [], []
    for number, text in enumerate(texts):
        words = text.split()
        cut = draw.randint(2, max(2, min(8, len(words) // 2)))
        start, good = " ".join(words[:cut]), tokenizer(text)["input_ids"] + [eos]
        if number % 2:
            starts.append((start, good[:LONGEST]))
            continue
        end, ended = spoil(words[cut:], draw)
        bad = tokenizer(f"{start} {end}")["input_ids"] + [eos] * ended
        pairs.append((good[:LONGEST], bad[:LONGEST]))
    for at in range(0, len(starts), 128):
        batch = starts[at : at + 128]
        made = babble(policy, tokenizer, [start for start, _ in batch], 1.4)
        pairs += [(good, row[:LONGEST]) for (_, good), row in zip(batch, made, strict=True)]
    draw.shuffle(pairs)
    return pairs


def babble(
    policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, starts: Sequence[str], temperature: float
) -> list[list[int]]:
    """Starts and what the policy makes of them in 40 tokens, without padding."""
    ids = tokenizer(list(starts), return_tensors="pt", padding=True)
    made = policy.generate(
        input_ids=ids["input_ids"],
        attention_mask=ids["attention_mask"],
        max_new_tokens=40,
        do_sample=True,
        temperature=temperature,
        top_k=0,  # all of the vocabulary, as PPO samples; 50 is the library's default
    )
    return [[token for token in row if token != tokenizer.pad_token_id] for row in made.tolist()]


def make_prompts(texts: Sequence[str], draw: random.Random) -> Dataset:
    """The first two to five words of sentences."""
    prompts = [" ".join(text.split()[: draw.randrange(2, 6)]) for text in texts]
    return Dataset.from_dict({"prompt": list(dict.fromkeys(prompts))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo/assets"))
    parser.add_argument("--force", action="store_true", help="make everything anew")
    parser.add_argument("--seconds", type=float, default=1.0, help="training time, as a multiple of the demo's")
    options = parser.parse_args()
    done = options.out / "complete"
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    made_with = f"python {platform.python_version()}, {options.seconds} of the training, code {code[:16]}\n"
    if done.is_file() and done.read_text() == made_with and not options.force:
        console.print(f"models and data are there already: {options.out} (--force makes them anew)")
        return
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    disable_progress_bar()
    hf_logging.disable_progress_bar()
    torch.manual_seed(0)
    texts = sentences()
    random.Random(0).shuffle(texts)
    test, unseen, train = texts[:64], texts[64:1064], texts[1064:]  # unseen: to prompt with
    tokenizer = make_tokenizer(train)
    rows = [tokenizer(text)["input_ids"][: LONGEST - 1] + [tokenizer.eos_token_id] for text in train]
    console.print(
        f"text: {len(texts):,} sentences, {sum(map(len, texts)) / 1000:.0f} kB, from Python's reference documentation "
        f"and docstrings (PSF licence); {sum(map(len, rows)):,} tokens"
    )
    policy = pretrain(rows, llama_config(tokenizer), PRETRAIN_SECONDS * options.seconds)
    reward, accuracy = train_reward([*unseen[:400], *train], tokenizer, policy, REWARD_SECONDS * options.seconds)
    console.print(f"reward model: orders {accuracy:.0%} of held-out pairs rightly")
    for model, name in ((policy, "policy"), (reward, "reward")):
        model.save_pretrained(options.out / name)
        tokenizer.save_pretrained(options.out / name)
    draw = random.Random(2)
    DatasetDict(train=make_prompts(unseen, draw), test=make_prompts(test, draw)).save_to_disk(options.out / "prompts")
    done.write_text(made_with)


if __name__ == "__main__":
    main()
