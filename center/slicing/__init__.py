"""Windows over streams of records, as merges of slices (`Slicer`) or one by one (`Bucketing`).

windows = [TumblingWindow("60s"), SlidingWindow("20s", "5s"), SessionWindow("30s")]
slicer = Slicer(lambda: CountMin(), windows, lateness_ms=10_000)
slicer.update(values, times_ms, site="fra")
for result in slicer.advance("fra", watermark_ms):
    result.synopsis.query(Frequency("a"))
"""

from center.slicing.bucketing import Bucketing
from center.slicing.families import SlidingCount, WindowFamily
from center.slicing.results import Late, WindowResult
from center.slicing.slicer import Slicer
from edgewater.windows import CountWindow, SessionWindow, SlidingWindow, TumblingWindow

__all__ = [
    "Bucketing",
    "CountWindow",
    "Late",
    "SessionWindow",
    "Slicer",
    "SlidingCount",
    "SlidingWindow",
    "TumblingWindow",
    "WindowFamily",
    "WindowResult",
]
