"""How long queries can wait at the center, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from center.api.measure_models import ApiModel
from center.catalog import SetAside
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.streams import MAX_TIME_MS
from edgewater.model.windows import window_ends


class QueryLoad(ApiModel):
    """The load of a query."""

    query: str
    version: int
    slack_ms: float | None
    """Until its next answer becomes late: when the frame that closes a window came, or is expected to come, less now
    and the cost. Negative: it is late. Null: no frame is expected."""
    frames: int
    """Frames in the log that are not applied."""
    late_ms: int
    """Since the oldest of them came; 0: there is none."""
    cost_ms: int | None
    """From a frame's arrival until answers have its values, 95th percentile of a minute in which it had frames. Null:
    not measured yet."""
    set_aside: SetAside | None
    """Its frames are kept, and not applied. Null: they are applied."""

    @classmethod
    def of(
        cls,
        query: RegisteredQuery,
        *,
        frames: int,
        oldest_at_ms: int | None,
        cost_ms: int | None,
        edges: Sequence[EdgeRecord],
        set_aside: SetAside | None,
        now_ms: int,
    ) -> Self:
        due_ms = _expected_ms(query, edges, now_ms) if oldest_at_ms is None else float(oldest_at_ms)
        return cls(
            query=query.ref.name,
            version=query.ref.version,
            slack_ms=None if due_ms is None else due_ms - now_ms - (cost_ms or 0),
            frames=frames,
            late_ms=0 if oldest_at_ms is None else max(0, now_ms - oldest_at_ms),
            cost_ms=cost_ms,
            set_aside=set_aside,
        )

    def by_slack(self) -> tuple[float, str]:
        return math.inf if self.slack_ms is None else self.slack_ms, self.query


class Load(ApiModel):
    queries: list[QueryLoad]
    """The least slack first."""


def _expected_ms(query: RegisteredQuery, edges: Sequence[EdgeRecord], now_ms: int) -> float | None:
    """Returns the wall time at which the first edge is expected to close the next window; None if no edge will."""
    ends = window_ends(query.spec.window)
    if ends is None:
        return None
    step_ms, offset_ms = ends
    expected = []
    for edge in edges:
        stream = edge.stream(query.spec.stream)
        if edge.retired or stream is None or edge.watermarks.get(stream.name, 0) >= MAX_TIME_MS:
            continue
        at_ms = stream.clock.to_event_ms(now_ms)
        end_ms = offset_ms + ((at_ms - offset_ms) // step_ms + 1) * step_ms
        expected.append(stream.clock.to_wall_ms(end_ms))
    return min(expected, default=None)
