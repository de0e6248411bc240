from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sqlalchemy import event

from center.catalog import Catalog
from center.ledger import AT_ONCE_MS, EdgesChanged, FramesMerged, Ledger, QueryDeleted
from center.results import ResultStore, writes
from center.results import schema as t
from center.results.late_records import MAX_RANGES, late_by_window
from center.results.writes import MAX_SIDE_BY_SIDE
from center.storage.database import open_engine
from edgewater.answers import NO_LATE, Cause, Phase
from edgewater.answers.uniting import MAX_DEVICES
from edgewater.base.errors import Conflict, IncompatibleState, InvalidRequest, NotFound, StorageError
from edgewater.base.streams import MAX_CONSTANT
from edgewater.model.measure import Measure
from edgewater.runtime.state_release import RELEASE
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.encoding import codec
from edgewater.wire import DroppedRecords, DropReason, QueryRef
from tests.center.results_world import KEY, MINUTE, REF, Job, answers_after, edge_record, partial, registered, total
from tests.center.snapshots import snapshot
from tests.examples import examples
from tests.insides import engine_of
from tests.refusals import refused

OpenJob = Callable[..., Job]


@pytest.fixture
def job(open_job: OpenJob) -> Job:
    return open_job("a", "b", lateness="10m")


# Answers


def test_an_answer_is_the_merge_of_all_batches_of_its_window(job: Job) -> None:
    assert job.batch(job.frame("a", 30_000, m0=1), job.frame("a", 30_000, m0=2)) == []
    assert job.batch(job.frame("a", MINUTE, m0=4)) == []
    (emission,) = job.batch(job.frame("b", MINUTE, m0=8, m1=16), now_ms=MINUTE + 40)
    record = job.store.latest(REF)
    assert record is not None
    assert total(record.synopsis) == 15
    assert (record.answer_id, record.query, record.window_start_ms, record.window_end_ms) == (1, REF, 0, MINUTE)
    assert (record.revision, record.phase, record.answered_at_ms, record.staleness_ms) == (
        1,
        "complete",
        MINUTE + 40,
        40,
    )
    assert record.facts == emission.facts
    assert job.store.consumed() == {KEY: 4}


