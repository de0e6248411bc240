from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge.core.ahead import JOINED_MS, MAX_SPANS, AheadRecords

times = st.lists(st.integers(0, 200_000), max_size=60)


@given(st.lists(times, min_size=1, max_size=5), st.integers(0, 200_000))
def test_the_spans_cover_every_record_once(batches: list[list[int]], now_ms: int) -> None:
    ahead = AheadRecords()
    for batch in batches:
        if batch:
            ahead.add(np.array(batch, np.int64))
    given = sorted(t for batch in batches for t in batch)
    spans = ahead.spans(0)
    assert len(spans) <= MAX_SPANS
    assert sum(n for _, _, n in spans) == len(given)
    assert all(end < begin for (_, end, _), (begin, _, _) in pairwise(spans))
    for first, last, records in spans:
        inside = [t for t in given if first <= t <= last]
        assert (inside[0], inside[-1], len(inside)) == (first, last, records)
    if len(spans) < MAX_SPANS:
        assert all(begin - end >= JOINED_MS for (_, end, _), (begin, _, _) in pairwise(spans))
    ahead.drop_before(now_ms)
    assert ahead.spans(0) == [s for s in spans if s[1] >= now_ms]
    assert AheadRecords.from_state(ahead.to_state()).spans(0) == ahead.spans(0)
