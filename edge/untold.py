"""Up to where slices may be closed, of a query with an accuracy that samples. Pure.

An edge counts all records and processes some. How many there were the center is told at points of time
(`edge.accuracy`), and a slice that was closed before would be taken for what was processed of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge.slices import Slice
from edgewater.query import QuerySpec
from edgewater.streams import END_OF_TIME_MS, NEVER_MS
from edgewater.windows import Sliding


def is_untold(held: Slice, told_before_ms: int) -> bool:
    """Whether records of the slice were passed over of which the center has not been told."""
    return held.told_by_ms > NEVER_MS and held.told_by_ms >= told_before_ms


def told_through(
    slices: Mapping[int, Slice], spec: QuerySpec, told_before_ms: int, watermark_ms: int, through_ms: int
) -> int:
    """Event time up to which slices may be closed: the watermark, or less.

    A slice that was closed before, and of which more has come, holds up no others but those with which one of its
    windows would become final.

    Args:
        slices: by their start.
        told_before_ms: the center has been told of all that came before, by the monitor's clock.
        through_ms: up to where they were closed before.
    """
    result = watermark_ms
    for start, held in slices.items():
        end = start + spec.window.slice_ms
        if end <= watermark_ms and is_untold(held, told_before_ms):
            result = min(result, (end if end > through_ms else _next_final(spec, start, through_ms)) - 1)
    return result


def _next_final(spec: QuerySpec, start: int, after_ms: int) -> int:
    """When the next window over a slice becomes final, behind `after_ms`; the end of time if there is none."""
    window = spec.window
    assert isinstance(window, Sliding)  # as those of all queries with a monitor
    every, last_end = window.every_ms, window.last_window_end(start)
    first_end = last_end - (last_end - start - window.slice_ms) // every * every
    last = last_end + spec.lateness_ms
    if last <= after_ms:
        return END_OF_TIME_MS
    return max(first_end + spec.lateness_ms, last - (last - after_ms - 1) // every * every)
