from __future__ import annotations

import numpy as np
import pytest

from center.estimation.conformal import MAX_WIDENING, MIN_WINDOWS, ConformalRecord


def record(ratios: list[list[float]], scope: str | None = None) -> ConformalRecord:
    result = ConformalRecord(0.95, scope)  # type: ignore[arg-type]
    for each in ratios:
        result.add(each)
    return result


def test_intervals_are_as_wide_as_past_errors_were_and_never_narrower() -> None:
    errors = np.abs(np.random.default_rng(1).normal(0, 1 / 1.96, 400))
    assert record([[0.1]] * 100).widening == 1.0
    assert record([[2 * float(e)] for e in errors]).widening == pytest.approx(2.0, rel=0.12)
    assert record([[9.0]] * 100).widening == MAX_WIDENING


def test_a_few_windows_do_not_widen() -> None:
    assert record([[3.0]] * (MIN_WINDOWS - 1)).widening == 1.0
    assert record([[3.0]] * MIN_WINDOWS).widening == 3.0
    assert record([[]] * 100).widening == 1.0


def test_for_all_groups_simultaneously_the_largest_error_of_each_window_counts() -> None:
    windows = [[0.5] * 9 + [1.5]] * 40
    assert record(windows, "each").widening == 1.5
    windows = [[0.5] * 39 + [1.5]] * 40
    assert record(windows, "each").widening == 1.0
    assert record(windows, "all").widening == 1.5


def test_the_record_is_part_of_the_state() -> None:
    one = record([[1.7], [0.2]] * 30)
    again = ConformalRecord(0.95, None)
    again.restore(one.to_state())
    assert (again.widening, again.to_state()) == (one.widening, one.to_state())
    assert one.widening == 1.7
