"""`Turn`: the order in which the queries of an edge use the link, in one pull.

First closes come before everything else, and alone: the frames of a pull are one message, and a message arrives as a
whole (`edge/core/shipper.py`). Closes that are due together share the message, since a message of its own costs each of
them four times its bytes. A link that is too narrow for the first closes alone still carries other frames, because
`MOST_FIRST_PULLS` limits how many pulls of first closes follow each other. Otherwise no slice would be closed for the
last time, and no other query would send anything.

All other frames share the link equally, by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). A query is
served at the larger of two numbers: the bytes at which its last frame ended, and the bytes at which the last frame of
any query began. The query with the smallest number is next. First closes do not count: they would take from a query its
turn for the last closes. So a query with much to send gets what the others leave,
and a query that was idle saves nothing up.
"""

from __future__ import annotations

from collections.abc import Iterable

from edge.core.events import PullEvent
from edge.core.policies import FIRST_GROUPS
from edge.core.query_pipeline import QueryPipeline

LEAST_FIRST_GROUPS, MOST_FIRST_GROUPS = 4, 24
"""The limits of a query's part of `FIRST_GROUPS`."""
MOST_FIRST_PULLS = 4
"""After so many pulls of first closes in a row, other frames have a pull. The first closes of 200 queries need four."""


class Turn:
    """The queries of one pull.

    Args:
        served_bytes: the number at which the last frame was served, over all queries.
        first_pulls: how many pulls of first closes came just before.

    Attributes:
        queries: in the order in which they are pulled from.
        first_groups: as in `PullConditions`.
        room_bytes: the capacity for the next frame.
        frames: how many frames were built.
        first_pulls: how many pulls of first closes come just before the next pull.
    """

    def __init__(self, pull: PullEvent, queries: Iterable[QueryPipeline], served_bytes: int, first_pulls: int) -> None:
        self.pull, self._served_bytes = pull, served_bytes
        self.frames, self.room_bytes = 0, pull.capacity_bytes
        self.first_groups: int | None = None
        every = list(queries)
        may_be_first = first_pulls < MOST_FIRST_PULLS
        first = [p for p in every if may_be_first and p.shipper.awaits_first_close(p.watermark_ms)]
        self.first_pulls = first_pulls + 1 if first else 0
        if first:
            self.queries = sorted(first, key=_deadline)
            self.first_groups = min(max(FIRST_GROUPS // len(first), LEAST_FIRST_GROUPS), MOST_FIRST_GROUPS)
            self.room_bytes //= len(first)
        else:
            self.queries = sorted(every, key=lambda p: (self._served_at(p), p.through_ms, p.ref.name))

    def _served_at(self, pipeline: QueryPipeline) -> int:
        return max(pipeline.served_bytes, self._served_bytes)

    def serve(self, pipeline: QueryPipeline, size: int) -> int:
        """Counts a frame of a query; returns `served_bytes` for the next pull."""
        self.frames += 1
        if self.first_groups is None:
            at = self._served_at(pipeline)
            pipeline.served_bytes, self._served_bytes, self.room_bytes = at + size, at, self.room_bytes - size
        return self._served_bytes

    @property
    def is_full(self) -> bool:
        """Whether the pull ends with these frames. Small frames cost more, so another frame needs at least half of the
        capacity.
        """
        is_used = self.first_groups is None and 2 * self.room_bytes < self.pull.capacity_bytes
        return is_used or self.frames >= self.pull.max_frames


def _deadline(pipeline: QueryPipeline) -> tuple[float, str]:
    return pipeline.through_ms + pipeline.store.policy.staleness_ms, pipeline.ref.name
