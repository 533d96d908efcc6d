"""Makes what the demo trains on: text, tokenizer, a pre-trained Llama, a reward model and prompts.

    python examples/demo/prepare.py --out runs/demo/assets

Everything is really made here, in under three minutes on two cores, and nothing is fetched: the text is Python's own
documentation (`corpus.py`), the preferences are derived from it (`preferences.py`). A second call finds the work done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import SOURCE, sentences
from datasets import Dataset, DatasetDict, disable_progress_bars
from preferences import Preference, cut, make_preferences
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.utils import logging


CODE = [Path(__file__).with_name(name) for name in ("corpus.py", "preferences.py", "prepare.py")]


@dataclass(frozen=True)
class Settings:
    """What the assets are made with; `effort` multiplies the steps and pairs, so that 0.02 is a rehearsal."""

    effort: float = 1.0
    seed: int = 0
    vocab_size: int = 2000
    context_length: int = 128
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    pretrain_steps: int = 600
    pretrain_batch: int = 32
    pretrain_learning_rate: float = 3e-3
    reward_pairs: int = 3000
    reward_batch: int = 32
    reward_learning_rate: float = 1e-3
    held_out: int = 1200
    eval_prompts: int = 64
    sample_tokens: int = 40

    def scaled(self, number: int) -> int:
        return max(2, round(self.effort * number))

    def made_with(self) -> dict[str, Any]:
        """What decides the outcome: these settings, the interpreter (it brings the text) and this code."""
        code = b"".join(path.read_bytes() for path in CODE)
        return asdict(self) | {"python": platform.python_version(), "code": hashlib.sha256(code).hexdigest()[:16]}


console = Console(highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("runs/demo/assets"), help="the folder to fill")
    parser.add_argument("--force", action="store_true", help="make everything again, even if it is there")
    parser.add_argument("--effort", type=float, default=1.0, help="fraction of the training to do (0.02: a rehearsal)")
    arguments = parser.parse_args()
    if not 0 < arguments.effort <= 10:
        parser.error(f"--effort is {arguments.effort}; give a number above 0 and up to 10.")
    prepare(arguments.out, Settings(effort=arguments.effort), arguments.force)


def prepare(out: Path, settings: Settings, force: bool = False) -> dict[str, Any]:
    """Fill `out` with `policy/`, `reward/` (each with the tokenizer), `prompts/` and `assets.json`, written last.

    Returns:
        The content of assets.json: `made_with` and the measured `figures`.
    """
    manifest = out / "assets.json"
    made_with = settings.made_with()
    if manifest.exists() and not force:
        saved: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        if saved["made_with"] == made_with:
            console.print(f"The assets in {out} are complete and made with these settings (--force makes them anew).")
            return saved
    manifest.unlink(missing_ok=True)
    logging.disable_progress_bar()
    disable_progress_bars()
    set_seed(settings.seed)
    started = time.perf_counter()

    text = sentences()
    random.Random(settings.seed).shuffle(text)
    text, unseen = text[settings.held_out :], text[: settings.held_out]
    console.print(f"[bold]text[/]       {len(text):,} sentences, {sum(map(len, text)) / 1e3:.0f} kB, from {SOURCE}")
    tokenizer = train_tokenizer(text, settings)
    console.print(f"[bold]tokenizer[/]  byte-level BPE, {len(tokenizer):,} tokens")

    policy = build_policy(tokenizer, settings)
    figures: dict[str, float] = {"parameters": policy.num_parameters()}
    figures |= pretrain(policy, tokenizer, text, unseen, settings)
    save(policy, tokenizer, out / "policy")

    reward = build_reward(out / "policy")
    figures |= train_reward(reward, policy, tokenizer, text, unseen, settings)
    save(reward, tokenizer, out / "reward")

    prompts = DatasetDict(
        train=prompt_dataset(unseen[settings.eval_prompts :], settings.seed),
        test=prompt_dataset(unseen[: settings.eval_prompts], settings.seed),
    )
    shutil.rmtree(out / "prompts", ignore_errors=True)
    prompts.save_to_disk(out / "prompts")
    figures["seconds"] = time.perf_counter() - started
    console.print(f"[bold]prompts[/]    {len(prompts['train'])} to train on, {len(prompts['test'])} to look at")
    console.print(f"All of it in {figures['seconds']:.0f} s, in {out}")
    manifest.write_text(json.dumps({"made_with": made_with, "figures": figures}, indent=2) + "\n", encoding="utf-8")
    return {"made_with": made_with, "figures": figures}


def train_tokenizer(text: Sequence[str], settings: Settings) -> PreTrainedTokenizerFast:
    """Byte-level BPE (so nothing is unknown) with a pad token that is not the end token, padding on the left."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=settings.vocab_size,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=settings.context_length,
        clean_up_tokenization_spaces=False,
    )


