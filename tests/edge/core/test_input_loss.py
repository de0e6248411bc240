"""Lost input: each query states the windows that may lack it, in order with its data."""

from __future__ import annotations

from typing import Any

import pytest

from edge.core.core import EdgeCore
from edge.core.dropped import MAX_SLICES
from edge.core.events import Configured, Ingested, InputLost, PullEvent
from edge.core.streams import StreamSpec
from edge.records import RejectedRecords
from edgewater.base.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, StreamClock
from edgewater.model.query import QuerySpec
from edgewater.wire import Frame, FrameBody, InputLoss, QueryRef
from tests.cores import drained
from tests.edge.core.test_core import ALL_OPEN, LATER, batch, make_core
from tests.edge.recovery_world import COLUMNS, QUERIES

LOST_AT = 60_000


def frames(core: EdgeCore) -> list[Frame]:
    return drained(core, PullEvent(10_000, ALL_OPEN))


def losses(built: list[Frame]) -> dict[str, tuple[InputLoss, ...]]:
    return {f.query.name: f.unpack().losses for f in built if f.unpack().losses}


def lost(**parts: Any) -> InputLost:
    return InputLost("flights", "file", "file-gone", LOST_AT, **parts)


def test_a_loss_is_stated_once_by_each_query_from_where_its_windows_are_not_final() -> None:
    core = make_core()
    core.handle(Ingested("flights", "file", batch(("UA", 500, 1_000), ("UA", 500, 45_000)), 45_000))
    frames(core)
    assert core.pulls.next_pull_ms(1e6, LOST_AT) != LOST_AT
    core.handle(lost())
    assert core.pulls.next_pull_ms(1e6, LOST_AT) == LOST_AT, "it does not wait for records"
    stated = losses(frames(core))
    # Read up to 45 s, in slices of 10 s; with a lateness of 30 s a record at 10 s would still be counted.
    assert stated["exact"] == (InputLoss("file", "file-gone", 10_000, LOST_AT + 1),)
    assert stated["budgeted"] == (InputLoss("file", "file-gone", 40_000, LOST_AT + 1),)
    assert losses(frames(core)) == {}
    assert core.streams["flights"].records == 2


@pytest.mark.parametrize(
    ("window", "lost_ms", "stated"),
    [
        # The windows that end by 44 s are final. The last window over a record at 39.5 s ends at 69 s.
        ({"sliding": "30s", "every": "1s"}, 39_500, True),
        ({"sliding": "30s", "every": "1s"}, 16_000, True),
        ({"sliding": "30s", "every": "1s"}, 13_500, False),
        ({"session": "1s", "max": "20s"}, 39_500, True),
        ({"session": "1s", "max": "20s"}, 20_500, False),
        ({"tumbling": "10s"}, 41_000, True),
        ({"tumbling": "10s"}, 39_500, False),
    ],
)
def test_a_late_record_that_is_lost_is_stated_while_a_window_over_its_slice_is_not_final(
    window: dict[str, str], lost_ms: int, stated: bool
) -> None:
    """A record may be too late for some windows over its slice, and count in others."""
    mapping = {"name": "q", "from": "flights", "measures": {"n": "count()"}, "window": window, "lateness": "1s"}
    core = make_core(queries=((QueryRef("q", 1), QuerySpec.from_mapping(mapping)),))
    core.handle(Ingested("flights", "file", batch(("UA", 500, 1_000), ("UA", 500, 45_000)), 45_000))
    frames(core)
    core.handle(lost(from_ms=lost_ms, to_ms=lost_ms + 1, records=1, was_ingested=True))
    expected = {"q": (InputLoss("file", "file-gone", lost_ms, lost_ms + 1, 1),)} if stated else {}
    assert losses(frames(core)) == expected


def test_records_ahead_of_the_clock_may_be_lost_too() -> None:
    core = make_core()
    core.handle(Ingested("flights", "file", batch(("UA", 500, 90_000)), 45_000))
    core.handle(lost())
    assert {loss.to_ms for (loss,) in losses(frames(core)).values()} == {90_001}


def test_a_stream_without_a_clock_bounds_nothing() -> None:
    core = make_core(StreamSpec(COLUMNS, clock=None))
    core.handle(lost())
    assert {loss for (loss,) in losses(frames(core)).values()} == {InputLoss("file", "file-gone")}


def test_a_query_that_is_registered_after_a_loss_states_it_as_far_as_it_concerns_it() -> None:
    core = make_core(queries=QUERIES[:1])
    core.handle(Ingested("flights", "file", batch(("UA", 500, 12_000)), 12_000))
    core.handle(lost())
    core.handle(Configured((*QUERIES, LATER)))
    stated = losses(frames(core))
    assert stated["later"] == stated["budgeted"] == (InputLoss("file", "file-gone", 20_000, LOST_AT + 1),)


def test_a_loss_survives_a_restart_and_its_records_keep_their_numbers() -> None:
    core = make_core()
    core.handle(lost(from_ms=5_000, to_ms=8_000, records=3, was_ingested=True))
    again = EdgeCore({"flights": StreamSpec(COLUMNS)})
    again.restore(core.to_state())
    assert again.to_state() == core.to_state()
    assert again.streams["flights"].records == 3 and again.streams["flights"].watermark_ms == 7_999
    assert set(losses(frames(again))) == {"exact", "budgeted"}


def test_losses_travel_in_the_body() -> None:
    stated = (InputLoss("s", "restart"), InputLoss("s", "file-gone", -5, MAX_TIME_MS, 0))
    body = FrameBody(7, losses=stated)
    assert Frame.pack(1, QUERIES[0][0], body).unpack() == body


# Rejected records


