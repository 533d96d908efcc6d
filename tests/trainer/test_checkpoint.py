"""A checkpoint is whole or is none, and what is not whole or is another run's is refused before any engine starts."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMAT
from torch.distributed.checkpoint.metadata import Metadata
from transformers import TrainerCallback

from trl_realloc import PPOConfig, PPOTrainer
from trl_realloc.algorithms.nonfinite import NonFiniteError
from trl_realloc.cli.recipe_parser import parse_recipe
from trl_realloc.trainer.checkpoint import CheckpointError, SaveError, manifest
from trl_realloc.trainer.checkpoint.manifest import (
    MANIFEST,
    checkpoints_in,
    file_names,
    read_manifest,
    size_and_checksum,
)
from trl_realloc.trainer.checkpoint.resuming import newest_whole, read_resume_setting
from trl_realloc.trainer.checkpoint.saving import UnfinishedCheckpoint, surplus
from trl_realloc.trainer.checkpoint.state_storage import Reader, Writer
from trl_realloc.trainer.checkpoint.write_errors import WriteErrors
from trl_realloc.trainer.checks.config_checks import ConfigError


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "response_length": 4, "num_ppo_epochs": 1}
METADATA, PARTS = "training_state/.metadata", "training_state/__0_0.distcp"
CRITIC = "value_model/model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two updates, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.trainer(folder, **SAVING).train()
    return folder


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> PPOTrainer:
    """A trainer of the same run, not started."""
    return tiny.trainer(tmp_path_factory.mktemp("again"), **SAVING)


@pytest.fixture
def run(saved: Path, again: PPOTrainer, tmp_path: Path) -> Path:
    """A copy of the saved run that `again` resumes in."""
    shutil.copytree(saved, tmp_path / "run")
    again.args.output_dir = str(tmp_path / "run")
    return tmp_path / "run"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_noise(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def one_byte_changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def with_nan(folder: Path) -> None:
    """Changes a number of the policy's optimizer state, and nothing else."""
    metadata = Reader(folder).read_metadata()
    stored = next(at for index, at in metadata.storage_data.items() if index.fqn.endswith("norm.weight/exp_avg"))
    content = bytearray((folder / PARTS).read_bytes())
    chunk = content[stored.offset : stored.offset + stored.length]
    tensor = torch.load(io.BytesIO(chunk), weights_only=True)
    tensor[0] = float("nan")
    torch.save(tensor, changed := io.BytesIO())
    content[stored.offset : stored.offset + stored.length] = changed.getvalue()
    (folder / PARTS).write_bytes(content)


def without_a_parameter(folder: Path) -> None:
    metadata = Reader(folder).read_metadata()
    for name in [name for name in metadata.state_dict_metadata if name.startswith("critic/score.weight/")]:
        del metadata.state_dict_metadata[name]
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


class Command:
    def __reduce__(self) -> Any:
        return os.mkdir, ("run by a checkpoint",)


def with_a_command(folder: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Command()))


def listed_anew(folder: Path) -> None:
    """Write the manifest of what is in the folder now."""
    manifest = read_manifest(folder)
    assert manifest is not None
    files = {name: size_and_checksum(folder / name) for name in file_names(folder)}
    replace(manifest, files=files).write(folder)


