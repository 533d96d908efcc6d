"""`FinishedSamples`: tells each rank of its samples as they end, on whichever ranks they are generated.

The outputs of a generation as a whole are sent in another way, by `exchange`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from ...algorithms.rollout import Rollouts
from ..messages import Messages


_END = b""


class FinishedSamples:
    """One rank's side. All ranks make one.

    Args:
        messages: of this rank, used by nothing else.
        ranks: their number.
        rank: this one.
        tag: of the messages.
    """

    def __init__(self, messages: Messages, ranks: int, rank: int, tag: int) -> None:
        self.messages, self.ranks, self.rank, self.tag = messages, ranks, rank, tag
        self._ended: Callable[[int, Rollouts], None] | None = None
        self._starts: Sequence[int] = ()
        self._left = 0  # of this rank's samples
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, sizes: Sequence[int], ended: Callable[[int, Rollouts], None]) -> None:
        """A generation begins. All ranks together, after all of them have ended the one before.

        Args:
            sizes: how many samples each rank has. They are numbered in the order of the ranks.
            ended: called with the position of a sample among this rank's, and the sample with the columns that were
                generated; from another thread where another rank has generated it.
        """
        self._starts, self._left = (0, *accumulate(sizes)), sizes[self.rank]
        self._ended = ended
        if self.ranks > 1:
            self._thread = threading.Thread(target=self._receive, daemon=True, name="finished-samples")
            self._thread.start()

    def add(self, samples: Rollouts) -> None:
        """Samples have ended on this rank. Ignored where no generation has begun."""
        if self._ended is None:
            return
        for at, index in enumerate(samples.tensor("index").tolist()):
            owner, sample = bisect_right(self._starts, index) - 1, samples.select([at])
            if owner == self.rank:
                self._take(sample)
            else:
                self.messages.send(sample.to_bytes(), owner, self.tag)

    def end(self) -> None:
        """The generation has ended on all ranks. All ranks together. Waits until all of this rank's samples are known.
        Raises what `ended` has raised."""
        if self._thread is not None:
            self.messages.send(_END, (self.rank + 1) % self.ranks, self.tag)
            self._thread.join()
            self.messages.flush()
        self._ended = self._thread = None
        if self._error is not None:
            raise self._error

    def _receive(self) -> None:
        # a message is certain to come until the end has, and then while samples are left, which are other ranks'
        has_ended = False
        try:
            while not has_ended or self._left:
                _, content = self.messages.receive_any(self.tag)
                if content == _END:
                    has_ended = True
                else:
                    self._take(Rollouts.from_bytes(content))
        except BaseException as error:  # raised by `end`
            self._error = error

    def _take(self, sample: Rollouts) -> None:
        assert self._ended is not None, "a generation has begun"
        with self._lock:
            self._ended(int(sample.tensor("index")[0]) - self._starts[self.rank], sample)
            self._left -= 1
