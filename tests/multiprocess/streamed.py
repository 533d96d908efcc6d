"""A rank that trains the same run under several plans and writes what each of them drew, logged and trained."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from transformers import TrainerCallback

from trl_realloc.planner.dispatcher import Continue, Score


class Samples(TrainerCallback):
    """Collects the samples and the orders of each update on rank 0."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.samples: list[dict[str, Any]] = []
        self.moved, self.forwards = 0, 0

    def watch(self, trainer: Any) -> None:
        executor = trainer.executor
        run = executor.run

        def noted(*args: Any, **kwargs: Any) -> Any:
            iteration = run(*args, **kwargs)
            orders = executor.orders
            self.moved += sum(len(order.samples) for order in orders if isinstance(order, Continue))
            self.forwards += sum(isinstance(order, Score) for order in orders)
            if "responses" in iteration.samples:
                tokens = [row.tolist() for row in iteration.samples.ragged("responses").rows()]
                logprobs = [row.tolist() for row in iteration.samples.ragged("logprobs").rows()]
                self.samples.append({"responses": tokens, "logprobs": logprobs})
            return iteration

        executor.run = noted


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, plan in options["plans"].items():
        notes = Samples()
        made = tiny.trainer(folder / name, plan=plan, **options.get("config", {}))
        notes.watch(made)
        start = time.time()
        made.train()
        seconds = time.time() - start
        weights = tiny.weights(made)
        if made.accelerator.process_index == 0:
            spans = [(s.call, s.device, s.start, s.end, s.step) for s in made.timeline.spans]
            written = {
                "log": tiny.updates(made),
                "samples": notes.samples,
                "moved": notes.moved,
                "forwards": notes.forwards,
                "seconds": seconds,
                "spans": spans,
            }
            (folder / f"{name}.json").write_text(json.dumps(written))
            save_file({key: tensor.contiguous() for key, tensor in weights.items()}, folder / f"{name}.safetensors")
        made.accelerator.wait_for_everyone()
        made.close()
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
