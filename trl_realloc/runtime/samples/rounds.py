"""`Rounds`: the ranks of a job serve each other's requests together, also while some of them have none left.

A rank that shares engines with others cannot leave while these still need it. In TRL's loop over tool calls the ranks
take different numbers of turns, so a rank that is done goes on joining rounds without requests (`Rounds.finish`).
What a request is and how it is served is the caller's; `trainer/policy/planned_generation` generates.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..failures.alarm import JobFailed
from ..messages import Messages, combined


_COUNTS, _FAILURES, _REQUESTS, _ANSWERS = 0, 2, 4, 5  # tags; `combined` uses two


class ServedRequests(NamedTuple):
    """Consecutive requests of one rank that one rank serves.

    Args:
        source: the rank whose requests they are.
        start, stop: their positions among its requests.
        server: the rank that serves them.
    """

    source: int
    start: int
    stop: int
    server: int


def divide(counts: Sequence[int], homes: Sequence[int]) -> list[ServedRequests]:
    """Who serves which requests of a round. No rank serves more than `ceil(total / number of servers)`, and requests
    stay with their home server as far as that allows: its cache may have their beginnings.

    Args:
        counts: the number of requests of each rank.
        homes: by rank, the rank that serves its requests if it can.

    Returns:
        Shares without empty ones, by source and then by position; a source has one share at most with a server. The
        same on every rank.
    """
    servers = sorted(set(homes))
    room = dict.fromkeys(servers, -(-sum(counts) // len(servers)))
    kept = []
    for count, home in zip(counts, homes, strict=True):
        kept.append(min(count, room[home]))
        room[home] -= kept[-1]
    shares = []
    for source, (count, home) in enumerate(zip(counts, homes, strict=True)):
        start = kept[source]
        if start:
            shares.append(ServedRequests(source, 0, start, home))
        for server in servers:
            stop = min(count, start + room[server])
            if stop > start:
                shares.append(ServedRequests(source, start, stop, server))
                room[server] -= stop - start
                start = stop
    return shares


class Rounds:
    """One rank's side of the rounds. Every rank makes one, and every rank takes part in every round: by `join`, or
    inside `finish` once it has no more requests. A job in which all ranks call `join` equally often needs no `finish`.

    Args:
        messages: between the ranks, used by these rounds alone.
        ranks: of the job, 0 to n - 1.
        rank: this one.
        homes: see `divide`.
        serve: makes an answer for each request, in their order. Called on the ranks in `homes` alone. Requests and
            answers are anything that can be pickled.
    """

    def __init__(
        self,
        messages: Messages,
        ranks: Sequence[int],
        rank: int,
        homes: Sequence[int],
        serve: Callable[[list[Any]], list[Any]],
    ) -> None:
        self._messages, self._ranks, self._rank, self._homes, self._serve = messages, ranks, rank, homes, serve

    def join(self, requests: Sequence[object]) -> list[Any]:
        """Take part in a round with these requests, perhaps none. Returns an answer for each, in order.

        Raises:
            JobFailed: another rank could not serve its share; on every other rank.
            Exception: that of `serve`, on the rank where it was raised.
        """
        answers = self._round(requests)
        assert answers is not None, "a rank with requests takes part in a round that is served"
        return answers

    def finish(self) -> None:
        """Take part in the rounds of the others until every rank has called this. Raises as `join` does."""
        while self._round(None) is not None:
            pass

    def agree(self, error: Exception | None) -> None:
        """Raise if any rank has an error. All ranks together.

        Raises:
            JobFailed: another rank's error.
            Exception: this rank's error.
        """
        message = None if error is None else (str(error) or type(error).__name__)
        first = combined(
            self._messages, self._ranks, self._rank, message, lambda one, other: one or other, tag=_FAILURES
        )
        self._messages.flush()
        if error is not None:
            raise error
        if first is not None:
            raise JobFailed(first, is_shared=True)

    def _round(self, requests: Sequence[object] | None) -> list[Any] | None:
        """One round. `None` without one: all ranks have finished."""
        posted = {self._rank: None if requests is None else len(requests)}
        counts: dict[int, int | None] = combined(
            self._messages, self._ranks, self._rank, posted, lambda one, other: {**one, **other}, tag=_COUNTS
        )
        if all(count is None for count in counts.values()):
            self._messages.flush()
            return None
        shares = divide([counts[rank] or 0 for rank in self._ranks], self._homes)
        served, error = list[Any](), None
        to_serve = self._exchange(shares, requests or ())
        if to_serve:
            try:
                served = self._serve(to_serve)
            except Exception as caught:
                error = caught
        self.agree(error)
        return self._return(shares, served)

    def _exchange(self, shares: Sequence[ServedRequests], requests: Sequence[object]) -> list[Any]:
        """Send this rank's requests to their servers. Returns those that this rank serves, in the order of the
        shares."""
        for share in shares:
            if share.source == self._rank != share.server:
                self._messages.send(pickle.dumps(requests[share.start : share.stop]), share.server, _REQUESTS)
        to_serve: list[Any] = []
        for share in shares:
            if share.server == self._rank:
                is_own = share.source == self._rank
                to_serve += requests[share.start : share.stop] if is_own else self._receive(share.source, _REQUESTS)
        return to_serve

    def _return(self, shares: Sequence[ServedRequests], served: Sequence[object]) -> list[Any]:
        """Send answers to the ranks whose requests they are for. Returns those for this rank's requests."""
        local, at = list[Any](), 0
        for share in shares:
            if share.server == self._rank:
                part = served[at : at + share.stop - share.start]
                at += len(part)
                if share.source == self._rank:
                    local = list(part)
                else:
                    self._messages.send(pickle.dumps(part), share.source, _ANSWERS)
        answers: list[Any] = []
        for share in shares:
            if share.source == self._rank:
                answers += local if share.server == self._rank else self._receive(share.server, _ANSWERS)
        self._messages.flush()
        return answers

    def _receive(self, rank: int, tag: int) -> list[Any]:
        items: list[Any] = pickle.loads(self._messages.receive(rank, tag))  # safe: from another rank of this job
        return items
