"""Draws timelines, and the memory of devices, with one colour for each call in all pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .fused import parted
from .spans import LOOP, Span, is_host_work
from .timeline import Timeline


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH, MAX_INCHES = 10.0, 100.0  # width and maximum height of a picture, in inches
MAX_NUMBERED = 32  # maximum number of rows of a picture with iteration numbers
# Colours that the colour-blind can tell apart (Okabe and Ito, Color Universal Design, 2008).
COLOURS = {
    "actor.generate": "#0072B2",
    "actor.forward": "#56B4E9",
    "actor.train": "#D55E00",
    "critic.forward": "#CC79A7",
    "critic.train": "#E69F00",
    "reference.forward": "#009E73",
    "reward.forward": "#F0E442",
}
MOVES = " -> "  # separates the two calls in a reallocation's name
OTHER = "#999999"  # reallocations, and other spans that are not model calls
HOST, BETWEEN = "#333333", "#DDDDDD"  # reward functions and tools, and the training loop
HOST_HATCHES = ("////", "....", "xxxx", "----", "++++")  # hatches of the first function, the second, ...
HOST_HEIGHT = 0.35  # height of the functions' bars, which are drawn over the calls' bars
FORWARD = 0.5  # opacity of a training call's forwards, if they are drawn apart from its backwards


def colour(name: str) -> str:
    """The colour of a call or of its task; for calls that run together, the first call's."""
    named = (code for call, code in COLOURS.items() if parted(name)[0].startswith(call))
    if is_host_work(name):
        return BETWEEN if name == LOOP else HOST
    return OTHER if MOVES in name else next(named, OTHER)


