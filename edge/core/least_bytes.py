"""When entries of an open slice are sent, and how sums are rounded: so that no byte is sent that can be saved.

An entry that is sent early has to be sent again if it changes much. So an edge waits until the rest of a slice's time
is just enough to send what the slice needs:

- Under an error budget alone, and for exact results, the last of it should arrive when the slice closes. Entries that
  change later are sent again, so sending begins `EARLY_MARGIN` times as early as the link needs.
- Under a combined budget answers have until their deadline. Only what the link could not send between the close and
  the deadline is sent early, as late as possible. Nothing is omitted: where both limits cannot hold, the error budget
  does.

On a link that is too narrow the time begins with the slice: the link is then never idle, and entries whose change is
improbable go first. On a wide link the time is so short that nothing is sent early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache import MAX_QUEUED, ErrorLimits, GroupHistory, primary_mask
from edge.core.slices import CLOSING_FRAME_BYTES, LinkEstimate, Slice
from edgewater.model.query import QuerySpec
from edgewater.model.streams import MIN_TIME_MS
from edgewater.synopses import DivisibleSum, Stack

USED_AFTER_CLOSE = 0.8
"""The fraction of the link's bytes between a slice's close and its deadline that a combined budget plans with."""
EARLY_FRAME_BYTES = 200
"""Approximate size of a frame of an open slice, without entries, before compression."""
EARLY_FRAME_SHARE = 1 / 2
"""A frame may have this share of what has to be sent early: larger ones delay what follows, smaller ones are mostly
overhead."""
LEAST_EARLY_GROUPS = 16
"""A frame of an open slice has at least so many groups, because a smaller frame is mostly overhead."""
EARLY_MARGIN = 1.5
"""Without a staleness, sending begins so many times as early as the link needs for what the slice needs."""
MIN_DRAIN_MS = 20
"""What can be sent in less wall time is sent when the slice closes: earlier, many entries would be sent twice."""
UNKNOWN_DRAIN_SHARE = 1 / 4
"""While only a lower bound of the bandwidth is known, what would take less of the slice's time is not sent early: the
link is probably wide, and the entries would be sent twice."""
LATE_SHARE = 1 / 8
"""If the watermark is further behind the clock than this fraction of a slice, the source may be late. Then nothing of a
slice that has ended is sent early without a staleness, since most groups will change."""
NEEDED_MARGIN = 1.1
"""By how much a slice may need more sends than earlier ones did, or than its first part says."""
LEAST_ELAPSED = 0.25
"""The sends that the first slice needs are extrapolated from no less than this fraction of it."""
GROWN_ELAPSED = 0.5
"""The sends that a slice needs more than earlier ones are extrapolated from no less than this fraction of it."""
ROUNDED_SHARE = 1 / 16
"""Sent sums are multiples of at most this fraction of the share, so that they take fewer bytes."""


@dataclass(frozen=True, slots=True)
class SlicePeriod:
    """A slice and the stream's clock and watermark, in event time."""

    start_ms: int
    end_ms: int
    now_ms: int
    watermark_ms: int

    @property
    def elapsed(self) -> float:
        return (self.now_ms - self.start_ms) / (self.end_ms - self.start_ms)

    @property
    def close_ms(self) -> int:
        """When the watermark passes the slice's end if it stays as far behind the clock as it is."""
        return max(self.end_ms + max(self.now_ms - self.watermark_ms, 0), self.now_ms)


@dataclass(frozen=True, slots=True)
class EarlySends:
    """The entries of an open slice that cannot wait for its close.

    Attributes:
        entries: how many entries, at least 1.
        from_ms: event time at which sending them has to begin.
        fitting: how many of them arrive before the slice closes, at least 1: a later send would delay the close.
    """

    entries: int
    from_ms: float
    fitting: int

    @property
    def in_one_frame(self) -> int:
        """How many entries one frame may have, if that is more than frames of open slices have."""
        return math.ceil(EARLY_FRAME_SHARE * self.entries)


