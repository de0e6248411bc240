"""When to send entries of an open slice, and how to round sums, so that an edge sends the fewest bytes.

An entry that is sent early has to be sent again if it changes much. So an edge waits until the remaining time of a
slice is just enough to send what the slice needs:

- Under an error budget alone, and for exact results, the last entry should arrive when the slice closes. Entries that
change later are sent again, so sending begins `EARLY_MARGIN` times as early as the link needs.
- Under a combined budget answers have until their deadline. Only what the link could not send between the close and the
deadline is sent early, as late as possible. Nothing is omitted: if the limits contradict each other, the error budget
holds.

On a link that is too narrow, sending begins with the slice: the link is then never idle, and the entries that are least
likely to change go first. On a wide link the time is so short that nothing is sent early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache.error_limits import ErrorLimits, primary_mask
from edge.cache.history import GroupHistory
from edge.cache.send_queue import MAX_QUEUED
from edge.core.slices import CLOSING_FRAME_BYTES, LinkEstimate, Slice
from edgewater.model.query import QuerySpec
from edgewater.synopses import DivisibleSum, Stack

USED_AFTER_CLOSE = 0.8
"""The fraction of the link's bytes between a slice's close and its deadline that a combined budget plans with."""
EARLY_FRAME_BYTES = 200  # measured: bench.constants
"""Approximate size of a frame of an open slice, without entries, before compression. With 500, exact answers are 7 %
later on a narrow link."""
EARLY_FRAME_SHARE, EARLY_FRAME_MS = 1 / 2, 1_000  # limit: how long a frame occupies the link
"""The fraction of the early sends that one frame may have, and the wall time for which it may occupy the link. Larger
frames delay later frames; smaller frames are mostly overhead."""
LEAST_EARLY_GROUPS = 64
"""The least number of groups in a frame of an open slice. A smaller frame is mostly overhead."""
MIN_DRAIN_MS = 20
"""Sends that take less wall time than this wait for the slice's close. Sent earlier, many entries would be sent twice.
"""
NEEDED_MARGIN = 1.1
"""A slice may need this many times the sends of earlier slices, or of the estimate from its first part."""
LEAST_ELAPSED = 0.25
"""The sends of the first slice are extrapolated from at least this fraction of the slice."""
GROWN_ELAPSED = 0.5
"""The sends that a slice needs beyond earlier slices are extrapolated from at least this fraction of the slice."""
ROUNDED_SHARE = 1 / 16
"""Sent sums are multiples of at most this fraction of the share, so that they take fewer bytes."""


@dataclass(frozen=True, slots=True)
class OpenSlice:
    """A slice that has not closed, and what its early sends depend on.

    Attributes:
        start_ms, end_ms: event time.
        now_ms, watermark_ms: the stream's clock and watermark, in event time.
        limits: the error limits of its groups.
        history: of groups over closed slices.
        link: what the query may use of the link.
        entry_bytes: the estimated size of an entry in a frame.
    """

    start_ms: int
    end_ms: int
    now_ms: int
    watermark_ms: int
    slice_: Slice
    limits: ErrorLimits
    history: GroupHistory
    link: LinkEstimate
    entry_bytes: float

    @property
    def elapsed(self) -> float:
        return (self.now_ms - self.start_ms) / (self.end_ms - self.start_ms)

    @property
    def close_ms(self) -> int:
        """When the watermark will pass the slice's end, if its distance to the clock stays the same."""
        return max(self.end_ms + max(self.now_ms - self.watermark_ms, 0), self.now_ms)

    @property
    def pending(self) -> int:
        """The number of groups that have something to send."""
        return self.slice_.count_pending(self.limits, 1.0)


@dataclass(frozen=True, slots=True)
class EarlyTerms:
    """What a policy demands of an open slice.

    Attributes:
        close_ms: event time at which the slice is expected to close.
        free_ms: for how long the link may carry entries of the slice after its close.
        margin: sending begins this many times as early as the link needs.
        queued_ms: event time before the close by which the last entry has to be sent.
        least_ms: sends that take less time wait for the slice's close.
        from_start: sending begins with the slice.
    """

    close_ms: int
    free_ms: float
    margin: float
    queued_ms: float
    least_ms: float
    from_start: bool = False


