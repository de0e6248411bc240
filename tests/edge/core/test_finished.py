"""The counters of finished slices: as a dictionary would hold them, in a tenth of its memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core import finished
from edge.core.finished import Counters, FinishedSlices

TIMES = st.integers(-300, 300)
STEPS = st.lists(st.tuples(st.sampled_from(["set", "set", "set", "forget", "starts", "state"]), TIMES), max_size=60)


def _of(counters: dict[int, Counters]) -> FinishedSlices:
    return FinishedSlices(rows=np.array([(s, *c) for s, c in sorted(counters.items())], np.int64).reshape(-1, 5))


@given(STEPS)
def test_it_holds_what_was_set_and_not_forgotten(steps: list[tuple[str, int]]) -> None:
    held, expected = FinishedSlices(), dict[int, Counters]()
    before, finished.MAX_RECENT = finished.MAX_RECENT, 5
    try:
        for step, (action, start) in enumerate(steps):
            if action == "set":
                held[start] = expected[start] = (step + 1, step, start, start + 9)
            elif action == "forget":
                held.forget_before(start)
                expected = {other: counters for other, counters in expected.items() if other >= start}
            elif action == "starts":
                assert held.starts().tolist() == sorted(expected)
            else:
                state = held.to_state()
                assert state.pack("test") == _of(expected).to_state().pack("test")
                held = FinishedSlices.from_state(state)
            assert {start: held.get(start) for start in range(-300, 301)} == {
                start: expected.get(start) for start in range(-300, 301)
            }
    finally:
        finished.MAX_RECENT = before


@pytest.mark.slow
def test_a_million_slices_take_40_bytes_each() -> None:
    held = FinishedSlices()
    for start in range(100_000):
        held[start] = 1, 0, start, start
    assert held.nbytes < 100_000 * 40 + 1_024 * 400
    held.forget_before(99_999)
    assert held.nbytes <= 400 and held.starts().tolist() == [99_999]
