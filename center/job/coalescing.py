"""When a batch begins: after the arrival of all frames that edges send at the same moment. Pure.

A window ends at all edges at once, so their frames arrive within milliseconds of each other. A batch that began with
the first frame would have to end before the other frames are read. The answer needs all of them, and would come one
batch later. Measured with three edges on two busy cores: 11 of 15 windows missed their first batch by 3 to 40 ms, and
waited 200 ms.

An edge with hundreds of queries that close together sends their frames in several messages, which become several group
commits. The first commit would become a batch of its own, for which all others wait: of 500 queries, 64 and then 436.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping

MAX_WAIT_S = 0.05
"""The longest delay of a batch: a fraction of its duration."""
REMEMBERED_BATCHES = 4  # limit: memory of past batches
MANY_FRAMES = 64
"""With more pending frames, of fewer than `MANY_QUERIES` queries, a batch begins at once."""
MANY_QUERIES = 32
"""If at least this many queries have pending frames, frames of further queries are expected."""
MAX_WAIT_MANY_S = 0.2
"""The longest delay of a batch of many queries: a second batch costs more."""
QUIET_S = 0.05
"""Frames of many queries arrive within this time of each other: one group commit after the other."""
SAME_TICK_S = 0.5
"""A batch that begins this soon after a batch of many queries has frames that were sent together with that batch's
frames."""


class BatchCoalescer:
    """Delays a batch while frames of an edge are missing that sent frames for one of the query's last batches.

    With one edge, or after all edges have sent, there is no delay. An edge that has gone costs `MAX_WAIT_S` in each of
    the next `REMEMBERED_BATCHES` batches.
    """

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_wait_s = max_wait_s
        self._since_s: float | None = None
        self._recent: dict[str, deque[frozenset[str]]] = {}
        self._grown: tuple[int, float] = (0, 0.0)
        self._ticks: deque[frozenset[str]] = deque(maxlen=REMEMBERED_BATCHES)
        self._tick_s = -math.inf

    def wait_until_s(self, pending: Mapping[str, Collection[str]], now_s: float) -> float | None:
        """Returns when the batch begins if no further frame arrives; None: it begins now.

        Args:
            pending: by query key, the edges of the pending frames; only queries with any.
            now_s: of a monotonic clock.
        """
        if not pending:
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = now_s
        until_s = self._since_s + self._max_wait_s
        if now_s < until_s and self._is_any_missing(pending):
            return until_s
        self._since_s = None
        self._begin_tick(frozenset(pending), now_s)
        for key, edges in pending.items():
            self._recent.setdefault(key, deque(maxlen=REMEMBERED_BATCHES)).append(frozenset(edges))
        return None

    def expects_many(self, pending: Collection[str]) -> bool:
        """Returns whether frames of `MANY_QUERIES` or more queries are expected.

        So many queries are pending, or a recent batch of so many queries had all pending ones.
        """
        return len(pending) >= MANY_QUERIES or any(pending and tick.issuperset(pending) for tick in self._ticks)

    def wait_for_queries_until_s(self, pending: Collection[str], now_s: float) -> float | None:
        """As `wait_until_s`, if many are expected (`expects_many`).

        The delay ends when all queries of the last batches of many queries have frames, or `QUIET_S` after frames of a
        new query arrived.
        """
        if self._since_s is None:
            self._since_s = now_s
        if len(pending) != self._grown[0]:
            self._grown = len(pending), now_s
        until_s = min(self._grown[1] + QUIET_S, self._since_s + MAX_WAIT_MANY_S)
        if now_s < until_s and not (self._ticks and frozenset().union(*self._ticks).issubset(pending)):
            return until_s
        self._since_s, self._grown = None, (0, 0.0)
        self._begin_tick(frozenset(pending), now_s)
        return None

    def _begin_tick(self, queries: frozenset[str], now_s: float) -> None:
        """Records which queries have frames at the same time, even if the frames came into two batches."""
        if self._ticks and now_s - self._tick_s < SAME_TICK_S:
            self._ticks[-1] |= queries
        elif len(queries) >= MANY_QUERIES:
            self._ticks.append(queries)
            self._tick_s = now_s

    def keep(self, keys: Collection[str]) -> None:
        """Drops all queries but these."""
        self._recent = {key: recent for key, recent in self._recent.items() if key in keys}
        self._ticks = deque((tick.intersection(keys) for tick in self._ticks), REMEMBERED_BATCHES)

    def _is_any_missing(self, pending: Mapping[str, Collection[str]]) -> bool:
        return any(not frozenset().union(*self._recent.get(key, ())) <= set(edges) for key, edges in pending.items())
