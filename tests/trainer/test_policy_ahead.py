"""The prompts of later generations are read ahead of TRL's loop, which gets every micro-batch once and in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc import Cluster, GRPOConfig, RLOOConfig
from trl_realloc.plan.algorithm_graphs import grpo_graph
from trl_realloc.plan.presets import separate
from trl_realloc.plan.staleness import Staleness
from trl_realloc.trainer.config_checks import ConfigError
from trl_realloc.trainer.plan_request import PlanRequest
from trl_realloc.trainer.policy_ahead import PolicyAheadMixin, UpcomingBatches
from trl_realloc.trainer.policy_setup import most_ahead, within_epochs


@given(size=st.integers(0, 12), chunk=st.integers(1, 4), looks=st.lists(st.integers(0, 9), max_size=12))
def test_every_micro_batch_comes_once_and_in_order_however_far_one_looks(
    size: int, chunk: int, looks: list[int]
) -> None:
    upcoming, trained = UpcomingBatches(iter(range(size))), []
    places = iter(looks)
    while given_ := [item for _, item in zip(range(chunk), upcoming, strict=False)]:
        for item in given_:
            if trained:
                upcoming.advance()
            trained.append(item)
            for place in [next(places, 0)]:
                expected = item + place if item + place < size else None
                assert upcoming.after(place) == expected
    assert trained == list(range(size))


class Loop:
    """What Trainer and TRL's class do with the micro-batches: each generation's comes `every` times."""

    def __init__(self, generations: int, every: int) -> None:
        self.source = iter([[{"prompt": number}] for number in range(generations) for _ in range(every)])
        self.every, self.step = every, 0
        self.announced: list[list[int]] = []

    def get_batch_samples(self, iterator: Iterator[Any], count: int, device: Any) -> tuple[list[Any], None]:
        return [item for _, item in zip(range(count), iterator, strict=False)], None

    def _prepare_inputs(self, batch: Any) -> Any:
        if self.step % self.every == 0:
            self._generate([row["prompt"] for row in batch])
        self.step += 1

    def _generate(self, prompts: Any) -> Any:
        self.announced[-1].insert(0, prompts[0])
        return prompts


class Trainer(PolicyAheadMixin, Loop):
    def __init__(
        self, generations: int, steps: int, iterations: int, accumulated: int, versions: int, last: int
    ) -> None:
        super().__init__(generations, steps * iterations)
        self.args = SimpleNamespace(
            steps_per_generation=steps, num_iterations=iterations, gradient_accumulation_steps=accumulated
        )
        self.state = SimpleNamespace(max_steps=last, global_step=0)
        self.model = SimpleNamespace(training=True)
        self.calls: Any = SimpleNamespace(
            ahead=SimpleNamespace(versions=versions),
            announce=lambda prompts: self.announced.append([of_one[0] for of_one in prompts]),
            take_ages=dict,
        )

    def _tokenize_prompts(self, prompts: list[int]) -> Any:
        return prompts, None, {}

    def run(self) -> None:
        while self.state.global_step < self.state.max_steps:
            batches, _ = self.get_batch_samples(self.source, self.args.gradient_accumulation_steps, None)
            if not batches:
                return
            for batch in batches:
                self._prepare_inputs(batch)
            self.state.global_step += 1


@pytest.mark.parametrize(("steps", "iterations", "accumulated"), [(2, 1, 2), (4, 1, 2), (2, 2, 2), (1, 1, 3)])
@pytest.mark.parametrize("versions", [1, 3])
def test_the_generations_after_the_current_one_are_announced_as_far_as_epoch_and_run_have_them(
    steps: int, iterations: int, accumulated: int, versions: int
) -> None:
    every = steps * iterations
    for generations, last in ((6, 100), (9, 3), (20, 3)):
        trainer = Trainer(generations, steps, iterations, accumulated, versions, last)
        trainer.run()
        count = min(generations, -(-last * accumulated // every))
        assert len(trainer.announced) == count
        for number, announced in enumerate(trainer.announced):
            assert announced == list(range(number, min(count, number + versions + 1))), json.dumps(trainer.announced)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (GRPOConfig, {"vllm_importance_sampling_correction": False}, "leave vllm_importance_sampling_correction on"),
        (RLOOConfig, {}, "RLOO has none, so set it to 0"),
    ],
)
def test_a_staleness_without_a_correction_is_refused(config: type, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config("out", max_staleness=1, bf16=False, **settings)
    assert config("out", bf16=False, **settings).max_staleness == 0


@pytest.mark.parametrize(("prompts", "asked", "most"), [(64, 3, 3), (64, 9, 7), (16, 2, 1), (8, 2, 0), (7, 1, 0)])
def test_the_staleness_is_less_than_the_generations_of_an_epoch(
    prompts: int, asked: int, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A generation is of 8 prompts."""
    args: Any = SimpleNamespace(max_staleness=asked, num_generations=4, generation_batch_size=32)
    assert most_ahead(args, range(prompts)) == most
    assert most_ahead(args, iter(())) == asked, "of a data set without a length nothing is known"
    plan = replace(separate(Cluster(1, 2), graph=grpo_graph()), staleness=Staleness(asked))
    request = PlanRequest(plan, plan.cluster, "vllm", (), None)
    found = within_epochs(request, most).plan
    assert found is not None and found.staleness.versions == most
    assert (f"an epoch has {most + 1} generation" in capsys.readouterr().err) == (most < asked)
