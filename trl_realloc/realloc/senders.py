"""Choice of the sender of a part for each device that lacks it, among the part's holders (`schedule`).

Nodes with equal numbers of holders and receivers are assigned together, as arrays over (node, receiver, parameter): a
part that thousands of devices lack takes only a few NumPy operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def assign_senders(
    holders: np.ndarray, receivers: np.ndarray, parameters: int, size: int, per_node: int, loads: np.ndarray
) -> np.ndarray:
    """For every (parameter, receiver) of a box, the least loaded device that can send it.

    Args:
        holders: devices that hold the box.
        receivers: (n,) devices that lack it.
        parameters: number m of parameters with this box.
        size: bytes of the box of one parameter.
        per_node: number of devices of a node.
        loads: (devices,) bytes sent by each device, updated in place.

    Returns:
        (m, n) int32: a holder in the receiver's node. In a node without holders, one receiver gets the parameter from a
        holder in another node, and sends it to the others.
    """
    sources = np.full((parameters, len(receivers)), -1, np.int32)
    far: list[np.ndarray] = []
    for near, columns in _alike_nodes(holders // per_node, receivers // per_node):
        if near.shape[1]:
            sources[:, columns] = np.moveaxis(_spread(holders[near], parameters, columns.shape[1], size, loads), 2, 0)
        else:
            far.append(columns)
    if far:
        _send_once_to_each_node(sources, far, holders, receivers, size, loads)
    return sources


def _send_once_to_each_node(
    sources: np.ndarray,
    far: list[np.ndarray],
    holders: np.ndarray,
    receivers: np.ndarray,
    size: int,
    loads: np.ndarray,
) -> None:
    """Set `sources` of the receivers whose nodes have no holder: one of a node's receivers gets a parameter from
    another node and sends it to the others.

    Args:
        far: (nodes, receivers of a node) columns of `sources`, one array per number of receivers of a node.
    """
    parameters = len(sources)
    first_columns = np.concatenate([columns[:, 0] for columns in far])
    place = np.argsort(np.argsort(receivers[first_columns], kind="stable"))  # rank of each node by its number
    from_other_node = _spread(holders[None], parameters, len(place), size, loads)[0][place]
    begin = 0
    for columns in far:
        nodes, width = columns.shape
        senders = from_other_node[begin : begin + nodes]  # (nodes, parameters)
        begin += nodes
        # the receivers of a node take turns, the least loaded first
        turns = np.argsort(loads[receivers[columns]], axis=1, kind="stable")
        entries = np.take_along_axis(columns, turns[:, np.arange(parameters) % width], 1)  # (nodes, parameters)
        sources[:, columns] = receivers[entries].T[:, :, None]
        sources[np.arange(parameters), entries] = senders
        np.add.at(loads, receivers[entries], (width - 1) * size)


def _alike_nodes(holder_nodes: np.ndarray, receiver_nodes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The nodes with receivers, grouped by their numbers of holders and receivers.

    Yields:
        (positions of the nodes' holders, positions of their receivers), each (nodes, devices of a node).
    """
    by_node, holders_by_node = np.argsort(receiver_nodes, kind="stable"), np.argsort(holder_nodes, kind="stable")
    nodes, starts, widths = np.unique(receiver_nodes[by_node], return_index=True, return_counts=True)
    sorted_nodes = holder_nodes[holders_by_node]
    near_starts = np.searchsorted(sorted_nodes, nodes)
    nears = np.searchsorted(sorted_nodes, nodes, side="right") - near_starts
    for near, width in np.unique(np.stack([nears, widths], 1), axis=0):
        alike = (nears == near) & (widths == width)
        yield (
            holders_by_node[near_starts[alike, None] + np.arange(near)],
            by_node[starts[alike, None] + np.arange(width)],
        )


def _spread(senders: np.ndarray, rows: int, columns: int, size: int, loads: np.ndarray) -> np.ndarray:
    """Senders with loads as even as whole items of `size` bytes allow. A sender serves neighbouring columns, which
    gives few and large messages.

    Args:
        senders: (nodes, senders of a node), all different.
        rows, columns: numbers of items of a node.
        loads: (devices,) bytes sent by each device, updated in place.

    Returns:
        (nodes, columns, rows) the sender of each item.
    """
    counts = _even_counts(loads[senders], rows * columns, size)
    loads[senders] += counts * size
    return np.repeat(senders.ravel(), counts.ravel()).reshape(len(senders), columns, rows)


def _even_counts(loads: np.ndarray, items: int, size: int) -> np.ndarray:
    """Water filling: (rows, n) integers, the number of `items` for each of the (rows, n) loads that makes a row as even
    as possible. Each row's sum is `items`."""
    order = np.argsort(loads, axis=1, kind="stable")
    rising = np.take_along_axis(loads, order, 1).astype(float)
    columns = np.arange(loads.shape[1])
    levels = (items * size + np.cumsum(rising, 1)) / (columns + 1)  # level if the lowest 1, 2, … loads took all items
    is_level = np.append(levels[:, :-1] <= rising[:, 1:], np.ones((len(loads), 1), bool), 1)
    last = np.argmax(is_level, 1)[:, None]
    exact = np.empty_like(rising)
    filled = np.where(columns <= last, (np.take_along_axis(levels, last, 1) - rising) / size, 0.0)
    np.put_along_axis(exact, order, filled, 1)
    counts = np.floor(exact).astype(int)
    rest = items - counts.sum(1, keepdims=True)
    more = np.empty_like(counts)
    np.put_along_axis(more, np.argsort(counts - exact, axis=1, kind="stable"), (columns < rest).astype(int), 1)
    return np.asarray(counts + more)
