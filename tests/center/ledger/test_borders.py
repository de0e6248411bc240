"""Versions of a query have different windows: each is answered by its version only, and a version with an end ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from center.budgets.processing_delay import AnswerMargin
from center.ledger import EdgesChanged, Emission, FramesMerged, FrameSummary, Ledger, QueryRegistered, TimeAdvanced
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, EdgeId
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.wire import DroppedRecords, DropReason, QueryRef, SliceClose
from tests.center.ledger.test_ledger import close, edge_record, spec, told
from tests.center.snapshots import snapshot

MINUTE = 60_000
OLD, NEW = QueryRef("q", 1), QueryRef("q", 2)


class Versions:
    """A ledger with both versions of a query. The second one begins at `border`."""

    def __init__(self, border: int, *edges: str, new: dict[str, Any] | None = None, **old: Any) -> None:
        self.ledger = Ledger(AnswerMargin(0))
        self.position = 0
        self.old = RegisteredQuery(OLD, spec(**old), 0, None, WindowRange(until_ms=border))
        self.new = RegisteredQuery(NEW, spec(**(old if new is None else new)), 0, None, WindowRange(border))
        self.ledger.handle(EdgesChanged(tuple(edge_record(name) for name in edges)))
        self.ledger.handle(QueryRegistered(replace(self.old, windows=ALL_WINDOWS)))

    def change(self) -> None:
        for query in (self.old, self.new):
            self.ledger.handle(QueryRegistered(query))

    def says(self, ref: QueryRef, edge: str, through_ms: int, *closes: SliceClose) -> list[Emission]:
        self.position += 1
        starts = tuple(c.slice_start_ms for c in closes if c.observed)
        frame = FrameSummary(ref, self.position, EdgeId(edge), through_ms, closes, starts, 100, 0, "i1")
        return self.ledger.handle(FramesMerged((frame,), 0))


def session(start_ms: int, first_ms: int, last_ms: int) -> SliceClose:
    return SliceClose(start_ms, 1, 0, (), first_ms, last_ms)


def test_windows_before_the_border_are_of_the_old_version_and_later_ones_of_the_new() -> None:
    center = Versions(2 * MINUTE, "a")
    center.change()
    slices = tuple(close(n * MINUTE, 1) for n in range(4))  # an edge of an earlier release knows no border
    old = center.says(OLD, "a", 4 * MINUTE, *slices)
    new = center.says(NEW, "a", 4 * MINUTE, *slices)
    assert [start // MINUTE for start, _, _ in told(old)] == [0, 1]
    assert [start // MINUTE for start, _, _ in told(new)] == [2, 3]


def test_a_version_ends_when_its_last_window_is_final() -> None:
    center = Versions(2 * MINUTE, "a", "b", lateness="1m")
    center.change()
    center.says(OLD, "a", 9 * MINUTE, close(MINUTE, 1))
    center.says(OLD, "b", 3 * MINUTE - 1, close(MINUTE, 1))
    assert center.ledger.ended(0) == []
    final = center.says(OLD, "b", 3 * MINUTE)
    assert [e.phase.value for e in final] == ["final"]
    assert center.ledger.ended(0) == [OLD]


def test_records_for_an_ended_version_are_counted_as_late() -> None:
    center = Versions(2 * MINUTE, "a")
    center.change()
    center.says(OLD, "a", 9 * MINUTE, close(MINUTE, 1))
    assert center.ledger.ended(0) == [OLD]
    assert center.says(OLD, "a", 9 * MINUTE, close(MINUTE, 3), close(5 * MINUTE, 7)) == []
    assert center.ledger.after_final(OLD) == 2, "those behind the border are of another version"


def test_windows_that_were_open_behind_a_new_border_are_dropped() -> None:
    center = Versions(2 * MINUTE, "a", budget={"staleness": "1s"})
    center.says(OLD, "a", 0, close(MINUTE, 1), close(3 * MINUTE, 1))
    assert center.ledger.open_windows(OLD) == 2
    center.change()
    assert center.ledger.open_windows(OLD) == 1
    assert not center.ledger.takes(OLD, 3 * MINUTE)
    given = center.ledger.handle(TimeAdvanced(20 * MINUTE))
    windows = [(e.query, e.window_start_ms // MINUTE) for e in given]
    assert {n for ref, n in windows if ref == OLD} <= {0, 1}
    assert {n for ref, n in windows if ref == NEW} and min(n for ref, n in windows if ref == NEW) == 2


def test_sliding_windows_over_the_border_belong_to_the_version_in_which_they_start() -> None:
    center = Versions(2 * MINUTE, "a", window={"sliding": "2m", "every": "1m"})
    center.change()
    slices = tuple(close(n * MINUTE, 1) for n in range(5))
    old, new = (center.says(ref, "a", 9 * MINUTE, *slices) for ref in (OLD, NEW))
    assert [start // MINUTE for start, _, _ in told(old)] == [-1, 0, 1]
    assert [start // MINUTE for start, _, _ in told(new)] == [2, 3, 4]
    assert center.ledger.takes(OLD, 2 * MINUTE) is False, "all its windows are final"
    late = center.says(NEW, "a", 9 * MINUTE, close(2 * MINUTE, 3))
    assert (late, center.ledger.after_final(NEW)) == ([], 2)


def test_a_session_over_the_border_is_cut_there() -> None:
    center = Versions(2 * MINUTE, "a", window={"session": "1m"})
    center.change()
    first, second = session(MINUTE, 90_000, 119_999), session(2 * MINUTE, 120_000, 150_000)
    (old,) = center.says(OLD, "a", 9 * MINUTE, first, second)
    (new,) = center.says(NEW, "a", 9 * MINUTE, first, second)
    assert (old.window_start_ms, old.window_end_ms) == (90_000, 179_999)
    assert (new.window_start_ms, new.window_end_ms) == (120_000, 210_000)
    assert old.facts.observed == new.facts.observed == 1
    assert center.ledger.ended(0) == [OLD]


def test_a_version_without_windows_has_ended_at_once() -> None:
    center = Versions(2 * MINUTE, "a")
    center.old = replace(center.old, windows=WindowRange(2 * MINUTE, 2 * MINUTE))
    center.change()
    assert center.ledger.ended(0) == [OLD]


def test_a_version_of_which_no_edge_is_left_ends_by_the_clock() -> None:
    center = Versions(2 * MINUTE, lateness="1m")
    center.change()
    assert center.ledger.ended(3 * MINUTE - 1) == []
    assert center.ledger.ended(3 * MINUTE) == [OLD]


def test_borders_are_part_of_the_stored_state() -> None:
    center = Versions(2 * MINUTE, "a")
    center.change()
    again = Ledger(AnswerMargin(0))
    again.load({ref: snapshot(center.ledger, ref) for ref in (OLD, NEW)})
    assert [again.book(ref).state.query.windows for ref in (OLD, NEW)] == [center.old.windows, center.new.windows]


def test_late_records_of_a_version_that_edges_have_forgotten_are_counted_on_the_query() -> None:
    center = Versions(2 * MINUTE, "a")
    center.change()
    center.says(OLD, "a", 9 * MINUTE, close(MINUTE, 1))
    dropped = (DroppedRecords(MIN_TIME_MS, DropReason.TOO_LATE, 5),)
    frame = FrameSummary(NEW, 99, EdgeId("a"), 9 * MINUTE, (), (), 100, 0, "a-1", dropped=dropped)
    center.ledger.handle(FramesMerged((frame.within(2 * MINUTE, MAX_TIME_MS),), 0))
    assert (center.ledger.after_final(OLD), center.ledger.after_final(NEW)) == (0, 5)