class OfPython3112(pickle.Pickler):
    """Writes the members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, written: Any) -> Any:
        return (getattr, (type(written), written.name)) if isinstance(written, Enum) else NotImplemented


def test_a_training_state_that_an_earlier_python_has_written_is_read(run: Path) -> None:
    folder = run / "checkpoint-2"
    metadata, content = Reader(folder).read_metadata(), (folder / METADATA).read_bytes()
    try:
        with (folder / METADATA).open("wb") as file:
            OfPython3112(file).dump(metadata)
        assert b"getattr" in (folder / METADATA).read_bytes()
        assert Reader(folder).read_metadata() == metadata
        for kind, name in ((Metadata, "__init__"), (MEMORY_FORMAT, "mro")):
            (folder / METADATA).write_bytes(pickle.dumps(Attribute(kind, name)))
            with pytest.raises(ValueError, match="no enum"):
                Reader(folder).read_metadata()
    finally:
        (folder / METADATA).write_bytes(content)


class Attribute:
    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return getattr, (self.kind, self.name)


DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    *[
        (name, how)
        for name in (METADATA, PARTS, "trainer_state.json", "scheduler.pt")
        for how in (truncated, of_noise, emptied, one_byte_changed, Path.unlink)
    ],
    ("rng_state.pth", truncated),
    ("model.safetensors", one_byte_changed),
    (CRITIC, Path.unlink),
    (MANIFEST, truncated),
    (MANIFEST, Path.unlink),
]


def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_for_an_older_one(
    run: Path, again: PPOTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with it: the file is named, no engine starts, and nobody is told to throw work away."""
    newest, older = run / "checkpoint-2", run / "checkpoint-1"
    keep = run / "kept"
    shutil.copytree(newest, keep)
    for name, damaged in DAMAGE:
        what = f"{name} {damaged.__name__}"
        damaged(newest / name)
        with pytest.raises(CheckpointError, match=name) as refused:
            again.run.checkpoints.find(str(newest))
        assert f"{older} is whole: resume from it" in str(refused.value), what
        assert "start from" not in str(refused.value)
        caplog.clear()
        os.utime(older / "trainer_state.json", (1, 1))
        found = again.run.checkpoints.find(True)
        assert found is not None and found.folder == older, what
        assert "passed over" in caplog.text and name in caplog.text, what
        shutil.rmtree(newest)
        shutil.copytree(keep, newest)
    assert again.run.checkpoints.find("auto").folder == newest  # type: ignore[union-attr]
    assert not again.placement.started


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (without_a_parameter, r"its critic has \d+ trained parameters, this run's \d+; it lacks score.weight"),
        (with_a_command, r"training_state/.metadata cannot be read \(it names (posix|nt).mkdir, which is no part of"),
    ],
)
def test_a_training_state_of_another_model_or_that_is_none_is_refused_before_anything_starts(
    run: Path, again: PPOTrainer, damaged: Callable[[Path], None], said: str
) -> None:
    damaged(run / "checkpoint-2")
    listed_anew(run / "checkpoint-2")
    with pytest.raises(CheckpointError, match=said):
        again.run.checkpoints.find(str(run / "checkpoint-2"))
    assert not again.placement.started and not Path("run by a checkpoint").exists()


def test_a_checkpoint_with_a_number_that_is_not_finite_is_refused_while_it_is_loaded(run: Path, tmp_path: Path) -> None:
    with_nan(run / "checkpoint-2")
    listed_anew(run / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"checkpoint-2: training_state holds NaN .* in policy/.*exp_avg"):
        tiny.trainer(tmp_path / "other", **SAVING).train(resume_from_checkpoint=str(run / "checkpoint-2"))


def test_a_checkpoint_of_an_earlier_format_is_refused_in_a_sentence(run: Path, again: PPOTrainer) -> None:
    path = run / "checkpoint-2" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(CheckpointError, match="of format 1, of an earlier release.*checkpoint-1 is whole"):
        again.run.checkpoints.find(str(run / "checkpoint-2"))


def test_without_a_whole_checkpoint_resuming_is_refused_and_auto_begins_only_where_there_is_none(
    run: Path, again: PPOTrainer
) -> None:
    for step in (1, 2):
        truncated(run / f"checkpoint-{step}" / PARTS)
    for given in (True, "auto", "true"):
        with pytest.raises(CheckpointError, match=r"is whole: .*checkpoint-2 \(training_state.* .*checkpoint-1 \("):
            again.run.checkpoints.find(given)
    again.args.output_dir = str(run / "fresh")
    assert again.run.checkpoints.find("auto") is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        again.run.checkpoints.find(True)


