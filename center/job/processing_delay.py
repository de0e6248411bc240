"""How long the center takes from a frame's arrival until its values are answered with, per query. Pure.

The edges' deadlines under a staleness budget are earlier by this. So it is a high quantile and not a mean,
and it follows a slow batch at once but a quick one only when the slow ones have left the window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from edgewater.wire.frames import QueryRef

QUANTILE = 0.95
WINDOW_MS = 60_000
MAX_SAMPLES = 1_024
SAY_EVERY_MS = 5_000
WORTH_SAYING = 0.2
"""A change by less than this part is not told."""
WORTH_SAYING_MS = 20


class ProcessingDelays:
    """Delays of the last minute, at most `MAX_SAMPLES` per query.

    Args:
        margin_ms: added to what is measured: an early answer is given so long before it is due.
    """

    def __init__(self, margin_ms: int = 0) -> None:
        self._margin_ms = margin_ms
        self._samples: dict[QueryRef, deque[tuple[int, int]]] = {}
        self._said: dict[QueryRef, tuple[int, int]] = {}

    def note(self, ref: QueryRef, delays_ms: Iterable[int], now_ms: int) -> None:
        """Frames of a query count from now on; each came so long ago."""
        held = self._samples.setdefault(ref, deque(maxlen=MAX_SAMPLES))
        held.extend((now_ms, max(0, delay)) for delay in delays_ms)
        _drop_before(now_ms - WINDOW_MS, held)

    def way_ms(self, ref: QueryRef) -> int | None:
        """The 95th percentile and the margin; None: nothing is known."""
        delays = sorted(delay for _, delay in self._samples.get(ref, ()))
        return delays[math.ceil(QUANTILE * len(delays)) - 1] + self._margin_ms if delays else None

    def news(self, now_ms: int) -> dict[QueryRef, int]:
        """What differs enough from what was said last. It counts as said.

        A query without frames for a minute may be deleted, and nothing is kept of it: the next ones are news.
        """
        for ref, held in list(self._samples.items()):
            _drop_before(now_ms - WINDOW_MS, held)
            if not held:
                del self._samples[ref]
                self.forget(ref)
        news = {}
        for ref in self._samples:
            way, (said, said_at_ms) = self.way_ms(ref), self._said.get(ref, (0, now_ms - SAY_EVERY_MS))
            if way is None or now_ms - said_at_ms < SAY_EVERY_MS:
                continue
            if abs(way - said) > max(WORTH_SAYING_MS, WORTH_SAYING * said):
                news[ref] = way
                self._said[ref] = (way, now_ms)
        return news

    def forget(self, ref: QueryRef) -> None:
        """What was said has not been heard: it is said again."""
        self._said.pop(ref, None)


def _drop_before(time_ms: int, samples: deque[tuple[int, int]]) -> None:
    while samples and samples[0][0] < time_ms:
        samples.popleft()
