"""A rank that has one sample's loss overflow in the first optimizer step of each role, under several plans; what it
made of it is written to the folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny
import torch

from trl_realloc.algorithms.algorithm import TokenLoss
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.plan.dataflow import Role
from trl_realloc.runtime.failures.alarm import JobFailed


SAMPLE = 3  # some rank's, and no other's


@dataclass
class Overflowing:
    """A loss that is infinite for one sample in the first mini-batch that has it."""

    loss: TokenLoss

    def __call__(
        self, outputs: Mapping[str, Ragged], samples: Rollouts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, statistics = self.loss(outputs, samples)
        spoils = (samples.tensor("index") == SAMPLE).float()
        spoils = torch.where(spoils > 0, torch.inf, 0.0)
        losses = {n: sums + spoils.to(sums) if n.endswith("_loss") else sums for n, sums in statistics.items()}
        return value + spoils.sum().to(value), losses


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, plan in options["plans"].items():
        made = tiny.trainer(
            folder, plan=plan, per_device_train_batch_size=4, num_ppo_epochs=2, max_steps=1, skip_nonfinite_updates=True
        )
        made.placement.start()
        for engine in filter(None, (made.placement.engine("actor.train"), made.placement.engine("critic.train"))):
            overflow_once(engine)
        before = tiny.weights(made)
        made.train()
        moved = {key.split(".")[0] for key, value in tiny.weights(made).items() if not torch.equal(value, before[key])}
        finite = all(bool(value.isfinite().all()) for value in tiny.weights(made).values())
        row = {k: v for row in made.state.log_history for k, v in row.items() if k.startswith("skipped_updates/")}
        # the same again, where nothing is left out: every rank ends, and no role has moved
        made.executor.runner.settings = replace(made.executor.runner.settings, skip_nonfinite=False)
        for engine in filter(None, (made.placement.engine("actor.train"), made.placement.engine("critic.train"))):
            overflow_once(engine)
        before, said = tiny.weights(made), {}
        try:
            batch = next(iter(made.get_train_dataloader()))
            made.executor.run(batch, 1, {Role.ACTOR: 1e-2, Role.CRITIC: 1e-2})
        except JobFailed as error:
            said = {call: str(error) for call in ("actor.train", "critic.train") if f"{call} failed" in str(error)}
        kept = all(torch.equal(value, before[key]) for key, value in tiny.weights(made).items())
        versions = [
            engine and engine.version
            for engine in (made.placement.engine("actor.train"), made.placement.engine("critic.train"))
        ]
        report = {"moved": sorted(moved), "finite": finite, "said": said, "kept": kept, "versions": versions, **row}
        (folder / f"{name}-{made.accelerator.process_index}.json").write_text(json.dumps(report))
        made.executor.channels.flush()
        made.accelerator.wait_for_everyone()
        made.close()


def overflow_once(engine: Any) -> None:
    train, steps = type(engine).train, iter([Overflowing])

    def first_overflows(samples: Rollouts, loss: TokenLoss, *rest: Any) -> Any:
        return train(engine, samples, next(steps, lambda own: own)(loss), *rest)

    engine.train = first_overflows


if __name__ == "__main__":
    main()
