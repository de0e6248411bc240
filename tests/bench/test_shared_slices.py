"""Slicing and bucketing give the windows that are worked out record by record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.shared_slices import Bucketing, Slicer
from edgewater.model.windows import SlidingWindow
from edgewater.synopses import HyperLogLog


@pytest.mark.parametrize("kind", [Slicer, Bucketing])
@pytest.mark.parametrize("every", [10, 25, 100])
def test_windows_have_their_records(kind: Any, every: int) -> None:
    rng = np.random.default_rng(2)
    times = np.sort(rng.integers(0, 1500, 400))
    times = times[(times < 600) | (times > 900)]
    values = np.arange(len(times))
    slicer, answers = kind(HyperLogLog, SlidingWindow(100, every)), []
    for at in range(0, len(times), 37):
        slicer.update(values[at : at + 37], times[at : at + 37])
        answers += slicer.advance(int(times[min(at + 37, len(times)) - 1]))
    answers += slicer.finish(int(times[-1]))
    starts = {int(t) // every * every - k * every for t in times for k in range(100 // every)}
    expected = {s: values[(times >= s) & (times < s + 100)] for s in starts}
    assert {a.start for a in answers} == {s for s, inside in expected.items() if len(inside)}
    for answer in answers:
        direct = HyperLogLog()
        direct.update(expected[answer.start])
        assert answer.state.to_bytes() == direct.to_bytes()
