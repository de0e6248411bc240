from __future__ import annotations

from center.job.processing_delay import SAY_EVERY_MS, WINDOW_MS, ProcessingDelays
from edgewater.wire.frames import QueryRef

Q, R = QueryRef("q", 1), QueryRef("r", 1)


def test_the_way_is_what_nineteen_frames_in_twenty_need_and_the_margin() -> None:
    ways = ProcessingDelays(margin_ms=200)
    assert ways.way_ms(Q) is None
    ways.note(Q, range(1, 101), 0)
    assert ways.way_ms(Q) == 95 + 200
    assert ways.way_ms(R) is None


def test_old_delays_are_forgotten() -> None:
    ways = ProcessingDelays()
    ways.note(Q, [9_000], 0)
    ways.note(Q, [100], WINDOW_MS + 1)
    assert ways.way_ms(Q) == 100


def test_nothing_is_kept_of_a_query_without_frames_for_a_minute_and_its_next_ones_are_news() -> None:
    ways = ProcessingDelays()
    ways.note(Q, [9_000], 0)
    assert ways.news(0) == {Q: 9_000}
    ways.note(R, [100], WINDOW_MS + 1)
    assert ways.news(WINDOW_MS + 1) == {R: 100}
    assert ways.way_ms(Q) is None
    assert Q not in ways._samples and Q not in ways._said
    ways.note(Q, [9_000], WINDOW_MS + 2)
    assert ways.news(WINDOW_MS + 2) == {Q: 9_000}


def test_only_what_differs_enough_is_said_and_not_too_often() -> None:
    ways = ProcessingDelays()
    ways.note(Q, [100], 0)
    assert ways.news(0) == {Q: 100}
    ways.note(Q, [115] * 50, 10)
    assert ways.news(SAY_EVERY_MS) == {}, "15 ms more is no news"
    ways.note(Q, [500] * 50, 10)
    assert ways.news(SAY_EVERY_MS - 1) == {}, "not so soon"
    assert ways.news(SAY_EVERY_MS) == {Q: 500}
    assert ways.news(2 * SAY_EVERY_MS) == {}


def test_what_was_not_heard_is_said_again() -> None:
    ways = ProcessingDelays()
    ways.note(Q, [100], 0)
    assert ways.news(0) == {Q: 100}
    ways.forget(Q)
    assert ways.news(1) == {Q: 100}
