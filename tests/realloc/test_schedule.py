"""Contract 2: a schedule brings every device exactly what it lacks, simulated in one process."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.plan.parameter_spec import Cut, ParameterSpec
from trl_realloc.realloc.layout import (
    Box,
    Layout,
    megatron_layout,
    owners_layout,
    replicated_layout,
    vllm_layout,
    zero3_layout,
)
from trl_realloc.realloc.schedule import TransferSchedule, make_schedule


Held = dict[int, dict[str, np.ndarray]]  # device -> parameter -> values, NaN where the device has none


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """A model of ragged dimensions: layers with weights cut by rows, by columns, by experts and not at all, an odd
    vocabulary, the head maybe tied."""
    layers, kv_heads, unit = draw(st.integers(1, 5)), draw(st.sampled_from([4, 6, 12])), draw(st.integers(1, 3))
    hidden, inner, vocabulary = draw(st.integers(1, 9)), draw(st.integers(1, 13)), draw(st.integers(1, 29))
    tied, experts = draw(st.booleans()), draw(st.integers(1, 5))
    parameters = [ParameterSpec("embed", (vocabulary, hidden), -1, Cut(0))]
    for layer in range(layers):
        parameters += [
            ParameterSpec(f"{layer}.k", (kv_heads * unit, hidden), layer, Cut(0, unit)),
            ParameterSpec(f"{layer}.o", (hidden, kv_heads * unit), layer, Cut(1, unit)),
            ParameterSpec(f"{layer}.up", (inner, hidden), layer, Cut(0)),
            ParameterSpec(f"{layer}.up.bias", (inner,), layer, Cut(0)),
            ParameterSpec(f"{layer}.down", (hidden, inner), layer, Cut(1)),
            ParameterSpec(f"{layer}.experts.gate_up_proj", (experts, 2 * inner, hidden), layer, Cut(0)),
            ParameterSpec(f"{layer}.experts.down_proj", (experts, hidden, inner), layer, Cut(0)),
            ParameterSpec(f"{layer}.norm", (hidden,), layer),
            ParameterSpec(f"{layer}.scale", (), layer),
        ]
    if not tied:
        parameters.append(ParameterSpec("head", (vocabulary, hidden), layers, Cut(0)))
    sizes = {"layers": layers, "heads": kv_heads, "kv_heads": kv_heads, "head_dim": unit, "hidden": hidden}
    width = draw(st.sampled_from([1, 2, 4]))
    return ModelSpec("drawn", tuple(parameters), bytes_per_element=width, **sizes, vocabulary=vocabulary, tied=tied)


@st.composite
def layouts(draw: st.DrawFn, spec: ModelSpec, cluster: Cluster) -> Layout:
    """Of any engine, on any run of devices."""
    size = draw(st.integers(1, cluster.size))
    mesh = DeviceMesh(draw(st.integers(0, cluster.size - size)), size)
    splits = [
        (tp, pp)
        for tp in (1, 2, 3, 4, 6)
        for pp in (1, 2, 3, 5)
        if size % (tp * pp) == 0 and spec.kv_heads % tp == 0 and pp <= spec.layers
    ]
    tp, pp = draw(st.sampled_from(splits))
    kind = draw(st.sampled_from(["replicated", "zero3", "megatron", "megatron", "owners", "vllm"]))
    match kind:
        case "replicated":
            return replicated_layout(spec, mesh)
        case "zero3":
            return zero3_layout(spec, mesh)
        case "owners":
            return owners_layout(spec, mesh, tp)
        case "vllm":
            return vllm_layout(spec, mesh, tp if spec.generates_under(tp) else 1)
        case _:
            return megatron_layout(spec, mesh, tp, pp)


@st.composite
def cases(draw: st.DrawFn, most: int = 16) -> tuple[Cluster, Layout, Layout]:
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    cluster = Cluster(draw(st.integers(1, max(1, most // per_node))), per_node)
    spec = draw(specs())
    return cluster, draw(layouts(spec, cluster)), draw(layouts(spec, cluster))


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def truth(spec: ModelSpec) -> Mapping[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {parameter.name: draw.random(parameter.shape) for parameter in spec.parameters}


def run(schedule: TransferSchedule, bucket_bytes: int) -> tuple[Held, int, int]:
    """What every device of the target ends with, the bytes sent, and those between nodes."""
    spec, cluster = schedule.spec, schedule.cluster
    values, shapes = truth(spec), {parameter.name: parameter.shape for parameter in spec.parameters}
    held: Held = {}

    def place(device: int, name: str) -> np.ndarray:
        return held.setdefault(device, {}).setdefault(name, np.full(shapes[name], np.nan))

    for device in schedule.source.devices:
        for name, boxes in schedule.source.parts(device).items():
            for box in boxes:
                place(device, name)[at(box)] = values[name][at(box)]
    received: Held = {}
    steps = {
        device: {(s.bucket, s.wave): s for s in schedule.steps(device, bucket_bytes)} for device in range(cluster.size)
    }
    sent = between = 0
    for when in sorted({when for own in steps.values() for when in own}):
        arriving = []
        for device, own in steps.items():
            step = own.get(when)
            if step is None:
                continue
            assert step.sends or step.receives
            for message in step.sends:
                assert message.source == device != message.target
                assert message in steps[message.target][when].receives, "both ends know a message"
                size = 0
                for piece in message.pieces:
                    assert piece.parameter in step.parameters
                    part = place(device, piece.parameter)[at(piece.box)].copy()
                    assert not np.isnan(part).any(), "a device sends only what it has"
                    before = received.setdefault(message.target, {}).setdefault(
                        piece.parameter, np.zeros(shapes[piece.parameter], int)
                    )
                    before[at(piece.box)] += 1
                    arriving.append((message.target, piece, part))
                    size += part.size * spec.bytes_per_element
                assert message.bytes == size
                sent += size
                if device // cluster.devices_per_node != message.target // cluster.devices_per_node:
                    between += size
            pairs = [(m.source, m.target) for m in (*step.sends, *step.receives)]
            assert len(pairs) == len(set(pairs)), "one message for a pair"
        for target, piece, part in arriving:
            place(target, piece.parameter)[at(piece.box)] = part
    for device, counts in received.items():
        for name, times in counts.items():
            assert times.max(initial=0) <= 1, "nothing comes twice"
            mine = np.zeros_like(times)
            for box in schedule.source.parts(device).get(name, ()):
                mine[at(box)] = 1
            assert (times + mine).max(initial=0) <= 1, "nothing comes that was there"
    return held, sent, between


def least(schedule: TransferSchedule) -> tuple[int, int]:
    """Bytes that devices lack, and bytes that nodes lack: counted element by element."""
    spec, cluster = schedule.spec, schedule.cluster
    lacked = crossing = 0
    for parameter in spec.parameters:
        has, wants = (np.zeros((cluster.size, math.prod(parameter.shape)), bool) for _ in range(2))
        for table, layout in ((has, schedule.source), (wants, schedule.target)):
            for placed in layout.parameters[parameter.name]:
                inside = np.zeros(parameter.shape, bool)
                inside[at(placed.box)] = True
                table[list(placed.devices)] |= inside.ravel()
        lacked += int((wants & ~has).sum())
        by_node = (cluster.nodes, cluster.devices_per_node, -1)
        crossing += int((wants.reshape(by_node).any(1) & ~has.reshape(by_node).any(1)).sum())
    return lacked * spec.bytes_per_element, crossing * spec.bytes_per_element


def check(cluster: Cluster, source: Layout, target: Layout, bucket_bytes: int) -> TransferSchedule:
    schedule = make_schedule(cluster, source, target)
    held, sent, between = run(schedule, bucket_bytes)
    values = truth(schedule.spec)
    for device in target.devices:
        for name, boxes in target.parts(device).items():
            for box in boxes:
                assert np.array_equal(held[device][name][at(box)], values[name][at(box)])
    lacked, crossing = least(schedule)
    assert sent == sum(schedule.sent(device) for device in range(cluster.size)) == lacked
    assert between == schedule.traffic()[1][0].sum() == crossing
    return schedule


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 2000))
def test_devices_get_their_parts_and_no_more(case: tuple[Cluster, Layout, Layout], bucket_bytes: int) -> None:
    check(*case, bucket_bytes)


@settings(max_examples=12, deadline=None)
@given(cases(most=64))
def test_on_meshes_of_up_to_64_devices_too(case: tuple[Cluster, Layout, Layout]) -> None:
    check(*case, 1 << 30)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 500))
def test_no_bucket_is_too_large_but_for_one_parameter(case: tuple[Cluster, Layout, Layout], bucket_bytes: int) -> None:
    schedule = make_schedule(*case)
    buckets = schedule.buckets(bucket_bytes)
    assert [name for names in buckets for name in names] == [p.name for p in schedule.spec.parameters]
    for device in range(case[0].size):
        received = dict.fromkeys(buckets, 0)
        for step in schedule.steps(device, bucket_bytes):
            received[step.parameters] += sum(message.bytes for message in step.receives)
        assert all(size <= bucket_bytes or len(names) == 1 for names, size in received.items())


@given(cases())
def test_equal_layouts_move_nothing(case: tuple[Cluster, Layout, Layout]) -> None:
    cluster, layout, _ = case
    schedule = make_schedule(cluster, layout, layout)
    assert not any(list(schedule.steps(d, 100)) for d in range(cluster.size))
    for device in layout.devices:
        kept = {(piece.parameter, piece.box) for piece in schedule.kept(device)}
        assert kept == {(name, box) for name, boxes in layout.parts(device).items() for box in boxes}


@given(cases())
def test_the_schedule_is_the_same_wherever_it_is_made(case: tuple[Cluster, Layout, Layout]) -> None:
    one, other = make_schedule(*case), make_schedule(*case)
    for device in range(case[0].size):
        assert list(one.steps(device, 300)) == list(other.steps(device, 300))


LLAMA_70B = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672}
LLAMA_70B |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}


def test_70_billion_parameters_on_1024_devices_load_no_sender_more_than_5_percent_above_the_mean() -> None:
    spec = ModelSpec.from_config(LLAMA_70B, bytes_per_element=2)
    mesh = DeviceMesh(0, 1024)
    schedule = make_schedule(Cluster(128, 8), megatron_layout(spec, mesh, 8, 16), megatron_layout(spec, mesh, 8, 1))
    sent = [size for device in range(mesh.size) if (size := schedule.sent(device))]
    assert max(sent) < 1.05 * statistics.mean(sent)


def test_one_holders_parameters_are_spread_by_those_that_have_them() -> None:
    """Of eight devices that want a whole model which one has: it sends little more than one copy, not seven."""
    spec = ModelSpec.of_shapes([(f"p{i}", (10, 10)) for i in range(64)], bytes_per_element=4)
    source, target = replicated_layout(spec, DeviceMesh(0, 1)), replicated_layout(spec, DeviceMesh(0, 8))
    schedule = check(Cluster(1, 8), source, target, 1 << 20)
    assert schedule.sent(0) < 1.3 * spec.bytes


def test_a_part_that_nobody_holds_is_refused_by_name() -> None:
    spec = ModelSpec.of_shapes([("a", (4,)), ("b", (4,))], bytes_per_element=4)
    target = replicated_layout(spec, DeviceMesh(0, 1))
    with pytest.raises(ValueError, match="no device of the source layout holds all of b"):
        make_schedule(Cluster(1, 2), Layout.of_parts(spec, {1: {"a": [((0, 4),)]}}), target)
