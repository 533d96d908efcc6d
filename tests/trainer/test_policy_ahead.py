"""The prompts of later generations are read ahead of TRL's loop, which gets every micro-batch once and in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc import GRPOConfig, RLOOConfig
from trl_realloc.trainer.checks.config_checks import ConfigError
from trl_realloc.trainer.policy.ahead import PromptsAhead, UpcomingBatches


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), looks=st.lists(st.integers(0, 9), max_size=30))
def test_every_micro_batch_comes_once_and_in_order_however_far_one_looks(sizes: list[int], looks: list[int]) -> None:
    """Also over the ends of epochs. An optimizer step has two micro-batches; the last one of an epoch may have one."""
    epochs = [[(number, at) for at in range(size)] for number, size in enumerate(sizes)]
    order = [item for epoch in epochs for item in epoch]
    update_of, updates = {}, 0
    for epoch in epochs:
        update_of |= {item: updates + item[1] // 2 for item in epoch}
        updates += -(-len(epoch) // 2)

    def begin(number: int) -> UpcomingBatches | None:
        return UpcomingBatches(iter(epochs[number]), lambda: begin(number + 1)) if number < len(epochs) else None

    upcoming, trained, places = begin(0), list[tuple[int, int]](), iter(looks)
    while upcoming is not None:
        has_begun = False
        while given_ := [item for _, item in zip(range(2), upcoming, strict=False)]:
            for place_in_step, item in enumerate(given_):
                if has_begun:
                    upcoming.advance()
                has_begun = True
                trained.append(item)
                places_after = next(places, 0)
                expected = order[len(trained) - 1 + places_after : len(trained) + places_after]
                assert upcoming.after(places_after) == (expected[0] if expected else None)
                if expected:
                    later = update_of[expected[0]] - update_of[item]
                    assert upcoming.updates_until(places_after, 2, place_in_step) == later
        upcoming = upcoming.following or begin(trained[-1][0] + 1)
    assert trained == order


class Loader:
    """Epochs of generations, each of which comes `every` times; numbered through all epochs."""

    def __init__(self, generations: int, every: int) -> None:
        self.generations, self.every, self.begun, self.epochs = generations, every, 0, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        first, self.begun = self.begun * self.generations, self.begun + 1
        torch.empty((), dtype=torch.int64).random_()  # as PyTorch's data loader does for its seed
        for number in range(first, first + self.generations):
            yield from [[{"prompt": number}] for _ in range(self.every)]


class Trainer:
    """What Trainer and TRL's class do with the micro-batches."""

    def __init__(
        self, generations: int, steps: int, iterations: int, accumulated: int, versions: int, last: int
    ) -> None:
        loader = Loader(generations, steps * iterations)
        self.loader, self.every, self.step = loader, loader.every, 0
        self.announced: list[list[int]] = []
        self.num_iterations = iterations
        self.args = SimpleNamespace(
            steps_per_generation=steps, gradient_accumulation_steps=accumulated, ignore_data_skip=False
        )
        self.state = SimpleNamespace(max_steps=last, global_step=0, epoch=0.0)
        self.model = SimpleNamespace(training=True)
        self.calls: Any = SimpleNamespace(
            ahead=SimpleNamespace(versions=versions),
            announce=lambda batches: self.announced.append([prompts[0] for prompts, _ in batches]),
            reads_texts=False,
            take_ages=dict,
        )
        self.ahead = PromptsAhead(self)
        self.ahead.begin_training(loader)

    def prepare_inputs(self, batch: Any) -> Any:
        self.ahead.advance()
        if self.step % self.every == 0:
            with self.ahead.announcing():
                self.announced[-1].insert(0, batch[0]["prompt"])
        self.step += 1

    def _tokenize_prompts(self, prompts: list[int]) -> Any:
        return prompts, None, {}

    def run(self) -> None:
        loader, accumulated = self.loader, self.args.gradient_accumulation_steps
        micro_batches = loader.generations * loader.every
        for epoch in range(1000):
            loader.set_epoch(epoch)
            iterator = iter(loader)
            for update in range(-(-micro_batches // accumulated)):
                count = min(accumulated, micro_batches - update * accumulated)
                batches = list(itertools.islice(self.ahead.batches(iterator), count))
                assert len(batches) == count
                for batch in batches:
                    self.prepare_inputs(batch)
                self.state.global_step += 1
                self.state.epoch = epoch + (update * accumulated + count) / micro_batches
                if self.state.global_step == self.state.max_steps:
                    return


@pytest.mark.parametrize(
    ("steps", "iterations", "accumulated"), [(2, 1, 2), (4, 1, 2), (2, 2, 2), (1, 1, 3), (1, 2, 3)]
)
@pytest.mark.parametrize("versions", [1, 3])
def test_the_generations_after_the_current_one_are_announced_as_far_as_the_run_has_them(
    steps: int, iterations: int, accumulated: int, versions: int
) -> None:
    """Over the ends of epochs, also of epochs with fewer generations than are announced, and in the order in which the
    training gets them."""
    for generations, last in ((6, 7), (2, 9), (1, 5), (20, 3)):
        trainer = Trainer(generations, steps, iterations, accumulated, versions, last)
        trainer.run()
        count = len(trainer.announced)
        for number, announced in enumerate(trainer.announced):
            assert announced == list(range(number, min(count, number + versions + 1))), json.dumps(trainer.announced)


def test_reading_ahead_leaves_the_random_numbers_of_the_training_as_they_were() -> None:
    drawn = []
    for versions in (0, 2):
        torch.manual_seed(0)
        trainer = Trainer(3, 1, 1, 1, versions, 7)
        prepare, numbers = trainer.prepare_inputs, list[float]()

        def shuffled(batch: Any, prepare: Any = prepare, numbers: list[float] = numbers) -> None:
            prepare(batch)
            numbers.append(float(torch.rand(1)))  # as TRL does after a generation

        trainer.prepare_inputs = shuffled  # type: ignore[method-assign]
        trainer.run()
        drawn.append(numbers)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("config", "settings"), [(GRPOConfig, {"vllm_importance_sampling_correction": False}), (RLOOConfig, {})]
)
def test_a_staleness_without_a_correction_is_refused(config: type, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set vllm_importance_sampling_correction to true, or max_staleness to 0"):
        config("out", max_staleness=1, bf16=False, **settings)
    assert config("out", bf16=False, **settings).max_staleness == 0
    settings["vllm_importance_sampling_correction"] = True
    assert config("out", max_staleness=1, bf16=False, **settings).max_staleness == 1
