"""A rank that trains two models with an optimizer of the script's own; which of the parameters that the script has
loaded are still in memory after the start is written to the folder."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import tiny
import torch


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    policy, value = tiny.policy(), tiny.classifier()
    whole = {
        f"{role}.{name}": weakref.ref(parameter)
        for role, model in (("policy", policy), ("value", value))
        for name, parameter in model.named_parameters()
        if name.endswith("_proj.weight")  # which are split
    }
    given: dict[str, Any] = {"model": policy, "value_model": value, "ref_model": tiny.policy()}
    if options.pop("own"):
        optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], lr=1e-2)
        given["optimizers"] = (optimizer, None)
        del optimizer
    made = tiny.trainer(folder, given=given, **options)
    del policy, value, given
    made.run.placed.start()
    gc.collect()
    alive = [name for name, parameter in whole.items() if parameter() is not None]
    made.train()
    report = {"whole": len(whole), "alive": alive, "updates": tiny.updates(made)}
    (folder / f"{made.accelerator.process_index}.json").write_text(json.dumps(report))
    made.close()


if __name__ == "__main__":
    main()