def build_policy(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.num_hidden_layers,
            num_attention_heads=settings.num_attention_heads,  # heads of 32, the smallest that vLLM takes on a CPU
            max_position_embeddings=settings.context_length,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pretrain(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    text: Sequence[str],
    unseen: Sequence[str],
    settings: Settings,
) -> dict[str, float]:
    """Next-token prediction on single sentences ended by the end token, so that the model learns to end them.

    Returns:
        `pretrain_loss_first`, `pretrain_loss_unseen` (nats per token, the latter on held-out text), `pretrain_tokens_per_s`.
    """
    ids = [tokenizer(line).input_ids + [tokenizer.eos_token_id] for line in text]
    pad = tokenizer.pad_token_id
    steps = settings.scaled(settings.pretrain_steps)
    batches = by_length(ids, settings.pretrain_batch, settings.seed)
    policy.train()
    losses: list[float] = []
    tokens, started = 0, time.perf_counter()
    with bar(f"pre-training, {policy.num_parameters() / 1e6:.1f}M parameters", steps) as progress:
        for _ in optimise(policy, settings.pretrain_learning_rate, steps):
            batch = padded(next(batches), pad)
            loss = token_loss(policy, batch, pad)
            loss.backward()
            losses.append(loss.item())
            tokens += int((batch != pad).sum())
            speed = tokens / (time.perf_counter() - started)
            progress(f"loss {mean(losses[-20:]):.2f}  {speed:,.0f} tokens/s")
    policy.eval()
    held = [tokenizer(line).input_ids + [tokenizer.eos_token_id] for line in unseen[:256]]
    with torch.no_grad():
        after = token_loss(policy, padded(held, pad), pad).item()
    console.print(f"[bold]language[/]   loss {losses[0]:.2f} -> {after:.2f} on unseen sentences, {speed:,.0f} tokens/s")
    return {"pretrain_loss_first": losses[0], "pretrain_loss_unseen": after, "pretrain_tokens_per_s": speed}


def token_loss(policy: LlamaForCausalLM, batch: torch.Tensor, pad: int) -> torch.Tensor:
    """Mean cross-entropy of the real tokens of `batch`, (sequences, tokens) int64, right-padded."""
    logits = policy(input_ids=batch).logits[:, :-1]  # causal: padding on the right is seen by no real token
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=pad)


def build_reward(policy_folder: Path) -> LlamaForSequenceClassification:
    """The pre-trained body with a head of one number that starts at 0."""
    logging.set_verbosity_error()  # the new head is reported as missing weights, which it is
    reward = LlamaForSequenceClassification.from_pretrained(policy_folder, num_labels=1)
    logging.set_verbosity_warning()
    torch.nn.init.zeros_(reward.score.weight)
    return reward


