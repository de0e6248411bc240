"""The plan of a link: required bytes by due time, optional bytes by water level, and nobody starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.link_plan import LATE_QUERIES_SHARE, LEAST_BYTES, LEVELS, Demand, bytes_above, message
from edgewater.synopses import FloatArray

ENTRY_BYTES = 50.0


def optional(query: int, errors: Sequence[float] | FloatArray, left_ms: float = 1_000.0) -> Demand:
    return Demand(query, left_ms, optional=bytes_above(np.sort(np.asarray(errors, float))[::-1], ENTRY_BYTES))


def test_bytes_are_counted_by_quarter_octave_and_the_last_level_has_all_groups() -> None:
    above = bytes_above(np.array([4.0, 1.0, 0.0]), 10.0)
    assert [above[np.searchsorted(-LEVELS, -level)] for level in (8.0, 4.0, 2.0, 1.0, 0.5)] == [0, 10, 10, 20, 20]
    assert above[-1] == 30.0


def test_the_largest_errors_of_all_queries_fill_a_message() -> None:
    a, b = np.geomspace(1.0, 1e-3, 200), np.geomspace(0.1, 1e-3, 200)
    room = 100 * ENTRY_BYTES
    planned = message([optional(0, a), optional(1, b)], 4.0, room)
    assert sum(planned.values()) == pytest.approx(room)
    left = [errors[int(planned[k] / ENTRY_BYTES)] for k, errors in enumerate((a, b))]
    assert max(left) <= 2 ** (1 / 4) * min(left)


def test_each_deadline_has_its_own_level_and_later_ones_do_not_pay_for_earlier_ones() -> None:
    errors = np.geomspace(1.0, 1e-3, 1_000)
    soon, later = optional(0, errors, 1_000.0), optional(1, errors[:100], 60_000.0)
    planned = message([later, soon], 10.0, 2_000.0)
    assert planned == {0: 2_000.0}, "the link carries all of the later query after the deadline of the first"
    planned = message([optional(1, errors, 1_000.0), optional(0, errors, 1_100.0)], 4.0, 4_000.0)
    assert min(planned.values()) > 1_500.0, "with about the same deadline both have about the same level"


def test_required_bytes_are_before_optional_ones_that_are_due_later_and_keep_their_deadline() -> None:
    required = Demand(0, 2_000.0, 3_000.0)
    assert list(message([optional(1, [1.0] * 100, 5_000.0), required], 2.0, 5_000.0)) == [0, 1]
    # What is due earlier has only what the required bytes leave: 4,000 B until their due time.
    planned = message([optional(1, [1.0] * 100, 1_000.0), required], 2.0, 2_000.0)
    assert planned == {1: pytest.approx(1_000.0), 0: pytest.approx(1_000.0)}


def test_as_many_queries_as_possible_are_in_time_and_the_late_one_has_at_most_half_while_others_wait() -> None:
    demands = [Demand(0, 1_000.0, 5_000.0), Demand(1, 1_000.0, 400.0), Demand(2, 1_000.0, 500.0)]
    assert list(message(demands, 1.0, 1_200.0)) == [1, 2, 0]
    waiting = optional(3, np.geomspace(1.0, 1e-6, 1_000))
    sizes, left = Counter[int](), {0: 50_000.0, 3: 50_000.0}
    for step in range(10):
        late = Demand(0, 1_000.0 - 100.0 * step, left[0])
        open_ = optional(3, np.geomspace(1.0, 1e-6, 1_000)[-int(left[3] / ENTRY_BYTES) :], 1_000.0 - 100.0 * step)
        for query, size in message([late, open_], 10.0, 1_000.0).items():
            sizes[query] += int(size)
            left[query] -= size
    assert waiting.optional[-1] == 50_000.0
    assert sizes[0] <= LATE_QUERIES_SHARE * 10_000 + 1_000 and sizes[0] >= 4_000


def test_priority_decides_who_is_late() -> None:
    for important in (0, 1):
        demands = [Demand(k, 1_000.0, 800.0, priority=10.0 if k == important else 1.0) for k in (0, 1)]
        assert next(iter(message(demands, 1.0, 500.0))) == important


def test_on_an_unknown_link_everything_is_planned() -> None:
    assert message([optional(0, [1.0] * 10), Demand(1, np.inf, 300.0)], 0.0, 10_000.0) == {0: 500.0, 1: 300.0}
    assert message([], 1.0, 1_000.0) == {}


@given(
    st.lists(
        st.tuples(st.floats(0, 1e5), st.floats(0, 1e6), st.lists(st.floats(0, 1e3), max_size=30), st.floats(0.1, 10)),
        max_size=12,
    ),
    st.floats(0, 100),
    st.integers(1, 100_000),
)
def test_a_message_is_never_too_large_and_never_empty_while_something_waits(
    queries: list[tuple[float, float, list[float], float]], rate: float, room: int
) -> None:
    demands = [
        Demand(k, left, required, bytes_above(np.sort(np.array(errors, float))[::-1], ENTRY_BYTES), priority)
        for k, (left, required, errors, priority) in enumerate(queries)
    ]
    planned = message(demands, rate, room)
    total = {d.query: d.required + d.optional[-1] for d in demands}
    assert sum(planned.values()) <= room + 1e-6
    assert all(0.0 < size <= total[query] * (1 + 1e-9) + 1e-6 for query, size in planned.items())
    if room >= LEAST_BYTES and max(total.values(), default=0.0) >= LEAST_BYTES:
        assert planned
