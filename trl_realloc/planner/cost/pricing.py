"""The cost model: time and memory of one call under one assignment. Those of a reallocation are in `search.problem`.

The time of a call is the sum of its parts (`call_cost.PARTS`). docs/studies/planner.md has the formulas with their
sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...plan.assignment import MAX_SLOTS, MEMORY_SHARE, Assignment, ParallelStrategy, sleeps
from ...plan.cluster import Cluster
from ...plan.dataflow import Call, CallKind
from ...plan.model_spec import ModelSpec
from ...realloc.memory import MOMENTS, gradient_bytes, state_bytes
from .activation_memory import kept_casts, working_bytes
from .call_cost import CallCost, StageSeconds, TrainingStage
from .device_memory import DeviceMemory
from .engine_room import EngineRoom, cache_bytes, engine_peak, layer_sums, load_seconds, model_part
from .estimate_factors import CalibrationFactors
from .hardware import Link, Rates
from .workload import Decoding, Workload
from .zero_costs import DataParallelGroup, backward_bucket, gathered_bytes, held_bucket, whole_gradient


ALLOCATE = 1e-3  # seconds to allocate the memory of a dropped copy; assumed, not measured
SLEEP = 0.5  # seconds in which a vLLM engine frees its memory and allocates it again (docs/hardware.md)
# shares of a device's memory that the planner tries for a vLLM engine
ENGINE_MEMORY_SHARES = tuple(step / 20 for step in range(3, 20))
PREFILL_TOKENS = 8192  # largest number of tokens of one prefill forward in a generation engine


@dataclass(frozen=True)
class Pricing:
    """The cost model of a job: cluster, workload, unit costs and memory.

    Args:
        memory: memory of a device. `None` if unknown; then no plan is refused for its memory.
        vllm_share: fraction of a device's memory that a vLLM engine reserves. `None`: on one device the planner's
            choice, else `MEMORY_SHARE`.
        vllm_sleeps: whether vLLM engines free this memory between their calls. `None`: only if no plan fits otherwise,
            or where the planner chooses the share.
        context_length: tokens of the longest request that an engine may get; `None`: the workload's longest sample.
        moments: bytes of optimizer state for each trained element, without the float32 master weight.
        default_cap: largest number of tokens of one forward if the plan has no `micro_batch_tokens`. `None`: no cap.
        corrections: calibration factors of the estimates, learned from earlier runs.
    """

    cluster: Cluster
    workload: Workload
    rates: Rates
    memory: DeviceMemory | None = None
    vllm_share: float | None = MEMORY_SHARE
    vllm_sleeps: bool | None = None
    context_length: int | None = None
    moments: int = MOMENTS
    default_cap: int | None = None
    calibration: CalibrationFactors = field(default_factory=CalibrationFactors)

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of a device that the planner tries for a vLLM engine; empty if it does not choose the share."""
        if self.vllm_share is not None or self.memory is None:
            return ()
        return tuple(share for share in ENGINE_MEMORY_SHARES if self.memory.takes_engine(share))

    def fits(self, size: float) -> bool:
        """True if a plan may use `size` bytes of a device, or if its memory is unknown."""
        return self.memory is None or size <= self.memory.usable

    def tried_shares(self, specs: Sequence[ModelSpec], assignment: Assignment) -> tuple[float, ...]:
        """The `shares` that the planner tries for the engines of an assignment: all of them on one device. On several
        devices, where meshes of many sizes are tried: the smallest share with which an engine starts, the smallest with
        which it decodes all its samples at once, one between these two, and `MEMORY_SHARE` if it is large enough."""
        if self.cluster.size == 1 or not self.shares:
            return self.shares
        samples = math.ceil(self.workload.episodes / assignment.strategy.dp)
        rooms = [room for spec in specs if (room := self.engine_room(spec, assignment, samples)) is not None]
        if not rooms or self.memory is None:
            return self.shares[-1:]
        starts = max(room.needed for room in rooms) / self.memory.total
        # number of longest requests; `needed` already has room for one; a request may be longer than any sample
        requests = self.workload.most_cached(min(samples, MAX_SLOTS)) / self.longest_request
        all_at_once = max(room.needed + room.request * max(0.0, requests - 1) for room in rooms)
        least, most = (self._enough(share) for share in (starts, all_at_once / self.memory.total))
        between = self._enough((least + most) / 2)
        return tuple(sorted({least, between, most, *(share for share in self.shares if share == MEMORY_SHARE > least)}))

    def _enough(self, share: float) -> float:
        """`share` rounded up to one of `shares`."""
        return next((larger for larger in self.shares if larger >= share), self.shares[-1])

    def share_of(self, assignment: Assignment) -> float:
        """The share of a device that the vLLM engine of an assignment takes."""
        return assignment.memory_share or self.vllm_share or MEMORY_SHARE

    def price(self, call: Call, specs: Sequence[ModelSpec], assignment: Assignment) -> CallCost:
        """The cost of a call that runs the models of `specs` one after the other."""
        cost = self.work(call, specs, assignment).times(self.calibration.factor(call, assignment))
        dispatch = self.calibration.dispatch
        if dispatch is None:
            cost += self.shared(CallCost({"dispatch": self.rates.call}), assignment.mesh.size)
        else:
            cost += CallCost({"dispatch": dispatch})
        functions = self.calibration.functions.get(call.name) if not specs else None
        return cost if functions is None else cost + CallCost({"functions": functions / assignment.strategy.dp})

    def work(self, call: Call, specs: Sequence[ModelSpec], assignment: Assignment) -> CallCost:
        """The cost of a call without corrections, and without receiving and sending its samples."""
        if call.passes > 1:
            work = replace(self.workload, episodes=call.passes * self.workload.episodes)
            return replace(self, workload=work).work(replace(call, passes=1), specs, assignment)
        total = CallCost({})
        for spec in specs:
            match call.kind:
                case CallKind.GENERATE:
                    total += self._generate(spec, assignment)
                case CallKind.FORWARD:
                    total += self._sharing(call.kind, assignment)._forward(spec, assignment)
                case CallKind.TRAIN:
                    total += self._sharing(call.kind, assignment)._train(spec, assignment)
        return self.shared(total, assignment.mesh.size, assignment.strategy.pp)

    def _sharing(self, kind: CallKind, assignment: Assignment) -> Pricing:
        """The cost model of a call that computes a prompt once per micro-batch, not once per sample."""
        strategy, work = assignment.strategy, self.workload
        parts = work.mini_batches if kind is CallKind.TRAIN else 1.0
        samples = work.episodes / max(1.0, parts) / strategy.dp / strategy.pp
        shared = work.sharing(samples, self.budget(kind, strategy), mini_batches=parts)
        return self if shared is work else self._by_together.setdefault(shared.together, replace(self, workload=shared))

    @cached_property
    def _by_together(self) -> dict[float, Pricing]:
        return {}

    def budget(self, kind: CallKind, strategy: ParallelStrategy) -> int:
        """The largest number of tokens of one forward."""
        tokens = self.workload.train_tokens if kind is CallKind.TRAIN else self.workload.forward_tokens
        return strategy.micro_batch_tokens or (tokens if self.default_cap is None else min(tokens, self.default_cap))

    # --- links of the groups of a mesh -------------------------------------------------------------------------------

    def _links(self, assignment: Assignment) -> tuple[Link, Link]:
        """The slowest link of all tensor-parallel groups, and that between pipeline stages, where each device sends by
        its own network adapter."""
        strategy, per_node, rates = assignment.strategy, self.cluster.devices_per_node, self.rates
        tensor = pipeline = rates.inside
        if assignment.mesh.size > per_node:  # whole nodes, where groups of neighbours lie side by side
            if per_node % strategy.tp:
                tensor = rates.across(math.gcd(per_node, strategy.tp))
            if per_node % (strategy.tp * strategy.pp):
                pipeline = rates.between
        return tensor, pipeline

    def _replicas(self, spec: ModelSpec, assignment: Assignment) -> DataParallelGroup:
        """The data-parallel groups of an assignment, with the link of the slowest one. Each group has one of every
        tp x pp neighbouring devices. Groups communicate at the same time, each by the adapters of its own devices."""
        strategy, per_node = assignment.strategy, self.cluster.devices_per_node
        link = self.rates.inside
        if assignment.mesh.size > per_node:
            link = self.rates.across(max(1, per_node // (strategy.tp * strategy.pp)))
        return DataParallelGroup(link, strategy.dp, self.rates.overlap, spec.layers or 1)

    # --- scoring -----------------------------------------------------------------------------------------------------

    def _forward(self, spec: ModelSpec, assignment: Assignment) -> CallCost:
        strategy, work, rates = assignment.strategy, self.workload, self.rates
        tokens, squared = work.tokens / strategy.dp, work.episodes * work.mean_square / strategy.dp
        parts = self.forward_of(spec, assignment, tokens, squared)
        size = model_part(spec, assignment) * spec.stored_bytes / (strategy.dp if strategy.zero_stage == 3 else 1)
        largest = self._largest_micro_batch(CallKind.FORWARD, tokens, strategy)
        working = self._working(spec, largest, strategy, backward=False) + gathered_bytes(spec, assignment)
        if assignment.offload or assignment.drop:
            parts["load"] = ALLOCATE if assignment.drop else size / rates.host_bandwidth
            return CallCost(parts, 0.0, working + size)
        return CallCost(parts, size, working)

    def _pass(
        self,
        spec: ModelSpec,
        assignment: Assignment,
        tokens: float,
        squared: float,
        micro: int,
        *,
        train: bool = False,
        answered: float | None = None,
    ) -> tuple[dict[str, float], float]:
        """Forwards, and with `train` backwards, of `micro` micro-batches through all pipeline stages.

        ReaL's formula, (micro + pp - 1) times the time of a stage, plus the messages between stages, which ReaL's code
        leaves out. `tokens`, `squared` (sum of the squared sample lengths) and `answered` (tokens whose logits are
        computed; `None`: the response tokens) are per micro-batch.

        Returns:
            Seconds by part, and the compute seconds of one stage for one micro-batch.
        """
        pp = assignment.strategy.pp
        stage = self._stage(spec, assignment, tokens, squared, train=train, answered=answered)
        parts = {"compute": micro * stage.compute}
        if assignment.strategy.tp > 1:
            parts["tensor"] = micro * stage.tensor
        if pp > 1:
            parts["bubble"] = (pp - 1) * (stage.compute + stage.tensor)
            parts["pipeline"] = (1 + train) * (micro + pp - 2) * stage.message
        return parts, stage.compute

    def _stage(
        self,
        spec: ModelSpec,
        assignment: Assignment,
        tokens: float,
        squared: float,
        *,
        train: bool,
        answered: float | None = None,
    ) -> StageSeconds:
        """One micro-batch on the slowest pipeline stage, with the arguments of `_pass`."""
        strategy, rates, work = assignment.strategy, self.rates, self.workload
        tensor_link, pipeline_link = self._links(assignment)
        layers = self._stage_layers(spec, assignment)
        if answered is None:
            answered = tokens * work.mean_response / work.mean_length  # the head runs only at response positions
        layer = layers * rates.layer(spec, tokens, squared, strategy.tp)
        forward, backward = layer + rates.head(spec, answered, strategy.tp), 0.0
        if train:
            backward = work.recompute * layer + layers * rates.layer_backward(spec, tokens, squared, strategy.tp)
            backward += rates.head(spec, answered, strategy.tp, backward=True)
        activations = tokens * spec.hidden * spec.activation_bytes
        sweep = layers * layer_sums(spec, assignment) * tensor_link.all_reduce(activations, strategy.tp)
        hop = pipeline_link.send(activations) + rates.hop if strategy.pp > 1 else 0.0
        return StageSeconds((forward, backward), (sweep, train * (1 + work.recompute) * sweep), hop)

    # --- training ----------------------------------------------------------------------------------------------------

    def _train(self, spec: ModelSpec, assignment: Assignment) -> CallCost:
        strategy, work, rates = assignment.strategy, self.workload, self.rates
        micro, tokens, squared = self._training_micro_batches(assignment)
        parts, compute = self._pass(spec, assignment, tokens, squared, micro, train=True)
        size = model_part(spec, assignment) * spec.stored_bytes
        elements = spec.trained_share * model_part(spec, assignment)
        gradients = elements * gradient_bytes(spec.bytes_per_element, assignment)
        stage, dp = strategy.zero_stage, strategy.dp
        if dp > 1:
            group = self._replicas(spec, assignment)
            weights = elements * spec.bytes_per_element
            by_owner = stage == 1 and assignment.engine == "megatron"
            step = group.optimizer_step(stage, gradients, weights, spec.bytes, micro, compute, by_owner=by_owner)
            parts["data"] = step * (rates.zero(stage, trains=True) if stage else 1.0)
        parts["optimizer"] = rates.optimizer(elements / (dp if stage else 1), spec.bytes_per_element)
        parts = {name: work.updates * seconds for name, seconds in parts.items()}
        held_gradients = gradients / (dp if stage >= 2 else 1)
        static = size / (dp if stage == 3 else 1)
        static += elements * state_bytes(spec.bytes_per_element, assignment, self.moments) / (dp if stage else 1)
        static += held_bucket(spec, assignment)
        held = min(strategy.pp, micro) if strategy.pp > 1 else 1  # with 1F1B the first stage holds pp micro-batches
        largest = self._largest_micro_batch(CallKind.TRAIN, micro * tokens, strategy)
        without_kept = self._working(spec, largest, strategy, backward=True, held=0)
        working = self._working(spec, largest, strategy, backward=True, held=held)
        working += max(0.0, whole_gradient(spec, assignment) - without_kept)
        working += backward_bucket(spec, assignment) + gathered_bytes(spec, assignment)
        if work.updates % 1:  # an optimizer step spans several generations, so its gradients stay in memory
            return CallCost(parts, static + held_gradients, working)
        return CallCost(parts, static, working + held_gradients, held_gradients)

    def _training_micro_batches(self, assignment: Assignment) -> tuple[int, float, float]:
        """Micro-batches of a replica's mini-batch: (number, tokens of each, sum of squared sample lengths of each)."""
        strategy, work = assignment.strategy, self.workload
        share = strategy.dp * work.mini_batches
        tokens, squared = work.tokens / share, work.episodes * work.mean_square / share
        micro = _micro_batches(tokens, self.budget(CallKind.TRAIN, strategy), strategy.pp)
        return micro, tokens / micro, squared / micro

    def training_stage(self, spec: ModelSpec, assignment: Assignment) -> TrainingStage:
        """The slowest stage of a pipeline that trains. A mini-batch takes it `micro_batches + pp - 1` times as long as
        one micro-batch, as `price` has it."""
        if self.workload.together == 1.0 and (shared := self._sharing(CallKind.TRAIN, assignment)) is not self:
            return shared.training_stage(spec, assignment)
        micro, tokens, squared = self._training_micro_batches(assignment)
        seconds = self._stage(spec, assignment, tokens, squared, train=True)
        strategy = assignment.strategy
        largest = self._largest_micro_batch(CallKind.TRAIN, micro * tokens, strategy)
        working, with_one = (self._working(spec, largest, strategy, backward=True, held=held) for held in (0, 1))
        return TrainingStage(micro, seconds, with_one - working, working)

    # --- generation --------------------------------------------------------------------------------------------------

    def _generate(self, spec: ModelSpec, assignment: Assignment) -> CallCost:
        strategy, work = assignment.strategy, self.workload
        share = math.ceil(work.episodes / strategy.dp)
        slots, room, static, cache = self._engine_memory(spec, assignment, share)
        read = share * work.prompt_tokens
        if assignment.engine == "transformers":  # no slot is refilled before the whole batch ends
            steps = work.response_tokens[-1]
            mean = work.prompt_tokens + steps / 2
            decoding = Decoding(((steps * math.ceil(share / slots), min(share, slots), mean),))
        else:
            decoding, read = work.decoding(strategy.dp, slots, room), share * work.engine_prompt(share)
        parts: dict[str, float] = {}
        for steps, batch, cached in decoding.phases:
            _add(parts, self.decode_step(spec, assignment, batch, cached), steps)
        _add(parts, self.prefill(spec, assignment, read, work.prompt_tokens))
        if decoding.reread:
            _add(parts, self.prefill(spec, assignment, decoding.reread, work.prompt_tokens + work.mean_response / 2))
        load = {"load": self.load_seconds(spec, assignment)}
        if sleeps(assignment):
            load, static, cache = {"load": load["load"] + SLEEP}, 0.0, cache + static
        elif assignment.drop:
            load, static, cache = {"load": ALLOCATE}, 0.0, cache + static
        elif assignment.engine != "vllm":
            load = {}
        _add(parts, load)
        return CallCost({name: seconds for name, seconds in parts.items() if seconds}, static, cache)

    def load_seconds(self, spec: ModelSpec, assignment: Assignment) -> float:
        """`engine_room.load_seconds`, with a copy of each worker's part between host memory and its device if the plan
        offloads the weights."""
        size, bandwidth = spec.elements * spec.bytes_per_element, self.rates.host_bandwidth
        part = size / (assignment.strategy.tp * assignment.strategy.pp)
        load = load_seconds(size, part, bandwidth, is_gpu=self.memory is not None and self.memory.is_gpu)
        return load + (part / bandwidth if assignment.offload else 0.0)

    def decode_step(self, spec: ModelSpec, assignment: Assignment, batch: float, cached: float) -> dict[str, float]:
        """Seconds by part of one decode step of an engine.

        Args:
            batch: number of samples in the step.
            cached: mean number of cached tokens of a sample.
        """
        rates = self.rates
        tensor_link, pipeline_link = self._links(assignment)
        tp, pp, layers = assignment.strategy.tp, assignment.strategy.pp, self._stage_layers(spec, assignment)
        part = batch / pp  # pp micro-batches keep all stages busy
        busy, reading = rates.decode(spec, part, cached, tp)
        parts = {"compute": rates.decode_head(spec, part, tp), "launch": rates.step + rates.sample * batch}
        _add(parts, {"memory" if reading > busy else "compute": pp * layers * max(reading, busy)})
        size = part * spec.hidden * spec.activation_bytes
        if not rates.decodes_whole:
            logits = part * spec.outputs * spec.activation_bytes
            sums = pp * layers * layer_sums(spec, assignment)
            parts["tensor"] = sums * tensor_link.all_reduce(size, tp) + tensor_link.gather(logits, tp)
        if pp > 1:
            parts["pipeline"] = pp * pipeline_link.send(size)
        return parts

    def prefill(self, spec: ModelSpec, assignment: Assignment, tokens: float, length: float) -> dict[str, float]:
        """Seconds by part of an engine's prefill of `tokens` tokens, of samples with `length` tokens each. Logits are
        computed for each sample's last token."""
        micro = _micro_batches(tokens, PREFILL_TOKENS, assignment.strategy.pp)
        last = tokens / length / micro
        return self._pass(spec, assignment, tokens / micro, tokens * length / micro, micro, answered=last)[0]

    def forward_of(self, spec: ModelSpec, assignment: Assignment, tokens: float, squared: float) -> dict[str, float]:
        """Seconds by part of one replica's forward of `tokens` tokens; `squared` is the sum of the squared lengths."""
        micro = _micro_batches(tokens, self.budget(CallKind.FORWARD, assignment.strategy), assignment.strategy.pp)
        parts, stage = self._pass(spec, assignment, tokens / micro, squared / micro, micro)
        if assignment.strategy.zero_stage == 3:
            gather = self._replicas(spec, assignment).gather_parameters(spec.bytes, stage)
            parts["data"] = micro * gather * self.rates.zero(3, trains=False)
        return parts

    def _stage_layers(self, spec: ModelSpec, assignment: Assignment) -> int:
        return math.ceil((spec.layers or 1) / assignment.strategy.pp)

    def engine_slots(self, spec: ModelSpec, assignment: Assignment, share: int) -> tuple[int, float]:
        """The largest number of samples that an engine with `share` samples decodes at once, and the tokens whose keys
        and values its cache holds."""
        return self._engine_memory(spec, assignment, share)[:2]

    def slots(self, spec: ModelSpec, assignment: Assignment, share: int, held: float | None = None) -> int:
        """The number of samples that an engine with `share` samples decodes at once.

        Args:
            held: cached tokens of each sample; `None`: the length of the longest sample.
        """
        slots, room = self.engine_slots(spec, assignment, share)
        return max(1, int(min(slots, room / (held or self.workload.longest))))

    def _engine_memory(self, spec: ModelSpec, assignment: Assignment, share: int) -> tuple[int, float, float, float]:
        """(largest number of samples decoded at once, tokens that the cache holds, static bytes, additional bytes while
        generating: the cache and, with Transformers, the weights that autocast keeps cast)."""
        strategy = assignment.strategy
        weights = model_part(spec, assignment) * spec.stored_bytes
        of_token = cache_bytes(spec, strategy)
        cache = self.workload.longest * of_token  # bytes of one sample
        if assignment.engine == "transformers":
            fitting = int(self.workload.forward_tokens / self.workload.longest)
            slots = min(share, max(1, self.workload.generation_batch or fitting))
            return slots, math.inf, weights, slots * cache + kept_casts(spec)
        share = min(share, MAX_SLOTS)
        if self.memory is None:
            return share, math.inf, weights, share * cache
        room = self.engine_room(spec, assignment, share)
        assert room is not None, "the memory is known"
        if room.share < room.needed:  # report more memory than the device has, so that the memory check refuses it
            return 1, math.inf, max(weights, self.memory.total) + cache, 0.0
        return share, room.cache / of_token if of_token else math.inf, room.share, 0.0

    @property
    def longest_request(self) -> float:
        """Tokens of the longest request that an engine may get."""
        return max(self.context_length or 0, self.workload.longest)

    def engine_room(self, spec: ModelSpec, assignment: Assignment, share: int) -> EngineRoom | None:
        """`EngineRoom` for an engine that generates `share` samples. `None` if the memory of the device is unknown."""
        if self.memory is None:
            return None
        strategy = assignment.strategy
        weights = model_part(spec, assignment) * spec.bytes_per_element
        peak = engine_peak(spec, strategy.tp, share, self.longest_request) if self.memory.is_gpu else 0.0
        request = self.longest_request * cache_bytes(spec, strategy)
        return EngineRoom(self.memory.total * self.share_of(assignment), weights, peak, request)

    # --- memory and shared processors --------------------------------------------------------------------------------

    def _largest_micro_batch(self, kind: CallKind, tokens: float, strategy: ParallelStrategy) -> float:
        """Tokens of the largest micro-batch of a replica that has `tokens` tokens. Samples are packed first-fit up to
        the budget, so the first micro-batch is full and the last may be small. A sample is never divided."""
        return max(min(self.budget(kind, strategy), tokens / strategy.pp), self.workload.longest)

    def _working(
        self, spec: ModelSpec, tokens: float, strategy: ParallelStrategy, *, backward: bool, held: int = 1
    ) -> float:
        return working_bytes(spec, tokens, strategy, self.rates, self.workload, backward=backward, held=held)

    def shared(self, cost: CallCost, devices: int, stages: int = 1) -> CallCost:
        """The cost of work on `devices` neighbouring devices, with their slowdown if they share processors.

        Args:
            stages: number of pipeline stages, which start and end one after the other; 1 if no pipeline.
        """
        sharing, per_node = self.rates.sharing, self.cluster.devices_per_node
        if sharing is None:
            return cost
        active = [stage * devices / stages for stage in range(1, stages)]
        slowdowns = [sharing.slowdown(min(number, per_node)) for number in (*active, devices)]
        return cost.slowed(slowdowns[-1], slowdowns[:-1])


def _add(parts: dict[str, float], more: Mapping[str, float], times: float = 1.0) -> None:
    for name, seconds in more.items():
        parts[name] = parts.get(name, 0.0) + times * seconds


def _micro_batches(tokens: float, budget: float, pp: int) -> int:
    """The number of micro-batches for `tokens` tokens. A pipeline has at least one for each stage."""
    return max(1, math.ceil(tokens / budget), pp if pp > 1 else 1)