def rejected(core: EdgeCore) -> list[tuple[int, int | None, int]]:
    return [(d.slice_start_ms, d.until_ms, d.records) for frame in frames(core) for d in frame.unpack().dropped]


def push(core: EdgeCore, *parts: RejectedRecords, rows: Any = (), at_ms: int = 45_000) -> None:
    core.handle(Ingested("flights", "file", batch(*rows), at_ms, rejected=parts))


def test_a_rejected_record_is_stated_by_each_query_with_its_slice() -> None:
    core = make_core(queries=QUERIES[:1])
    push(core, RejectedRecords("wrong-type", 3, 12_000, 15_000, is_timed=True), rows=[("UA", 500, 1_000)])
    assert core.pulls.next_pull_ms(1e6, 45_000) is not None
    push(core, rows=[("UA", 500, 44_000)])
    assert rejected(core) == [(10_000, 20_000, 3)]
    assert core.streams["flights"].rejected == {"file": {"wrong-type": 3}}


@pytest.mark.parametrize(
    ("before", "part", "clock", "expected"),
    [
        ((), (None, None), LIVE, (40_000, 50_000)),  # nothing is known but the time
        ((), (None, None), None, (MIN_TIME_MS, MAX_TIME_MS)),
        ((21_000,), (None, None), LIVE, (20_000, 50_000)),  # from the watermark until now
        ((21_000,), (None, None), None, (20_000, 30_000)),
        ((21_000,), (33_000, 35_000), None, (20_000, 40_000)),  # valid records around them
        ((), (13_000, 25_000), None, (10_000, 30_000)),
        ((), (13_000, 25_000), LIVE, (10_000, 50_000)),
        ((), (13_000, 25_000), StreamClock(10_000_000, 0, 1.0), (10_000, 30_000)),  # the source is far behind
    ],
)
def test_a_rejected_record_without_a_time_may_be_in_each_slice_around_it(
    before: tuple[int, ...], part: tuple[int | None, int | None], clock: StreamClock | None, expected: tuple[int, int]
) -> None:
    core = make_core(StreamSpec(COLUMNS, clock=clock), queries=QUERIES[:1])
    if before:
        push(core, rows=[("UA", 500, *before)])
    push(core, RejectedRecords("malformed", 2, *part))
    push(core, rows=[("UA", 500, 44_000)])
    assert rejected(core) == [(*expected, 2)]


def test_a_reason_that_is_about_a_whole_file_is_counted_and_no_statement_of_windows() -> None:
    core = make_core(queries=QUERIES[:1])
    push(core, RejectedRecords("file-truncated", 1), rows=[("UA", 500, 44_000)])
    assert rejected(core) == []
    assert core.streams["flights"].rejected == {"file": {"file-truncated": 1}}


def test_a_guess_is_stated_with_its_slice_and_is_no_rejection() -> None:
    core = make_core(queries=QUERIES[:1])
    push(core, RejectedRecords("assumed-copy", 3, 12_000, 15_000, is_timed=True), rows=[("UA", 500, 1_000)])
    push(core, rows=[("UA", 500, 44_000)])
    assert rejected(core) == [(10_000, 20_000, 3)]
    assert not core.streams["flights"].rejected.get("file"), "heartbeats do not call it a rejected record"


@pytest.mark.parametrize("reason", ["wrong-type", "assumed-copy", "read-again", "too-many-series"])
def test_records_in_very_many_slices_are_stated_together_and_none_is_forgotten(reason: str) -> None:
    core = make_core(queries=QUERIES[:1])
    parts = [RejectedRecords(reason, 1, 10_000 * n, 10_000 * n + 1, is_timed=True) for n in range(3_000)]
    push(core, *parts)
    push(core, rows=[("UA", 500, 44_000)])
    stated = rejected(core)
    assert len(stated) <= MAX_SLICES and sum(n for _, _, n in stated) == 3_000
    for n in range(3_000):
        assert any(start <= 10_000 * n and (until or 0) > 10_000 * n for start, until, _ in stated)


@pytest.mark.parametrize("restored", [False, True])
def test_a_column_that_had_values_and_is_null_in_most_records_is_named(restored: bool) -> None:
    core = make_core(queries=QUERIES[:1])
    push(core, rows=[("UA", 500, 1_000)] * 40)
    stream = core.streams["flights"]
    assert stream.null_columns() == []
    if restored:
        again = make_core(queries=())
        again.restore(core.to_state())
        core = again
        stream = core.streams["flights"]
    push(core, rows=[("UA", None, 1_000)] * 10)
    assert stream.null_columns() == []
    for _ in range(6):
        push(core, rows=[("UA", None, 1_000)] * 10)
    assert stream.null_columns() == [("file", "distance")]
    push(core, rows=[("UA", 500, 1_000)] * 70)
    assert stream.null_columns() == [], "it is back"


@pytest.mark.parametrize("records", [64, 70, 1_000])
def test_a_column_that_loses_its_values_within_a_batch_is_named(records: int) -> None:
    core = make_core(queries=QUERIES[:1])
    push(core, rows=[("UA", 500, 1_000)] * records + [("UA", None, 1_000)] * records)
    push(core, rows=[("UA", None, 1_000)] * 5)
    assert core.streams["flights"].null_columns() == [("file", "distance")]


def test_a_column_that_never_had_values_is_not_missed() -> None:
    core = make_core(queries=QUERIES[:1])
    push(core, rows=[("UA", None, 1_000)] * 500)
    push(core, rows=[("UA", None if n % 2 else 5, 1_000) for n in range(500)])
    push(core, rows=[("UA", None, 1_000)] * 500)
    assert core.streams["flights"].null_columns() == []
