"""When a micro-batch begins: not in the middle of what edges say about one moment. Pure.

Edges speak at the same moments, for a window ends at all of them at once, and their frames come within
milliseconds of each other. A batch that began with the first of them would have to end before the others
are read, and the answer that needs all of them would come a whole batch later. Measured with three edges
on two busy cores: of 15 windows 11 missed their first batch by 3 to 40 ms, and waited 200 ms for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

MOST_S = 0.05
"""How long a batch is held back at most: a fraction of what it takes."""
REMEMBERED_BATCHES = 4
MANY_FRAMES = 64
"""So many waiting frames are worth a batch, whoever is lacking."""


class BatchCoalescer:
    """Holds a batch back while an edge is lacking that spoke in one of the query's last batches.

    With one edge, or once all are there, nothing is held back. An edge that has gone away costs `MOST_S` in each of
    the next `REMEMBERED_BATCHES` batches.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._since_s: float | None = None
        self._spoke: dict[str, deque[frozenset[str]]] = {}

    def holds(self, waiting: Mapping[str, Collection[str]], now_s: float) -> bool:
        """Whether to look again a little later rather than to begin the batch now.

        Args:
            waiting: by query key, the edges of the frames that wait; only queries with any.
            now_s: of a clock that does not go back.
        """
        if not waiting:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < self._most_s and self._is_any_lacking(waiting):
            return True
        self._since_s = None
        for key, edges in waiting.items():
            self._spoke.setdefault(key, deque(maxlen=REMEMBERED_BATCHES)).append(frozenset(edges))
        return False

    def keep(self, keys: Collection[str]) -> None:
        """Forgets all queries but these."""
        self._spoke = {key: spoke for key, spoke in self._spoke.items() if key in keys}

    def _is_any_lacking(self, waiting: Mapping[str, Collection[str]]) -> bool:
        return any(not frozenset().union(*self._spoke.get(key, ())) <= set(edges) for key, edges in waiting.items())
