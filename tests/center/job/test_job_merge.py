from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest

from center.job.batch_applier import to_batch
from center.job.loop_core import positions_of
from center.job.merge import SkipKind, Skipped, SlicePartial, merge_partials
from center.storage.frame_log import FrameEntry
from edgewater.base.errors import StorageError, SynopsisError
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, Partial, QueryRef, SliceClose
from tests.center.kept_frames import facts_of_frame, partials_of_frame

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


FRAMES = [(KEY, entry(n)) for n in (1, 2)]


def partials(position: int, *of_frame: Partial) -> list[SlicePartial]:
    return partials_of_frame(entry(position), FrameBody(0, of_frame))


def facts(*bodies: FrameBody) -> dict[str, dict[int, bytes]]:
    """Of the frames at the first positions."""
    return {KEY: {n: facts_of_frame(body) for n, body in enumerate(bodies, 1)}}


def total(payload: bytes) -> int:
    return int(GroupedAggregate.from_bytes(payload).query("bytes").value.sum())


def test_partials_of_one_slice_are_merged_and_others_are_not() -> None:
    read = [
        *partials(1, Partial(0, make_synopsis(1)), Partial(0, make_synopsis(10))),
        *partials(2, Partial(0, make_synopsis(2)), Partial(1000, make_synopsis(100))),
    ]

    merged, refused = merge_partials(read)

    assert {(p.slice_start_ms, p.position): total(p.data) for p in merged} == {(0, None): 13, (1000, 2): 100}
    assert refused == []


def test_a_corrupt_partial_costs_its_own_data_only() -> None:
    read = [
        *partials(1, Partial(0, make_synopsis(1))),
        *partials(2, Partial(0, b"EWS1 nothing")),
        *partials(3, Partial(0, make_synopsis(4))),
    ]

    merged, refused = merge_partials(read)

    assert [(total(p.data), p.position) for p in merged] == [(5, None)]
    assert [(r.kind, r.position, r.slice_start_ms) for r in refused] == [(SkipKind.REFUSED, 2, 0)]
    assert "synops" in refused[0].reason


@pytest.mark.parametrize("first", [0, 1, 2])
def test_partials_that_do_not_merge_stay_apart_wherever_they_come(first: int) -> None:
    good = [make_synopsis(1), make_synopsis(4)]
    read = [*good[:first], make_synopsis(7, column="host"), *good[first:]]

    merged, _ = merge_partials(p for n, part in enumerate(read, 1) for p in partials(n, Partial(0, part)))

    assert {(total(p.data), p.position) for p in merged} == {(5, None), (7, first + 1)}


def test_a_lone_corrupt_partial_is_refused_too() -> None:
    merged, (refused,) = merge_partials(partials(1, Partial(0, b"rubbish")))

    assert merged == [] and refused.kind is SkipKind.REFUSED


def test_the_summary_of_a_frame_has_its_facts() -> None:
    close = SliceClose(1000, 12, 3)
    body = FrameBody(2000, (Partial(2000, make_synopsis(1)), Partial(1000, make_synopsis(1))), (close,))

    (fact,) = to_batch(FRAMES[:1], partials_of_frame(entry(1), body), [], facts(body)).summaries

    assert (fact.query, fact.position, fact.edge, fact.incarnation) == (REF, 1, "jfk", "i1")
    assert (fact.through_ms, fact.closes, fact.touched) == (2000, (close,), (1000, 2000))
    assert (fact.wire_bytes, fact.received_at_ms) == (123, 5_001)


def test_a_key_that_two_tasks_have_merged_becomes_two_deltas() -> None:
    bodies = [FrameBody(0, (Partial(0, make_synopsis(i)),)) for i in (1, 2)]
    tasks = [merge_partials(partials_of_frame(entry(i), bodies[i - 1]))[0] for i in (2, 1)]

    batch = to_batch(FRAMES, (p for merged in tasks for p in merged), [], facts(*bodies))

    assert {(total(delta.data), delta.position) for delta in batch.deltas} == {(1, 1), (2, 2)}
    assert [f.position for f in batch.summaries] == [1, 2]
    assert batch.through == {KEY: 2}


def test_a_damaged_frame_counts_as_read_and_its_facts_are_not_used() -> None:
    damage = Skipped(KEY, 2, SkipKind.DAMAGED, "torn")

    batch = to_batch(FRAMES, [], [damage], facts(FrameBody(0), FrameBody(1000, closes=(SliceClose(0, 5, 0),))))

    assert batch.through == {KEY: 2} and batch.skipped == (damage,)
    damaged = batch.summaries[1]
    (lost,) = damaged.losses
    assert (lost.source, lost.reason) == ("frames", "frame-damaged"), "what it had is lost to its windows"
    assert (damaged.through_ms, damaged.closes, damaged.edge) == (MIN_TIME_MS, (), "jfk")


def test_frames_that_left_the_index_after_they_were_read_are_not_applied() -> None:
    with pytest.raises(StorageError):
        to_batch(FRAMES, [], [], facts(FrameBody(0)))


def test_a_refused_partial_is_stated_as_a_loss_of_its_own_frame() -> None:
    bodies = [FrameBody(0, (Partial(0, synopsis),)) for synopsis in (make_synopsis(1), b"rubbish")]
    merged, refused = merge_partials(p for n, b in enumerate(bodies, 1) for p in partials_of_frame(entry(n), b))

    batch = to_batch(FRAMES, merged, refused, facts(*bodies))

    assert [[(x.reason, x.from_ms) for x in s.losses] for s in batch.summaries] == [[], [("partial-refused", 0)]]


@pytest.mark.parametrize("fault", [ValueError, RecursionError, OverflowError])
def test_whatever_a_partial_raises_costs_only_that_partial(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupedAggregate, "from_bytes", staticmethod(faulty(fault("no decoder foresees this"))))
    merged, (refused,) = merge_partials([*partials(1, Partial(0, make_synopsis(1))), *partials(2, Partial(0, b"bomb"))])

    assert [total(p.data) for p in merged] == [1]
    assert refused.reason.startswith(fault.__name__)


@pytest.mark.parametrize("fault", [MemoryError("short"), SynopsisError("cannot be read")])
def test_a_partial_that_does_not_fit_into_memory_is_not_refused(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoders turn exceptions into errors of their own."""
    if isinstance(fault, SynopsisError):
        fault.__cause__ = MemoryError("short")
    monkeypatch.setattr(GroupedAggregate, "from_bytes", staticmethod(faulty(fault)))
    with pytest.raises(MemoryError):
        merge_partials([*partials(1, Partial(0, make_synopsis(1))), *partials(2, Partial(0, b"bomb"))])


def faulty(fault: Exception) -> Callable[[bytes], GroupedAggregate]:
    read = GroupedAggregate.from_bytes

    def from_bytes(partial: bytes) -> GroupedAggregate:
        if partial == b"bomb":
            raise fault
        return read(partial)

    return from_bytes


def test_successive_positions_are_one_range() -> None:
    frames = [(key, replace(entry(n), position=n)) for key, n in (("a@1", 1), ("a@1", 2), ("a@1", 4), ("b@1", 5))]

    assert positions_of(frames) == {"a@1": [(0, 2), (3, 4)], "b@1": [(4, 5)]}
