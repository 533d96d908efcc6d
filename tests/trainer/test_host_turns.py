"""What TRL's trainers get from the generation of a plan: log-probabilities from vLLM alone, joined over turns."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import recorded_rollouts
import torch
import trl

import trl_realloc
from trl_realloc.algorithms.rollout import Ragged, Rollouts
from trl_realloc.engines.generation.vllm_support import is_vllm_available
from trl_realloc.engines.requests import Sampling
from trl_realloc.trainer.policy.group_rewards import GroupRewards
from trl_realloc.trainer.policy.single_candidates import SingleCandidates
from trl_realloc.trainer.policy.turns import Turns
from trl_realloc.trainer.policy.user_spans import FunctionSpans


def responses(prompts: Any, *_: Any, **__: Any) -> Rollouts:
    """Responses without an engine, as the calls of a plan give them."""
    ids, logprobs = recorded_rollouts.responses(0, prompts)
    rows = [[math.nan if value is None else value for value in row] for row in logprobs]
    columns = {"responses": Ragged.of(ids, torch.long), "logprobs": Ragged.of(rows, torch.float32)}
    return Rollouts(**columns, has_eos=torch.ones(len(ids), dtype=torch.bool))


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize(
    "engine",
    [
        "transformers",
        pytest.param("vllm", marks=pytest.mark.skipif(not is_vllm_available(), reason="vLLM is not installed")),
    ],
)
def test_losses_see_vllms_log_probabilities_also_uncorrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, corrects: bool
) -> None:
    """TRL masks samples far from the policy by them (`off_policy_mask_threshold`) without a correction too."""
    made = recorded_rollouts.make(
        trl_realloc,
        tmp_path,
        base=lambda trainer: trainer,
        use_vllm=engine == "vllm",
        vllm_importance_sampling_correction=corrects,
    )
    monkeypatch.setattr(made.calls, "generate", responses)
    made._get_per_token_logps_and_entropies = lambda _, ids, mask, width, **__: (torch.zeros(len(ids), width), None, 0)
    batch = made._generate_and_score_completions([{"prompt": "w2 w3 w4"}] * 4)
    expected = responses(made.processing_class(["w2 w3 w4"] * 4)["input_ids"])
    for ids, row in zip(batch["completion_ids"], expected.ragged("responses").rows(), strict=True):
        assert ids[: len(row)].tolist() == row.tolist()
    assert ("sampling_per_token_logps" in batch) == (engine == "vllm")
    if engine == "vllm":
        for sampled, row in zip(batch["sampling_per_token_logps"], expected.ragged("logprobs").rows(), strict=True):
            torch.testing.assert_close(sampled[: len(row)], row, equal_nan=True)
    assert made.vllm_importance_sampling_correction == (corrects and engine == "vllm")
    made.close()


class OwnTurns(trl.GRPOTrainer):  # type: ignore[misc]
    """Generates by itself, and tells the log-probabilities of all turns."""

    def _generate(self, prompts: Any) -> Any:
        return [[2]], [[3, 4, 5]], None, ["w3 w4 w5"], [[0.0, None, -1.0]], {}, None, []


def turns_of(kind: type, forced: SingleCandidates, finish: Any = None, **attributes: Any) -> Any:
    made: Any = object.__new__(kind)
    vars(made).update({"tools": None, "rollout_func": None, "args": SimpleNamespace(tool_workers=1), **attributes})
    calls: Any = SimpleNamespace(finish_turns=finish, generates_turns=False)
    spans = FunctionSpans(made)
    return Turns(made, lambda: calls, spans, forced, GroupRewards(made, spans)).methods()


def test_log_probabilities_are_those_of_all_turns_and_a_single_turn_stays_as_it_is() -> None:
    forced = SingleCandidates(Sampling(8, 1.0, top_k=3), full_vocabulary=False)
    assert turns_of(trl.GRPOTrainer, forced) == turns_of(trl.RLOOTrainer, forced) == {}
    (name, generate), *_ = turns_of(OwnTurns, forced).items()
    assert name == "_generate" and len(generate(["w2"])) == 8
    assert forced.zeroed(torch.full((1, 3), -2.0)).tolist() == [[0.0, -2.0, -2.0]]


def test_a_rank_whose_turns_are_over_generates_for_the_others() -> None:
    ended: list[str] = []
    forced = SingleCandidates(Sampling(8, 1.0), full_vocabulary=False)
    turns = turns_of(trl.GRPOTrainer, forced, lambda: ended.append("end"), rollout_func=lambda prompts, _: prompts)
    assert turns["rollout_func"](["w2"], None) == ["w2"] and ended == ["end"]
    assert {*turns} == {"rollout_func", "_generate"}
