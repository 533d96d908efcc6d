"""The demo's training by GRPO from a recipe; the reward is the check of a story's end. `train_rloo.py` is the same by
RLOO.

accelerate launch --config_file recipes/demo/accelerate.yaml examples/demo/train_grpo.py --config recipes/demo/grpo.yaml
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_from_disk
from rich.console import Console
from stories import right_end
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.utils.logging import disable_progress_bar

from trl_realloc import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_realloc.cli.main import plan_table
from trl_realloc.cli.recipe_parser import parse_recipe, run
from trl_realloc.trainer.report.callbacks import CompactProgress, MetricsWriter


@dataclass
class DemoArguments:
    """What the demo reads besides the trainer's configuration.

    Args:
        model_name_or_path: the policy.
        dataset_path: a dataset on disk with a `prompt` column and the splits `train` and `test`.
    """

    model_name_or_path: str = field(metadata={"help": "The policy."})
    dataset_path: str = field(metadata={"help": "A dataset on disk with a `prompt` column."})


def train(
    trainer_class: type[GRPOTrainer | RLOOTrainer] = GRPOTrainer,
    config_class: type[GRPOConfig | RLOOConfig] = GRPOConfig,
) -> None:
    disable_progress_bar()  # of loading a small model: two lines of noise for each
    script, args = parse_recipe((DemoArguments, config_class))
    prompts = load_from_disk(script.dataset_path)
    folder = Path(args.output_dir)
    trainer = trainer_class(
        model=script.model_name_or_path,
        reward_funcs=right_end,  # 1 for the right end of a story, word for word, and 0 for anything else
        args=args,
        train_dataset=prompts["train"],
        eval_dataset=prompts["test"],
        processing_class=AutoTokenizer.from_pretrained(script.model_name_or_path, padding_side="left"),
        callbacks=[MetricsWriter(folder / "metrics.jsonl")],
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(CompactProgress())
    speaks = trainer.accelerator.is_main_process
    if speaks and args.plan != "auto":  # the planner has said what it chose
        Console().print(plan_table(trainer.plan))
    before = trainer.generate_completions()
    trainer.train()
    after = trainer.generate_completions()
    trainer.save_model()
    if speaks:
        rows = json.dumps({"before": before, "after": after}, indent=1)
        (folder / "completions.json").write_text(rows, encoding="utf-8")


if __name__ == "__main__":
    run(train)
