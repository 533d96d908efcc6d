"""The experts that a mixture's routers choose inside vLLM, its *routes*: `SlotRoutes` stores them in a worker beside
the keys and values of each token, `RequestRoutes` reads those of a request. Tokens from the prefix cache then have the
routes with which their keys and values were computed.

Both are in vLLM's process; what the routes are used for is in `training.router_replay`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..requests import MOST_IN_A_BYTE
from .vllm_compat import BlocksOfRequests, NoRoutes, full_attention_group, slots_of_forward, watch_routers


if TYPE_CHECKING:
    from vllm import LLM

    from ..requests import Routes


class SlotRoutes:
    """The routes of every token in a worker's cache: 384 bytes a token for 48 layers with 8 experts each, where keys
    and values of Qwen3-30B-A3B take 98 KB.

    Raises:
        NoRoutes: see `watch_routers` and `full_attention_group`.
    """

    def __init__(self, model_runner: Any) -> None:
        config = model_runner.model_config
        cache = model_runner.kv_cache_config
        group, self._layer = full_attention_group(cache)
        self._slots = cache.num_blocks * cache.kv_cache_groups[group].kv_cache_spec.block_size
        self._dtype = torch.uint8 if config.get_num_experts() <= MOST_IN_A_BYTE else torch.int16
        self._routes: Tensor | None = None
        self._seen = set[int]()
        self._layers = watch_routers(model_runner.model, self._see)

    def _see(self, layer: int, experts: Tensor) -> None:
        slots = slots_of_forward(self._layer)
        if slots is None:
            return
        if self._routes is None:
            # the last row is for padding, whose slot is -1
            shape = (self._slots + 1, self._layers, experts.shape[1])
            self._routes = torch.zeros(shape, dtype=self._dtype, device=experts.device)
        self._seen.add(layer)
        count = min(len(slots), len(experts))
        self._routes[slots[:count], layer] = experts[:count].to(self._dtype)

    def problem(self) -> str | None:
        """The reason why a forward has not told the experts of every layer; `None` if it has."""
        missing = self._layers - len(self._seen)
        return f"{missing} of {self._layers} layers do not tell the experts they choose" if missing else None

    def at(self, slots: np.ndarray[Any, Any]) -> Routes:
        """(slots, layers times k): the routes at these slots of the cache."""
        assert self._routes is not None, "the engine has computed a token at its start"
        rows = self._routes[torch.from_numpy(slots).to(self._routes.device)]
        routes: Routes = rows.flatten(1).cpu().numpy()
        return routes


class RequestRoutes:
    """Reads the routes of requests.

    Raises:
        NoRoutes: the workers do not record routes. The message says why.
    """

    def __init__(self, llm: LLM) -> None:
        problem = next(filter(None, llm.collective_rpc("why_no_routes")), None)
        if problem is not None:
            raise NoRoutes(problem)
        self._llm = llm
        self._blocks = BlocksOfRequests(llm.llm_engine, llm.collective_rpc("route_group")[0])

    def name(self, request_id: str) -> str:
        """vLLM's own name of an unfinished request, for `take`."""
        return self._blocks.name(request_id)

    def take(self, name: str, tokens: int, *, ended: bool) -> Routes:
        """The routes of the first `tokens` tokens of a request. To be called before the next step if it has ended."""
        blocks, size = np.asarray(self._blocks.take(name, ended=ended), dtype=np.int64), self._blocks.block_size
        position = np.arange(tokens)
        routes: Routes = self._llm.collective_rpc(
            "routes_at", args=(blocks[position // size] * size + position % size,)
        )[0]
        return routes

    def forget(self) -> None:
        """Forget requests that have ended."""
        self._blocks.forget()
