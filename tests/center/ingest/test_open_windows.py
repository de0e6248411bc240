"""An edge that makes up windows of the past opens a bounded number of them, and honest edges lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.ingest.open_windows import MAX_STEPS, OpenWindows, SliceSet
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.wire import Frame, FrameBody, InputLoss, Partial, SliceClose
from tests.center.gateway_world import JFK, MILES, RawEdge, center, spec, synopsis
from tests.center.kept_frames import stored_body

NOW_MS = 100_000_000
SECOND = {"name": "q", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "1s"}, "lateness": "1m"}
WITHIN = 61
"""Windows of `SECOND` that are not final at the time up to which all is closed."""


def windows(most: int = 100, **changed: Any) -> OpenWindows:
    return OpenWindows(QuerySpec.from_mapping(SECOND | changed), most)


@given(st.lists(st.integers(0, 40), max_size=25), st.sampled_from([(1, 1), (4, 1), (6, 2)]), st.integers(0, 45))
def test_slices_count_as_the_windows_over_them(starts: list[int], sizes: tuple[int, int], before: int) -> None:
    size, every = sizes
    held = SliceSet(size, every)
    for start in starts:
        if start not in held:
            held.add(start)
    held.drop_before(before)
    kept = {start for start in starts if start >= before}
    covered = {start - back for start in kept for back in range(size)}
    assert held.starts == sorted(kept) and held.covered_ms == len(covered)
    assert held.windows == -(-len(covered) // every)


def test_slices_that_are_never_closed_are_refused_beyond_the_bound() -> None:
    held = windows()
    refused = [held.refuse("a", n, MIN_TIME_MS, [10_000 * n + 1000 * i for i in range(10)]) for n in range(100)]
    assert sum(map(len, refused)) == 1000 - 100 - WITHIN and held.count == 100 + WITHIN
    assert held.refuse("a", 100, MIN_TIME_MS, [0, 5000]) == set(), "those that are open take more"
    assert held.refuse("a", 101, MIN_TIME_MS, [999_000]) == {999_000}
    assert held.refuse("a", 102, 2_000_000, []) == set() and held.count == 0, "it closes them"
    assert held.refuse("a", 103, MIN_TIME_MS, [5_000_000]) == set()


def test_so_are_slices_of_the_past_of_an_edge_that_is_up_to_date() -> None:
    held = windows(lateness="365d", most=100)
    held.most = 200
    held.refuse("a", 0, NOW_MS, [])
    assert len(held.refuse("a", 1, NOW_MS, [1000 * i for i in range(500)])) == 300
    assert len(held.refuse("b", 0, NOW_MS, [])) == 0, "a new incarnation begins anew, but for what is open"
    assert len(held.refuse("b", 1, NOW_MS, [1_000_000 + 1000 * i for i in range(500)])) == 500


KINDS: list[dict[str, str]] = [{"tumbling": "1s"}, {"sliding": "5m", "every": "1s"}, {"session": "1s", "max": "5m"}]


@pytest.mark.parametrize("window", KINDS, ids=["tumbling", "sliding", "session"])
def test_a_backfill_of_a_year_in_order_is_never_refused(window: dict[str, str]) -> None:
    held = windows(most=10, window=window)
    for n in range(200):
        starts = [1000 * (40 * n + i) for i in range(40)]
        for _ in range(2):  # sent again after a lost connection
            assert held.refuse("a", n, starts[-1] + 1000, starts) == set()
    assert held.count == 0
    for n in range(20, 200):  # all frames since the last acknowledgement
        starts = [1000 * (40 * n + i) for i in range(40)]
        assert held.refuse("a", n, starts[-1] + 1000, starts) == set() and held.count == 0
    for n in range(200, 200 + 2 * MAX_STEPS):
        held.refuse("a", n, 40_000 * (n + 1), [])
    assert len(held._seqs) <= MAX_STEPS
    assert held.refuse("b", 0, 1000, [0]) == set() and held.count == 0, "and of one that lost its state"


def test_late_records_of_each_window_within_the_lateness_are_never_refused() -> None:
    held = windows(most=10)
    for n in range(1000):
        late = [1000 * max(n - back, 0) for back in range(60)]
        assert held.refuse("a", n, 1000 * (n + 1), [*{1000 * n, *late}]) == set()
    assert held.count <= 10 + WITHIN


def test_a_slice_under_many_windows_counts_as_all_of_them() -> None:
    held = windows(most=1000, window={"sliding": "500s", "every": "1s"}, lateness="0s")
    apart = [1_000_000 * n for n in range(10)]
    assert len(held.refuse("a", 0, MIN_TIME_MS, apart)) == 7
    beside = windows(most=1000, window={"sliding": "500s", "every": "1s"}, lateness="0s")
    assert beside.refuse("a", 0, MIN_TIME_MS, [1000 * n for n in range(900)]) == set()


async def test_at_a_gateway_what_is_refused_is_a_stated_loss_and_the_honest_edge_counts(tmp_path: Path) -> None:
    good, tens = synopsis(b"ua"), spec(window={"tumbling": "10s"}, lateness="1h")

    def frame(seq: int, starts: list[int], through_ms: int, *, closes: bool) -> Frame:
        closed = tuple(SliceClose(start, 1, 0) for start in starts) if closes else ()
        return Frame.pack(seq, MILES, FrameBody(through_ms, tuple(Partial(s, good) for s in starts), closed))

    # Alarms are written when this test asks for it: of those between two writes the last one is kept.
    async with (
        center(tmp_path, open_windows=50, write_ms=60_000) as c,
        RawEdge(c.port) as evil,
        RawEdge(c.port) as honest,
    ):
        c.clock[0] = NOW_MS
        c.catalog.queries.register(tens, 1)
        await evil.hello("lga")
        await honest.hello()
        most = 50 + 361
        for seq in range(6):
            await evil.send(frame(seq, [10_000 * (100 * seq + i) for i in range(100)], MIN_TIME_MS, closes=False))
        refused = (await evil.until("refused")).refused
        assert refused.reason == "open-windows" and "gateway.open_windows" in refused.message
        await evil.acked(5)
        await honest.send(frame(0, [10_000 * i for i in range(500, 600)], 6_000_000, closes=True))
        await honest.acked(0)
        entries = c.catalog.frames.entries("miles@1", 0, 99)
        bodies = [(e.edge, stored_body(c.catalog, c.log, e)) for e in entries]
        kept = [p.slice_start_ms for edge, body in bodies for p in body.partials if edge != JFK]
        lost = [loss for edge, body in bodies for loss in body.losses if edge != JFK]
        assert kept == [10_000 * i for i in range(most)]
        assert lost == [
            InputLoss("frames", "partial-refused", s, s + 1) for s in range(10_000 * most, 6_000_000, 10_000)
        ]
        assert [len(body.partials) for edge, body in bodies if edge == JFK] == [100]
        await c.gateway._status.flush()
        (alarm,) = c.catalog.alarms.latest()
        assert (alarm.kind, alarm.edge) == ("frame-refused", "lga") and "too many windows" in alarm.message
