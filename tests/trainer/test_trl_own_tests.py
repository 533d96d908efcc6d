"""TRL's own tests of GRPO and RLOO, with this package's classes in the places of TRL's."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from trl_sources import Unreachable, files_of_last_sdist, qwen_ranks
from trl_stand_ins import qwen_tokenizer, write_remote_model
from trl_test_run import group_of, read_outcomes, run_files, run_pytest, table


PASSED = 14  # how many the selection has; all of them pass, as they do with TRL's classes
# Few of each kind: all of them take minutes (`run_trl_grpo_tests.py`)
SELECTION = (
    "(entropy_mask or init_minimal or mismatched_reward or beta or reward_func_standard and GRPO"
    " or truncated_completions and not all_masked or training_peft and not checkpointing) and not vlm"
)
OWN_FILE = """
import pytest
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer, RLOOTrainer


def test_code_of_a_repository():
    model = AutoModelForCausalLM.from_pretrained("trl-internal-testing/tiny-RemoteForCausalLM", trust_remote_code=True)
    assert type(model).__name__ == "RemoteForCausalLM"


def test_classes_are_replaced():
    assert (GRPOTrainer.__module__, RLOOTrainer.__module__) == ("given_classes", "given_classes")


def test_train_fails():
    raise ValueError("no such tokens")


@pytest.mark.skip(reason="no such machine")
def test_vllm():
    pass


@pytest.mark.xfail(reason="not yet")
def test_with_tools():
    assert not "reached"
"""
GIVEN_CLASSES = """
import trl


class GRPOTrainer(trl.GRPOTrainer):
    pass


class RLOOTrainer(trl.RLOOTrainer):
    pass
"""


def test_outcomes_and_reasons_are_told_of_a_run_with_other_classes_and_a_model_made_here(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_own.py").write_text(OWN_FILE)
    (tmp_path / "given_classes.py").write_text(GIVEN_CLASSES)
    write_remote_model(tmp_path / "hub", tiny.tokenizer())
    outcomes = tmp_path / "outcomes.json"
    status = run_pytest(tmp_path, ["test_own.py"], classes="given_classes", modules=[tmp_path], outcomes=outcomes)
    assert status == pytest.ExitCode.TESTS_FAILED
    told = read_outcomes(outcomes)
    assert {test.split("::")[1]: (row["outcome"], row["reason"]) for test, row in told.items()} == {
        "test_code_of_a_repository": ("passed", ""),
        "test_classes_are_replaced": ("passed", ""),
        "test_train_fails": ("failed", "ValueError: no such tokens"),
        "test_vllm": ("skipped", "no such machine"),
        "test_with_tools": ("xfailed", "not yet"),
    }
    groups = ["parts and refusals", "parts and refusals", "training on text", "vLLM", "tools, environments"]
    assert [group_of(test) for test in told] == groups
    assert "failed, 1: ValueError: no such tokens\n    test_own.py::test_train_fails" in table(told)


def test_the_tokenizer_made_here_has_the_ids_that_are_in_the_code_of_trls_tests() -> None:
    try:
        tokenizer = qwen_tokenizer(qwen_ranks())
    except Unreachable as error:
        pytest.skip(str(error))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (151_643, 151_645)
    call = '<tool_call>\n{"name": "multiply_tool", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'
    ids = [151657, 198, 4913, 606, 788, 330, 64648, 22785, 497, 330, 16370, 788, 5212, 64, 788, 220, 18, 11, 330, 65]
    assert tokenizer.decode([*ids, 788, 220, 19, 11248, 151658, 151645]) == call
    assert tokenizer("Done!<|im_end|>").input_ids == [17453, 0, 151645]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_selection_of_trls_own_tests_passes() -> None:
    try:
        files = files_of_last_sdist()
        outcomes = run_files(
            files,
            ["test_grpo_trainer.py", "test_rloo_trainer.py"],
            classes="trl_realloc",
            rows=3,
            options=["-k", SELECTION],
        )
    except Unreachable as error:
        pytest.skip(str(error))
    print(table(outcomes))
    assert sum(row["outcome"] == "passed" for row in outcomes.values()) == len(outcomes) == PASSED
