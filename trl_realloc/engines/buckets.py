"""Cuts a sequence of tensors into buckets of bounded size, so that a collective is called for many at once.

Computes the grouping only. The collectives are in `mesh_group`, the export of parameters in `training/weight_export`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar


Item = TypeVar("Item")


def in_buckets(
    items: Iterable[Item],
    bytes_of: Callable[[Item], int],
    bucket_bytes: int,
    kind_of: Callable[[Item], Hashable] = lambda item: None,
) -> Iterator[list[Item]]:
    """Yield consecutive items in lists, in order. A bucket ends where the next item would exceed `bucket_bytes` or is
    of another kind (such as the dtype, where a bucket is sent as one flat tensor). A larger item is a bucket by itself.

    The grouping depends on the items' sizes and kinds alone, so ranks with the same items have the same buckets.
    `items` is read at most one item beyond the bucket that is yielded.
    """
    bucket: list[Item] = []
    filled = 0
    for item in items:
        size = bytes_of(item)
        if bucket and (filled + size > bucket_bytes or kind_of(item) != kind_of(bucket[0])):
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket
