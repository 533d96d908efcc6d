"""`SampledRoutes`: the experts with which a mixture's engine sampled this rank's completions, or with which the policy
computed them first, for the policy's forwards.

TRL's loop does not carry them, so they are found by the token ids of prompt and completion together. After several
turns the engine's last answer has the experts of all turns. Equal completions have the experts of one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...algorithms.rollout import Ragged, Rollouts, token_keys
from ...plan.algorithm_graphs import ROUTES


class SampledRoutes:
    """The routes of the completions of this rank's latest generation of the training, and of its latest evaluation."""

    def __init__(self) -> None:
        self._of_mode: dict[bool, dict[bytes, Tensor]] = {True: {}, False: {}}
        self._trains = True
        self._empty: Tensor | None = None  # (0, layers times k)

    def begin_generation(self, *, trains: bool) -> None:
        """Forget the completions of the earlier generation, of the training or of evaluations."""
        self._trains = trains
        self._of_mode = {True: {} if trains else self._of_mode[True], False: {}}

    def add(self, prompts: Sequence[Sequence[int]], outputs: Rollouts) -> None:
        """Keep the routes of an engine's completions.

        Args:
            outputs: columns `responses` and, if the engine records them, `routes`.
        """
        if ROUTES in outputs:
            self._keep(_keys(outputs.plus(prompts=Ragged.of(prompts, torch.long))), outputs)

    def record(self, samples: Rollouts, outputs: Rollouts) -> None:
        """Keep the routes of a forward of the policy, if it records them (`router_replay` is `recompute`).

        Args:
            outputs: outputs for the same samples in the same order.
        """
        if ROUTES in outputs:
            self._keep(_keys(samples), outputs)

    def _keep(self, keys: Sequence[bytes], outputs: Rollouts) -> None:
        routes = outputs.ragged(ROUTES).rows()
        self._empty = routes[0][:0]
        self._of_mode[self._trains].update((key, rows) for key, rows in zip(keys, routes, strict=True) if len(rows))

    def attach(self, samples: Rollouts) -> Rollouts:
        """The samples with the column `routes`, if this rank has any. A sample that is not known, such as one that goes
        on with a tool's result or whose response is masked, has those of the longest beginning that it shares with a
        known one. A token's experts depend on the tokens before it alone."""
        if self._empty is None or not len(samples):
            return samples
        keys, known = _keys(samples), self._of_mode[False] | self._of_mode[True]
        ordered = [] if all(key in known for key in keys) else sorted(known)
        found = [known[key] if key in known else self._of_beginning(key, known, ordered) for key in keys]
        return samples.plus(**{ROUTES: Ragged.of(found, self._empty.dtype)})

    def _of_beginning(self, key: bytes, known: Mapping[bytes, Tensor], ordered: Sequence[bytes]) -> Tensor:
        assert self._empty is not None, "there are routes"
        at = bisect_left(ordered, key)  # the longest common beginning is that with a neighbor
        alike = [known[other][: _shared_tokens(key, other)] for other in ordered[max(at - 1, 0) : at + 1]]
        return max(alike, key=len, default=self._empty)


def _shared_tokens(key: bytes, other: bytes) -> int:
    differ = (at for at, pair in enumerate(zip(key, other, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(key), len(other))) // torch.long.itemsize


def _keys(samples: Rollouts) -> list[bytes]:
    return [prompt + response for prompt, response in token_keys(samples)]
