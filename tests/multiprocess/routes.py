"""A rank that trains a mixture of experts in bfloat16, once for each of the given runs. It compares the experts
of each of the policy's forwards with those that the engines recorded; rank 0 writes the counts.

A run has the settings of GRPO's trainer, RLOO's (`kind`) or PPO's (`ppo`), and may have `family`, `tools` (its
completions call a tool), `reward_model`, and `resumes` (the checkpoint of an earlier run).
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

from trl_realloc import GRPOTrainer, RLOOTrainer
from trl_realloc.engines.generation.background_generation import BackgroundGeneration
from trl_realloc.engines.transformers_compat import routers
from trl_realloc.runtime.process_groups import all_gather_object


Tokens = tuple[int, ...]


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
    _routed: dict[nn.Module, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        handle = global_hooks.register_module_forward_hook(self._note)
        yield
        handle.remove()

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        kind = type(module).__name__.lower()
        if kind == "embedding":
            self._ids, self._routed = inputs[0], {}
        elif kind.endswith("topkrouter"):
            self._routed[module] = output
        elif kind.endswith("forcausallm") and self._routed and next(module.parameters()).requires_grad:
            # the check of the head runs the model without an embedding
            if self._ids is not None:
                self._add_rows(module)
            self._ids = None

    def _add_rows(self, model: nn.Module) -> None:
        used, chosen = [], []
        for router, index in routers(model):
            outputs = self._routed[router]
            used.append(next(part for part in outputs if not part.is_floating_point()))  # not the logits and weights
            chosen.append(mixtures.choice(router, outputs[index].detach(), used[-1].shape[-1]))
        experts = (torch.stack(part, 1).sort(-1).values.split(self._ids.shape[1]) for part in (used, chosen))
        for tokens, *of_row in zip(self._ids.tolist(), *experts, strict=True):
            self.rows.append((torch.is_grad_enabled(), tuple(tokens), *of_row))


def look_up(word: int) -> str:
    """Look up a word.

    Args:
        word: the word.
    """
    return f"w{word}"


def model_of(run: dict[str, Any]) -> Any:
    return mixtures.mixture(run.get("family", "qwen3_moe"), attn_implementation="eager")


def made_for(folder: Path, run: dict[str, Any]) -> Any:
    given: dict[str, Any] = {"model": model_of(run)}
    settings = {"bf16": True, "use_cpu": True, "gradient_checkpointing": False, **run}
    settings.pop("family", None)
    if "eval_strategy" in settings:
        given["eval_dataset"] = tiny.prompts(8)
    if settings.pop("tools", False):
        return tool_user(folder, pytest.MonkeyPatch(), [look_up], given=given, **settings)
    if settings.pop("ppo", False):
        return tiny.trainer(folder, given={**given, "train_dataset": tiny_groups.PROMPTS}, **settings)
    if settings.pop("reward_model", False):
        given |= {"reward_funcs": [tiny.classifier()], "reward_processing_classes": [tiny.tokenizer()]}
    kind = {"GRPO": GRPOTrainer, "RLOO": RLOOTrainer}[settings.pop("kind", "GRPO")]
    return tiny_groups.trainer(folder, kind, given=given, **settings)


def recorded(tokens: Tokens, known: Sequence[tuple[Tokens, Any]]) -> list[Any]:
    """The routes that engines recorded for a row, or for its longest beginning."""
    alike = [(len(other), routes) for other, routes in known if tokens[: len(other)] == other]
    longest = max((length for length, _ in alike), default=0)
    return [routes for length, routes in alike if length == longest]


def first_forwards(rows: Sequence[Any]) -> dict[Tokens, Any]:
    """The experts of the first forward of each row, by its tokens without padding, of all of them but the last."""
    found: dict[Tokens, Any] = {}
    for is_trained, tokens, used, _ in rows:
        length = len(torch.tensor(tokens).nonzero())
        if not is_trained:
            found.setdefault(tokens[:length], used[: length - 1].numpy())
    return found


def counts(forwards: Sequence[Any], known: Sequence[tuple[Tokens, Any]]) -> dict[str, int]:
    """Of all ranks' rows: how many are trained, scored, computed with other experts than those of an engine, unknown to
    the engines, and of which the router would choose others."""
    found = dict.fromkeys(("trained", "scored", "different", "unknown", "flipped"), 0)
    for is_trained, tokens, used, chosen in forwards:
        if len(tokens) <= 2:  # in the place of samples, where there are none
            continue
        found["trained" if is_trained else "scored"] += 1
        routes = [np.sort(rows.reshape(len(rows), *used.shape[1:]), -1) for rows in recorded(tokens, known)]
        found["unknown"] += not routes
        found["different"] += bool(routes) and not any(np.array_equal(used[: len(r)].numpy(), r) for r in routes)
        found["flipped"] += not torch.equal(used, chosen)
    return found


def still(made: Any, model: nn.Module) -> list[str]:
    """The parameters that are trained on this rank and are those of `model`. All ranks together."""
    engine, begun = made.placement.engine("actor.train"), dict(model.named_parameters())
    exported = (pair for bucket in engine.export(merged=False) for pair in bucket) if engine is not None else ()
    return [name for name, tensor in exported if torch.equal(tensor, begun[name])]


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
        unchanged = sum(all_gather_object(still(made, model_of(run)), control), [])
        if made.accelerator.is_main_process:
            if run.get("router_replay") == "recompute":
                known = [*first_forwards(all_rows).items()]
            whole = sum(len(routes) == len(tokens) - 1 for tokens, routes in known)
            told = {"completions": len(known), "whole": whole, "continued": continued, "still": unchanged}
            (folder / f"{name}.json").write_text(json.dumps(counts(all_rows, known) | told))
        made.close()
        tiny.forget_accelerate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
