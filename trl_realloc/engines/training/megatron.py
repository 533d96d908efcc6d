"""Training and scoring a Transformers model on a mesh as data x tensor x pipeline groups.

No model is converted: tensor parallelism is the family's own plan (`tensor`), pipeline stages are the model less the
other stages' layers (`pipeline`). Owns how the groups work together in one call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...algorithms.base import TokenLoss
from ...algorithms.rollout import Ragged, Rollouts, micro_batches
from ...plan.model_spec import FAMILIES, ModelSpec
from ...realloc.transfer import Parts
from ..base import BUCKET_BYTES, Bucket, EngineError, Rate
from ..buckets import in_buckets
from ..mesh_group import SplitGroups
from .master_weights import Master, Masters, NamedOptimizer
from .nonfinite_guard import guarded, refusal
from .packed_attention import base_of
from .packed_forward import PolicyHead, RoleHead, TokenLogprobs, run_forward, run_training, tied_weight
from .pipeline import Pipeline, keep_stage
from .replicated import set_learning_rate
from .tensor_parallel import box_of, is_split, local, split_tensors, vocabulary_start
from .vocab_parallel import SplitLogprobs
from .weight_export import check_state, checkpoint_names


if TYPE_CHECKING:
    from ..base import TrainingEngine


class MegatronEngine:
    """All ranks of a replica (its tensor groups and stages) are given the same samples and return the same results.

    Args:
        head: the role's whole model and what is asked of it; reduced here to this rank's part.
        groups: of the mesh.
        device: where the model lives.
        shard_optimizer: ZeRO stage 1 over the data-parallel group.
        compute_dtype, make_optimizer, max_grad_norm: as `ReplicatedEngine`'s. Parameters of less than float32 are
            trained through float32 master weights.

    Raises:
        EngineError: a family that cannot be split, or adapters that cannot.
        PlanError: the model cannot be split by so much.
    """

    def __init__(
        self,
        head: RoleHead,
        groups: SplitGroups,
        device: torch.device,
        *,
        shard_optimizer: bool = False,
        compute_dtype: torch.dtype | None = None,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        max_grad_norm: float = 0.0,
    ) -> None:
        check_model(head.model, groups.tp.size, groups.pp.size)
        if groups.pp.size > 1 and not head.packed:
            raise EngineError(
                f"{type(base_of(head.model)).__name__} does not keep samples apart that share a row (its attention is "
                f"{head.model.config._attn_implementation}), which a pipeline needs; load it with "
                f"attn_implementation='sdpa', or use pp: 1."
            )
        self.head, self.groups, self.device = head, groups, device
        self.compute_dtype, self.max_grad_norm = compute_dtype, max_grad_norm
        self.frozen = make_optimizer is None
        self.version = 0
        if self.frozen:
            head.requires_grad_(False).eval()
        model = head.model
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._learned = [name for name, p in model.named_parameters() if p.requires_grad]
        tied = tied_weight(model)
        self._tied = next((name for name, p in model.named_parameters() if p is tied), None)
        # over the whole model, before it is cut: a user's optimizer knows the parameters as they were given, and a
        # stage in which nothing is trained has none to make one over
        optimizer = NamedOptimizer.of(make_optimizer(model), model) if make_optimizer is not None else None
        if groups.pp.size > 1:
            keep_stage(model, groups.pp.index, groups.pp.size)
        head.to(device)
        partial_gradients: frozenset[str] = frozenset()
        if groups.tp.size > 1:
            partial_gradients = split_tensors(model, groups.tp)
            if isinstance(head, PolicyHead):
                head.token_logprobs = self._split_logprobs
        self.pipeline: Pipeline | None = None
        if groups.pp.size > 1:
            self.pipeline = Pipeline(head, groups.pp, device, base_of(model).config.hidden_size)
        self.masters: Masters | None = None
        if optimizer is not None:
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            shared = frozenset({self._tied} if self._tied and groups.pp.size > 1 else ())
            self.masters = Masters(
                trained, optimizer, groups, shard=shard_optimizer, tied=shared, partial=partial_gradients
            )

    def _split_logprobs(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        first = vocabulary_start(base_of(self.head.model).get_output_embeddings())
        result: tuple[Tensor, Tensor]
        if first is None:
            result = TokenLogprobs.apply(local(logits), targets, temperature)
        else:
            result = SplitLogprobs.apply(local(logits), targets, temperature, first, self.groups.tp)
        return result

    @property
    def parameter_names(self) -> list[str]:
        """Of the whole model, whichever of them are here."""
        return list(self._shapes)

    @property
    def has_replicas(self) -> bool:
        return self.groups.mesh.size > 1

    # --- calls --------------------------------------------------------------------------------------------------

    def forward(self, samples: Rollouts, micro_batch_tokens: int) -> dict[str, Ragged]:
        was_training = self.head.training
        self.head.eval()
        try:
            if self.pipeline is None:
                with torch.no_grad():
                    return run_forward(self._call, samples, micro_batch_tokens, self.groups.mesh, self.device)
            return self._through_stages(samples, micro_batch_tokens)
        finally:
            self.head.train(was_training)

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> dict[str, Tensor]:
        assert self.masters is not None, "a frozen role was asked to train"
        self.head.train()
        if self.pipeline is None:
            statistics = run_training(
                self._call,
                samples,
                loss,
                micro_batch_tokens,
                self.groups.mesh,
                self.device,
                lambda value, is_last: value.backward(),  # type: ignore[no-untyped-call]
            )
        else:
            statistics = self._train_stages(samples, loss, micro_batch_tokens)
        set_learning_rate(self.masters.optimizer, learning_rate)
        if not self.masters.step(self.max_grad_norm):
            raise refusal(self.groups.mesh, samples, statistics)
        self.version += 1
        return statistics

    def _through_stages(self, samples: Rollouts, budget: int) -> dict[str, Ragged]:
        assert self.pipeline is not None
        wanted = samples.only(("index", "prompts", "responses"))
        batches = self._batches(wanted, budget)
        parts: dict[int, Mapping[str, Ragged]] = {}

        def finish(at: int, outputs: Mapping[str, Ragged]) -> Tensor:
            parts[at] = {name: column.to("cpu") for name, column in outputs.items()}
            return torch.zeros((), device=self.device)

        if batches:
            micros = [wanted.select(batch).to(self.device) for batch in batches]
            self.pipeline.run(micros, finish, learns=False, call=self._in_context)
        made: dict[str, Ragged] = {}
        if parts:
            order = torch.argsort(torch.tensor([i for batch in batches for i in batch]))
            made = {n: Ragged.cat([parts[at][n] for at in range(len(batches))]).select(order) for n in parts[0]}
        return self._from_last_stage(made)

    def _train_stages(self, samples: Rollouts, loss: TokenLoss, budget: int) -> dict[str, Tensor]:
        assert self.pipeline is not None
        batches = self._batches(samples, budget)
        parts: dict[int, dict[str, Tensor]] = {}
        micros = [samples.select(batch).to(self.device) for batch in batches]

        def finish(at: int, outputs: Mapping[str, Ragged]) -> Tensor:
            value, statistics = loss(outputs, micros[at])
            parts[at] = {name: sums.float().cpu() for name, sums in statistics.items()}
            return guarded(value.float())

        if batches:
            self.pipeline.run(micros, finish, learns=True, call=self._in_context)
        made: dict[str, Tensor] = {}
        if parts:
            order = torch.argsort(torch.tensor([i for batch in batches for i in batch]))
            made = {n: torch.cat([parts[at][n] for at in range(len(batches))])[order] for n in parts[0]}
        return self._from_last_stage(made)

    def _batches(self, samples: Rollouts, budget: int) -> list[list[int]]:
        """Micro-batches within the budget, and so many that every stage can be at work at once."""
        return micro_batches(samples.lengths.tolist(), min(budget, -(-samples.tokens // self.groups.pp.size)))

    def _from_last_stage(self, made: Any) -> Any:
        box = [made]
        last = self.groups.pp.ranks[-1]
        dist.broadcast_object_list(box, last, group=self.groups.pp.group, device=self.groups.pp.device)
        return box[0]

    def _call(self, samples: Rollouts) -> Mapping[str, Ragged]:
        outputs: Mapping[str, Ragged] = self._in_context(lambda: self.head(samples))
        return outputs

    def _in_context(self, compute: Callable[[], Any]) -> Any:
        if self.compute_dtype is None:
            return compute()
        with torch.autocast(self.device.type, self.compute_dtype):
            return compute()

    # --- parameters -----------------------------------------------------------------------------------------------

    def parts(self) -> Parts:
        """As `ReplicatedEngine.parts`: this rank's stage, and of it its tensor-parallel slices."""
        named = list(self.head.model.named_parameters())
        wanted = set(self._learned) or {name for name, _ in named}
        return {name: [(box_of(p), local(p.data))] for name, p in named if name in wanted}

    def export(self, bucket_bytes: int = BUCKET_BYTES, *, merged: bool = True) -> Iterator[Bucket]:
        """Full tensors on the mesh's first rank, empty buckets on the others; collective.

        Raises:
            EngineError: `merged`, and the model has adapters: reallocate those, or export them as they are.
        """
        model: Any = self.head.model
        if merged and hasattr(model, "get_base_model"):
            raise EngineError("a split model's adapters are merged where they are reallocated to, not here.")
        named = partial(checkpoint_names, model) if merged else list
        own = dict(model.named_parameters())
        itemsize = next(self.head.parameters()).element_size()
        for names in in_buckets(self._shapes, lambda name: math.prod(self._shapes[name]) * itemsize, bucket_bytes):
            here = {n: (box_of(own[n]), local(own[n].data)) for n in names if n in own and self._stands_for(own[n], n)}
            whole = self._whole(here)
            yield named([(name, whole[name]) for name in names if name in whole])

    def state_dict(self) -> dict[str, Any]:
        """As `ReplicatedEngine.state_dict`; whole on the mesh's first rank, collective."""
        assert self.masters is not None, "a frozen role has no state"
        cells: dict[str, dict[str, tuple[Any, Tensor]]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        for master in filter(self.masters.counts, self.masters.all):
            assert master.weight is not None
            slots = self.masters.slots(master)
            full = {key: cell for key, cell in slots.items() if torch.is_tensor(cell) and cell.dim()}
            for key, cell in {**full, "master": master.weight.data}.items():
                # of another shape are an optimizer's factors, which it has of whole parameters alone
                box = box_of(master.parameter) if cell.shape == master.weight.shape else None
                cells.setdefault(key, {})[master.name] = (box, cell.float())
            scalars[master.name] = copy.deepcopy({key: cell for key, cell in slots.items() if key not in full})
        kinds = sorted({key for told in self._gathered(sorted(cells)) for key in told})
        parameters: dict[str, dict[str, Tensor]] = {}
        for key in kinds:
            for name, tensor in self._whole(cells.get(key, {})).items():
                parameters.setdefault(name, {})[key] = tensor
        every = {name: own for told in self._gathered(scalars) for name, own in told.items()}
        return {"version": self.version, "parameters": parameters, "scalars": every}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.masters is not None, "a frozen role has no state to load"
        check_state(state, self._learned)
        for master in self.masters.all:
            index = tuple(slice(start, stop) for start, stop in box_of(master.parameter))
            shape = master.parameter.shape
            cells = {
                key: (cell[index] if cell.shape == shape else cell).to(self.device, copy=True)
                for key, cell in state["parameters"][master.name].items()
            }
            weight = cells.pop("master")
            scalars = state["scalars"][master.name]
            slots = {**cells, **{k: c.clone() if torch.is_tensor(c) else c for k, c in scalars.items()}}
            self.masters.load(master, weight, slots)
        self.version = state["version"]

    def close(self) -> None:
        pass

    def _stands_for(self, parameter: Tensor, name: str) -> bool:
        """Whether this rank's part is the one that is taken, of all replicas of it."""
        groups = self.groups
        of_tensor = is_split(parameter) or groups.tp.index == 0
        return groups.dp.index == 0 and of_tensor and not (name == self._tied and groups.pp.index > 0)

    def _gathered(self, word: Any) -> list[Any]:
        if self.groups.mesh.size == 1:
            return [word]
        words: list[Any] = [None] * self.groups.mesh.size
        dist.all_gather_object(words, word, group=self.groups.mesh.group)
        return words

    def _whole(self, here: Mapping[str, tuple[Any, Tensor]]) -> dict[str, Tensor]:
        """Parameters put together on the mesh's first rank from each rank's boxes; nothing elsewhere. Collective."""
        mine = {name: (box, tensor.cpu()) for name, (box, tensor) in here.items()}
        if self.groups.mesh.size == 1:
            told: list[Any] = [mine]
        else:
            told = [None] * self.groups.mesh.size if self.groups.mesh.is_leader else []
            dist.gather_object(mine, told or None, self.groups.mesh.ranks[0], group=self.groups.mesh.group)
        whole: dict[str, Tensor] = {}
        for part in told:
            for name, (box, tensor) in part.items():
                if box is None:
                    whole[name] = tensor
                    continue
                place = whole.setdefault(name, torch.empty(self._shapes[name], dtype=tensor.dtype))
                place[tuple(slice(start, stop) for start, stop in box)] = tensor
        return whole


def check_model(model: Any, tp: int, pp: int) -> None:
    """Raises:
    EngineError: the family is none that can be split, or has adapters that cannot be.
    PlanError: tp or pp does not fit the model.
    """
    base = base_of(model)
    family = base.config.model_type
    if family not in FAMILIES:
        raise EngineError(
            f"engine megatron cannot split the family {family!r} ({type(base).__name__}); it can "
            f"{', '.join(sorted(FAMILIES))}. Use engine zero for it."
        )
    head = "lm" if base.get_output_embeddings() is not None else "score"
    ModelSpec.from_config(base.config, head, bytes_per_element=4).check_strategy(tp, pp)  # type: ignore[arg-type]
    for name, config in getattr(model, "peft_config", {}).items():
        beyond = ("use_dora", "trainable_token_indices", "target_parameters")
        is_lora = str(config.peft_type).rpartition(".")[2] == "LORA"
        plain = is_lora and not any(getattr(config, key, None) for key in beyond)
        if tp > 1 and not plain:
            raise EngineError(f"engine megatron cannot split the adapter {name!r} by tp; use plain LoRA, or tp: 1.")


if TYPE_CHECKING:  # the type checker proves that the engine keeps its protocol
    _TRAINS: type[TrainingEngine] = MegatronEngine


__all__ = ["Master", "MegatronEngine", "check_model"]