def draw_timeline(timeline: Timeline, path: str | Path, *, title: str = "", calls: Sequence[str] = ()) -> None:
    """Draw a timeline with a row for each device, in the format of the file's suffix. Neighbours with the same calls at
    the same times share a row. Concurrent spans of a device are drawn side by side, with iteration numbers if it
    generates for several iterations. Reward functions and tools are narrow hatched bars over the calls. With streamed
    calls, a second plot below shows the number of samples that each call has finished.

    Args:
        calls: the order of all calls in the legend. *optional*, defaults to the order of their first starts.

    Raises:
        ValueError: there are no spans.
        ImportError: matplotlib is not installed.
    """
    if not timeline.spans:
        raise ValueError("a timeline without spans cannot be drawn; run at least one step.")
    zero, order = min(span.start for span in timeline.spans), calls or timeline.calls
    rows = _rows(timeline)
    row = {devices[0]: number for number, devices in enumerate(rows)}
    is_ahead = timeline.runs_ahead
    calls_alone = Timeline(span for span in timeline.spans if not span.is_host_work)
    lanes = calls_alone.lanes() if is_ahead or calls_alone.overlaps else {}
    functions = [call for call in order if is_host_work(call) and call != LOOP]
    streamed = set[str]() if is_ahead else timeline.streamed_calls()
    figure = new_figure(WIDTH, min(1.5 + 0.35 * len(rows) + 2.0 * bool(streamed), MAX_INCHES))
    axes = figure.add_subplot(211 if streamed else 111)
    for call in order:
        spans = [span for span in timeline.spans if span.call == call and span.device in row]
        if call in functions:
            _draw_functions(axes, call, HOST_HATCHES[functions.index(call) % len(HOST_HATCHES)], spans, row, zero)
        else:
            _draw_spans(axes, call, spans, lanes, row, zero)
    if is_ahead and len(rows) <= MAX_NUMBERED:
        _number(axes, {span: lane for span, lane in lanes.items() if span.device in row}, row, zero)
    axes.set_yticks(range(len(rows)), [_named(devices) for devices in rows])
    axes.invert_yaxis()
    if streamed:
        flow = figure.add_subplot(212, sharex=axes)
        for call in order:
            if call in streamed:
                times, samples = timeline.samples_ended(call)
                flow.step([time - zero for time in times], samples, where="post", color=colour(call))
        flow.set_ylabel("samples ended")
        flow.set_xlabel("seconds")
    else:
        axes.set_xlabel("seconds")
    axes.set_title(plain(title), fontsize="medium", loc="left")
    figure.legend(loc="outside lower center", ncols=min(len(order), 5), frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def draw_memory(holds: Mapping[str, float], total: float, path: str | Path, *, title: str = "") -> None:
    """Draw the memory of a device as one stacked bar: its parts, and the rest of `total`, all in bytes. A call's part
    has the call's colour, and is hatched if the call has it only while it runs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(WIDTH, 2.2)
    axes = figure.add_subplot()
    left = 0.0
    for name, size in sorted(holds.items(), key=lambda item: -item[1]):
        call = next((call for call in COLOURS if call in name), name)
        hatch = None if name == call else "//"
        axes.barh(0, size / 1e9, left=left, color=colour(call), edgecolor="white", hatch=hatch, label=plain(name))
        left += size / 1e9
    axes.barh(0, max(0.0, total / 1e9 - left), left=left, color="none", edgecolor=OTHER, label="free")
    axes.set_yticks([])
    axes.set_xlabel("GB")
    axes.set_title(plain(title), fontsize="medium", loc="left")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, with sizes in inches. Raises `ImportError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # importing it takes half a second, and only pictures need it
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install matplotlib.") from None
    return Figure(figsize=(width, height), layout="constrained")


def _draw_spans(
    axes: Axes,
    call: str,
    spans: Sequence[Span],
    lanes: dict[Span, tuple[int, int]],
    row: Mapping[int, int],
    zero: float,
) -> None:
    places = [lanes.get(span, (0, 1)) for span in spans]
    together = parted(call)[1:]
    axes.barh(
        [row[span.device] + (0.5 + lane) * 0.8 / of - 0.4 for span, (lane, of) in zip(spans, places, strict=True)],
        [span.seconds for span in spans],
        [0.8 / of for _, of in places],
        left=[span.start - zero for span in spans],
        color=colour(call),
        alpha=FORWARD if call.endswith(", forward") else 1.0,
        hatch="//" if together else None,
        edgecolor=colour(together[0]) if together else "white",
        linewidth=0.5,
        label=plain(call),
    )


def _draw_functions(
    axes: Axes, name: str, hatch: str, spans: Sequence[Span], row: Mapping[int, int], zero: float
) -> None:
    axes.barh(
        [row[span.device] for span in spans],
        [span.seconds for span in spans],
        HOST_HEIGHT,
        left=[span.start - zero for span in spans],
        color="white",
        hatch=hatch,
        edgecolor=HOST,
        linewidth=0.5,
        label=plain(name),
        zorder=3,
    )


def _rows(timeline: Timeline) -> list[list[int]]:
    """The devices of each row: neighbours with the same spans."""
    work: dict[int, set[tuple[str, float, float, int]]] = defaultdict(set)
    for span in timeline.spans:
        work[span.device].add((span.call, span.start, span.end, span.step))
    rows: list[list[int]] = []
    for device in timeline.devices:
        if rows and device == rows[-1][-1] + 1 and work[device] == work[rows[-1][0]]:
            rows[-1].append(device)
        else:
            rows.append([device])
    return rows


def plain(text: str) -> str:
    """The text with escaped dollar signs, which Matplotlib would read as formulas."""
    return text.replace("$", r"\$")


def _named(devices: Sequence[int]) -> str:
    return f"device {devices[0]}" if len(devices) == 1 else f"devices {devices[0]}-{devices[-1]}"


def _number(axes: Axes, lanes: dict[Span, tuple[int, int]], row: Mapping[int, int], zero: float) -> None:
    """Write the iteration's number on spans that are long enough."""
    whole = max((span.end for span in lanes), default=zero) - zero
    for span, (lane, of) in lanes.items():
        if span.seconds > 0.02 * whole:
            height, middle = row[span.device] + (0.5 + lane) * 0.8 / of - 0.4, (span.start + span.end) / 2 - zero
            axes.text(middle, height, str(span.step), ha="center", va="center", fontsize=5, color="white")
