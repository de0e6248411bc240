from __future__ import annotations

import numpy as np
import pytest

from center.early.calibration import MAX_WIDENING, MAX_WINDOWS, STEP, ConformalRecord


def record(ratios: list[list[float]], scope: str | None = None) -> ConformalRecord:
    result = ConformalRecord(0.95, scope)  # type: ignore[arg-type]
    for start_ms, each in enumerate(ratios):
        result.add(start_ms, each, result.widening)
    return result


def test_intervals_are_as_wide_as_past_errors_were_and_never_narrower() -> None:
    errors = np.abs(np.random.default_rng(1).normal(0, 1 / 1.96, 400))
    assert record([[0.1]] * 100).widening == 1.0
    assert record([[2 * float(e)] for e in errors]).widening == pytest.approx(2.0, rel=0.12)
    assert record([[9.0]] * 100).widening == MAX_WIDENING


def test_a_short_record_widens_to_its_largest_error() -> None:
    assert record([[0.9], [0.2]]).widening == 1.0
    assert record([[0.2], [3.0], [0.2]]).widening == 3.0
    assert record([[]] * 100).widening == 1.0


def test_misses_that_exceed_the_confidence_are_few_whatever_their_cause() -> None:
    result = ConformalRecord(0.95, None)
    misses, errors = 0, [1.0 + 0.008 * n for n in range(300)]  # ever larger: no quantile of the past contains the next
    for start_ms, error in enumerate(errors):
        misses += error > result.widening
        result.add(start_ms, [error], result.widening)
    assert misses <= 0.05 * len(errors) + 0.05 / STEP + 1


def test_a_later_error_of_a_window_replaces_its_first_one() -> None:
    result = record([[0.5]] * 3)
    result.add(1, [2.0], 1.0)
    assert result.widening == 2.0 and len(result.to_state()["windows"]) == 3


def test_the_newest_windows_are_remembered() -> None:
    result = record([[9.0]] * 3 + [[0.1]] * MAX_WINDOWS)
    assert len(result.to_state()["windows"]) == MAX_WINDOWS and result.widening == 1.0


def test_for_all_groups_simultaneously_the_largest_error_of_each_window_counts() -> None:
    windows = [[0.5] * 9 + [1.5]] * 40
    assert record(windows, "each").widening == 1.5
    windows = [[0.5] * 39 + [1.5]] * 40
    assert record(windows, "each").widening == 1.0
    assert record(windows, "all").widening == 1.5


def test_an_extreme_is_stated_only_after_enough_windows_have_kept_theirs() -> None:
    result = ConformalRecord(0.95, None, of_extremes=True)
    is_stated = []
    for start_ms in range(60):
        is_stated.append(result.widening == 1.0)
        result.add(start_ms, [10.0 if start_ms in (30, 32) else 0.0], result.widening)
    assert not any(is_stated[:20]) and all(is_stated[20:31]), "each of twenty windows allows a twentieth of a miss"
    assert not any(is_stated[31:50]), "a miss, and soon another one"
    assert ConformalRecord(0.95, None).widening == 1.0, "an interval of another measure needs no such record"
