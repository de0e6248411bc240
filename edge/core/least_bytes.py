"""What a combined budget saves: nothing is sent early that can wait, and sums are rounded before they are sent.

An entry of an open slice that is sent early has to be sent again if it changes much. Under an error budget alone that
buys freshness; under a combined budget answers have until their deadline. So an edge sends what exceeds the error
budget when the slice closes, and before that only as much as the link could not send between the close and the
deadline, as late as possible. It never omits anything: where both limits cannot hold, the error budget does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache import ErrorLimits, GroupHistory, primary_mask
from edge.core.slices import LinkEstimate, Slice
from edgewater.query import QuerySpec
from edgewater.streams import MIN_TIME_MS
from edgewater.synopses import DivisibleSum, Stack

USED_AFTER_CLOSE = 0.8
"""The fraction of the link's bytes between a slice's close and its deadline that a combined budget plans with."""
CLOSING_FRAME_BYTES = 500
"""Approximate size of a frame that closes a slice, without entries, before compression."""
EARLY_FRAME_BYTES = 200
"""Approximate size of a frame of an open slice, without entries, before compression."""
EARLY_FRAME_SHARE = 1 / 2
"""A frame may have this share of what has to be sent early: larger ones delay what follows, smaller ones are mostly
overhead."""
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
    """Returns what of an open slice has to be sent before it closes, so that the rest can be sent between its close and
    the deadline; None: nothing. A slice that would close after its deadline cannot be in time, and waits for its close.
    """
    budget = spec.staleness_budget
    if budget is None or link.bytes_per_ms <= 0.0 or period.now_ms == MIN_TIME_MS:
        return None
    rate = link.bytes_per_ms / entry_bytes
    deadline_ms = period.end_ms + budget.staleness_ms * link.speed - link.path_delay_ms
    if deadline_ms <= period.close_ms:
        return None
    pending = slice_.count_pending(limits, 1.0)
    # If repeated sends counted, a slice that repeats many would let the next one begin earlier, and repeat more.
    sent = int(np.count_nonzero(slice_.entries.sends))
    if history.slices:
        seen = int(np.count_nonzero(primary_mask(slice_.entries, limits) | (slice_.entries.sends > 0)))
        needed = max(NEEDED_MARGIN * history.needed, seen / max(period.elapsed, GROWN_ELAPSED)) - sent
    else:
        needed = NEEDED_MARGIN * pending / max(period.elapsed, LEAST_ELAPSED)
    after_close_bytes = USED_AFTER_CLOSE * link.bytes_per_ms * (deadline_ms - period.close_ms) - CLOSING_FRAME_BYTES
    excess = max(float(pending), needed) - max(after_close_bytes, 0.0) / entry_bytes
    before_close_bytes = link.bytes_per_ms * (period.close_ms - period.now_ms) - EARLY_FRAME_BYTES
    fitting = math.floor(before_close_bytes / entry_bytes)
    if excess <= 0.0 or fitting < 1:
        return None
    return EarlySends(math.ceil(excess), period.close_ms - excess / rate, fitting)


def quanta_of(spec: QuerySpec, shares: Mapping[str, float], stacks: Mapping[str, Stack]) -> dict[str, float]:
    """Returns, per measure whose sent values are rounded, the power of two of which they are multiples.

    What rounding leaves is withheld. Such a rest counts as a record that was not sent, so nothing is rounded beside a
    limit of records or a percentage.

    Args:
        shares: the largest error that a slice may withhold, per measure with an absolute limit.
        stacks: the measures of the slice.
    """
    budget, counts_records = spec.error_budget, any(m.function.error is None for m in spec.measures)
    if not spec.saves_bytes or budget is None or budget.relative or counts_records:
        return {}
    sums = {m.name for m in spec.measures if m.function.error == "sum" and isinstance(stacks[m.name], DivisibleSum)}
    return {
        name: 2.0 ** (math.frexp(share * ROUNDED_SHARE)[1] - 1)
        for name, share in shares.items()
        if name in sums and share * ROUNDED_SHARE > 0.0
    }
