"""Layouts cover every parameter exactly once, and lie as the engines' parameters do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_realloc.plan.assignment import Assignment, ParallelStrategy
from trl_realloc.plan.cluster import DeviceMesh
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.realloc.layout import (
    Layout,
    chunks,
    flat_boxes,
    held_once,
    layout_of,
    megatron_layout,
    owners_layout,
    padded_chunks,
    repeated_chunks,
    replicated_layout,
    split_box,
    vllm_layout,
    volume,
    zero3_layout,
)


LLAMA = {"model_type": "llama", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 5}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


def llama(**changes: object) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, **changes}, bytes_per_element=4)


def check_covers(layout: Layout) -> None:
    """Each element of each parameter is in one box, and each box has a holder."""
    for parameter in layout.spec.parameters:
        seen = np.zeros(parameter.shape, int)
        for placed in layout.parameters[parameter.name]:
            assert placed.devices and list(placed.devices) == sorted(set(placed.devices))
            seen[tuple(slice(start, stop) for start, stop in placed.box)] += 1
        assert (seen == 1).all(), parameter.name


@given(shapes, st.data())
def test_a_stretch_of_a_flattened_parameter_is_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    elements = math.prod(shape)
    start = data.draw(st.integers(0, elements))
    stop = data.draw(st.integers(start, elements))
    whole = np.arange(elements).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    found = [whole[tuple(slice(a, b) for a, b in box)].ravel() for box in boxes]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.integers(1, 40))
def test_a_box_is_cut_into_parts_of_at_most_so_many_elements(shape: tuple[int, ...], most: int) -> None:
    seen = np.zeros(shape, int)
    parts = list(split_box(tuple((0, size) for size in shape), most))
    for box in parts:
        seen[tuple(slice(start, stop) for start, stop in box)] += 1
        assert volume(box) <= most
    assert (seen == 1).all() and parts == sorted(parts)


@pytest.mark.parametrize("strategy", [{"dp": 8}, {"dp": 8, "zero_stage": 3}, {"dp": 4, "tp": 2}, {"dp": 2, "pp": 4}])
def test_of_replicas_every_element_is_kept_once_and_each_device_keeps_its_share(strategy: dict[str, int]) -> None:
    spec = llama()
    engine = "megatron" if "tp" in strategy or "pp" in strategy else "zero"
    layout = layout_of(Assignment(DeviceMesh(8, 8), ParallelStrategy(**strategy), engine), spec)
    kept = held_once({device: layout.parts(device) for device in layout.devices})
    check_covers(Layout.of_parts(spec, kept))
    held = {device: sum(volume(box) for boxes in parts.values() for box in boxes) for device, parts in kept.items()}
    assert sum(held.values()) == spec.elements
    for device, parts in kept.items():
        outer = layout.parts(device)
        for name, boxes in parts.items():
            for box in boxes:
                around = [all(a <= s and e <= b for (a, b), (s, e) in zip(o, box, strict=True)) for o in outer[name]]
                assert sum(around) == 1
    if "pp" not in strategy:  # stages differ in size
        assert max(held.values()) <= 1.2 * spec.elements / 8


def test_of_hundreds_of_replicas_some_keep_a_parameter_and_all_a_share() -> None:
    spec = llama()
    layout = layout_of(Assignment(DeviceMesh(0, 256), ParallelStrategy(dp=256), "zero"), spec)
    kept = held_once({device: layout.parts(device) for device in layout.devices})
    check_covers(Layout.of_parts(spec, kept))
    for parameter in spec.parameters:
        assert sum(parameter.name in parts for parts in kept.values()) <= 64
    held = [sum(volume(box) for boxes in parts.values() for box in boxes) for parts in kept.values()]
    assert sum(held) == spec.elements and max(held) < spec.elements / 20


@given(st.lists(shapes, min_size=1, max_size=4), st.integers(0, 5), st.integers(1, 9))
def test_zero_3_deals_every_parameter_out_evenly(held: list[tuple[int, ...]], first: int, size: int) -> None:
    spec = ModelSpec.of_shapes([(f"p{i}", shape) for i, shape in enumerate(held)], bytes_per_element=4)
    elements = {parameter.name: parameter.elements for parameter in spec.parameters}
    layout = zero3_layout(spec, DeviceMesh(first, size))
    check_covers(layout)
    for device in range(first, first + size):
        for name, boxes in layout.parts(device).items():
            assert sum(map(volume, boxes)) <= -(-elements[name] // size)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(t, p) for t, p in itertools.product((1, 2, 4), (1, 2, 5)) if t * p > 1])
def test_tensor_and_pipeline_groups_hold_all_of_the_model(tp: int, pp: int, tied: bool) -> None:
    spec = llama(tie_word_embeddings=tied)
    layout = megatron_layout(spec, DeviceMesh(0, 2 * tp * pp), tp, pp)
    check_covers(layout)
    assert layout.devices == frozenset(range(2 * tp * pp))
    first_replica, second = layout.parts(0), layout.parts(tp * pp)
    assert first_replica == second, "replicas lie alike"
    last = layout.parts(tp * pp - 1)
    assert ("model.embed_tokens.weight" in last) == (tied or pp == 1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vllm_repeats_the_keys_where_there_are_more_devices_than_heads_of_them(tp: int) -> None:
    layout = vllm_layout(llama(intermediate_size=48), DeviceMesh(0, 2 * tp), tp)
    check_covers(layout)
    keys = layout.parameters["model.layers.0.self_attn.k_proj.weight"]
    assert len(keys) == min(tp, 4) and all(len(placed.devices) == 2 * max(1, tp // 4) for placed in keys)
    queries = layout.parameters["model.layers.0.self_attn.q_proj.weight"]
    assert len(queries) == tp


MIXTURE = {**LLAMA, "model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@given(st.integers(2, 9), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 5]))
def test_whole_experts_are_divided_over_a_tensor_group_and_their_channels_in_vllm(count: int, tp: int, pp: int) -> None:
    spec = ModelSpec.from_config({**MIXTURE, "num_experts": count}, bytes_per_element=4)
    ours, of_vllm = megatron_layout(spec, DeviceMesh(0, tp * pp), tp, pp), vllm_layout(spec, DeviceMesh(0, tp), tp)
    boxes = [placed.box for placed in ours.parameters["model.layers.1.mlp.experts.down_proj"]]
    assert [box[0] for box in boxes] == [interval for interval in chunks(count, tp) if interval[0] < interval[1]]
    assert max(map(volume, boxes)) == pytest.approx(spec.unevenness(tp) * count * 8 * 32 / tp)
    assert len(ours.parameters["model.layers.1.mlp.gate.weight"]) == 1
    for layout in (ours, of_vllm):
        check_covers(layout)
    gates = of_vllm.parts(0)["model.layers.1.mlp.experts.gate_up_proj"]
    assert [box[1] for box in gates] == [(0, 8 // tp), (8, 8 + 8 // tp)]


def test_vllm_pads_the_vocabulary_before_it_cuts_it() -> None:
    assert padded_chunks(131, 4) == [(0, 48), (48, 96), (96, 131), (131, 131)]
    assert chunks(131, 4) == [(0, 33), (33, 66), (66, 99), (99, 131)]
    assert repeated_chunks(8, 4, 4) == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_every_engine_has_its_layout() -> None:
    spec, mesh = llama(), DeviceMesh(0, 4)

    def of(engine: str, strategy: ParallelStrategy) -> Layout:
        return layout_of(Assignment(mesh, strategy, engine), spec)

    assert of("zero", ParallelStrategy(4, zero_stage=2)).parameters == replicated_layout(spec, mesh).parameters
    assert of("zero", ParallelStrategy(4, zero_stage=3)).parameters == zero3_layout(spec, mesh).parameters
    assert of("megatron", ParallelStrategy(2, 2)).parameters == megatron_layout(spec, mesh, 2, 1).parameters
    assert of("vllm", ParallelStrategy(2, 2)).parameters == owners_layout(spec, mesh, 2).parameters
    assert of("vllm", ParallelStrategy(2, 2)).devices == {0, 2}


def test_a_layout_made_from_what_devices_say_they_hold_is_the_one_made_from_the_config() -> None:
    spec = llama()
    derived = megatron_layout(spec, DeviceMesh(4, 4), 2, 2)
    said = Layout.of_parts(spec, {device: derived.parts(device) for device in derived.devices})
    for name, placed in derived.parameters.items():
        assert sorted(said.parameters[name], key=lambda cell: cell.box) == sorted(placed, key=lambda cell: cell.box)
