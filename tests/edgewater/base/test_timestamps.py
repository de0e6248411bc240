"""Event times as text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.timestamps import EARLIEST_MS, LATEST_MS, parse_time, rfc3339


@given(st.integers(EARLIEST_MS, LATEST_MS))
def test_a_time_is_read_as_it_was_written(time_ms: int) -> None:
    assert parse_time(rfc3339(time_ms)) == time_ms
    assert ("." in rfc3339(time_ms)) == (time_ms % 1000 != 0)


@pytest.mark.parametrize("time_ms", [EARLIEST_MS - 1, LATEST_MS + 1, -(10**15), 10**15, EARLIEST_MS, LATEST_MS, -1, 0])
def test_a_time_outside_of_rfc_3339_is_shown_all_the_same(time_ms: int) -> None:
    text = rfc3339(time_ms)
    assert text.endswith("Z") and np.datetime64(text[:-1]) == np.datetime64(time_ms, "ms")
