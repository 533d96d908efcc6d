"""The demo's training: PPO from a recipe, as one would write it for models and data of one's own.

accelerate launch --config_file recipes/demo/accelerate.yaml examples/demo/train.py --config recipes/demo/ppo.yaml
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_from_disk
from rich.console import Console
from stories import right_end
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from trl_realloc import PPOConfig, PPOTrainer
from trl_realloc.cli.main import plan_table
from trl_realloc.cli.recipe_parser import parse_recipe, run
from trl_realloc.trainer.report.callbacks import CompactProgress, MetricsWriter


@dataclass
class DemoArguments:
    """What the demo reads besides `PPOConfig`.

    Args:
        dataset_path: a dataset on disk with a `prompt` column and the splits `train` and `test`.
    """

    dataset_path: str = field(metadata={"help": "A dataset on disk with a `prompt` column."})


def main() -> None:
    disable_progress_bar()  # of loading a small model: two lines of noise for each
    script, args = parse_recipe((DemoArguments, PPOConfig))
    tokenizer = AutoTokenizer.from_pretrained(args.sft_model_path, padding_side="left")
    prompts = load_from_disk(script.dataset_path)
    folder = Path(args.output_dir)
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=args.sft_model_path,
        ref_model=None,
        # a learned model of what people prefer, and a check that no text can fool
        reward_model=[args.reward_model_path, right_end],
        value_model=args.reward_model_path,  # a critic that starts from the reward model knows what is valued
        train_dataset=prompts["train"],
        eval_dataset=prompts["test"],
        callbacks=[MetricsWriter(folder / "metrics.jsonl")],
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(CompactProgress())
    speaks = trainer.accelerator.is_main_process
    if speaks and args.plan != "auto":  # the planner has said what it chose
        Console().print(plan_table(trainer.plan))
    before = trainer.generate_completions(sampling=True)
    trainer.train()
    after = trainer.generate_completions(sampling=True)
    trainer.save_model()
    if speaks:
        completions: dict[str, list[dict[str, Any]]] = {"before": before, "after": after}
        (folder / "completions.json").write_text(json.dumps(completions, indent=1), encoding="utf-8")


if __name__ == "__main__":
    run(main)
