"""Decides how long the records of a source wait so that they are processed together (`ReadPace`).

Each batch has a fixed cost for each query, the journal and the link. So a source that keeps up waits between two reads,
whatever brings its records (`SourceContext.coalesce_s`).
The closer the source's watermark is to the end of a window, the shorter the wait. So no answer is later.
`docs/decisions/0012-scheduling.md` has the measurements.
"""

from __future__ import annotations

from edge.core.core import EdgeCore
from edge.records import COALESCE_S
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.windows import window_ends

LONGEST_WAIT_S = 1.0  # limit: the delay of records that wait for others
SHORTER_WAIT_S = 0.25  # limit: records that a crash loses, and error at a deadline
"""The longest wait of records that cannot be read again: until they are in the journal, a crash loses them. And of
those of a staleness budget: their groups leave all the time, in small frames, and what waits is not among them."""
WAIT_SHARE = 0.1  # limit: the delay, as a share of the shortest window
"""The largest part of the shortest window for which records wait."""
MOST_WAITING = 4_096
"""If a batch has more records, its source waits half as long, because the fixed cost of the batch is small."""


class ReadPace:
    """The pace of the sources of one edge."""

    def __init__(self, core: EdgeCore) -> None:
        self._core = core
        self._longest_wait_s: dict[str, float] = {}  # by stream

    def count(self, stream: str, rows: int) -> None:
        """Adapts the wait of a stream to the size of its last batch, so that batches have about `MOST_WAITING`
        records.
        """
        factor = 0.5 if rows > MOST_WAITING else 2.0 if 2 * rows < MOST_WAITING else 1.0
        longest_s = factor * self._longest_wait_s.get(stream, COALESCE_S)
        self._longest_wait_s[stream] = min(max(longest_s, COALESCE_S), LONGEST_WAIT_S)

    def wait_s(self, stream: str, source: str) -> float:
        """Returns how long the next records of a source may wait, in seconds (`CoalesceTime`).

        The wait ends before the source's watermark is expected to reach the next end of a window. Records of a query
        with an accuracy wait no longer than necessary, because their delays are measured.
        """
        state, queries = self._core.streams[stream], self._core.queries_of(stream)
        clock = state.spec.clock
        if clock is None or any(pipeline.monitor is not None for pipeline in queries):
            return COALESCE_S
        watermark_ms = state.source_watermark_ms(source)
        may_wait = source in state.replayable and not any(p.store.policy.may_omit for p in queries)
        most_s = LONGEST_WAIT_S if may_wait else SHORTER_WAIT_S
        longest_s = min(self._longest_wait_s.get(stream, COALESCE_S), most_s)
        for pipeline in queries:
            window = pipeline.spec.window
            every_ms, first_end_ms = window_ends(window) or (window.slice_ms, window.origin_ms)
            longest_s = min(longest_s, WAIT_SHARE * every_ms / clock.speed / 1000)
            if MIN_TIME_MS < watermark_ms < MAX_TIME_MS:
                left_ms = every_ms - (watermark_ms - first_end_ms) % every_ms
                longest_s = min(longest_s, left_ms / clock.speed / 1000)
        return max(longest_s, COALESCE_S)
