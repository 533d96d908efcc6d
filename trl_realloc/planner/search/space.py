"""The candidates of each call: every legal mesh, engine, strategy, micro-batch size and offload, with its cost.

The cost of a call depends on the size of its mesh and not on its position, so it is computed once for each size. A
candidate is left out if another candidate on the same mesh needs less time and less memory. `fastest` chooses one
candidate for each call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random

from ...common.errors import PlanError
from ...plan.algorithm_graphs import ppo_graph
from ...plan.assignment import ENGINE_ABILITIES, Assignment, ParallelStrategy
from ...plan.cluster import Cluster, DeviceMesh, legal_meshes
from ...plan.dataflow import Call, CallKind, DataflowGraph
from ...plan.model_spec import ModelSpec
from ..cost.call_cost import CallCost
from ..cost.engine_refusal import check_share
from ..cost.estimate_factors import layout_name
from ..cost.pricing import Pricing


MAX_MESHES = 512  # largest number of meshes of a cluster. If there are more, `meshes_of` selects some of them
NODE_STEPS = 16  # number of node boundaries of such meshes
MANY = 256  # devices; on more, a transfer schedule takes seconds, so only those of the chosen plan are made
MAX_CANDIDATES = 12  # largest number of candidates of one call on one mesh
BIAS_DRAWS = 400  # number of draws of random errors of which `selection_bias` is the mean


@dataclass(frozen=True)
class Candidate:
    """One possible assignment of one call, with its cost."""

    assignment: Assignment
    cost: CallCost

    @property
    def seconds(self) -> float:
        return self.cost.seconds


State = tuple["Candidate", ...]  # a candidate for each call of a graph, in the graph's order


@dataclass(frozen=True)
class TrainingSplits:
    """Splits of a training call's parameters that the optimizer and the adapters of a run allow.

    Args:
        elements: whether the optimizer works on parts of a parameter: ZeRO of the engine `zero`, and tp.
        parameters: whether parameters may be distributed over several optimizers: ZeRO of megatron, and pp.
        by_deepspeed: whether DeepSpeed can build the optimizer for its flat tensors.
        tensor: whether tp can split the policy's trained parameters: whole models and plain LoRA.
        stages: whether pp can split them: whole models, and adapters whose parameters belong to one layer each.
    """

    elements: bool = True
    parameters: bool = True
    by_deepspeed: bool = True
    tensor: bool = True
    stages: bool = True

    def allow(self, engine: str, tp: int = 1, pp: int = 1, zero_stage: int = 0) -> bool:
        """True if a call may train with this engine, these degrees and this ZeRO stage."""
        flattens, distributes = zero_stage and engine == "zero", zero_stage and engine != "zero"
        if flattens and not self.by_deepspeed:
            return False
        if (tp > 1 and not self.tensor) or (pp > 1 and not self.stages):
            return False
        return (self.elements or not (tp > 1 or flattens)) and (self.parameters or not (pp > 1 or distributes))


UNKNOWN_OPTIMIZER = TrainingSplits(elements=False, parameters=False)  # it may read all parameters in a step


@dataclass(frozen=True)
class Space:
    """The set of assignments that the search chooses from.

    Args:
        engines: names of the engines that may run calls.
        deep_generation: whether generation may use pipeline stages, as in the papers' systems but in no engine here.
        offload: whether frozen roles may be kept in host memory between their calls.
        zero_stages: ZeRO stages that the `zero` engine may use.
        splits: splits of training calls that the optimizer and the adapters allow.
        smallest_mesh: smallest number of devices in a mesh.
        train_width: largest tp x dp of a training call. `None`: no limit.
        deepest: largest pp. `None`: no limit.
        micro_per_stage: number of micro-batches per pipeline stage in training, for systems that fix this number and
            use one micro-batch per stage in scoring. `None`: the planner chooses the number.
    """

    cluster: Cluster
    graph: DataflowGraph
    specs: Mapping[str, Sequence[ModelSpec]]
    pricing: Pricing
    engines: tuple[str, ...] = ("vllm", "zero", "megatron")
    deep_generation: bool = False
    offload: bool = True
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    smallest_mesh: int = 1
    train_width: int | None = None
    deepest: int | None = None
    micro_per_stage: int | None = None
    splits: TrainingSplits = TrainingSplits()

    @staticmethod
    def of_run(
        specs: Mapping[str, Sequence[ModelSpec]],
        pricing: Pricing,
        *,
        graph: DataflowGraph | None = None,
        generation_engine: str = "vllm",
        engines: Sequence[str] = ("zero", "megatron"),
        zero_stages: Sequence[int] | None = None,
        splits: TrainingSplits | None = None,
    ) -> Space:
        """The space of a run's plans.

        Args:
            specs: models that each call runs, by the call's name.
            graph: *optional*, defaults to PPO's.
            engines: engines that may score and train.
            zero_stages: *optional*, defaults to all stages if a device's memory is known, else 0 alone, because the
                other stages save memory and cost time.
            splits: *optional*, defaults to all splits.
        """
        knows_memory = pricing.memory is not None
        return Space(
            pricing.cluster,
            graph or ppo_graph(),
            specs,
            pricing,
            (generation_engine, *engines),
            offload=knows_memory,
            zero_stages=tuple(zero_stages) if zero_stages is not None else ((0, 1, 2, 3) if knows_memory else (0,)),
            splits=splits or TrainingSplits(),
        )

    @property
    def generation_engine(self) -> str:
        """The first engine that generates."""
        return next(engine for engine in self.engines if CallKind.GENERATE in ENGINE_ABILITIES[engine].kinds)

    @property
    def is_small(self) -> bool:
        """True if a search has time for the transfer schedules of all plans that it prices."""
        return self.cluster.size <= MANY

    @property
    def training_stages(self) -> tuple[int, ...]:
        """The ZeRO stages that every training call of the engine `zero` may have."""
        if any(call.trains and self._is_quantized(call) for call in self.graph.calls):
            return (0,)
        return tuple(stage for stage in self.zero_stages if self.splits.allow("zero", zero_stage=stage))

    def candidates(self) -> dict[str, list[Candidate]]:
        """The candidates of each call, by the name of the call. Each list is sorted by seconds.

        Raises:
            PlanError: a call fits on no mesh. The message states the least memory that the call needs, or that the
                share of its vLLM engine is too small.
        """
        return {name: self._of_call(self.graph.call(name)) for name in self.graph.order}

    def _of_call(self, call: Call) -> list[Candidate]:
        by_size: dict[int, list[Candidate]] = {}
        candidates: list[Candidate] = []
        smallest = CallCost({}, static=math.inf)
        for mesh in meshes_of(self.cluster):
            if mesh.size < min(self.smallest_mesh, self.cluster.size):
                continue
            if mesh.size not in by_size:
                priced = [
                    Candidate(assignment, self.pricing.price(call, self.specs.get(call.name, ()), assignment))
                    for assignment in self._assignments(call, DeviceMesh(0, mesh.size))
                ]
                smallest = min([smallest, *(c.cost for c in priced)], key=lambda cost: cost.static + cost.transient)
                by_size[mesh.size] = undominated(self._unbiased(call, self._fitting(priced)))
            candidates += [Candidate(replace(c.assignment, mesh=mesh), c.cost) for c in by_size[mesh.size]]
        if not candidates:
            if call.kind is CallKind.GENERATE:
                tried = [a for size in by_size for a in self._assignments(call, DeviceMesh(0, size))]
                check_share(call, self.specs.get(call.name, ()), self.pricing, tried)
            usable = self.pricing.memory.usable if self.pricing.memory else 0.0
            least = smallest.static + smallest.transient
            raise PlanError(
                f"{call.name} fits on no mesh of {self.cluster}: it needs at least {least / 1e9:.1f} GB per device "
                f"({_most_of(call, smallest)}), and a device has {usable / 1e9:.0f} GB for a plan."
            )
        return sorted(candidates, key=lambda candidate: candidate.seconds)

    def pipelines(self, call: Call, size: int) -> list[Candidate]:
        """All assignments of a call to pipelines of two or more stages on the first `size` devices."""
        specs = self.specs.get(call.name, ())
        deep = (
            assignment
            for assignment in self._assignments(call, DeviceMesh(0, size))
            if assignment.strategy.pp > 1 and not assignment.offload and not assignment.drop
        )
        return self._fitting(
            [Candidate(assignment, self.pricing.price(call, specs, assignment)) for assignment in deep]
        )

    def _unbiased(self, call: Call, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates of one mesh with their estimates corrected for `selection_bias`, except layouts that a run has
        measured."""
        measured = self.pricing.calibration.layouts.get(call.name, {})
        fastest: dict[ParallelStrategy, float] = {}
        for candidate in sorted(candidates, key=lambda c: -c.seconds):
            if layout_name(candidate.assignment) not in measured:
                fastest[replace(candidate.assignment.strategy, micro_batch_tokens=None)] = candidate.seconds
        factor = 1 + selection_bias([*fastest.values()], self.pricing.rates.layout_error)
        return [
            c if layout_name(c.assignment) in measured else Candidate(c.assignment, c.cost.times(factor))
            for c in candidates
        ]

    def _fitting(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [c for c in candidates if self.pricing.fits(c.cost.static + c.cost.transient)]

    def _assignments(self, call: Call, mesh: DeviceMesh) -> Iterator[Assignment]:
        for engine in self.engines:
            ability = ENGINE_ABILITIES[engine]
            if call.kind not in ability.kinds:
                continue
            deep = self.deep_generation and call.kind is CallKind.GENERATE
            degrees = (*ability.degrees, *(("pp",) if deep else ()))
            for dp, tp, pp in self._degrees(call, engine, mesh.size, degrees):
                if engine == "megatron" and tp == pp == 1 and ("zero" in self.engines or self._is_quantized(call)):
                    continue  # the `zero` engine has the same layout
                for stage in self._stages(call, engine, dp):
                    for tokens in self._micro_batches(call, dp, pp):
                        strategy = ParallelStrategy(dp, tp, pp, stage, tokens)
                        if engine != "vllm" or not self.pricing.vllm_sleeps:
                            yield from self._shares(call, Assignment(mesh, strategy, engine))
                        if self._may_rest(call, stage):
                            yield Assignment(mesh, strategy, engine, offload=True)
                        if self._may_drop(call, engine, stage):
                            yield from self._shares(call, Assignment(mesh, strategy, engine, drop=True))

    def _shares(self, call: Call, assignment: Assignment) -> Iterator[Assignment]:
        if assignment.engine != "vllm" or not self.pricing.shares:
            yield assignment
            return
        for share in self.pricing.tried_shares(self.specs.get(call.name, ()), assignment):
            yield replace(assignment, memory_share=share)

    def _degrees(self, call: Call, engine: str, size: int, degrees: Sequence[str]) -> Iterator[tuple[int, int, int]]:
        # A tensor-parallel group is within a node. On several nodes, tp divides the number of devices per node.
        for tp in _divisors(min(size, self.cluster.devices_per_node)) if "tp" in degrees else (1,):
            for pp in _divisors(size // tp) if "pp" in degrees and size % tp == 0 else (1,):
                dp, rest = divmod(size, tp * pp)
                if self.deepest is not None and pp > self.deepest:
                    continue
                if call.trains and self.train_width is not None and tp * dp > self.train_width:
                    continue
                if call.trains and not self.splits.allow(engine, tp, pp):
                    continue
                if rest or (dp > 1 and "dp" not in degrees) or dp > self.pricing.workload.episodes:
                    continue
                generates = call.kind is CallKind.GENERATE
                if all(
                    _splits(spec, call, tp, pp) and self.pricing.rates.measured(spec, tp, pp, generates)
                    for spec in self.specs.get(call.name, ())
                ):
                    yield dp, tp, pp

    def _stages(self, call: Call, engine: str, dp: int) -> Iterator[int]:
        for stage in ENGINE_ABILITIES[engine].zero_stages:
            if stage in self.zero_stages or stage == 0:
                if stage and (dp == 1 or self._is_quantized(call)):
                    continue
                if call.trains and not self.splits.allow(engine, zero_stage=stage):
                    continue
                if call.trains or stage in (0, 3):
                    yield stage

    def _is_quantized(self, call: Call) -> bool:
        return any(spec.quantization is not None for spec in self.specs.get(call.name, ()))

    def _micro_batches(self, call: Call, dp: int, pp: int) -> Iterator[int | None]:
        """The micro-batch sizes to try, in tokens. `None` is the default size.

        Pipelines also get smaller sizes. If the memory of a device is known, the default is also halved as long as the
        longest sample fits.
        """
        work = self.pricing.workload
        tokens = self.pricing.budget(call.kind, ParallelStrategy())
        share = work.tokens / dp / (work.mini_batches if call.trains else 1)
        if self.micro_per_stage is not None:
            yield self.fixed_micro_batch(call, dp, pp)
            return
        yield None
        if call.kind is CallKind.GENERATE:
            return
        if pp > 1:
            for times in (1, 2, 4):
                if work.longest <= share / (times * pp) < tokens:
                    yield int(share / (times * pp))
        if self.pricing.memory is not None:
            while tokens / 2 >= work.longest:
                tokens //= 2
                yield tokens

    def fixed_micro_batch(self, call: Call, dp: int, pp: int) -> int | None:
        """Tokens of a micro-batch of a training pipeline by `micro_per_stage`. `None`: the default size."""
        if self.micro_per_stage is None or not call.trains or pp == 1:
            return None
        work = self.pricing.workload
        return max(1, math.ceil(work.tokens / dp / work.mini_batches / (self.micro_per_stage * pp)))

    def _may_rest(self, call: Call, stage: int) -> bool:
        frozen = self.graph.train_call(call.role) is None
        return self.offload and frozen and call.kind is CallKind.FORWARD and stage < 3

    def _may_drop(self, call: Call, engine: str, stage: int) -> bool:
        """True if a copy of trained parameters, or the memory of a vLLM engine, may be freed between calls.

        A copy is freed only if the memory of a device is known and ZeRO stage 3 does not shard it. An engine sleeps
        only if the job sets it, or if the job does not set it and the planner chooses the engine's memory share.
        """
        trained = self.graph.train_call(call.role) is not None and not call.trains
        if engine == "vllm":
            is_open = self.pricing.vllm_sleeps is None and bool(self.pricing.shares)
            return trained and (is_open or bool(self.pricing.vllm_sleeps))
        return self.pricing.memory is not None and trained and stage < 3


def meshes_of(cluster: Cluster) -> list[DeviceMesh]:
    """The legal meshes of a cluster.

    If there are more than `MAX_MESHES`, only meshes with at least a 64th of the devices are returned: aligned meshes of
    2^n devices or nodes, the rest of the cluster beside them, and meshes that begin and end at a `NODE_STEPS`th of the
    nodes.
    """
    if cluster.nodes * (cluster.nodes + 1) // 2 + 2 * cluster.size <= MAX_MESHES:
        return list(dict.fromkeys([*legal_meshes(cluster), cluster.mesh]))
    smallest = max(1, cluster.size // 64)
    meshes = [cluster.mesh]
    per_node = cluster.devices_per_node
    size = 1
    while size < per_node and per_node % size == 0:
        if size >= smallest:
            meshes += [DeviceMesh(first, size) for first in range(0, cluster.size, size)]
        size *= 2
    count = 1
    while count <= cluster.nodes:
        if count * per_node >= smallest:
            starts = range(0, cluster.nodes - count + 1, count)
            meshes += [DeviceMesh(start * per_node, count * per_node) for start in starts]
            rest = cluster.nodes - count  # the remaining nodes, so that two calls can run at once
            if rest and cluster.nodes * per_node - count * per_node >= smallest:
                meshes += [DeviceMesh(count * per_node, rest * per_node), DeviceMesh(0, rest * per_node)]
        count *= 2
    ends = [*range(0, cluster.nodes, math.ceil(cluster.nodes / NODE_STEPS)), cluster.nodes]
    meshes += [DeviceMesh(start * per_node, (end - start) * per_node) for start, end in combinations(ends, 2)]
    return list(dict.fromkeys(meshes))


def undominated(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that no other candidate beats in all of seconds, static bytes and transient bytes.

    Some slower candidates with another layout are kept too (`_new_layout`). At most `MAX_CANDIDATES` are returned: the
    fastest within each of several memory limits.
    """
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds, c.cost.static, c.cost.transient)):
        if not any(
            b.cost.static <= candidate.cost.static * 1.001 and b.cost.transient <= candidate.cost.transient * 1.001
            for b in best
        ) or _new_layout(candidate, best):
            best.append(candidate)
    return best if len(best) <= MAX_CANDIDATES else _spread(best)


def _spread(candidates: Sequence[Candidate]) -> list[Candidate]:
    """`MAX_CANDIDATES` of these candidates, which are sorted by seconds: the fastest within each of several memory
    limits, then the fastest of the rest. The limits are a constant factor apart, from the least memory of a candidate
    to that of the fastest."""
    sizes = [c.cost.static + c.cost.transient for c in candidates]
    least = max(min(sizes), 1.0)  # a byte; a reward in Python has none
    limits = [least * (sizes[0] / least) ** (step / (MAX_CANDIDATES - 1)) for step in range(MAX_CANDIDATES)]
    chosen = {next(index for index, size in enumerate(sizes) if size <= limit * 1.001) for limit in limits}
    rest = (index for index in range(len(candidates)) if index not in chosen)
    while len(chosen) < MAX_CANDIDATES:
        chosen.add(next(rest))
    return [candidates[index] for index in sorted(chosen)]


def _new_layout(candidate: Candidate, best: Sequence[Candidate]) -> bool:
    """True if `best` lacks this engine and layout, and the candidate takes less than 1.5 times the fastest seconds. A
    layout that saves a reallocation can compensate for a slower call."""
    layout = candidate.assignment.engine, candidate.assignment.strategy.layout
    same = any((b.assignment.engine, b.assignment.strategy.layout) == layout for b in best)
    return not same and candidate.seconds < 1.5 * best[0].seconds


def _most_of(call: Call, cost: CallCost) -> str:
    sizes = {
        "parameters and optimizer state" if call.trains else "parameters": cost.static,
        "gradients": cost.gradients,
        "activations" if call.kind is not CallKind.GENERATE else "its engine": cost.transient - cost.gradients,
    }
    name = max(sizes, key=lambda name: sizes[name])
    return f"{sizes[name] / 1e9:.1f} for {name}"


def _splits(spec: ModelSpec, call: Call, tp: int, pp: int) -> bool:
    if spec.quantization is not None and tp * pp > 1:
        return False
    if pp > max(spec.layers, 1) or (tp > 1 and not spec.layers):
        return False
    if call.kind is CallKind.GENERATE:
        return spec.generates_under(tp)
    return tp == 1 or spec.kv_heads % tp == 0


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def selection_bias(seconds: Sequence[float], error: float) -> float:
    """The mean share by which the layout with the lowest of several estimates takes longer than it, with independent
    errors: the choice tends to be a layout that was underestimated. A parametric bootstrap: the estimates count as true
    seconds, and the choice is by these seconds with random errors.

    Args:
        seconds: estimated seconds of each layout.
        error: relative standard deviation of an estimate.
    """
    if not error or len(seconds) < 2:
        return 0.0
    draw, real, expected = Random(0), 0.0, 0.0
    for _ in range(BIAS_DRAWS // 2):
        errors = [draw.gauss(0.0, error) for _ in seconds]
        for sign in (1, -1):  # antithetic errors, whose mean is 0
            estimates = [true * max(0.1, 1 + sign * share) for true, share in zip(seconds, errors, strict=True)]
            chosen = min(range(len(seconds)), key=estimates.__getitem__)
            real, expected = real + seconds[chosen], expected + estimates[chosen]
    return max(0.0, real / expected - 1) if expected else 0.0
