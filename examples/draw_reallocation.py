"""Draws one reallocation box by box: who holds which part of a few parameters before and after, and who sends what.

python examples/draw_reallocation.py docs/reallocation.png

Needs neither torch nor a process group: layouts and schedules are made from a config and a strategy alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from trl_realloc.plan.cluster import Cluster, DeviceMesh
from trl_realloc.plan.model_spec import ModelSpec
from trl_realloc.realloc.layout import Layout, megatron_layout, zero3_layout
from trl_realloc.realloc.schedule import TransferSchedule, make_schedule


CONFIG = {
    "model_type": "llama",
    "vocab_size": 13,  # ragged: four devices have parts of rows
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
SHOWN = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight")


def draw_layout(axes: Any, layout: Layout, name: str, shape: tuple[int, ...], title: str) -> None:
    """A parameter as a rectangle, rows down; each box in the colour of its first holder, with all holders' numbers."""
    for placed in layout.parameters[name]:
        (top, bottom), (left, right) = placed.box
        colour = f"C{placed.devices[0]}"
        axes.add_patch(
            Rectangle((left, top), right - left, bottom - top, facecolor=colour, alpha=0.45, edgecolor="white")
        )
        middle = ((left + right) / 2, (top + bottom) / 2)
        axes.annotate(", ".join(map(str, placed.devices)), middle, ha="center", va="center", fontsize=9)
    axes.set_xlim(0, shape[1])
    axes.set_ylim(shape[0], 0)
    axes.set_xticks([0, shape[1]])
    axes.set_yticks([0, shape[0]])
    axes.set_title(title, fontsize=9)


def draw_schedule(axes: Any, schedule: TransferSchedule, devices: int) -> None:
    """Kilobytes from each device (row) to each other (column)."""
    sent = [[0.0] * devices for _ in range(devices)]
    for device in range(devices):
        for step in schedule.steps(device, 1 << 30):
            for message in step.sends:
                sent[message.source][message.target] += message.bytes / 1000
    axes.imshow(sent, cmap="Blues", vmin=0)
    for source in range(devices):
        for target in range(devices):
            if sent[source][target]:
                dark = sent[source][target] > 0.6 * max(map(max, sent))
                number = f"{sent[source][target]:.1f}"
                colour = "white" if dark else "black"
                axes.annotate(number, (target, source), ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(devices), [f"to {d}" for d in range(devices)], fontsize=8)
    axes.set_yticks(range(devices), [f"from {d}" for d in range(devices)], fontsize=8)
    axes.set_title("the schedule, kB", fontsize=9)


def main(path: Path) -> None:
    spec = ModelSpec.from_config(CONFIG, "lm", bytes_per_element=4)
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    mesh = DeviceMesh(0, 4)
    source, target = zero3_layout(spec, mesh), megatron_layout(spec, mesh, 2, 2)
    schedule = make_schedule(Cluster(2, 2), source, target)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    grid = figure.add_gridspec(2, 4, width_ratios=[1, 1, 1, 1.2])
    for column, name in enumerate(SHOWN):
        short = name.removesuffix(".weight").removeprefix("model.")
        draw_layout(figure.add_subplot(grid[0, column]), source, name, shapes[name], f"{short}\nZeRO-3 on 0-3")
        draw_layout(figure.add_subplot(grid[1, column]), target, name, shapes[name], "tp 2, pp 2 on 0-3")
    draw_schedule(figure.add_subplot(grid[:, 3]), schedule, mesh.size)
    figure.savefig(path, dpi=120)
    inside, between = (sent.sum() for sent, _ in schedule.traffic())
    print(f"{inside + between:,.0f} bytes on the wire, of them {between:,.0f} between nodes.")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("reallocation.png"))