def early_sends(
    slice_: Slice,
    spec: QuerySpec,
    history: GroupHistory,
    limits: ErrorLimits,
    period: SlicePeriod,
    link: LinkEstimate,
    entry_bytes: float,
) -> EarlySends | None:
    """Returns what of an open slice has to be sent before it closes; None: nothing. A slice that would close after its
    deadline cannot be in time, and waits for its close.
    """
    budget, waits = spec.staleness_budget, spec.cache.eviction == "gain"
    close_ms = period.close_ms
    if budget is None and close_ms - period.end_ms > LATE_SHARE * (period.end_ms - period.start_ms):
        close_ms = period.end_ms
    if period.now_ms == MIN_TIME_MS or close_ms <= period.now_ms:
        return None
    if link.bytes_per_ms <= 0.0:
        return None if waits or budget is not None else EarlySends(MAX_QUEUED, period.start_ms, MAX_QUEUED)
    free_ms, margin, queued_ms = 0.0, EARLY_MARGIN, link.path_delay_ms
    if budget is not None:
        free_ms = period.end_ms + budget.staleness_ms * link.speed - link.path_delay_ms - close_ms
        margin, queued_ms = 1.0, 0.0
        if free_ms <= 0.0:
            return None
    rate = link.bytes_per_ms / entry_bytes
    after_close = _entries_in(free_ms * USED_AFTER_CLOSE, link, entry_bytes)
    excess = _most_needed(slice_, history, period) - after_close
    if close_ms - margin * max(excess, 0.0) / rate <= period.now_ms:  # looking at each group would not change it before
        excess = min(excess, _needed(slice_, history, limits, period) - after_close)
    before_close_bytes = link.bytes_per_ms * (close_ms - period.now_ms - queued_ms) - EARLY_FRAME_BYTES
    fitting = math.floor(before_close_bytes / entry_bytes)
    least_ms = MIN_DRAIN_MS * link.speed if budget is None else 0.0
    if link.is_lower_bound:
        least_ms = UNKNOWN_DRAIN_SHARE * (period.end_ms - period.start_ms)
    if excess <= 0.0 or fitting < 1 or excess / rate < least_ms:
        return None
    # The policies of TR 16-003 send whenever the link is idle.
    from_ms = close_ms - margin * excess / rate if waits or budget is not None else float(period.start_ms)
    return EarlySends(math.ceil(excess), from_ms, fitting)


def _entries_in(free_ms: float, link: LinkEstimate, entry_bytes: float) -> float:
    """Returns how many entries the link sends in a time after the close, beside the frame that closes the slice."""
    return max(link.bytes_per_ms * free_ms - CLOSING_FRAME_BYTES, 0.0) / entry_bytes


def _most_needed(slice_: Slice, history: GroupHistory, period: SlicePeriod) -> float:
    """Returns an upper bound of `_needed`, without looking at each group."""
    groups = len(slice_.entries) / max(period.elapsed, LEAST_ELAPSED)
    return NEEDED_MARGIN * max(groups, history.needed if history.slices else 0.0)


def _needed(slice_: Slice, history: GroupHistory, limits: ErrorLimits, period: SlicePeriod) -> float:
    """Returns how many entries are expected to be sent from now on until the slice has been sent completely."""
    pending = slice_.count_pending(limits, 1.0)
    if not history.slices:
        return max(float(pending), NEEDED_MARGIN * pending / max(period.elapsed, LEAST_ELAPSED))
    # If repeated sends counted, a slice that repeats many would let the next one begin earlier, and repeat more.
    sent = int(np.count_nonzero(slice_.entries.sends))
    seen = int(np.count_nonzero(primary_mask(slice_.entries, limits) | (slice_.entries.sends > 0)))
    needed = max(NEEDED_MARGIN * history.needed, seen / max(period.elapsed, GROWN_ELAPSED)) - sent
    return max(float(pending), needed)


def quanta_of(spec: QuerySpec, shares: Mapping[str, float], stacks: Mapping[str, Stack]) -> dict[str, float]:
    """Returns, per measure whose sent values are rounded, the power of two of which they are multiples.

    What rounding leaves is withheld. Such a rest counts as a record that was not sent, so nothing is rounded beside a
    limit of records or a percentage.

    Args:
        shares: the largest error that a slice may withhold, per measure with an absolute limit.
        stacks: the measures of the slice.
    """
    budget, counts_records = spec.error_budget, any(m.function.error is None for m in spec.measures)
    if budget is None or budget.relative or counts_records:
        return {}
    sums = {m.name for m in spec.measures if m.function.error == "sum" and isinstance(stacks[m.name], DivisibleSum)}
    return {
        name: 2.0 ** (math.frexp(share * ROUNDED_SHARE)[1] - 1)
        for name, share in shares.items()
        if name in sums and share * ROUNDED_SHARE > 0.0
    }
