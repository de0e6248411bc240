"""What the center takes of a staleness budget: from a frame's arrival until answers contain its values, and from the
time of an early answer until clients have it. Pure.

Edges subtract both from their deadlines. So each is a high quantile, not a mean: it rises at once with a slow batch,
and decreases only when the slow batches have left the samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable

from edgewater.wire import QueryRef

QUANTILE = 0.95
WINDOW_MS = 60_000
MAX_SAMPLES = 1_024  # limit: memory of the measurements
REPORT_INTERVAL_MS = 5_000  # limit: writes to the catalog
MIN_RELATIVE_CHANGE = 0.2
"""A smaller relative change is not reported."""
MIN_CHANGE_MS = 20  # limit: writes to the catalog
LEAST_MARGIN_MS = 200  # measured: bench.compare
READ_MS = 100  # measured: bench.compare
"""From the end of the transaction until a client of the live stream has the answer, while the machine is busy."""
MAX_MARGIN_MS = 2_000  # limit: what an outage of the store takes from later budgets
MARGIN_SAMPLES = 20  # limit: for how many answers a slow time is remembered
MARGIN_QUANTILE = 0.9  # limit: how many answers may come late while a machine gets slower


class AnswerMargin:
    """How long before the end of a staleness budget an early answer is given, so that clients have it at the end.

    Args:
        least_ms: the margin while answers are written at once.
    """

    def __init__(self, least_ms: int = LEAST_MARGIN_MS) -> None:
        self._written_ms: deque[int] = deque(maxlen=MARGIN_SAMPLES)
        self.ms = self._least_ms = least_ms

    def written(self, after_ms: int) -> None:
        """Adds how long after its time an early answer was in the store."""
        if after_ms <= MAX_MARGIN_MS:  # else the store or the driver had failed
            self._written_ms.append(max(0, after_ms))
            self.ms = max(self._least_ms, _quantile(self._written_ms, MARGIN_QUANTILE) + READ_MS)

    def of(self, budget_ms: int) -> int:
        """Returns the margin under a budget: at most half of it."""
        return min(self.ms, budget_ms // 2)


class ProcessingDelays:
    """Delays of the last minute, at most `MAX_SAMPLES` per query.

    Args:
        margin: added to the measured delay, because an early answer is given this long before it is due.
    """

    def __init__(self, margin: AnswerMargin) -> None:
        self._margin = margin
        self._samples: dict[QueryRef, deque[tuple[int, int]]] = {}
        self._reported: dict[QueryRef, tuple[int, int]] = {}

    def add(self, ref: QueryRef, delays_ms: Iterable[int], now_ms: int) -> None:
        """Adds the delays of frames of a query that are applied now."""
        samples = self._samples.setdefault(ref, deque(maxlen=MAX_SAMPLES))
        samples.extend((now_ms, max(0, delay_ms)) for delay_ms in delays_ms)
        _drop_before(now_ms - WINDOW_MS, samples)

    def delay_ms(self, ref: QueryRef) -> int | None:
        """Returns the 95th percentile plus the margin; None without samples."""
        delays = [delay_ms for _, delay_ms in self._samples.get(ref, ())]
        return _quantile(delays, QUANTILE) + self._margin.ms if delays else None

    def take_changes(self, now_ms: int) -> dict[QueryRef, int]:
        """Returns the delays that differ enough from the delays returned last. They count as reported.

        A query without frames for a minute may be deleted. So its state is dropped, and its next delay is reported.
        """
        for ref, samples in list(self._samples.items()):
            _drop_before(now_ms - WINDOW_MS, samples)
            if not samples:
                del self._samples[ref]
                self.mark_unreported(ref)
        changes = {}
        for ref in self._samples:
            delay_ms = self.delay_ms(ref)
            reported_ms, reported_at_ms = self._reported.get(ref, (0, now_ms - REPORT_INTERVAL_MS))
            if delay_ms is None or now_ms - reported_at_ms < REPORT_INTERVAL_MS:
                continue
            if abs(delay_ms - reported_ms) > max(MIN_CHANGE_MS, MIN_RELATIVE_CHANGE * reported_ms):
                changes[ref] = delay_ms
                self._reported[ref] = (delay_ms, now_ms)
        return changes

    def mark_unreported(self, ref: QueryRef) -> None:
        """Marks a delay as not reported. Called if the report could not be stored."""
        self._reported.pop(ref, None)


def _quantile(values: Collection[int], quantile: float) -> int:
    return sorted(values)[math.ceil(quantile * len(values)) - 1]


def _drop_before(time_ms: int, samples: deque[tuple[int, int]]) -> None:
    while samples and samples[0][0] < time_ms:
        samples.popleft()
