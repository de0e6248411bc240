from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from center.job.merge import merge_rows
from center.job.microbatch import gaps, to_micro_batch, unapplied
from center.job.rows import ROW_SCHEMA, FrameRow, RowKind, from_table, row_of_damage, rows_of_positions, to_batch
from center.storage.frame_facts import FrameFacts
from center.storage.frame_log import FrameEntry
from edgewater.model.errors import StorageError
from edgewater.model.streams import MIN_TIME_MS, EdgeId
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, Partial, QueryRef, SliceClose
from tests.center.kept_frames import facts_of_frame, rows_of_frame

REF = QueryRef("downloads_by_url", 3)
KEY = "downloads_by_url@3"


def make_synopsis(*sizes: int, column: str = "url", url: str = "/a") -> bytes:
    from edgewater.synopses import function_named

    function = function_named("sum")
    assert function is not None
    grouped = GroupedAggregate({column: pa.string()}, {"bytes": function.make((), pa.int64())})
    grouped.update([pa.array([url] * len(sizes))], {"bytes": pa.array(sizes, pa.int64())}, len(sizes))
    return grouped.to_bytes()


def entry(position: int, edge: str = "jfk") -> FrameEntry:
    return FrameEntry(REF, position, EdgeId(edge), "i1", position + 40, 7, "segment", 0, 10, 123, 5_000 + position)


def frame_rows(position: int, *partials: Partial) -> list[FrameRow]:
    return rows_of_frame(entry(position), FrameBody(0, partials))


def damaged_rows(position: int) -> list[FrameRow]:
    return [*rows_of_positions([(KEY, position)]), row_of_damage(KEY, position, "torn")]


def facts(*bodies: FrameBody) -> dict[str, dict[int, FrameFacts]]:
    """Of the frames at the first positions."""
    return {KEY: {n: facts_of_frame(entry(n), body) for n, body in enumerate(bodies, 1)}}


def total(payload: bytes) -> int:
    return int(GroupedAggregate.from_bytes(payload).query("bytes").value.sum())


def test_rows_come_out_of_arrow_as_they_went_in() -> None:
    rows = [
        *frame_rows(1, Partial(1000, make_synopsis(5))),
        row_of_damage(KEY, 2, "é"),
    ]

    batch = to_batch(rows)

    assert batch.schema == ROW_SCHEMA
    assert from_table(batch) == rows


def test_partials_of_one_slice_are_merged_and_others_are_not() -> None:
    rows = [
        *frame_rows(1, Partial(0, make_synopsis(1)), Partial(0, make_synopsis(10))),
        *frame_rows(2, Partial(0, make_synopsis(2)), Partial(1000, make_synopsis(100))),
    ]

    merged = [r for r in merge_rows(rows) if r.kind is RowKind.PARTIAL]

    assert {r.slice_start_ms: total(r.payload) for r in merged} == {0: 13, 1000: 100}


def test_a_batch_that_is_run_again_has_nothing_new() -> None:
    rows = [*frame_rows(1, Partial(0, make_synopsis(1))), *frame_rows(2, Partial(0, make_synopsis(2)))]
    other = [replace(row, query="other@1") for row in rows]

    assert unapplied([*rows, *other], {KEY: 2, "other@1": 0}) == other


def test_a_query_with_some_news_keeps_all_its_rows_for_the_store_to_refuse() -> None:
    # Merged, a partial stands at the first of its positions: dropped by that, what is new in it would be lost.
    merged = merge_rows([*frame_rows(1, Partial(0, make_synopsis(1))), *frame_rows(2, Partial(0, make_synopsis(2)))])

    assert unapplied(merged, {KEY: 1}) == merged


def test_a_corrupt_partial_costs_its_own_data_only() -> None:
    rows = [
        *frame_rows(1, Partial(0, make_synopsis(1))),
        *frame_rows(2, Partial(0, b"EWS1 nothing")),
        *frame_rows(3, Partial(0, make_synopsis(4))),
    ]

    merged = merge_rows(rows)

    assert [(total(r.payload), r.partials) for r in merged if r.kind is RowKind.PARTIAL] == [(5, 2)]
    (refused,) = [r for r in merged if r.kind is RowKind.REFUSED]
    assert (refused.position, refused.slice_start_ms) == (2, 0)
    assert b"synops" in refused.payload


@pytest.mark.parametrize("first", [0, 1, 2])
def test_partials_that_do_not_merge_stay_apart_wherever_they_come(first: int) -> None:
    good = [make_synopsis(1), make_synopsis(4)]
    partials = [*good[:first], make_synopsis(7, column="host"), *good[first:]]

    merged = merge_rows(row for n, p in enumerate(partials, 1) for row in frame_rows(n, Partial(0, p)))

    found = {(total(r.payload), r.partials) for r in merged if r.kind is RowKind.PARTIAL}
    assert found == {(5, 2), (7, 1)}
    (alone,) = [r for r in merged if r.kind is RowKind.PARTIAL and r.partials == 1]
    assert alone.position == first + 1


def test_a_lone_corrupt_partial_is_refused_too() -> None:
    merged = merge_rows(frame_rows(1, Partial(0, b"rubbish")))

    assert [r.kind for r in merged] == [RowKind.READ, RowKind.REFUSED]