@dataclass(frozen=True, slots=True)
class EarlySends:
    """The entries of an open slice that cannot wait for its close.

    Attributes:
        entries: how many entries, at least 1. They arrive before the slice closes: a later send would delay the close.
        from_ms: event time at which sending them has to begin.
        in_one_frame: how many entries one frame may have.
    """

    entries: int
    from_ms: float
    in_one_frame: int


def early_sends(open_: OpenSlice, terms: EarlyTerms) -> EarlySends | None:
    """Returns which entries of an open slice have to be sent before it closes; None: no entries."""
    close_ms, link, entry_bytes = terms.close_ms, open_.link, open_.entry_bytes
    if close_ms <= open_.now_ms:
        return None
    if link.bytes_per_ms <= 0.0:
        return EarlySends(MAX_QUEUED, open_.start_ms, MAX_QUEUED) if terms.from_start else None
    rate = link.likely_bytes_per_ms / entry_bytes
    after_close = _entries_in(terms.free_ms, link, entry_bytes)
    excess = _most_needed(open_) - after_close
    # before that time, counting the groups changes nothing
    if close_ms - terms.margin * max(excess, 0.0) / rate <= open_.now_ms:
        excess = min(excess, _needed(open_) - after_close)
    before_close_bytes = link.bytes_per_ms * (close_ms - open_.now_ms - terms.queued_ms) - EARLY_FRAME_BYTES
    fitting = math.floor(before_close_bytes / entry_bytes)
    if excess <= 0.0 or fitting < 1 or excess / rate < terms.least_ms:
        return None
    from_ms = float(open_.start_ms) if terms.from_start else close_ms - terms.margin * excess / rate
    return EarlySends(min(math.ceil(excess), fitting), from_ms, in_one_frame(excess, link, entry_bytes))


def in_one_frame(entries: float, link: LinkEstimate, entry_bytes: float) -> int:
    """Returns how many of the early sends one frame may have. A larger frame would occupy the link for longer."""
    if link.bytes_per_ms <= 0.0:
        return MAX_QUEUED
    fitting = EARLY_FRAME_MS * link.speed * link.likely_bytes_per_ms / entry_bytes
    return max(math.ceil(min(EARLY_FRAME_SHARE * entries, fitting)), LEAST_EARLY_GROUPS)


def _entries_in(free_ms: float, link: LinkEstimate, entry_bytes: float) -> float:
    """Returns how many entries the link sends within `free_ms` after the close, beside the closing frame."""
    return max(link.likely_bytes_per_ms * free_ms - CLOSING_FRAME_BYTES, 0.0) / entry_bytes


def _most_needed(open_: OpenSlice) -> float:
    """Returns an upper bound of `_needed`, without a loop over the groups."""
    history = open_.history
    groups = len(open_.slice_.entries) / max(open_.elapsed, LEAST_ELAPSED)
    return NEEDED_MARGIN * max(groups, history.needed if history.slices else 0.0)


def _needed(open_: OpenSlice) -> float:
    """Returns how many entries are expected to be sent from now on until the slice has been sent completely."""
    pending, history, entries = open_.pending, open_.history, open_.slice_.entries
    if not history.slices:
        return max(float(pending), NEEDED_MARGIN * pending / max(open_.elapsed, LEAST_ELAPSED))
    # Repeated sends do not count. Otherwise a slice with many of them would let the next slice begin earlier and repeat
    # more.
    sent_groups = int(np.count_nonzero(entries.sends))
    changed_groups = int(np.count_nonzero(primary_mask(entries, open_.limits) | (entries.sends > 0)))
    needed = max(NEEDED_MARGIN * history.needed, changed_groups / max(open_.elapsed, GROWN_ELAPSED)) - sent_groups
    return max(float(pending), needed)


def quanta_of(spec: QuerySpec, shares: Mapping[str, float], stacks: Mapping[str, Stack]) -> dict[str, float]:
    """Returns the rounding unit of each measure whose sent values are rounded, a power of two.

    The difference of rounding is withheld. It counts as a record that was not sent, so nothing is rounded if the query
    limits records or a percentage.

    Args:
        shares: the largest error that a slice may withhold, per measure with an absolute limit.
        stacks: the measures of the slice.
    """
    sums = {m.name for m in spec.measures if m.function.error == "sum" and isinstance(stacks[m.name], DivisibleSum)}
    return {
        name: 2.0 ** (math.frexp(share * ROUNDED_SHARE)[1] - 1)
        for name, share in shares.items()
        if name in sums and share * ROUNDED_SHARE > 0.0
    }
