"""A rank that trains a mixture of experts in bfloat16, once for each of the given runs. It compares the experts
of each of the policy's forwards with those that the engines recorded; rank 0 writes the counts.

A run has the settings of GRPO's trainer, or of PPO's (`ppo`), and may have `tools` (its completions call a tool),
`reward_model`, and `resumes` (the checkpoint of an earlier run).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import tiny
import tiny_groups
import torch
from tool_users import trainer as tool_user
from torch import nn
from torch.nn.modules import module as global_hooks

from trl_realloc.engines.generation.background_generation import BackgroundGeneration
from trl_realloc.runtime.process_groups import all_gather_object


Tokens = tuple[int, ...]
LAYERS = 2


@dataclass
class Engines:
    """Notes what this rank's engines record.

    Attributes:
        routes: (tokens and their routes) of each completion.
        continued: number of completions that began in another engine or another run.
    """

    routes: list[tuple[Tokens, np.ndarray[Any, Any]]] = field(default_factory=list)
    continued: int = 0

    def follow(self) -> None:
        start, add, poll = (getattr(BackgroundGeneration, name) for name in ("__init__", "add", "poll"))
        asked: dict[int, dict[int, Any]] = {}  # by generation and index

        def started(generation: Any, process: Any, checks: Any, requests: Any, *rest: Any) -> None:
            asked[id(generation)] = {request.index: request for request in requests}
            start(generation, process, checks, requests, *rest)

        def added(generation: Any, requests: Any) -> None:
            asked[id(generation)] |= {request.index: request for request in requests}
            add(generation, requests)

        def polled(generation: Any, timeout_s: float) -> Any:
            completions = poll(generation, timeout_s)
            for completion in completions:
                request = asked[id(generation)][completion.index]
                self.routes.append(((*request.prompt_ids, *completion.token_ids), completion.routes))
                self.continued += request.begun is not None and bool(request.begun.token_ids)
            return completions

        for name, function in (("__init__", started), ("add", added), ("poll", polled)):
            setattr(BackgroundGeneration, name, function)


@dataclass
class Forwards:
    """Notes the experts of each row of each forward of a mixture that is trained.

    Attributes:
        rows: (whether it is trained, token ids with padding, experts used, experts that the routers choose) of each
            row; experts are (tokens, layers, k), ascending.
    """

    rows: list[tuple[bool, Tokens, Any, Any]] = field(default_factory=list)
    _ids: Any = None
    _layers: list[tuple[Any, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        handle = global_hooks.register_module_forward_hook(self._note)
        yield
        handle.remove()

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        kind = type(module).__name__
        if kind == "Embedding":
            self._ids, self._layers = inputs[0], []
        elif kind == "Qwen3MoeTopKRouter":
            self._layers.append((output[0].detach(), output[2]))
        elif kind == "Qwen3MoeForCausalLM" and self._ids is not None and next(module.parameters()).requires_grad:
            # the check of the head runs the model without an embedding
            used = torch.stack([indices for _, indices in self._layers], 1)
            chosen = torch.stack([logits.topk(used.shape[-1]).indices for logits, _ in self._layers], 1)
            experts = (part.sort(-1).values.split(self._ids.shape[1]) for part in (used, chosen))
            for tokens, *of_row in zip(self._ids.tolist(), *experts, strict=True):
                self.rows.append((torch.is_grad_enabled(), tuple(tokens), *of_row))
            self._ids = None


def look_up(word: int) -> str:
    """Look up a word.

    Args:
        word: the word.
    """
    return f"w{word}"


def made_for(folder: Path, run: dict[str, Any]) -> Any:
    model = mixtures.mixture("qwen3_moe", moe_intermediate_size=32, attn_implementation="eager")
    given: dict[str, Any] = {"model": model}
    settings = {"bf16": True, "use_cpu": True, "gradient_checkpointing": False, **run}
    if settings.pop("tools", False):
        return tool_user(folder, pytest.MonkeyPatch(), [look_up], given=given, **settings)
    if settings.pop("ppo", False):
        return tiny.trainer(folder, given={**given, "train_dataset": tiny_groups.PROMPTS}, **settings)
    if settings.pop("reward_model", False):
        given |= {"reward_funcs": [tiny.classifier()], "reward_processing_classes": [tiny.tokenizer()]}
    return tiny_groups.trainer(folder, given=given, **settings)


def recorded(tokens: Tokens, known: Sequence[tuple[Tokens, Any]]) -> list[Any]:
    """The routes that engines recorded for a row, or for its longest beginning."""
    alike = [(len(other), routes) for other, routes in known if tokens[: len(other)] == other]
    longest = max((length for length, _ in alike), default=0)
    return [routes for length, routes in alike if length == longest]


def counts(forwards: Sequence[Any], known: Sequence[tuple[Tokens, Any]]) -> dict[str, int]:
    """Of all ranks' rows: how many are trained, scored, computed with other experts than those of an engine, unknown to
    the engines, and of which the router would choose others."""
    found = dict.fromkeys(("trained", "scored", "different", "unknown", "flipped"), 0)
    for is_trained, tokens, used, chosen in forwards:
        if len(tokens) <= 2:  # in the place of samples, where there are none
            continue
        found["trained" if is_trained else "scored"] += 1
        routes = [np.sort(rows.reshape(len(rows), LAYERS, -1), -1) for rows in recorded(tokens, known)]
        found["unknown"] += not routes
        found["different"] += bool(routes) and not any(np.array_equal(used[: len(r)].numpy(), r) for r in routes)
        found["flipped"] += not torch.equal(used, chosen)
    return found


def main(folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    engines, forwards = Engines(), Forwards()
    engines.follow()
    for name, run in runs.items():
        resumes = run.pop("resumes", None)
        if resumes is None:
            engines.routes.clear()
        engines.continued = 0
        forwards.rows.clear()
        made = made_for(folder / name, run)
        with forwards.followed():
            made.train(resume_from_checkpoint=None if resumes is None else str(folder / resumes))
        control = made.placement.control
        all_rows = [row for rows in all_gather_object(forwards.rows, control) for row in rows]
        known = [routes for rank_routes in all_gather_object(engines.routes, control) for routes in rank_routes]
        continued = sum(all_gather_object(engines.continued, control))
        if made.accelerator.is_main_process:
            whole = sum(len(routes) == len(tokens) - 1 for tokens, routes in known)
            told = {"completions": len(known), "whole": whole, "continued": continued}
            (folder / f"{name}.json").write_text(json.dumps(counts(all_rows, known) | told))
        made.close()
        tiny.forget_accelerate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
