"""GRPO of SmolLM2 on a task of reasoning-gym, from a recipe: of all its weights, or of adapters (`use_peft`), also over
4-bit weights (`load_in_4bit`).

python examples/smollm2/train_grpo.py --config recipes/smollm2/grpo.yaml
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from tasks import held_out_rows, right_answer, training_rows
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_realloc import GRPOConfig, GRPOTrainer
from trl_realloc.cli.recipe_parser import parse_recipe, run
from trl_realloc.trainer.report.callbacks import CompactProgress, MetricsWriter


@dataclass
class Arguments:
    """What the script reads besides `GRPOConfig` and TRL's `ModelConfig`."""

    task: str = field(metadata={"help": "A key of `tasks.TASKS`."})


def main() -> None:
    script, args, model = parse_recipe((Arguments, GRPOConfig, ModelConfig))
    folder = Path(args.output_dir)
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=right_answer,
        args=args,
        train_dataset=Dataset.from_list(training_rows(script.task, 1000)),
        eval_dataset=Dataset.from_list(held_out_rows(script.task)),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left"),
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
        callbacks=[MetricsWriter(folder / "metrics.jsonl")],
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(CompactProgress())
    before = trainer.generate_completions()
    trainer.train()
    after = trainer.generate_completions()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        rows = json.dumps({"before": before, "after": after}, indent=1)
        (folder / "completions.json").write_text(rows, encoding="utf-8")


if __name__ == "__main__":
    run(main)
