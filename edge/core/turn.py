"""`Turn`: the order in which the queries of an edge use the link, in one pull.

First closes come before everything else, and alone: the frames of a pull are one message, and a message arrives as a
whole (`edge/core/shipper.py`). Closes that are due together share the message, since a message of its own costs each of
them four times its bytes. A link that is too narrow for the first closes alone still carries other frames, because
`MOST_FIRST_PULLS` limits how many pulls of first closes follow each other. Otherwise no slice would be closed for the
last time, and no other query would send anything.

All other frames leave as `edge/core/link_plan.py` plans, except in one message of `MESSAGES_PER_FAIR`, and in the one
that follows so many pulls of first closes. There the query that was served least is first. A query is served at the
larger of two numbers: the bytes at which its last frame ended, and the bytes at which the last frame in such a message
began. So a planned frame takes no turn from others, and a query that was idle saves nothing up. Queries that wait
divide the message, down to `LEAST_BYTES` each. First closes do not count: they would take from a query its turn for the
last closes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edge.core.events import PullEvent
from edge.core.link_plan import LEAST_BYTES, MESSAGES_PER_FAIR, Demand, message
from edge.core.policies import FIRST_GROUPS
from edge.core.query_pipeline import QueryPipeline
from edgewater.model.query import DEFAULT_PRIORITY
from edgewater.wire import QueryRef

LEAST_FIRST_GROUPS, MOST_FIRST_GROUPS = 4, 24
"""The limits of a query's part of `FIRST_GROUPS`."""
MOST_FIRST_PULLS = 4
"""After so many pulls of first closes in a row, other frames have a pull. The first closes of 200 queries need four."""


class Turn:
    """The queries of one pull.

    Args:
        demands: returns what queries have to send of closed slices (`PullPlanner.demands`).
        served_bytes: the number at which the last frame was served, over all queries.
        first_pulls: how many pulls of first closes came just before.
        turns: how many other pulls there were.

    Attributes:
        queries: in the order in which they are pulled from.
        first_groups: as in `PullConditions`.
        frames: how many frames were built.
        first_pulls, turns: for the next pull.
    """

    def __init__(
        self,
        pull: PullEvent,
        queries: Sequence[QueryPipeline],
        demands: Callable[[Sequence[QueryPipeline]], list[Demand]],
        served_bytes: int,
        first_pulls: int,
        turns: int,
    ) -> None:
        self.pull, self._served_bytes, self.turns = pull, served_bytes, turns
        self.frames, self._left_bytes = 0, pull.capacity_bytes
        self.first_groups: int | None = None
        self._rooms, self._is_fair = dict[QueryRef, int](), False
        may_be_first = first_pulls < MOST_FIRST_PULLS
        first = [p for p in queries if may_be_first and p.shipper.awaits_first_close(p.watermark_ms)]
        self.first_pulls = first_pulls + 1 if first else 0
        if first:
            self.queries = sorted(first, key=_deadline)
            self.first_groups = min(max(FIRST_GROUPS // len(first), LEAST_FIRST_GROUPS), MOST_FIRST_GROUPS)
            self._left_bytes //= len(first)
            return
        self.queries = sorted(queries, key=lambda p: (self._served_at(p), p.through_ms, p.ref.name))
        # A close of a slice that has been sent, or a report of arrivals, is small, and is not delayed by entries.
        small = [p for p in self.queries if p.monitor or p.shipper.has_unreported_closes(p.watermark_ms)]
        self._is_fair = len(small) < 2 or not may_be_first or not self.turns % MESSAGES_PER_FAIR
        if self._is_fair:
            # Each query that waits has its turn soon, with a small frame if they are many.
            room = max(pull.capacity_bytes // max(len(small), 1), LEAST_BYTES)
            self._rooms = {p.ref: room for p in small}
            return
        rate, asked = pull.bandwidth_bytes_s / 1000.0, demands(self.queries)
        planned = message(asked, rate, pull.capacity_bytes)
        waiting = {self.queries[d.query].ref for d in asked}
        self._rooms = {p.ref: LEAST_BYTES for p in small if p.ref not in waiting} | {
            self.queries[k].ref: math.ceil(size) for k, size in planned.items()
        }
        order = {ref: k for k, ref in enumerate(self._rooms)}
        self.queries.sort(key=lambda p: order.get(p.ref, len(order)))

    def _served_at(self, pipeline: QueryPipeline) -> int:
        return max(pipeline.served_bytes, self._served_bytes)

    def room_bytes(self, pipeline: QueryPipeline) -> int:
        """Returns the capacity of a query's frame; 0: the query has none in this pull.

        Small frames cost more, so a frame that is not planned needs at least half of the capacity.
        """
        if self.first_groups is not None:
            return self._left_bytes
        least = 1 if pipeline.ref in self._rooms else self.pull.capacity_bytes / 2
        return (
            min(self._rooms.get(pipeline.ref, self._left_bytes), self._left_bytes) if self._left_bytes >= least else 0
        )

    def serve(self, pipeline: QueryPipeline, size: int) -> int:
        """Counts a frame of a query; returns `served_bytes` for the next pull."""
        self.frames += 1
        if self.first_groups is None:
            self.turns += self.frames == 1
            at = self._served_at(pipeline)
            pipeline.served_bytes = at + size * DEFAULT_PRIORITY // pipeline.spec.priority
            self._left_bytes -= size
            # A planned frame may be of a query that was served much. Others keep what they lack.
            self._served_bytes = at if self._is_fair else self._served_bytes
        return self._served_bytes

    @property
    def is_full(self) -> bool:
        """Whether the pull ends with these frames."""
        return self.frames >= self.pull.max_frames


def _deadline(pipeline: QueryPipeline) -> tuple[float, str]:
    return pipeline.through_ms + pipeline.store.policy.staleness_ms, pipeline.ref.name
