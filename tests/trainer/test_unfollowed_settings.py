"""Settings of Transformers' and TRL's trainers that have no effect where a plan's engines train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny_groups import settings, trainer
from transformers import PreTrainedModel

from trl_realloc import GRPOConfig, PPOConfig, RLOOConfig
from trl_realloc.trainer.checks.unfollowed_settings import GRPO_AND_RLOO, PPO, UNFOLLOWED, Then, unfollowed_settings


OF_ALL: list[tuple[dict[str, Any], str]] = [
    ({"torch_compile": True}, "torch_compile has no effect: ragged batches change the shape"),
    ({"torch_compile_backend": "eager"}, "torch_compile has no effect"),
    ({"bf16_full_eval": True, "use_cpu": True}, "bf16_full_eval has no effect"),
    ({"ddp_bucket_cap_mb": 25}, "ddp_bucket_cap_mb has no effect: no model is wrapped"),
    ({"save_on_each_node": True}, "save_on_each_node has no effect"),
]
OF_PPO: list[tuple[dict[str, Any], str]] = [
    ({"auto_find_batch_size": True}, "auto_find_batch_size has no effect"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha has no effect: no noise"),
    ({"use_liger_kernel": True}, "use_liger_kernel has no effect"),
    ({"torch_empty_cache_steps": 5}, "torch_empty_cache_steps has no effect"),
    ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen has no effect"),
    ({"accelerator_config": {"split_batches": True}}, "accelerator_config has no effect"),
    ({"dataloader_num_workers": 2}, "dataloader_num_workers has no effect"),
    ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy has no effect"),
    ({"debug": "underflow_overflow"}, "debug has no effect"),
]


@pytest.mark.parametrize(("changes", "words"), [*OF_ALL, *OF_PPO])
def test_a_setting_that_ppo_does_not_use_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (said,) = unfollowed_settings(tiny.arguments(tmp_path, **changes), Then.LOG)
    assert said.startswith(words)


@pytest.mark.parametrize(("changes", "words"), [*OF_ALL, ({"cache_implementation": "static"}, "cache_implementation")])
@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
def test_a_setting_that_grpo_and_rloo_do_not_use_is_named(
    tmp_path: Path, kind: type, changes: dict[str, Any], words: str
) -> None:
    (said,) = unfollowed_settings(settings(tmp_path, kind, **changes), Then.LOG)
    assert said.startswith(words)


def test_the_table_of_settings_in_the_documentation_is_made_of_the_rows() -> None:
    """To make it anew, take the lines of this test's message."""
    titles = {Then.LOG: "no effect", Then.ACCELERATE: "Accelerate trains, as in TRL", Then.REFUSE: "refused"}
    lines = []
    for then, title in titles.items():
        cells = [
            ", ".join(f"`{row.name}`" for row in UNFOLLOWED if row.then is then and kind in row.trainers)
            for kind in (PPO, GRPO_AND_RLOO)
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    table = "\n".join(["| what happens | PPO | GRPO and RLOO |", "| --- | --- | --- |", *lines, ""])
    assert table in (Path(__file__).parents[2] / "docs" / "differences.md").read_text(encoding="utf-8"), table


def test_the_rows_name_settings_that_the_configurations_have() -> None:
    of_older_releases = {"use_transformers_paged"}
    of_trainers = {PPO: {PPOConfig}, GRPO_AND_RLOO: {GRPOConfig, RLOOConfig}}
    for row in UNFOLLOWED:
        for kind in row.trainers:
            fields = {field.name for config in of_trainers[kind] for field in dataclasses.fields(config)}
            assert row.name in fields | of_older_releases, f"{kind} has no setting {row.name}"


def test_defaults_and_what_trls_loop_uses_are_not_named(tmp_path: Path) -> None:
    used = settings(tmp_path, torch_empty_cache_steps=5, dataloader_num_workers=2)
    for args in (tiny.arguments(tmp_path), settings(tmp_path), settings(tmp_path, RLOOConfig), used):
        assert not list(unfollowed_settings(args, Then.LOG))


@pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
def test_trl_refuses_to_find_a_batch_size_for_groups(tmp_path: Path, kind: type) -> None:
    with pytest.raises(ValueError, match="auto_find_batch_size is not supported"):
        settings(tmp_path, kind, auto_find_batch_size=True)


def test_the_log_of_a_run_names_what_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.trainer(tmp_path, torch_compile=True).close()
    trainer(tmp_path, torch_compile=True).close()
    assert len([text for text in caplog.messages if text.startswith("torch_compile has no effect")]) == 2


@pytest.mark.skipif(not hasattr(PreTrainedModel, "activation_checkpointing_enable"), reason="an older Transformers")
@pytest.mark.parametrize("kwargs", [{"every_n_layers": 2}, {"use_reentrant": False}])
def test_activations_are_recomputed_as_the_settings_say(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    changes = {"gradient_checkpointing": None, "activation_checkpointing": True, "max_steps": 1}
    made = tiny.trained(tmp_path, **changes, activation_checkpointing_kwargs=kwargs)
    recomputed = [layer.gradient_checkpointing for layer in made.model.policy.model.layers]
    made.close()
    assert sum(recomputed) == (1 if "every_n_layers" in kwargs else 2)
