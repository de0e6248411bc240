"""The close barrier of a query with early answers: the event time up to which its slices may be closed.

If records of a slice were sampled out, the slice stays open until the arrivals of these records have been reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge.core.slices import Slice
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.model.windows import SlidingWindow


def is_unreported(slice_: Slice, reported_before_ms: int) -> bool:
    """Returns whether the slice has sampled-out records whose arrivals have not been reported."""
    return slice_.unreported_until_ms > MIN_TIME_MS and slice_.unreported_until_ms >= reported_before_ms


def close_barrier_ms(
    slices: Mapping[int, Slice], spec: QuerySpec, reported_before_ms: int, watermark_ms: int, through_ms: int
) -> int:
    """Returns the close barrier for sampled queries: the event time up to which slices may be closed.

    It is the watermark, or less if a slice has unreported arrivals. A slice that was already closed and has got late
    records holds back only the close that would make one of its windows final.

    Args:
        slices: by their start.
        reported_before_ms: as in `ArrivalMonitor.reported_before_ms`.
        through_ms: event time up to which slices are already closed.
    """
    result = watermark_ms
    for start, slice_ in slices.items():
        end = spec.window.slice_end(start)
        if end <= watermark_ms and is_unreported(slice_, reported_before_ms):
            result = min(result, (end if end > through_ms else _next_final(spec, start, through_ms)) - 1)
    return result


def _next_final(spec: QuerySpec, start: int, after_ms: int) -> int:
    """Returns when the next window over a slice becomes final after `after_ms`; the maximum time if none does."""
    window = spec.window
    assert isinstance(window, SlidingWindow)  # true for all queries with a monitor
    every, last_end = window.every_ms, window.last_window_end(start)
    first_end = last_end - (last_end - start - window.slice_ms) // every * every
    last = last_end + spec.lateness_ms
    if last <= after_ms:
        return MAX_TIME_MS
    return max(first_end + spec.lateness_ms, last - (last - after_ms - 1) // every * every)
