"""Computes the border between the windows of a query's version and the windows of its next version. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgewater.base.errors import InvalidRequest
from edgewater.base.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS
from edgewater.base.timestamps import TIME_ACCEPTED, rfc3339
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.window_range import next_border

BORDER_MARGIN_MS = 10_000  # limit: how late an edge may learn a border
"""Wall time within which edges receive a border. An edge's clock may also be ahead of the center's by this time."""


def event_now_ms(spec: QuerySpec, edges: Sequence[EdgeRecord], now_ms: int) -> int:
    """Returns the event time of a stream at a wall time, by the clock of the first edge that serves it."""
    return next((s.clock for s in _served(spec, edges)), LIVE).to_event_ms(now_ms)


def is_served(spec: QuerySpec, edges: Sequence[EdgeRecord]) -> bool:
    """Returns whether an edge that has connected serves the query's stream."""
    return any(True for _ in _served(spec, edges))


def _served(spec: QuerySpec, edges: Sequence[EdgeRecord]) -> Iterator[StreamRecord]:
    return (s for e in sorted(edges, key=lambda e: e.edge) if not e.retired for s in e.streams if s.answers(spec))


def choose_border(
    live: RegisteredQuery,
    spec: QuerySpec,
    at_ms: int | None,
    edges: Sequence[EdgeRecord],
    now_ms: int,
    answered_ms: int = MIN_TIME_MS,
) -> int:
    """Returns the event time at which windows of a new version begin.

    Args:
        at_ms: the border is the first possible border at or after this time; None: at or after the first time that all
            connected edges can apply.
        answered_ms: start of the last window of the live version that has an answer.

    Raises:
        InvalidRequest: `at` is in the past, or there is no possible border.
    """
    soon_ms = event_now_ms(spec, edges, now_ms + BORDER_MARGIN_MS)
    marks = (e.watermarks.get(spec.stream, MIN_TIME_MS) for e in edges if not e.retired)
    read_ms = max((mark for mark in marks if MIN_TIME_MS < mark <= soon_ms), default=MIN_TIME_MS)
    if at_ms is None:
        first_ms = max(soon_ms, answered_ms + 1, live.windows.from_ms)
    else:
        passed_ms = read_ms if read_ms > MIN_TIME_MS else event_now_ms(spec, edges, now_ms)
        for past_ms, what in (
            (passed_ms, "edges have read records up to it" if read_ms > MIN_TIME_MS else "this is the time now"),
            (answered_ms, f"version {live.ref.version} has answered the window that starts then"),
        ):
            if at_ms <= past_ms:
                raise InvalidRequest("at", rfc3339(at_ms), f"a time after {rfc3339(past_ms)}: {what}", "it is past")
        first_ms = at_ms
    if first_ms < live.windows.from_ms:
        accepted = f"{rfc3339(live.windows.from_ms)} or later: version {live.ref.version} begins then"
        raise InvalidRequest("at", rfc3339(first_ms), accepted)
    border_ms = next_border(first_ms, live.spec.window, spec.window)
    if border_ms is None or border_ms >= MAX_TIME_MS:
        reason = (
            f"no window {spec.window.to_mapping()} begins between slices of sessions {live.spec.window.to_mapping()}"
        )
        raise InvalidRequest("window", None, f"another window, or another name, or {TIME_ACCEPTED}", reason)
    return border_ms
