"""When a micro-batch begins: not before the frames that edges send at the same moment have all arrived. Pure.

A window ends at all edges at once, so their frames arrive within milliseconds of each other. A batch that began with
the first of them would have to end before the others are read, and the answer that needs all of them would come one
batch later. Measured with three edges on two busy cores: 11 of 15 windows missed their first batch by 3 to 40 ms, and
waited 200 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

MAX_WAIT_S = 0.05
"""The longest delay of a batch: a fraction of its duration."""
REMEMBERED_BATCHES = 4
MANY_FRAMES = 64
"""With more pending frames a batch begins at once."""


class BatchCoalescer:
    """Delays a batch while an edge is missing that sent frames for one of the query's last batches.

    With one edge, or once all have sent, there is no delay. An edge that has gone costs `MAX_WAIT_S` in each of the
    next `REMEMBERED_BATCHES` batches.
    """

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_wait_s = max_wait_s
        self._since_s: float | None = None
        self._recent: dict[str, deque[frozenset[str]]] = {}

    def should_wait(self, pending: Mapping[str, Collection[str]], now_s: float) -> bool:
        """Whether to check again a little later instead of beginning the batch now.

        Args:
            pending: by query key, the edges of the pending frames; only queries with any.
            now_s: of a monotonic clock.
        """
        if not pending:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < self._max_wait_s and self._is_any_missing(pending):
            return True
        self._since_s = None
        for key, edges in pending.items():
            self._recent.setdefault(key, deque(maxlen=REMEMBERED_BATCHES)).append(frozenset(edges))
        return False

    def keep(self, keys: Collection[str]) -> None:
        """Drops all queries but these."""
        self._recent = {key: recent for key, recent in self._recent.items() if key in keys}

    def _is_any_missing(self, pending: Mapping[str, Collection[str]]) -> bool:
        return any(not frozenset().union(*self._recent.get(key, ())) <= set(edges) for key, edges in pending.items())
