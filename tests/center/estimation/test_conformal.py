from __future__ import annotations

import numpy as np
import pytest

from center.estimation.conformal import LEAST, WIDEST, IntervalRecord
from center.estimation.estimator import FURTHEST, AccuracyBook
from edgewater.accuracy import report_schedule
from tests.center.accuracy_world import spec


def record(ratios: list[list[float]], scope: str | None = None) -> IntervalRecord:
    result = IntervalRecord(0.95, scope)  # type: ignore[arg-type]
    for each in ratios:
        result.note(each)
    return result


def test_intervals_are_as_wide_as_past_errors_were_and_never_narrower() -> None:
    errors = np.abs(np.random.default_rng(1).normal(0, 1 / 1.96, 400))
    assert record([[0.1]] * 100).widening == 1.0
    assert record([[2 * float(e)] for e in errors]).widening == pytest.approx(2.0, rel=0.12)
    assert record([[9.0]] * 100).widening == WIDEST


def test_a_few_windows_say_nothing_yet() -> None:
    assert record([[3.0]] * (LEAST - 1)).widening == 1.0
    assert record([[3.0]] * LEAST).widening == 3.0
    assert record([[]] * 100).widening == 1.0


def test_of_all_groups_at_once_the_worst_of_each_window_counts() -> None:
    windows = [[0.5] * 9 + [1.5]] * 40
    assert record(windows, "each").widening == 1.5
    windows = [[0.5] * 39 + [1.5]] * 40
    assert record(windows, "each").widening == 1.0
    assert record(windows, "all").widening == 1.5


def test_the_record_is_part_of_the_state() -> None:
    one = record([[1.7], [0.2]] * 30)
    again = IntervalRecord(0.95, None)
    again.restore(one.to_state())
    assert (again.widening, again.to_state()) == (one.widening, one.to_state())
    assert one.widening == 1.7


def test_notes_and_snapshots_of_an_older_release_are_read() -> None:
    accuracy = spec().accuracy
    assert accuracy is not None
    clock = report_schedule(spec().window, accuracy, 0)
    assert clock is not None
    book = AccuracyBook(accuracy, clock, None)
    state = {k: v for k, v in book.to_state().items() if k != "intervals"}
    book.restore(state)
    book.apply(["finish", 0, 1.0])
    book.apply(["finish", 0, 1.0, [FURTHEST]])
    assert book.to_state()["intervals"] == [[FURTHEST]]