def test_resume_from_checkpoint_is_read_from_recipes_and_command_lines(tmp_path: Path) -> None:
    assert [read_resume_setting(word) for word in ("auto", "True", "true", "False", None, False, True)] == [
        "auto", True, True, None, None, None, True,
    ]  # fmt: skip
    assert read_resume_setting("runs/checkpoint-3") == "runs/checkpoint-3"
    for word in ("auto", "true", "runs/checkpoint-3"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"output_dir: {tmp_path}\nbf16: false\nuse_cpu: true\nresume_from_checkpoint: {word}\n")
        (args,) = parse_recipe([PPOConfig], ["--config", str(recipe)])
        assert read_resume_setting(args.resume_from_checkpoint) == read_resume_setting(word)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "adapters": ({"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, {}, "one of them trains LoRA adapters"),
    "policy": ({"model": tiny.policy(num_hidden_layers=3)}, {}, "its policy has 21 trained parameters, this run's 30"),
    "width": ({"model": tiny.policy(intermediate_size=48)}, {}, r"has the shape \(64, 32\), this run's \(48, 32\)"),
    "critic": ({"value_model": tiny.classifier(num_hidden_layers=1)}, {}, "its critic has 21 trained parameters"),
    "optimizer": ({}, {"optim": "sgd"}, "its optimizer is AdamW, this run's is SGD"),
    "batch": ({}, {"per_device_train_batch_size": 4}, "its updates have 8 episodes, this run's 4.*ignore_data_skip"),
    "order": ({}, {"data_seed": 7}, "its data_seed is 42, this run's 7.*ignore_data_skip"),
    "rows": ({"train_dataset": tiny.prompts(32)}, {}, "its data set has 64 prompts, this run's 32.*ignore_data_skip"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_before_anything_starts(saved: Path, tmp_path: Path, what: str) -> None:
    given, changes, said = OTHERS[what]
    other = tiny.trainer(tmp_path, given=given, **{**SAVING, **changes})
    with pytest.raises(CheckpointError, match=said):
        other.train(resume_from_checkpoint=str(saved / "checkpoint-2"))
    assert not other.placement.started


def test_other_data_are_allowed_where_they_are_said_to_begin_anew(saved: Path, tmp_path: Path) -> None:
    """From the first row on; and the checkpoints of that run are resumed at their place in these data."""
    changes = {**SAVING, "max_steps": 5, "ignore_data_skip": True}
    given = {"train_dataset": tiny.prompts(16)}
    first = tiny.trainer(tmp_path, given=given, **changes)
    first.train(resume_from_checkpoint=str(saved / "checkpoint-2"))
    second = tiny.trainer(tmp_path, given=given, **{**changes, "ignore_data_skip": False})
    shutil.rmtree(tmp_path / "checkpoint-5")
    second.train(resume_from_checkpoint="auto")
    assert (first._data_begins, second._data_begins) == (2, 2)
    assert tiny.updates(first) == tiny.updates(second)


def test_the_best_model_of_a_run_on_other_data_is_loaded_at_the_end(saved: Path, tmp_path: Path) -> None:
    changes = {**SAVING, **tiny.every(1), "load_best_model_at_end": True, "greater_is_better": True}
    changes |= {"metric_for_best_model": "eval_objective/scores"}
    given = {"train_dataset": tiny.prompts(16), "eval_dataset": tiny.prompts(8)}
    made = tiny.trainer(tmp_path, given=given, **changes)
    made.run.placed.start()
    made.state.best_model_checkpoint = str(saved / "checkpoint-2")
    made._load_best_model()
    expected = load_file(saved / "checkpoint-2" / "model.safetensors")
    weights = tiny.weights(made)
    assert all(torch.equal(weights[f"policy.{name}"], tensor) for name, tensor in expected.items())


# --- writing --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a signal: nothing that comes after it is done."""


def writes(text: str) -> Callable[[Path, WriteErrors], None]:
    def write(folder: Path, problems: WriteErrors) -> None:
        for name in ("trainer_state.json", "scheduler.pt", METADATA, PARTS):
            with problems.writing(folder / name):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)

    return write


def save(
    folder: Path, step: int, text: str = "", limit: int | None = 1, run: str = "mine", best: Path | None = None
) -> None:
    final = folder / f"checkpoint-{step}"
    UnfinishedCheckpoint(final, run, writes(text or str(step)), {}, rank=0, control=None).finish(limit, best)


def test_a_job_that_is_killed_while_it_saves_leaves_a_whole_checkpoint_whenever_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each call that changes the disk, both for a new checkpoint and for one of a name that is there already."""
    for step in (2, 1):
        for moment in range(200):
            folder = tmp_path / f"{step}-{moment}"
            save(folder, 1, "old")
            left = iter(range(moment))
            with monkeypatch.context() as patched:
                for name in ("rename", "fsync", "unlink", "rmdir", "mkdir"):
                    patched.setattr(os, name, _dying(getattr(os, name), left))
                try:
                    save(folder, step, "new")
                except Killed:
                    finished = False
                else:
                    finished = True
            whole = newest_whole(folder)
            assert whole is not None and {p.read_text() for p in whole.glob("*.pt")} <= {"old", "new"}, moment
            save(folder, 3, "after")
            assert [path.name for path in checkpoints_in(folder)] == ["checkpoint-3"]
            assert not list(folder.glob("*.tmp")), "what the killed job left is removed"
            if finished:
                break
        assert finished and moment > 15


def _dying(call: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    def one_less(*arguments: Any, **named: Any) -> Any:
        if next(left, None) is None:
            raise Killed
        return call(*arguments, **named)

    return one_less


def test_of_old_checkpoints_only_the_runs_own_are_deleted(tmp_path: Path) -> None:
    save(tmp_path, 99, run="another's")
    (tmp_path / "checkpoint-98").mkdir()  # of nobody knows whom
    for step in (1, 2, 3, 4):
        save(tmp_path, step, limit=2, best=tmp_path / "checkpoint-1")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint-99", "checkpoint-98", "checkpoint-1", "checkpoint-4"}
    assert checkpoints_in(tmp_path)[0].name == "checkpoint-4", "the newest is what was written last"
    for best in (None, Path("elsewhere/checkpoint-9")):
        assert surplus(tmp_path / "checkpoint-4", "mine", 1, best) == [tmp_path / "checkpoint-1"]


def test_a_checkpoint_that_another_rank_deletes_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, limit=3)

    def read(folder: Path) -> Any:
        if folder.name == "checkpoint-2":
            shutil.rmtree(folder)
        return read_manifest(folder)

    monkeypatch.setattr(manifest, "read_manifest", read)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-3", "checkpoint-1"]


def test_a_disk_without_room_ends_the_run_in_a_sentence_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """A real disk of two megabytes, then a read-only one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("this user cannot mount a small disk")
    try:
        made = tiny.trainer(disk, **{**SAVING, "save_total_limit": 1, "max_steps": 4})
        with pytest.raises(
            SaveError, match=r"checkpoint-2 .*rank 0 on host .* cannot write .* MB are needed, .* MB are free"
        ):
            made.train()
        assert [path.name for path in disk.glob("checkpoint-*")] == ["checkpoint-1"]
        assert newest_whole(disk) == disk / "checkpoint-1"
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(SaveError, match="output_dir .*new cannot be made: Read-only file system"):
            tiny.trainer(disk / "new", **SAVING)
        other = tiny.trainer(disk, **SAVING)
        with pytest.raises(SaveError, match="checkpoints could not be saved: .*Read-only file system"):
            other.train()
        assert not other.placement.started
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def states(folder: Path) -> dict[str, torch.Tensor]:
    """The training state of a checkpoint, by DCP's own reader."""
    dcp_to_torch_save(folder / "training_state", folder.parent / "whole.pt")
    whole = torch.load(folder.parent / "whole.pt", weights_only=True)
    return {name: value for name, value in whole.items() if torch.is_tensor(value)}


def test_a_state_that_is_written_in_the_background_is_that_of_its_update_though_training_goes_on(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    write, finish = Writer.write_data, UnfinishedCheckpoint.finish

    def slow(writer: Writer, *given: Any) -> Any:
        target = made.state.global_step + 1
        while made.state.global_step < min(target, 2):
            time.sleep(0.01)
        return write(writer, *given)

    def noted(unfinished: UnfinishedCheckpoint, *given: Any, **named: Any) -> None:
        steps.append((unfinished.final.name, made.state.global_step))
        finish(unfinished, *given, **named)

    monkeypatch.setattr(Writer, "write_data", slow)
    monkeypatch.setattr(UnfinishedCheckpoint, "finish", noted)
    made = tiny.trainer(tmp_path, **SAVING, async_save=True)
    told = Told()
    made.add_callback(told)
    made.train()
    assert told.found == [(1, True), (2, True)], "callbacks find a checkpoint by the step that they are told"
    assert steps == [("checkpoint-1", 2), ("checkpoint-2", 2)]
    for name in ("checkpoint-1", "checkpoint-2"):
        assert newest_whole(tmp_path, checksums=True) == tmp_path / "checkpoint-2"
        ours, expected = states(tmp_path / name), states(saved / name)
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in expected)


def test_an_error_in_the_background_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Writer.write_data

    def failing(writer: Writer, *given: Any) -> Any:
        if "checkpoint-2" in str(writer.path):
            raise OSError(28, "No space left on device")
        return write(writer, *given)

    monkeypatch.setattr(Writer, "write_data", failing)
    made = tiny.trainer(tmp_path, **{**SAVING, "max_steps": 4}, async_save=True)
    with pytest.raises(SaveError, match=r"checkpoint-2 could not be saved: rank 0 .*__0_0.distcp: No space left on"):
        made.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


class Told(TrainerCallback):
    """Of each save the step that callbacks are told, and whether its checkpoint is there."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bool]] = []

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.found.append((state.global_step, (folder / "manifest.json").exists()))


class Breaks:
    """A reward that is infinite from the third update on."""

    __name__ = "breaks"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [float("inf") if self.calls > 2 else float(len(text)) for text in completions]


def test_a_run_that_ends_at_a_bad_score_saves_the_state_before_it_and_says_where_it_is(tmp_path: Path) -> None:
    changes = {**SAVING, "save_steps": 100, "max_steps": 4}
    made = tiny.trainer(tmp_path, given={"reward_model": Breaks()}, **changes)
    with pytest.raises((NonFiniteError, RuntimeError), match="returned inf for sample 0") as failed:
        made.train()
    assert f"newest whole checkpoint is {tmp_path / 'checkpoint-2'}" in failed.value.__notes__[0]
    mended = tiny.trainer(tmp_path, **changes)  # with another reward
    mended.train(resume_from_checkpoint="auto")
    assert len(tiny.updates(mended)) == mended.state.global_step == 4


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ConnectionError("the judge is gone")


def test_a_failure_says_that_nothing_has_been_saved_where_that_is_so(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, callbacks=[Stops()], **{**SAVING, "save_strategy": "no"})
    with pytest.raises(ConnectionError) as failed:
        made.train()
    assert failed.value.__notes__[0] == "Nothing of this run has been saved, because save_strategy is 'no'."


class BestFirst(TrainerCallback):
    """As if the first update, which is not saved, had been evaluated as the best."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.best_global_step = 1


def test_the_checkpoint_of_an_earlier_run_is_not_taken_for_the_best_of_this_one(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1")
    made = tiny.trained(tmp_path, callbacks=[BestFirst()], **{**SAVING, "save_steps": 2})
    assert (tmp_path / "checkpoint-2").is_dir()
    assert made.state.best_model_checkpoint is None
    own = tiny.trained(tmp_path / "own", callbacks=[BestFirst()], **SAVING)
    assert own.state.best_model_checkpoint == str(tmp_path / "own" / "checkpoint-1")


def test_the_best_model_cannot_be_loaded_at_the_end_where_only_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_best_model_at_end.*save_only_model"):
        tiny.arguments(tmp_path, save_only_model=True, load_best_model_at_end=True, **tiny.every(1))


def test_a_manifest_lists_every_file_with_its_size(saved: Path) -> None:
    folder = saved / "checkpoint-2"
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    there = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    assert {name: size for name, (size, _) in listed.items()} == {n: s for n, s in there.items() if n != MANIFEST}
