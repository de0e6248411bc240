from __future__ import annotations

from center.budgets.processing_delay import (
    LEAST_MARGIN_MS,
    MARGIN_SAMPLES,
    READ_MS,
    REPORT_INTERVAL_MS,
    WINDOW_MS,
    AnswerMargin,
    ProcessingDelays,
)
from edgewater.wire import QueryRef

Q, R = QueryRef("q", 1), QueryRef("r", 1)


def test_the_delay_is_the_95th_percentile_plus_the_margin() -> None:
    delays = ProcessingDelays(AnswerMargin(200))
    assert delays.delay_ms(Q) is None
    delays.add(Q, range(1, 101), 0)
    assert delays.delay_ms(Q) == 95 + 200
    assert delays.delay_ms(R) is None


def test_old_delays_are_dropped() -> None:
    delays = ProcessingDelays(AnswerMargin(0))
    delays.add(Q, [9_000], 0)
    delays.add(Q, [100], WINDOW_MS + 1)
    assert delays.delay_ms(Q) == 100


def test_a_query_without_frames_for_a_minute_is_dropped_and_its_next_delay_is_reported() -> None:
    delays = ProcessingDelays(AnswerMargin(0))
    delays.add(Q, [9_000], 0)
    assert delays.take_changes(0) == {Q: 9_000}
    delays.add(R, [100], WINDOW_MS + 1)
    assert delays.take_changes(WINDOW_MS + 1) == {R: 100}
    assert delays.delay_ms(Q) is None
    assert Q not in delays._samples and Q not in delays._reported
    delays.add(Q, [9_000], WINDOW_MS + 2)
    assert delays.take_changes(WINDOW_MS + 2) == {Q: 9_000}


def test_only_sufficient_changes_are_reported_and_not_too_often() -> None:
    delays = ProcessingDelays(AnswerMargin(0))
    delays.add(Q, [100], 0)
    assert delays.take_changes(0) == {Q: 100}
    delays.add(Q, [115] * 50, 10)
    assert delays.take_changes(REPORT_INTERVAL_MS) == {}, "15 ms more is too small a change"
    delays.add(Q, [500] * 50, 10)
    assert delays.take_changes(REPORT_INTERVAL_MS - 1) == {}, "not so soon"
    assert delays.take_changes(REPORT_INTERVAL_MS) == {Q: 500}
    assert delays.take_changes(2 * REPORT_INTERVAL_MS) == {}


def test_a_delay_that_was_not_stored_is_reported_again() -> None:
    delays = ProcessingDelays(AnswerMargin(0))
    delays.add(Q, [100], 0)
    assert delays.take_changes(0) == {Q: 100}
    delays.mark_unreported(Q)
    assert delays.take_changes(1) == {Q: 100}


def test_the_margin_grows_with_the_time_that_answers_take_and_shrinks_again() -> None:
    margin = AnswerMargin()
    assert margin.ms == LEAST_MARGIN_MS
    margin.written(10)
    assert margin.ms == LEAST_MARGIN_MS, "answers that are written at once need no more"
    for _ in range(3):
        margin.written(400)
    assert margin.ms == 400 + READ_MS
    margin.written(60_000)
    assert margin.ms == 400 + READ_MS, "an outage says nothing of the next answer"
    for _ in range(MARGIN_SAMPLES):
        margin.written(10)
    assert margin.ms == LEAST_MARGIN_MS


def test_one_slow_answer_of_many_takes_nothing_from_the_others() -> None:
    margin = AnswerMargin()
    for after_ms in (10, 10, 10, 10, 10, 10, 10, 10, 10, 900):
        margin.written(after_ms)
    assert margin.ms == LEAST_MARGIN_MS


def test_the_margin_is_at_most_half_of_a_budget() -> None:
    assert AnswerMargin(200).of(10_000) == 200
    assert AnswerMargin(200).of(300) == 150
