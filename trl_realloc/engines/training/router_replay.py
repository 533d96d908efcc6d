"""Router replay: a mixture of experts computes with the experts that another computation has chosen, its *routes*.

In 16 bits the routers of two implementations choose other experts for some tokens, so the log-probabilities of the
engine that sampled and of the model that is trained are of different networks. `replays` makes a model take routes. A
router's choice is one `topk` over the experts; its indices are replaced and its values gathered at them, so scores,
norms and gradients are the family's own. The same place records the routes of a forward (`ForwardRoutes`); how an
engine's are recorded is in `generation.vllm_routes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from ...algorithms.rollout import Ragged, Rollouts, on_device, places
from ...plan.algorithm_graphs import ROUTES
from ..requests import MOST_IN_A_BYTE
from ..transformers_compat import routers
from .deepspeed_compat import full_shape
from .packed_row import PackedRow


if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


ARGUMENT = (
    "replayed_routes"  # argument of the model and its layers: (tokens, layers, k) int16, -1 for the router's choice
)
RECORD = "recorded_routes"  # argument of the model and its layers: a `ForwardRoutes`
# families whose routes are replayed, by tests
REPLAYED_FAMILIES = frozenset({"glm4_moe", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})


def has_replay(config: PretrainedConfig) -> bool:
    """True if a model of this config can replay routes."""
    return config.get_text_config().model_type in REPLAYED_FAMILIES


class _Replay(TorchFunctionMode):
    """Replaces the experts that a router chooses.

    Args:
        routes: (tokens, k) int16, -1 for the router's own choice.
        experts: number of experts.
    """

    def __init__(self, routes: Tensor, experts: int) -> None:
        super().__init__()
        self._routes, self._experts = routes, experts
        self.chosen = routes

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, chosen = args[0], result.indices
        # a router with groups of experts also chooses groups
        if scores.dim() != 2 or scores.shape[-1] != self._experts or chosen.shape != self._routes.shape:
            return result
        routes = self._routes.to(chosen.dtype)
        self.chosen = experts = torch.where(routes < 0, chosen, routes)
        return torch.return_types.topk((scores.gather(-1, experts), experts))  # type: ignore[call-arg]


class ForwardRoutes:
    """The routes of one forward, which its layers add. A layer that is computed again for the backward adds the same.

    Attributes:
        of_layer: (cells, k) int64 by the number of the layer, of the layers of this pipeline stage.
    """

    def __init__(self, experts: int, layers: int, top_k: int) -> None:
        self.of_layer: dict[int, Tensor] = {}
        self._dtype = torch.uint8 if experts <= MOST_IN_A_BYTE else torch.int16
        self._layers, self._top_k = layers, top_k

    def of_samples(self, token_places: Tensor, lengths: Tensor) -> Ragged:
        """The column `ROUTES`, (tokens, layers times k), with 0 for the layers of other stages.

        Args:
            token_places: (tokens,) int64, the cell of each token of the samples, on the device of the forward.
            lengths: (n,) int64 in host memory, the tokens of each sample.
        """
        shape = (len(token_places), self._layers, self._top_k)
        result = torch.zeros(shape, dtype=self._dtype, device=token_places.device)
        for number, chosen in self.of_layer.items():
            result[:, number] = chosen[token_places].to(self._dtype)
        return Ragged(result.flatten(1), lengths)


class _LayerReplay:
    """The hooks of one layer: before its forward, which activation checkpointing may run again, and after it.

    Args:
        number: number of the layer among those with a router; `None` for a layer without one.
    """

    def __init__(self, number: int | None, experts: int) -> None:
        self._number, self._experts = number, experts
        self._entered: list[tuple[_Replay, ForwardRoutes | None]] = []

    def begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routes, record = kwargs.pop(ARGUMENT, None), kwargs.pop(RECORD, None)
        if routes is not None and self._number is not None:
            replay = _Replay(routes[:, self._number], self._experts)
            self._entered.append((replay, record))
            replay.__enter__()
        return args, kwargs

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        while self._entered:
            replay, record = self._entered.pop()
            replay.__exit__(None, None, None)
            if record is not None and self._number is not None:
                record.of_layer[self._number] = replay.chosen


def replays(model: PreTrainedModel) -> int:
    """Make the layers of a mixture take `ARGUMENT`. Returns the number of its routers."""
    found = [module for module, _ in routers(model)]
    number = 0
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        router = next((module for module in layer.modules() if any(module is one for one in found)), None)
        experts = 0 if router is None else full_shape(router.weight)[0]
        hooks = _LayerReplay(None if router is None else number, experts)
        layer.register_forward_pre_hook(hooks.begin, with_kwargs=True)
        layer.register_forward_hook(hooks.end, always_call=True)
        number += router is not None
    return number


def routes_of(
    samples: Rollouts, row: Tensor, column: Tensor, width: int, packed: PackedRow | None, layers: int, top_k: int
) -> Tensor:
    """(cells, layers, k) int16: the routes of the tokens of a forward, -1 where there are none.

    Args:
        samples: samples on the device of the forward, maybe with the column `ROUTES`, (tokens, layers times k).
        row, column: (tokens,) int64 in host memory, the place of each token of the samples.
        width: cells of a row.
        packed: row of the samples if they share tokens. A shared token has the route of one of the samples.
        layers, top_k: number of routers, and of the experts that each chooses.
    """
    lengths, device = samples.lengths, samples.ragged("responses").values.device
    none = Ragged(torch.empty(0, layers * top_k, dtype=torch.int16, device=device), torch.zeros_like(lengths))
    routes = samples.ragged(ROUTES) if ROUTES in samples else none
    known = torch.minimum(routes.lengths, lengths)
    position = places(lengths)
    start = torch.repeat_interleave(torch.cumsum(routes.lengths, 0) - routes.lengths, lengths)
    # the last row of the table below is of tokens without routes
    index = torch.where(position < torch.repeat_interleave(known, lengths), start + position, len(routes.values))
    if packed is not None and packed.saved:
        of_cells = index[packed.taken]
    else:
        of_cells = torch.full((width * (int(row.max()) + 1),), len(routes.values))
        of_cells[row * width + column] = index
    values = routes.values.to(torch.int16)
    table = torch.cat([values, values.new_full((1, values.shape[1]), -1)])
    return table[on_device(of_cells, table.device)].view(len(of_cells), layers, -1)
