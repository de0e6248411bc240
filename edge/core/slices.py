"""The state of one slice of a query, and the estimates with which its entries are selected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.error_limits import ErrorLimits, primary_mask
from edge.cache.send_queue import SendQueue
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.synopses import IntArray
from edgewater.synopses.encoding.state import State

INITIAL_ENTRY_BYTES = 48.0  # limit: the size of the first frame
"""The estimated size of an entry in a frame until the first one is sent, before compression."""
FEW_ENTRIES = 32
"""A frame of so many entries counts half in estimates of the size of entries: a frame of few is mostly header."""
CLOSING_FRAME_BYTES = 500
"""Approximate size of a frame that closes a slice, without entries, before compression."""

_NUMBERS_0_3, _LATE_0_3 = 10, 6  # format: of states of release 0.3
"""The numbers of a slice in states of release 0.3, and the position of the number that has another meaning now."""


@dataclass(slots=True)
class Slice:
    """The entries and counters of a slice.

    Attributes:
        observed: number of records.
        late: number of records that arrived after the slice was closed.
        first_ms, last_ms: event times of the first and the last record.
        close_reported: whether the last `SliceClose` with the current counters has been sent.
        is_stated: under a staleness budget, whether a `SliceClose` has been sent, at least a provisional one.
        learned: whether the history was updated with the slice. This happens once, at the first pull after its end.
        late_until_ms: under a staleness budget, if the deadline had passed at the first pull after the slice's end:
            event time until which groups are sent nevertheless.
        first_arrival_ms: event time by the stream's clock at which the slice's first records arrived.
        unreported_until_ms: for a query with early answers: arrival time (by the monitor's clock) of the last batch
            with sampled-out records. The slice may be closed when all arrivals until then are reported.
        sampling_rate: for a function of a sample: the lowest rate at which records of the slice were sampled.
        send_queue: the order in which the entries are sent.
        pending_count: the cache of `count_pending`: its key, and the number.
    """

    entries: SliceEntries
    observed: int = 0
    late: int = 0
    first_ms: int = MAX_TIME_MS
    last_ms: int = MIN_TIME_MS
    close_reported: bool = False
    learned: bool = False
    late_until_ms: int = MIN_TIME_MS
    first_arrival_ms: int = MIN_TIME_MS
    unreported_until_ms: int = MIN_TIME_MS
    sampling_rate: float = 1.0
    is_stated: bool = False
    send_queue: SendQueue = field(default_factory=SendQueue)
    pending_count: tuple[tuple[Any, ...], int] = ((), 0)

    @property
    def counters(self) -> tuple[int, int, int, int]:
        return self.observed, self.late, self.first_ms, self.last_ms

    def count_pending(self, limits: ErrorLimits, margin: float) -> int:
        """Returns the number of groups that have used up the fraction `margin` of their limit; cached."""
        key = (self.entries.newest_batch, *limits.absolute.items(), margin)
        if self.pending_count[0] != key:
            self.pending_count = key, int(np.count_nonzero(primary_mask(self.entries, limits, margin)))
        return self.pending_count[1]

    def discount_pending(self, limits: ErrorLimits, groups: IntArray) -> None:
        """Updates the cached count before these groups are sent, without a full count."""
        key, count = self.pending_count
        if key:
            counted = primary_mask(self.entries, limits, float(key[-1]), groups)
            self.pending_count = key, count - int(np.count_nonzero(counted))

    def forget_unchanged(self, limits: ErrorLimits) -> None:
        """Forgets pending values that change nothing at the center, so that they are not sent."""
        groups = self.entries.unchanged()
        if len(groups):
            self.discount_pending(limits, groups)
            self.entries.forget(groups)

    def to_state(self) -> State:
        flags = self.close_reported, self.learned, self.late_until_ms, self.first_arrival_ms
        numbers = [*self.counters, *flags, self.unreported_until_ms, self.sampling_rate, self.is_stated]
        components = {"entries": self.entries.to_state(), "send_queue": self.send_queue.to_state()}
        return State(numbers, {}, components)

    @classmethod
    def from_state(cls, state: State, bounded: tuple[str, ...]) -> Slice:
        numbers = list(state.numbers)
        if len(numbers) == _NUMBERS_0_3:
            numbers[_LATE_0_3] = MIN_TIME_MS  # a number of groups
        result = cls(SliceEntries.from_state(state.components["entries"], bounded), *numbers)
        result.send_queue = SendQueue.from_state(state.components["send_queue"])
        return result


def is_final(spec: QuerySpec, start: int, watermark_ms: int) -> bool:
    """Returns whether all windows over a slice take no more late records at this watermark."""
    return spec.window.last_window_end(start) + spec.lateness_ms <= watermark_ms


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """The measured link, in the event time of a stream.

    Attributes:
        bytes_per_ms: bytes per ms of event time; 0: unknown, treated as unlimited.
        path_delay_ms: event time from sending a frame to its values being in an answer.
        speed: ms of event time in a ms of wall time.
        mid_bytes_per_ms: the median of the link's bytes per ms. `bytes_per_ms` is what the link carries with 90 %, for
            frames that are sent; the median says whether entries may wait.
    """

    bytes_per_ms: float = 0.0
    path_delay_ms: float = 0.0
    speed: float = 1.0
    mid_bytes_per_ms: float = 0.0

    @property
    def likely_bytes_per_ms(self) -> float:
        """The median; what the link is known to carry, if there is no median."""
        return self.mid_bytes_per_ms or self.bytes_per_ms


UNKNOWN_LINK = LinkEstimate()
