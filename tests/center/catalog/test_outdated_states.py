"""Hellos of edges that run on a copy of their state, or on an older one, and frames of two processes on one state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from center.catalog import Catalog, IndexOutcome, SessionStart
from edgewater.base.errors import EdgewaterError, OutdatedState
from edgewater.model.edge_records import HeartbeatRecord, StateDigest
from edgewater.wire import QueryRef
from tests.center.catalog_world import FLIGHTS, JFK, frame, spec


def begin(catalog: Catalog, state: StateDigest, *, oldest: int = 1, following: int = 1, now_ms: int = 1_000) -> object:
    """What the catalog answers to a Hello: the highest durable seq, None, or an error."""
    start = SessionStart(JFK, "i1", {}, (FLIGHTS,), oldest, following, now_ms, "s", state=state)
    (outcome,) = catalog.edges.begin_sessions([start])
    return outcome


def report(catalog: Catalog, incarnation: str, **durable: int) -> None:
    catalog.edges.record_heartbeats(
        [HeartbeatRecord(JFK, {}, durable, {}, 0, 0, 0, 0, 1_000, incarnation=incarnation, durable=durable)]
    )


@pytest.fixture
def ref(catalog: Catalog) -> QueryRef:
    return catalog.queries.register(spec(), 1)[0].ref


def test_a_process_that_begins_on_the_newest_state_goes_on(catalog: Catalog, ref: QueryRef) -> None:
    assert begin(catalog, StateDigest((1,))) is None
    catalog.frames.index([replace(frame(ref, 1), run=1)])
    report(catalog, "i1", flights=10)
    for runs in ((1,), (1, 2), (1, 2, 3, 4), (2, 4, 5)):
        assert begin(catalog, StateDigest(runs, {"flights": 10}), oldest=2, following=2) == 1
    assert catalog.edges.get(JFK).state_lost_at_ms is None and catalog.alarms.latest() == []


@pytest.mark.parametrize(
    ("state", "following", "alarm"),
    [
        (StateDigest((1, 9), {"flights": 10}), 2, "id-in-use-twice"),
        (StateDigest((9,), {"flights": 10}), 2, "id-in-use-twice"),
        (StateDigest((), {"flights": 10}), 2, "id-in-use-twice"),
        (StateDigest((1, 2, 3), {"flights": 10}), 1, "edge-state-behind"),
        (StateDigest((1, 2, 3), {"flights": 9}), 2, "edge-state-behind"),
        (StateDigest((1, 2, 3), {"flights": 10}, {1: 8}), 2, "id-in-use-twice"),
    ],
)
def test_a_state_that_is_not_the_newest_one_is_refused_and_stated(
    catalog: Catalog, ref: QueryRef, state: StateDigest, following: int, alarm: str
) -> None:
    begin(catalog, StateDigest((1,)))
    assert begin(catalog, StateDigest((1, 2))) is None
    assert catalog.frames.index([replace(frame(ref, 1), run=2)]) == [IndexOutcome.NEW]
    report(catalog, "i1", flights=10)
    refused = begin(catalog, state, following=following, now_ms=5_000)
    assert isinstance(refused, OutdatedState)
    assert [a.kind for a in catalog.alarms.latest()] == [alarm]
    assert catalog.edges.get(JFK).state_lost_at_ms == 5_000
    # The other process goes on.
    assert catalog.frames.index([replace(frame(ref, 2), run=2)]) == [IndexOutcome.NEW]


def test_records_that_cannot_be_compared_are_not(catalog: Catalog) -> None:
    begin(catalog, StateDigest((1,)))
    report(catalog, "i1", flights=10, trains=4)
    for records in ({}, {"trains": 4}, {"flights": 11}, {"boats": 0}):
        assert begin(catalog, StateDigest((1, 2), records)) is None
    report(catalog, "i0", flights=100)  # a late heartbeat of an incarnation before
    assert begin(catalog, StateDigest((1, 2), {"flights": 10})) is None


def test_only_the_process_that_said_hello_last_adds_frames(catalog: Catalog, ref: QueryRef) -> None:
    begin(catalog, StateDigest((1,)))
    old, new = replace(frame(ref, 1, crc32c=7), run=1), replace(frame(ref, 1, crc32c=8), run=2)
    assert catalog.frames.index([old]) == [IndexOutcome.NEW]
    assert begin(catalog, StateDigest((1, 2)), oldest=2, following=2) == 1
    late = replace(frame(ref, 2, crc32c=7), run=1)
    mine = replace(frame(ref, 2, crc32c=9), run=2)
    assert catalog.frames.index([late, mine]) == [IndexOutcome.OUT_OF_SEQUENCE, IndexOutcome.NEW]
    assert [e.crc32c for e in catalog.frames.entries("miles@1", 0, 9)] == [7, 9]
    assert catalog.frames.index([new]) == [IndexOutcome.CONFLICT]
    assert not isinstance(begin(catalog, StateDigest((1, 2)), oldest=3, following=3), EdgewaterError)
