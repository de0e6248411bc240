"""Windows over streams of records, merged from shared slices (`Slicer`) or computed one by one (`Bucketing`).

This library is for users, benchmarks and the count windows of `center.batch`. The center's services do not call it.

    windows = [TumblingWindow("60s"), SlidingWindow("20s", "5s"), SessionWindow("30s")]
    slicer = Slicer(lambda: CountMin(), windows, lateness_ms=10_000)
    slicer.update(values, times_ms, site="fra")
    for result in slicer.advance("fra", watermark_ms):
        result.synopsis.query(Frequency("a"))
"""

from center.batch.slicing.families import SlidingCount, WindowFamily
from center.batch.slicing.results import LateCounts, WindowResult
from center.batch.slicing.slicer import Bucketing, Slicer
from edgewater.model.windows import CountWindow, SessionWindow, SlidingWindow, TumblingWindow

__all__ = [
    "Bucketing",
    "CountWindow",
    "LateCounts",
    "SessionWindow",
    "Slicer",
    "SlidingCount",
    "SlidingWindow",
    "TumblingWindow",
    "WindowFamily",
    "WindowResult",
]
