"""Lost input: each query states the windows that may lack it, in order with its data."""

from __future__ import annotations

from typing import Any

from edge.core import Configured, EdgeCore, FrameBuilt, Ingested, InputLost, PullEvent, StreamSpec
from edgewater.streams import MAX_TIME_MS
from edgewater.wire import Frame, FrameBody, InputLoss
from tests.edge.core.test_core import ALL_OPEN, LATER, batch, make_core
from tests.edge.recovery_world import COLUMNS, QUERIES

LOST_AT = 60_000


def frames(core: EdgeCore) -> list[Frame]:
    built = []
    while made := [e.frame for e in core.handle(PullEvent(10_000, ALL_OPEN)) if isinstance(e, FrameBuilt)]:
        built += made
    return built


def losses(built: list[Frame]) -> dict[str, tuple[InputLoss, ...]]:
    return {f.query.name: f.unpack().losses for f in built if f.unpack().losses}


def lost(**parts: Any) -> InputLost:
    return InputLost("flights", "file", "file-gone", LOST_AT, **parts)


def test_a_loss_is_stated_once_by_each_query_from_where_its_windows_are_not_final() -> None:
    core = make_core()
    core.handle(Ingested("flights", "file", batch(("UA", 500, 1_000), ("UA", 500, 45_000)), 45_000))
    frames(core)
    assert core.next_pull_ms(1e6, LOST_AT) != LOST_AT
    core.handle(lost())
    assert core.next_pull_ms(1e6, LOST_AT) == LOST_AT, "it does not wait for records"
    stated = losses(frames(core))
    # Read up to 45 s, in slices of 10 s; with a lateness of 30 s a record at 10 s would still be counted.
    assert stated["exact"] == (InputLoss("file", "file-gone", 10_000, LOST_AT + 1),)
    assert stated["budgeted"] == (InputLoss("file", "file-gone", 40_000, LOST_AT + 1),)
    assert losses(frames(core)) == {}
    assert core.streams["flights"].records == 2


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