def test_sliding_windows_share_their_slices(open_job: OpenJob) -> None:
    job = open_job("a", window={"sliding": "3m", "every": "1m"})
    job.batch(job.frame("a", 0, m0=1, m1=2, m2=4), job.frame("a", 6 * MINUTE, m3=8))
    records, _ = job.store.windows(REF, None, None, 100)
    assert [(r.window_start_ms // MINUTE, total(r.synopsis)) for r in records] == [
        (-2, 1), (-1, 3), (0, 7), (1, 14), (2, 12), (3, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(("read_bytes", "most_reads"), [(16 << 20, 6), (1, 200)])
def test_the_deltas_of_many_windows_are_read_together_within_a_bound(
    open_job: OpenJob, monkeypatch: pytest.MonkeyPatch, read_bytes: int, most_reads: int
) -> None:
    monkeypatch.setattr(writes, "READ_BYTES", read_bytes)
    job, reads = open_job("a", window={"sliding": "8m", "every": "1m"}), list[str]()
    frames = [job.frame("a", 0, **{f"m{n}": n + 1}) for n in range(0, 150, 20)]
    job.batch(*frames)
    event.listen(engine_of(job.store), "before_cursor_execute", lambda _c, _cursor, sql, *_: reads.append(sql))
    job.batch(job.frame("a", 160 * MINUTE))
    windows = job.store.windows(REF, None, None, 1_000)[0]
    values = {n * MINUTE: n + 1 for n in range(0, 150, 20)}
    expected = [sum(v for at, v in values.items() if 0 <= at - w.window_start_ms < 8 * MINUTE) for w in windows]
    assert [total(w.synopsis) for w in windows] == [value or None for value in expected]
    assert len(windows) >= len(values) * 8
    assert 0 < sum("given" in sql and "synopsis" in sql for sql in reads) <= most_reads


def test_a_revision_leaves_the_one_before_as_it_was(job: Job) -> None:
    job.batch(job.frame("a", MINUTE, m0=1), job.frame("b", MINUTE, m0=2))
    first = job.store.answer(REF, 0, 1)
    job.batch(job.frame("a", MINUTE, m0=4), now_ms=MINUTE)
    assert job.store.revisions(REF, 0) == [1, 2]
    assert job.store.answer(REF, 0, 1) == first
    assert total(first.synopsis) == 3
    assert total(job.store.answer(REF, 0, 2).synopsis) == 7


def test_a_window_without_data_is_answered_without_a_synopsis(open_job: OpenJob) -> None:
    job = open_job("a", budget={"staleness": "2s"})
    (emission,) = job.store.tick(job.ledger, [], MINUTE + 2000)
    record = job.store.latest(REF)
    assert record is not None
    assert (record.phase, record.synopsis) == (Phase.EARLY, None)
    assert emission.phase is Phase.EARLY


def test_data_for_a_final_window_is_never_applied(open_job: OpenJob) -> None:
    job = open_job("a", "b", window={"sliding": "2m", "every": "1m"})
    job.batch(job.frame("a", 2 * MINUTE, m0=1, m1=2), job.frame("b", 2 * MINUTE))
    final = job.store.answer(REF, 0, 1)
    assert final.phase is Phase.FINAL
    assert job.batch(job.frame("a", 2 * MINUTE, m0=100, m1=4)) == []
    assert job.store.revisions(REF, 0) == [1]
    assert job.store.answer(REF, 0, 1) == final
    (emission,) = job.batch(job.frame("a", 3 * MINUTE), job.frame("b", 3 * MINUTE))
    assert total(job.store.answer(REF, MINUTE, 1).synopsis) == 6, "minute 1 still counts in the window at 1"
    assert emission.facts.observed == 2
    assert not job.store.answer(REF, MINUTE, 1).facts.by_cause(Cause.AFTER_FINAL)
    assert job.store.late_records(REF) == {(REF, "a", "after-final"): 2}


@pytest.mark.parametrize("at_once", [True, False])
def test_records_dropped_before_their_window_has_an_answer_are_stated_in_it(open_job: OpenJob, at_once: bool) -> None:
    job = open_job("a", "b", budget={"staleness": "2s"})
    job.store.tick(job.ledger, [], MINUTE + 2000)
    assert job.store.revisions(REF, 0) == [1], "a later window has an answer already"
    fact, deltas = job.frame("a", 0, **{"m-1": 1})
    first = replace(fact, dropped=(DroppedRecords(-MINUTE, DropReason.TOO_LATE, 3),)), deltas
    second = job.frame("b", 0)
    for frames in ([first, second],) if at_once else ([first], [second]):
        job.batch(*frames)
    facts = job.store.answer(REF, -MINUTE, 1).facts
    assert (facts.observed, facts.records_by(Cause.AFTER_FINAL).total()) == (1, 3)


def test_ranges_of_rejected_records_with_one_start_are_kept_apart_and_bounded(open_job: OpenJob) -> None:
    job = open_job("a", lateness="10m")
    for n in range(3 * MAX_RANGES):
        fact, deltas = job.frame("a", 0)
        lost = DroppedRecords(0, DropReason.MALFORMED, 2, (n + 1) * MINUTE)
        job.batch((replace(fact, dropped=(lost,)), deltas), now_ms=n)
        with engine_of(job.store).connect() as connection:
            rows = connection.execute(t.late_slices.select()).all()
        assert sum(row.records for row in rows) == 2 * (n + 1)
        assert 1 <= len(rows) <= MAX_RANGES and max(row.slice_end_ms for row in rows) == (n + 1) * MINUTE
    (emission,) = [e for e in job.batch(job.frame("a", MINUTE, m0=1)) if e.window_start_ms == 0]
    assert emission.phase is Phase.COMPLETE
    assert job.store.answer(REF, 0, 1).facts.records_by(Cause.REJECTED).total() == 6 * MAX_RANGES
    assert job.ledger.states_late(REF) and job.ledger.after_final(REF) == 0
    again = Ledger()
    job.store.load_ledger(again)
    assert again.states_late(REF)


def test_rejected_records_of_devices_are_kept_apart_whatever_the_length_of_their_names(open_job: OpenJob) -> None:
    job = open_job("a", lateness="10m")
    only = {json.dumps({"host": end * MAX_CONSTANT}) for end in ("x", "\u00e9")}
    for _ in range(2):
        fact, deltas = job.frame("a", 0)
        dropped = tuple(DroppedRecords(0, DropReason.WRONG_TYPE, 2, MINUTE, only=each) for each in only)
        job.batch((replace(fact, dropped=dropped), deltas))
    job.batch(job.frame("a", MINUTE, m0=1))
    stated = job.store.answer(REF, 0, 1).facts.by_cause(Cause.REJECTED)
    assert {json.dumps(dict(each.only)): each.records for each in stated} == dict.fromkeys(only, 4)


def test_the_devices_that_a_window_tells_apart_are_bounded(open_job: OpenJob) -> None:
    job, each = open_job("a", window={"sliding": "10m", "every": "1m"}), MAX_DEVICES // 10 + 1
    for at in range(10):
        fact, deltas = job.frame("a", 0)
        devices = [f'{{"host":{each * at + n}}}' for n in range(each)]
        dropped = (DroppedRecords(at * MINUTE, DropReason.WRONG_TYPE, 1, (at + 1) * MINUTE, only=o) for o in devices)
        job.batch((replace(fact, dropped=tuple(dropped)), deltas))
    windows = [(-MINUTE, 9 * MINUTE), (0, 10 * MINUTE)]
    with engine_of(job.store).connect() as connection:
        most, all_of_them = late_by_window(connection, KEY, windows).values()
    assert len(most) == 9 * each and {kind: late.records for kind, late in all_of_them.items()} == {
        "wrong-type": 10 * each
    }


def test_late_and_rejected_records_are_found_by_window_whatever_the_length_of_their_ranges(job: Job) -> None:
    rng = np.random.default_rng(7)
    starts, lengths = rng.integers(0, 60, 80) * MINUTE, rng.choice([1, 1, 2, 5, 40], 80) * MINUTE
    rows = {(int(s), int(s + n)): int(rng.integers(1, 9)) for s, n in zip(starts, lengths, strict=True)}
    with engine_of(job.store).begin() as connection:
        for (start, end), n in rows.items():
            values = {"slice_start_ms": start, "slice_end_ms": end, "through_ms": 70 * MINUTE, "records": n}
            connection.execute(t.late_slices.insert().values(query=KEY, reason="malformed", **values))
        windows = [(at * MINUTE, (at + size) * MINUTE) for at in range(-3, 100) for size in (1, 7)]
        for size in (1, 7):
            each = [w for w in windows if w[1] - w[0] == size * MINUTE]
            found = late_by_window(connection, KEY, each)
            for start, end in each:
                expected = sum(n for (a, b), n in rows.items() if a < end and b > start and end <= 70 * MINUTE)
                assert found.get(start, {}).get("malformed", NO_LATE).records == expected


def test_slices_that_only_this_answer_needs_are_merged_with_stored_ones_and_not_stored(open_job: OpenJob) -> None:
    job, written = open_job("a", window={"sliding": "2m", "every": "1m"}), list[str]()
    job.batch(job.frame("a", 0, m0=1, m1=2))
    event.listen(engine_of(job.store), "before_cursor_execute", lambda _c, _cursor, sql, *_: written.append(sql))
    job.batch(job.frame("a", 0, m0=4), job.frame("a", 2 * MINUTE, m0=8))
    assert [total(job.store.answer(REF, start, 1).synopsis) for start in (-MINUTE, 0)] == [13, 15]
    assert not any("INSERT INTO deltas" in sql for sql in written)
    job.batch(job.frame("a", 3 * MINUTE, m1=16, m3=32))
    assert total(job.store.answer(REF, MINUTE, 1).synopsis) == 18
    assert any("INSERT INTO deltas" in sql for sql in written), "the next window needs the last slice"
    assert job.count(t.deltas) == 1


def test_slices_of_final_windows_are_dropped(open_job: OpenJob) -> None:
    job = open_job("a")
    for minute in range(30):
        job.batch(job.frame("a", minute * MINUTE, **{f"m{minute}": 1}))
    assert job.count(t.deltas) == 1
    assert job.count(t.answers) == 29


def test_deltas_of_a_slice_are_merged_when_there_are_too_many(job: Job) -> None:
    for i in range(3 * MAX_SIDE_BY_SIDE):
        job.batch(job.frame("a", 0, m0=1 << i))
        assert job.count(t.deltas) <= MAX_SIDE_BY_SIDE
    job.batch(job.frame("a", MINUTE), job.frame("b", MINUTE))
    record = job.store.latest(REF)
    assert record is not None
    assert total(record.synopsis) == (1 << 3 * MAX_SIDE_BY_SIDE) - 1


# Exactly once


def test_a_batch_that_is_applied_again_changes_nothing(job: Job) -> None:
    frames = [job.frame("a", MINUTE, m0=1), job.frame("b", MINUTE, m0=2)]
    assert len(job.batch(*frames)) == 1
    before, state = job.contents(), snapshot(job.ledger, REF)
    assert job.batch(*frames) == []
    after = job.contents()
    for renewed in ("result_counters", "leases"):
        del before[renewed], after[renewed]
    assert after == before
    assert snapshot(job.ledger, REF) == state


def test_a_batch_that_is_applied_again_after_a_restart_changes_nothing(open_job: OpenJob, job: Job) -> None:
    frames = [job.frame("a", MINUTE, m0=1), job.frame("b", MINUTE, m0=2)]
    job.batch(*frames)
    again = open_job("a", "b", lateness="10m")
    assert again.batch(*frames) == []
    assert again.store.revisions(REF, 0) == [1]
    (emission,) = again.batch((replace(frames[0][0], position=3), frames[0][1]), now_ms=MINUTE)
    assert emission.revision == 2
    assert total(again.store.answer(REF, 0, 2).synopsis) == 4


def test_a_batch_that_was_applied_in_part_is_refused(job: Job) -> None:
    old, new = job.frame("a", 0, m0=1), job.frame("a", 0, m0=2)
    job.batch(old)
    before = job.contents()
    with pytest.raises(Conflict):
        job.batch(old, new)
    assert job.contents() == before


TABLES = ("deltas", "ledger_queries", "ledger_entries", "answers", "shipped", "consumed")


@pytest.mark.parametrize("table", TABLES)
def test_a_failure_in_mid_transaction_leaves_store_and_ledger_as_they_were(job: Job, table: str) -> None:
    job.batch(job.frame("a", MINUTE, m0=1, m1=1))
    before, state = job.contents(), snapshot(job.ledger, REF)
    frames = [job.frame("b", MINUTE, m0=2, m1=2), job.frame("a", MINUTE, m0=4)]
    broken = True

    def refuse(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if broken and statement.startswith(f"INSERT INTO {table}"):
            raise OSError("the disk is gone")

    event.listen(engine_of(job.store), "before_cursor_execute", refuse)
    with pytest.raises(OSError):
        job.batch(*frames)
    assert snapshot(job.ledger, REF) == state
    assert job.contents() == before
    broken = False
    (emission,) = job.batch(*frames)
    assert (emission.window_start_ms, emission.revision, emission.facts.observed) == (0, 1, 3)
    assert total(job.store.answer(REF, 0, 1).synopsis) == 7


def test_a_commit_that_fails_leaves_the_ledger_as_it_was(job: Job) -> None:
    state = snapshot(job.ledger, REF)
    failures = [OSError("no space left on device")]

    def refuse(_conn: Any) -> None:
        if failures:
            raise failures.pop()

    event.listen(engine_of(job.store), "commit", refuse)
    frame = job.frame("a", MINUTE, m0=1)
    with pytest.raises(OSError):
        job.batch(frame)
    assert snapshot(job.ledger, REF) == state
    job.batch(frame)
    assert job.store.consumed() == {KEY: 1}


def test_a_ledger_that_cannot_be_loaded_again_at_once_is_loaded_before_the_next_batch(job: Job) -> None:
    state = snapshot(job.ledger, REF)
    broken = True

    def refuse(*_: Any) -> None:
        if broken:
            raise OSError("the server is gone")

    frames = [job.frame("a", MINUTE, m0=1), job.frame("b", MINUTE, m0=2)]
    event.listen(engine_of(job.store), "commit", refuse)
    for _ in range(2):
        with pytest.raises(OSError):
            job.batch(*frames)
        assert job.ledger.next_deadline() == AT_ONCE_MS
    broken = False
    assert job.store.tick(job.ledger, [], 0) == []
    assert snapshot(job.ledger, REF) == state
    (emission,) = job.batch(*frames)
    assert (emission.revision, total(job.store.answer(REF, 0, 1).synopsis)) == (1, 3)


def test_a_commit_whose_confirmation_is_lost_is_noticed_and_not_repeated(url: str, job: Job) -> None:
    frames = [job.frame("a", MINUTE, m0=1), job.frame("b", MINUTE, m0=2)]
    real = ResultStore(url)
    real.load_ledger(shadow := Ledger())
    # Another connection has written what this job believes to have failed.
    facts, deltas = [f for f, _ in frames], [d for _, ds in frames for d in ds]
    real.apply(shadow, deltas, facts, {KEY: 2}, 0)
    with pytest.raises(Conflict):
        job.batch(*frames)
    assert job.batch(*frames) == []
    assert snapshot(job.ledger, REF) == snapshot(shadow, REF)
    assert job.store.revisions(REF, 0) == [1]
    real.close()


def test_a_delta_that_no_frame_touches_is_refused(job: Job) -> None:
    fact, deltas = job.frame("a", 0, m0=1)
    stray = replace(deltas[0], slice_start_ms=MINUTE)
    with pytest.raises(StorageError):
        job.store.apply(job.ledger, [stray], [fact], {KEY: 1}, 0)


def test_a_partial_of_another_shape_is_refused_on_arrival(job: Job) -> None:
    job.batch(job.frame("a", 0, m0=1))
    measure = Measure.parse("s", "sum(x)")
    floats = GroupedAggregate({}, {"s": measure.function.make((), pa.float64())}).to_bytes()
    fact, deltas = job.frame("b", 0, m1=2)
    foreign = replace(deltas[0], data=floats, position=fact.position)
    job.store.apply(job.ledger, [foreign, *deltas], [fact], {KEY: fact.position}, 0)
    (refused,) = job.store.take_refused()
    assert (refused.delta.query, refused.delta.slice_start_ms) == (KEY, MINUTE)
    assert "float_sum" in refused.reason and "integer_sum" in refused.reason
    assert job.store.consumed() == {KEY: fact.position}, "the rest of its frame counts"
    assert job.count(t.deltas) == 2


def huge(value: int) -> bytes:
    """A partial that says it has almost all the records that can be counted."""
    message = codec.unseal(partial(value))
    message.records = (1 << 64) - 1
    return codec.seal(message)


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge fails where the records of all partials exceed what can be counted, as it did in an earlier release."""
    one_by_one, stacked = GroupedAggregate.merge_all, GroupedAggregate._add_messages

    def check(self: GroupedAggregate, records: Iterable[int]) -> None:
        if self.records + sum(records) > (1 << 64) - 1:
            raise ValueError("Value out of range")

    def merge_all(self: GroupedAggregate, others: Any) -> Any:
        check(self, (other.records for other in others))
        return one_by_one(self, others)

    def add_messages(self: GroupedAggregate, names: Any, messages: Any) -> None:
        check(self, (message.records for message in messages))
        stacked(self, names, messages)

    monkeypatch.setattr(GroupedAggregate, "merge_all", merge_all)
    monkeypatch.setattr(GroupedAggregate, "_add_messages", add_messages)


@pytest.mark.usefixtures("overflowing")
def test_partials_that_merge_only_one_by_one_cost_themselves_when_their_window_is_answered(job: Job) -> None:
    job.batch(job.frame("a", 0, m0=1))
    for synopsis in (huge(5), huge(7)):
        fact, (delta,) = job.frame("b", 0, m0=3)
        job.store.apply(job.ledger, [replace(delta, data=synopsis)], [fact], {KEY: fact.position}, 0)
    assert job.store.take_refused() == []
    job.batch(job.frame("b", MINUTE, m1=9))
    (emission,) = job.batch(job.frame("a", MINUTE, m1=2))
    assert [r.delta.slice_start_ms for r in job.store.take_refused()] == [0, 0]
    record = job.store.latest(REF)
    assert record is not None and total(record.synopsis) == 1
    assert emission.facts.edges_by(Cause.MISSING) == ["a", "b"], "either may have lost records of it"
    job.batch(job.frame("b", 2 * MINUTE), job.frame("a", 2 * MINUTE))
    record = job.store.latest(REF)
    assert record is not None and (total(record.synopsis), record.facts.edges_by(Cause.MISSING)) == (11, [])


@pytest.mark.usefixtures("overflowing")
def test_many_partials_of_one_slice_of_which_some_do_not_merge_cost_only_those(job: Job) -> None:
    for n in range(12):
        fact, (delta,) = job.frame("a", 0, m0=1)
        synopsis = huge(1_000) if n in (3, 7) else delta.data
        job.store.apply(job.ledger, [replace(delta, data=synopsis)], [fact], {KEY: fact.position}, 0)
    job.batch(job.frame("b", MINUTE))
    job.batch(job.frame("a", MINUTE))
    record = job.store.latest(REF)
    assert record is not None and total(record.synopsis) == 10
    assert "partial-refused" in {loss.reason for loss in record.facts.by_cause(Cause.INPUT_LOST)}


def test_a_frame_beyond_the_batchs_end_is_refused(job: Job) -> None:
    fact, deltas = job.frame("a", 0, m0=1)
    with pytest.raises(StorageError):
        job.store.apply(job.ledger, deltas, [fact], {KEY: 0}, 0)


def test_frames_do_not_come_in_through_a_tick(job: Job) -> None:
    with pytest.raises(ValueError):
        job.store.tick(job.ledger, [FramesMerged((), 0)], 0)


def test_a_tick_that_changes_nothing_writes_nothing(job: Job) -> None:
    job.store.tick(job.ledger, [], 1)
    before = job.contents()
    job.store.tick(job.ledger, [EdgesChanged((edge_record("a"), edge_record("b")))], 2)
    assert job.contents() == before


@pytest.mark.slow
def test_a_batch_writes_no_more_of_the_ledger_than_it_touches(open_job: OpenJob) -> None:
    job = open_job("a", lateness="1d")
    for minute in range(100):
        job.batch(job.frame("a", minute * MINUTE, **{f"m{minute}": 1}))
    written: list[Any] = []

    def note(_c: Any, _cur: Any, statement: str, _parameters: Any, context: Any, _many: bool) -> None:
        if "INTO ledger_entries" in statement:
            written.extend(row["start_ms"] for row in context.compiled_parameters)

    event.listen(engine_of(job.store), "before_cursor_execute", note)
    job.batch(job.frame("a", 99 * MINUTE, m5=1))
    assert len(written) == 2
    assert set(written) == {5 * MINUTE}


COURSE = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 4), st.integers(-(2**40), 2**40), st.booleans()),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@given(COURSE)
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_answers_are_exact_however_often_the_job_is_restarted_and_batches_are_repeated(
    new_database: Callable[[], str], course: list[tuple[str, int, int, int, bool]]
) -> None:
    """Each step: an edge closes up to a minute and ships one value of a slice; perhaps a crash."""
    url = new_database()
    job = Job(url, "a", "b", lateness="1d")
    sums: dict[int, int] = {}
    frames = []
    for edge, through, minute, value, crash in course:
        frame = job.frame(edge, through * MINUTE, **{f"m{minute}": value})
        frames.append(frame)
        sums[minute] = sums.get(minute, 0) + value
        job.batch(frame)
        if crash:
            position, observed = job.position, job.observed
            job.store.close()
            job = Job(url, "a", "b", lateness="1d")
            job.position, job.observed = position, observed
            assert job.batch(*frames) == []
    job.batch(job.frame("a", 1 << 62), job.frame("b", 1 << 62))
    records, _ = job.store.windows(REF, None, None, 100)
    assert {r.window_start_ms // MINUTE: total(r.synopsis) for r in records} == sums
    assert all(r.phase is Phase.FINAL for r in records)
    assert sum(r.facts.observed for r in records) == len(course)
    job.store.close()


# Queries come and go


def test_a_deleted_querys_state_is_dropped_and_its_answers_stay(open_job: OpenJob, job: Job) -> None:
    job.batch(job.frame("a", MINUTE, m0=1, m1=1), job.frame("b", MINUTE))
    job.store.tick(job.ledger, [QueryDeleted(REF)], 0)
    assert (job.count(t.deltas), job.count(t.ledger_entries)) == (0, 0)
    assert job.store.latest(REF) is not None
    late = job.frame("a", 2 * MINUTE, m1=1)
    assert job.batch(late) == []
    assert (job.count(t.deltas), job.store.consumed()) == (0, {KEY: 3})
    ledger = Ledger()
    job.store.load_ledger(ledger)
    assert ledger.is_deleted(REF) and ledger.queries() == []


def test_frames_of_a_query_that_the_ledger_does_not_know_fail_the_batch(job: Job) -> None:
    other = Job.__new__(Job)
    other.__dict__.update(job.__dict__, ref=QueryRef("unknown", 1))
    before = job.contents()
    with pytest.raises(NotFound):
        other.batch(other.frame("a", 0, m0=1))
    assert job.contents() == before


# Reading


def four_windows(open_job: OpenJob) -> Job:
    job = open_job("a", lateness="1d")
    job.batch(job.frame("a", 4 * MINUTE, m0=1, m1=2, m2=4, m3=8))
    job.batch(job.frame("a", 4 * MINUTE, m1=16), now_ms=MINUTE)
    return job


def test_windows_are_listed_in_pages_with_their_newest_revisions(open_job: OpenJob) -> None:
    store = four_windows(open_job).store
    first, cursor = store.windows(REF, None, None, 3)
    assert [(r.window_start_ms // MINUTE, r.revision) for r in first] == [(0, 1), (1, 2), (2, 1)]
    rest, end = store.windows(REF, None, None, 3, cursor)
    assert [r.window_start_ms // MINUTE for r in rest] == [3]
    assert end is None
    assert store.windows(REF, None, None, 4)[1] is None


def test_a_range_of_windows_includes_its_start_and_excludes_its_end(open_job: OpenJob) -> None:
    records, _ = four_windows(open_job).store.windows(REF, MINUTE, 3 * MINUTE, 10)
    assert [r.window_start_ms // MINUTE for r in records] == [1, 2]


def test_the_last_windows_are_found_by_the_start_of_the_first_of_them(open_job: OpenJob) -> None:
    store = four_windows(open_job).store
    assert [store.last(REF, n) for n in (1, 2, 4, 1000)] == [3 * MINUTE, 2 * MINUTE, 0, 0]
    assert store.last(QueryRef("none", 1), 3) is None


def test_a_foreign_cursor_is_refused(job: Job) -> None:
    with refused(InvalidRequest, "cursor"):
        job.store.windows(REF, None, None, 3, "x")


def test_the_windows_at_a_time_are_those_that_contain_it(open_job: OpenJob) -> None:
    job = open_job("a", window={"sliding": "3m", "every": "1m"})
    job.batch(job.frame("a", 9 * MINUTE, **{f"m{m}": 1 for m in range(6)}))
    assert [r.window_start_ms // MINUTE for r in job.store.at(REF, 3 * MINUTE)] == [1, 2, 3]
    assert [r.window_start_ms // MINUTE for r in job.store.at(REF, 3 * MINUTE - 1)] == [0, 1, 2]
    assert job.store.at(REF, 100 * MINUTE) == []
    assert job.store.at(QueryRef("none", 1), 0) == []


def test_answers_after_an_id_come_in_the_order_they_were_given(open_job: OpenJob) -> None:
    store = four_windows(open_job).store
    assert [(r.answer_id, r.window_start_ms // MINUTE, r.revision) for r in answers_after(store, 2, 10)] == [
        (3, 2, 1), (4, 3, 1), (5, 1, 2),
    ]  # fmt: skip
    assert [r.answer_id for r in answers_after(store, 0, 2, REF)] == [1, 2]
    assert answers_after(store, 0, 10, QueryRef("q", 2)) == []
    assert store.last_answer_id() == 5


def test_a_revision_that_was_never_given_is_not_found(open_job: OpenJob) -> None:
    store = four_windows(open_job).store
    with pytest.raises(NotFound):
        store.answer(REF, MINUTE, 3)
    assert store.revisions(REF, 77) == []
    assert store.latest(QueryRef("none", 1)) is None


def test_what_edges_shipped_is_counted_in_frames_and_bytes(job: Job) -> None:
    job.batch(job.frame("a", 0, m0=1), job.frame("a", 0), job.frame("b", 0))
    job.batch(job.frame("a", 0))
    assert job.store.shipped(REF) == {"a": {"frames": 3, "wire_bytes": 300}, "b": {"frames": 1, "wire_bytes": 100}}


def test_catalog_and_results_may_share_a_database(url: str, open_job: OpenJob) -> None:
    catalog = Catalog(url)
    query = catalog.queries.register(registered().query.spec, 0)[0]
    job = open_job("a", lateness="1m")
    job.batch(job.frame("a", MINUTE, m0=1))
    assert catalog.queries.all() == [query]
    assert job.store.latest(REF) is not None
    catalog.close()


@pytest.mark.parametrize("store", [Catalog, ResultStore])
def test_a_store_of_another_format_is_refused_with_its_release_and_left_as_it_is(
    url: str, store: type[Catalog] | type[ResultStore]
) -> None:
    store(url).close()
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE releases SET format = 99, release = '9.8.7'")
    with pytest.raises(IncompatibleState) as caught:
        store(url)
    assert "9.8.7" in str(caught.value) and RELEASE in str(caught.value)

    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT format, release FROM releases").all() == [(99, "9.8.7")]
        connection.exec_driver_sql("DROP TABLE releases")  # as releases that recorded none
    with pytest.raises(IncompatibleState):
        store(url)
    engine.dispose()


@pytest.mark.parametrize("store", [Catalog, ResultStore])
def test_a_store_of_the_same_format_is_opened_and_records_the_release_that_goes_on(
    url: str, store: type[Catalog] | type[ResultStore]
) -> None:
    store(url).close()
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE releases SET release = '9.8.7'")
    store(url).close()
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT release FROM releases").all() == [(RELEASE,)]
    engine.dispose()
