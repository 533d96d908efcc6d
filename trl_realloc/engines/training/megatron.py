"""Engine that trains and scores a Transformers model that is split over data x tensor x pipeline groups of a mesh.

The model is not converted: `tensor_parallel` splits it by the family's own plan, `pipeline` removes other stages'
layers, `split_masters` has the optimizer. This file combines them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...algorithms.algorithm import TokenLoss
from ...algorithms.nonfinite import refusal
from ...algorithms.rollout import Ragged, Rollouts
from ...plan.batching import stage_batches
from ...plan.model_spec import FAMILIES, ModelSpec
from ...realloc.transfer import Parts
from ..base import BUCKET_BYTES, Bucket, EngineError, Rate, SourceDigests
from ..mesh_group import SplitGroups, in_buckets
from ..parameter_pieces import Piece
from ..requests import SamplingMask
from ..training_state import StateSpecs, TensorSpec, TrainingState
from ..transformers_compat import attention_name
from .heads import PolicyHead, RoleHead, autocast, tied_weight
from .micro_batches import in_order, model_inputs, row_of, run_forward, run_training, statistics_in_order
from .packed_attention import base_of
from .packed_row import PackedRow
from .part_gather import PartGather
from .pipeline import MiniBatch, PackedSamples, StagePipeline, keep_stage
from .split_masters import NamedOptimizer, SplitMasters
from .stage_run import StageWork, run_pipeline
from .tensor_parallel import box_of, is_split, local, split_tensors, splits_adapter, vocabulary_start
from .token_logprobs import TokenLogprobs
from .vocab_parallel import SplitLogprobs
from .weight_export import check_names, checkpoint_names, whole_pieces
from .weight_source import fill, to_device


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..base import TrainingEngine


class MegatronEngine:
    """Implements `base.TrainingEngine`. All ranks of a replica (its tensor-parallel groups and stages) get the same
    samples and return the same results.

    Args:
        head: the role's full model in its head; reduced in place to this rank's part. If the model is on the meta
            device, only that part is read.
        groups: process groups of the mesh.
        device: device of the model.
        shard_optimizer: whether to shard the optimizer state over the data-parallel group (ZeRO stage 1).
        compute_dtype, make_optimizer, max_grad_norm: same as in `ReplicatedEngine`.

    Raises:
        EngineError: the model's family or its adapters cannot be split.
        PlanError: the model's sizes are not divisible by tp or pp.
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
                f"{type(base_of(head.model)).__name__} mixes samples that share a row (its attention is "
                f"{attention_name(head.model.config)}), but a pipeline needs packed rows; load it with "
                f"attn_implementation='sdpa', or use pp: 1."
            )
        self.head, self.groups, self.device = head, groups, device
        self.compute_dtype, self.max_grad_norm = compute_dtype, max_grad_norm
        self.frozen = make_optimizer is None
        self.version, self.grad_norm = 0, math.nan
        if self.frozen:
            head.requires_grad_(False).eval()
        model = head.model
        self._specs = {name: TensorSpec(tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
        self._gather: PartGather | None = None
        self._trained_names = [name for name, p in model.named_parameters() if p.requires_grad]
        tied = tied_weight(model)
        self._tied = next((name for name, p in model.named_parameters() if p is tied), None)
        # made before the model is split: a user's optimizer needs the full model's parameters, and a stage without
        # trained parameters could not make one
        optimizer = NamedOptimizer.of(make_optimizer, model) if make_optimizer is not None else None
        if groups.pp.size > 1:
            keep_stage(model, groups.pp.index, groups.pp.size)
        partial_gradients: frozenset[str] = frozenset()
        if groups.tp.size > 1:  # moves each parameter as it is split, so that the device has one whole parameter
            partial_gradients = split_tensors(model, groups.tp)
            if isinstance(head, PolicyHead):
                head.token_logprobs, head.vocabulary_group = self._split_logprobs, groups.tp
        to_device(head, device)
        fill(model, device)
        self.pipeline: StagePipeline | None = None
        if groups.pp.size > 1:
            self.pipeline = StagePipeline(head, groups.pp, device, base_of(model).config.hidden_size)
        self.masters: SplitMasters | None = None
        if optimizer is not None:
            trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            shared = frozenset({self._tied} if self._tied and groups.pp.size > 1 else ())
            self.masters = SplitMasters(
                trained, optimizer, groups, shard=shard_optimizer, tied=shared, partial=partial_gradients
            )

    def _split_logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, sampling_mask: SamplingMask | None
    ) -> tuple[Tensor, Tensor]:
        first = vocabulary_start(base_of(self.head.model).get_output_embeddings())
        result: tuple[Tensor, Tensor]
        if first is None:
            result = TokenLogprobs.apply(local(logits), targets, temperature, sampling_mask)
        else:
            result = SplitLogprobs.apply(local(logits), targets, temperature, first, self.groups.tp, sampling_mask)
        return result

    @property
    def parameter_specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

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
                    tree = self.head.tree(samples)
                    mesh = self.groups.mesh
                    return run_forward(self._call, samples, micro_batch_tokens, mesh, self.device, tree=tree)
            return self._through_stages(samples, micro_batch_tokens)
        finally:
            self.head.train(was_training)

    def train(
        self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int, learning_rate: Rate
    ) -> dict[str, Tensor]:
        statistics = self.add_gradients(samples, loss, micro_batch_tokens)
        self.step(samples, statistics, learning_rate)
        return statistics

    def add_gradients(self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int) -> dict[str, Tensor]:
        assert self.masters is not None, "a frozen role cannot be trained"
        self.head.train()
        if self.pipeline is None:
            return run_training(
                self._call,
                samples,
                loss,
                micro_batch_tokens,
                self.groups.mesh,
                self.device,
                lambda value, is_last: value.backward(),  # type: ignore[no-untyped-call]
                tree=self.head.tree(samples),
            )
        batch = self.mini_batch(samples, loss, micro_batch_tokens)
        run_pipeline(self.stage_work(batch.micros, batch.finish), trains=True)
        return self.statistics_of(batch)

    def mini_batch(self, samples: Rollouts, loss: TokenLoss, micro_batch_tokens: int) -> MiniBatch:
        """A mini-batch for the stages of a pipeline. The arguments are those of `train`."""
        batches, micros = self._micro_batches(samples, micro_batch_tokens)
        return MiniBatch(batches, micros, loss)

    def stage_work(
        self, micros: Sequence[PackedSamples], finish: Callable[[int, Mapping[str, Ragged]], Tensor]
    ) -> StageWork:
        """Micro-batches for this rank's stage; the arguments are `StageWork`'s."""
        assert self.pipeline is not None, "the model has one stage"
        return StageWork(self.pipeline, micros, finish, self.in_context)

    def statistics_of(self, batch: MiniBatch) -> dict[str, Tensor]:
        """The statistics of `train` for a mini-batch that has run through the stages. Collective over the pipeline."""
        parts = [batch.statistics[index] for index in range(len(batch.statistics))]
        lengths = [micro.samples.ragged("responses").lengths for micro in batch.micros]
        return self._of_stages(statistics_in_order(parts, batch.batches, lengths))

    def step(self, samples: Rollouts, statistics: Mapping[str, Tensor], learning_rate: Rate) -> None:
        """Take an optimizer step with the accumulated gradients. Collective over the mesh.

        Args:
            samples, statistics: this rank's share of the mini-batch, and its statistics.

        Raises:
            NonFiniteError: see `train`.
        """
        assert self.masters is not None, "a frozen role cannot be trained"
        self.masters.settings.give(learning_rate)
        self.grad_norm = self.masters.step(self.max_grad_norm)
        if not math.isfinite(self.grad_norm):
            raise refusal(samples, statistics, self.groups.mesh.max)
        self.version += 1

    def drop(self) -> None:
        assert self.masters is not None, "a frozen role has no gradients"
        self.masters.drop()

    def _through_stages(self, samples: Rollouts, budget: int) -> dict[str, Ragged]:
        batches, micros = self._micro_batches(model_inputs(samples), budget)
        parts: dict[int, Mapping[str, Ragged]] = {}

        def finish(index: int, outputs: Mapping[str, Ragged]) -> Tensor:
            parts[index] = outputs
            return torch.zeros((), device=self.device)

        run_pipeline(self.stage_work(micros, finish), trains=False)
        results = in_order([parts[index] for index in range(len(parts))], batches)
        values = self._of_stages({name: column.values for name, column in results.items()})
        lengths = self._from_last_stage({name: column.lengths for name, column in results.items()})
        return {name: Ragged(values[name], lengths[name]) for name in values}

    def _micro_batches(self, samples: Rollouts, budget: int) -> tuple[list[list[int]], list[PackedSamples]]:
        """Micro-batches as indices of samples, and on the device: within the budget, and if possible at least as many
        as stages, so that all stages compute at the same time."""
        tree = self.head.tree(samples)
        batches = stage_batches(samples.lengths.tolist(), budget, self.groups.pp.size, tree)
        micros = (PackedSamples(samples.select(batch).to(self.device), row_of(tree, batch)) for batch in batches)
        return batches, list(micros)

    def _of_stages(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The last stage's results, on every stage. If each stage has a part of some, the sums of the parts."""
        whole = self._from_last_stage(results)
        if not (isinstance(self.head, PolicyHead) and self.head.has_router_outputs):
            return whole
        missing = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        parts = {name: tensor.to(self.device, copy=True) for name, tensor in {**missing, **results}.items()}
        # routes are int16, which neither gloo nor NCCL sums; one stage alone has a route that is not 0
        self.groups.pp.sum_(part.view(torch.uint8) if part.dtype == torch.int16 else part for part in parts.values())
        return {name: tensor.cpu() for name, tensor in parts.items()}

    def _from_last_stage(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The last stage's results, on every stage."""
        return self.groups.pp.share(results, self.groups.pp.size - 1)

    def _call(self, samples: Rollouts, row: PackedRow | None) -> Mapping[str, Ragged]:
        outputs: Mapping[str, Ragged] = self.in_context(lambda: self.head(samples, row))
        return outputs

    def in_context(self, compute: Callable[[], object]) -> Any:
        """Run a part of the model's forward with the engine's autocast."""
        with autocast(self.device, self.compute_dtype):
            return compute()

    # --- parameters -----------------------------------------------------------------------------------------------

    def parts(self) -> Parts:
        """The tensor-parallel parts of this rank's stage."""
        named = list(self.head.model.named_parameters())
        names = set(self._trained_names) or {name for name, _ in named}
        return {name: [(box_of(p), local(p.data))] for name, p in named if name in names}

    def source_digests(self) -> SourceDigests:
        return {}

    def export(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        merged: bool = True,
        names: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> Iterator[Bucket]:
        """Full tensors on the mesh's first rank, empty buckets on the others.

        Raises:
            EngineError: `merged`, and the model has adapters.
        """
        model: Any = self.head.model
        if merged and hasattr(model, "get_base_model"):
            raise EngineError(
                "a split model's adapters cannot be merged; reallocate them, or export with merged=False."
            )
        rename = partial(checkpoint_names, model) if merged else list
        if self._gather is None:
            self._gather = PartGather(dict(model.named_parameters()), self._specs, self.groups, self._contributes)
        chosen = [name for name in self._specs if names is None or name in names]
        specs = self._specs
        for bucket in in_buckets(chosen, lambda n: specs[n].bytes, bucket_bytes, lambda n: specs[n].dtype):
            full = self._gather.full(bucket)
            yield rename([(name, full[name]) for name in bucket if name in full])

    def pieces(self, piece_bytes: int, names: Collection[str] | None = None) -> Iterator[Sequence[Piece]]:
        return whole_pieces(self.export(piece_bytes, merged=False, names=names))

    def training_state(self) -> TrainingState:
        """The parts that this rank steps."""
        assert self.masters is not None, "a frozen role has no training state"
        return self.masters.training_state(self.version)

    @contextlib.contextmanager
    def loading(self, specs: StateSpecs) -> Iterator[TrainingState]:
        assert self.masters is not None, "a frozen role has no training state"
        check_names(specs, self._trained_names)
        with self.masters.loading(specs) as state:
            yield state
        self.version = state.version

    def close(self) -> None:
        pass

    def _contributes(self, parameter: Tensor, name: str) -> bool:
        """True if this rank contributes a parameter to an export. Among ranks with the same part of it, one does."""
        groups = self.groups
        of_tensor = is_split(parameter) or groups.tp.index == 0
        return groups.dp.index == 0 and of_tensor and not (name == self._tied and groups.pp.index > 0)


def check_model(model: PreTrainedModel, tp: int, pp: int) -> None:
    """Check that a model can be split.

    Raises:
        EngineError: its family or its adapters cannot be split.
        PlanError: its sizes are not divisible by tp or pp.
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
        if tp > 1 and not splits_adapter(config):
            raise EngineError(f"engine megatron cannot split the adapter {name!r} by tp; use plain LoRA, or tp: 1.")


if TYPE_CHECKING:  # the type checker verifies that the protocol is implemented
    _TRAINS: type[TrainingEngine] = MegatronEngine


__all__ = ["MegatronEngine", "check_model"]
