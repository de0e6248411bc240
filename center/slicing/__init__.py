"""Windows over streams of records, as merges of slices (`Slicer`) or one by one (`Bucketing`).

slicer = Slicer(lambda: CountMin(), [Tumbling("60s"), Sliding("20s", "5s"), Session("30s")], lateness_ms=10_000)
slicer.update(values, times_ms, site="fra")
for result in slicer.advance("fra", watermark_ms):
    result.synopsis.query(Frequency("a"))
"""

from center.slicing.bucketing import Bucketing
from center.slicing.families import SlidingCount, WindowFamily
from center.slicing.results import Late, WindowResult
from center.slicing.slicer import Slicer
from edgewater.windows import CountWindow, Session, Sliding, Tumbling

__all__ = [
    "Bucketing",
    "CountWindow",
    "Late",
    "Session",
    "Slicer",
    "Sliding",
    "SlidingCount",
    "Tumbling",
    "WindowFamily",
    "WindowResult",
]