def train_reward(
    reward: LlamaForSequenceClassification,
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    text: Sequence[str],
    unseen: Sequence[str],
    settings: Settings,
) -> dict[str, float]:
    """Bradley-Terry: -log sigmoid(score(chosen) - score(rejected)), then scores scaled so that the policy's own
    samples have a standard deviation of 1.

    Returns:
        `reward_accuracy` on unseen pairs, and by kind; `score_real`, `score_sampled`, mean scores of unseen text and
        of the policy's samples for the same prompts, in those standard deviations.
    """
    with console.status("the policy writes what will be rejected"):
        pairs = make_preferences(
            policy, tokenizer, text[: settings.scaled(settings.reward_pairs)], settings.sample_tokens, settings.seed
        )
        trials = make_preferences(
            policy, tokenizer, unseen[: settings.scaled(512)], settings.sample_tokens, settings.seed + 1
        )
    pad = tokenizer.pad_token_id
    order = by_length(pairs, settings.reward_batch, settings.seed)
    steps = math.ceil(len(pairs) / settings.reward_batch)
    reward.train()
    margins: list[float] = []
    with bar("reward model, chosen over rejected", steps) as progress:
        for _ in optimise(reward, settings.reward_learning_rate, steps):
            margin = margin_of(reward, next(order), pad)
            (-F.logsigmoid(margin)).mean().backward()
            margins += (margin.detach() > 0).float().tolist()
            progress(f"right {mean(margins[-320:]):.0%} of the last pairs")
    reward.eval()
    with torch.no_grad():
        right = (margin_of(reward, trials, pad) > 0).tolist()
        sampled = [pair for pair in trials if pair.kind == "sampled"]
        rejected = scores(reward, [pair.rejected for pair in sampled], pad)
        chosen = scores(reward, [pair.chosen for pair in sampled], pad)
        reward.score.weight /= rejected.std()
    figures = {"reward_accuracy": mean(right)}
    for kind in dict.fromkeys(pair.kind for pair in trials):
        figures[f"reward_accuracy_{kind}"] = mean([r for r, p in zip(right, trials, strict=True) if p.kind == kind])
    figures |= {
        "score_real": (chosen.mean() / rejected.std()).item(),
        "score_sampled": (rejected.mean() / rejected.std()).item(),
    }
    kinds = ", ".join(f"{name[16:]} {share:.0%}" for name, share in figures.items() if name[15:16] == "_")
    console.print(
        f"[bold]reward[/]     prefers the documentation in {figures['reward_accuracy']:.0%} of {len(trials)} unseen "
        f"pairs ({kinds});\n           mean score {figures['score_real']:+.2f} for the documentation, "
        f"{figures['score_sampled']:+.2f} for what the policy writes (standard deviation 1)"
    )
    return figures


def margin_of(reward: Any, pairs: Sequence[Preference], pad: int) -> torch.Tensor:
    """Score of chosen less score of rejected, (pairs,) float32."""
    both = scores(reward, [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad)
    return both[: len(pairs)] - both[len(pairs) :]


def scores(reward: Any, rows: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """One score per row, (rows,) float32, read at the last token that is not padding."""
    batch = padded(rows, pad)
    return reward(input_ids=batch, attention_mask=batch != pad).logits[:, 0]  # type: ignore[no-any-return]


def prompt_dataset(text: Sequence[str], seed: int) -> Dataset:
    """A `prompt` column: how each sentence begins."""
    rng = random.Random(seed)
    return Dataset.from_dict({"prompt": [cut(line, rng)[0] for line in text]})


@contextmanager
def bar(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar; what it yields advances it by one step and says how things stand."""
    columns = TextColumn(f"{title:<36}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=steps)
        yield lambda standing: progress.update(task, advance=1, description=standing)


def optimise(model: torch.nn.Module, learning_rate: float, steps: int) -> Iterator[int]:
    """Counts steps; after each, clips the gradients and takes an AdamW step on a short warm-up and a cosine to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    for step in range(steps):
        yield step
        rate = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def by_length(rows: Sequence[Any], size: int, seed: int) -> Iterator[list[Any]]:
    """Endless batches of rows of like length (some 10% padding, where a random batch has half), in a seeded order."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(range(len(rows)), len(rows))
        for start in range(0, len(order), 16 * size):
            near = sorted(order[start : start + 16 * size], key=lambda at: len(rows[at]))
            batches = [near[at : at + size] for at in range(0, len(near), size)]
            rng.shuffle(batches)
            yield from ([rows[at] for at in batch] for batch in batches)


def padded(rows: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """(rows, longest) int64, padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