def test_the_summary_of_a_frame_has_its_facts() -> None:
    close = SliceClose(1000, 12, 3)
    body = FrameBody(2000, (Partial(2000, make_synopsis(1)), Partial(1000, make_synopsis(1))), (close,))

    (fact,) = to_micro_batch(rows_of_frame(entry(1), body), facts(body)).summaries

    assert (fact.query, fact.position, fact.edge, fact.incarnation) == (REF, 1, "jfk", "i1")
    assert (fact.through_ms, fact.closes, fact.touched) == (2000, (close,), (1000, 2000))
    assert (fact.wire_bytes, fact.received_at_ms) == (123, 5_001)


def test_a_key_that_two_tasks_have_merged_becomes_two_deltas() -> None:
    bodies = [FrameBody(0, (Partial(0, make_synopsis(i)),)) for i in (1, 2)]
    tasks = [merge_rows(rows_of_frame(entry(i), bodies[i - 1])) for i in (2, 1)]

    batch = to_micro_batch((row for rows in tasks for row in rows), facts(*bodies))

    assert {(total(delta.synopsis), delta.position) for delta in batch.deltas} == {(1, 1), (2, 2)}
    assert [f.position for f in batch.summaries] == [1, 2]
    assert batch.through == {KEY: 2}


def test_a_damaged_frame_counts_as_read_and_its_facts_are_not_used() -> None:
    rows = [*frame_rows(1), *damaged_rows(2)]

    batch = to_micro_batch(rows, facts(FrameBody(0), FrameBody(1000, closes=(SliceClose(0, 5, 0),))))

    assert batch.through == {KEY: 2}
    assert [(r.kind, r.position) for r in batch.skipped] == [(RowKind.DAMAGED, 2)]
    damaged = batch.summaries[1]
    (lost,) = damaged.losses
    assert (lost.source, lost.reason) == ("frames", "frame-damaged"), "what it had is lost to its windows"
    assert (damaged.through_ms, damaged.closes, damaged.edge) == (MIN_TIME_MS, (), "jfk")


def test_frames_that_left_the_index_after_they_were_read_are_not_applied() -> None:
    with pytest.raises(StorageError, match="the frame at 2"):
        to_micro_batch([*frame_rows(1), *frame_rows(2)], facts(FrameBody(0)))


def test_a_refused_partial_is_stated_as_a_loss_of_its_own_frame() -> None:
    bodies = [FrameBody(0, (Partial(0, synopsis),)) for synopsis in (make_synopsis(1), b"rubbish")]
    rows = [row for n, body in enumerate(bodies, 1) for row in rows_of_frame(entry(n), body)]

    batch = to_micro_batch(merge_rows(rows), facts(*bodies))

    assert [[(x.reason, x.from_ms) for x in s.losses] for s in batch.summaries] == [[], [("partial-refused", 0)]]


def test_merges_of_two_tasks_that_do_not_fit_are_deltas_of_their_own() -> None:
    good, other = make_synopsis(1), make_synopsis(7, column="host")
    tasks = [
        merge_rows([*frame_rows(1, Partial(0, good)), *frame_rows(2, Partial(0, good))]),
        merge_rows(frame_rows(3, Partial(0, other))),
    ]

    batch = to_micro_batch((row for rows in tasks for row in rows), facts(*[FrameBody(0)] * 3))

    assert {(total(d.synopsis), d.position) for d in batch.deltas} == {(2, None), (7, 3)}


@pytest.mark.parametrize("fault", [ValueError, RecursionError, MemoryError, OverflowError])
def test_whatever_a_partial_raises_costs_only_that_partial(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = GroupedAggregate.from_bytes

    def faulty(partial: bytes) -> GroupedAggregate:
        if partial == b"bomb":
            raise fault("no decoder foresees this")
        return read(partial)

    monkeypatch.setattr(GroupedAggregate, "from_bytes", staticmethod(faulty))
    merged = merge_rows([*frame_rows(1, Partial(0, make_synopsis(1))), *frame_rows(2, Partial(0, b"bomb"))])

    assert [total(r.payload) for r in merged if r.kind is RowKind.PARTIAL] == [1]
    (refused,) = [r for r in merged if r.kind is RowKind.REFUSED]
    assert refused.payload.startswith(fault.__name__.encode())


def test_a_gap_between_consumed_and_read_positions_is_found() -> None:
    rows = [*frame_rows(3), *frame_rows(6), *damaged_rows(4)]

    assert gaps(rows, {KEY: 2}) == {KEY: [(5, 5)]}
    assert gaps(rows, {}) == {KEY: [(1, 2), (5, 5)]}
    assert gaps([*rows, *frame_rows(5)], {KEY: 2}) == {}


def test_successive_positions_are_one_row() -> None:
    read = rows_of_positions([("a@1", 1), ("a@1", 2), ("a@1", 4), ("b@1", 5)])

    assert [(row.query, row.position, row.last) for row in read] == [("a@1", 1, 2), ("a@1", 4, 4), ("b@1", 5, 5)]
