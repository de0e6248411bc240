"""The columns of intervals in tables."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.answers.cells import beyond_int64, interval_columns
from edgewater.synopses import Estimates

LEAST, GREATEST = -(1 << 63), (1 << 63) - 1
INTEGERS = st.one_of(
    st.integers(-(10**37), 10**37), st.sampled_from([LEAST - 1, LEAST, GREATEST, GREATEST + 1, 1 << 53, (1 << 53) + 1])
)
BOUNDS = st.floats(0, 1e300) | st.just(float("inf")) | st.just(float("nan"))


@given(st.lists(st.tuples(INTEGERS, BOUNDS, BOUNDS), min_size=1, max_size=4))
def test_the_type_of_integers_depends_on_no_value_and_their_bounds_stay_bounds(
    rows: list[tuple[int, float, float]],
) -> None:
    exact = pa.array([Decimal(value) for value, _, _ in rows], pa.decimal128(38, 0))
    estimates = Estimates.exact_integers(exact)
    below, above = (np.array([row[n] for row in rows]) for n in (1, 2))
    widened = Estimates(
        estimates.value, estimates.value - below, estimates.value + above, integers=exact, present=estimates.present
    )
    for each, is_exact in ((estimates, True), (widened, False)):
        columns = interval_columns("m", each)
        assert {column.type for column in columns.values()} == {pa.int64()}
        shown = zip(*(column.to_pylist() for column in columns.values()), strict=True)
        for (value, _, _), beyond, (m, lower, upper) in zip(rows, beyond_int64(each), shown, strict=True):
            assert beyond == (not LEAST <= value <= GREATEST)
            assert m == (None if beyond else value)
            assert lower is None or lower <= value
            assert upper is None or upper >= value
            assert not is_exact or lower == upper == m


@pytest.mark.parametrize("value", [7, 1 << 60, 10**30])
def test_columns_of_floats_have_the_nearest_number_within_its_bounds(value: int) -> None:
    estimates = Estimates.exact_integers(pa.array([Decimal(value), Decimal(10**30)], pa.decimal128(38, 0)))
    middle, lower, upper = (c[0].as_py() for c in interval_columns("m", estimates, wide=True).values())
    assert middle == float(value) and lower <= value <= upper
