"""Final answers are given again when records come late: as rows, once each, at most one per window and minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, insert

from center.ledger import AT_ONCE_MS, QueryDeleted
from center.results import AnswerRecord
from center.results import schema as t
from center.results.corrections import WAIT_MS
from center.results.late_records import late_by_window
from edgewater.answers import Amount, Cause, Phase, WithheldBound
from edgewater.wire import DroppedRecords, DropReason, Withheld
from tests.center.results_world import KEY, MINUTE, REF, Job, answers_after, total
from tests.insides import engine_of

OpenJob = Callable[..., Job]
MOST = 5
"""The most windows of a transaction, in tests of more windows."""
LAST = 1 << 40
"""A wall time after all that the tests do."""


@pytest.fixture
def job(open_job: OpenJob) -> Job:
    """A job with final answers to 3 windows of one record, given at the wall time 0."""
    job = open_job("a", "b")
    job.batch(job.frame("a", 3 * MINUTE, m0=1, m1=2, m2=4), job.frame("b", 3 * MINUTE))
    return job


def late(record: AnswerRecord) -> int:
    return record.facts.records_by(Cause.AFTER_FINAL).total()


def stated(job: Job, window: int = 0) -> list[int]:
    """By revision of a window, the number of late records."""
    start = window * MINUTE
    return [late(job.store.answer(REF, start, revision)) for revision in job.store.revisions(REF, start)]


def reject(job: Job, from_ms: int, until_ms: int, records: int = 1, now_ms: int = 0) -> None:
    fact, deltas = job.frame("a", 0)
    lost = DroppedRecords(from_ms, DropReason.MALFORMED, records, until_ms)
    job.batch((replace(fact, dropped=(lost,)), deltas), now_ms=now_ms)


def correct_all(job: Job, now_ms: int) -> int:
    """Writes all corrections that are due. Returns their number."""
    written = 0
    while (due_ms := job.store.correct_at_ms) is not None and due_ms <= now_ms:
        written += job.store.correct(now_ms)
    return written


def test_a_correction_states_by_how_much_the_late_records_move_values(job: Job) -> None:
    for round_, amounts in enumerate(((Withheld("s", 5.0, 1.0, 1),), (Withheld("s", 7.0, 1.0, 1),), ())):
        fact, deltas = job.frame("a", 0)
        too_late = DroppedRecords(0, DropReason.TOO_LATE, 2, None, amounts)
        job.batch((replace(fact, dropped=(too_late,)), deltas))
        correct_all(job, 3 * round_ * WAIT_MS)
        (known,) = job.store.at(REF, 0)[0].facts.by_cause(Cause.AFTER_FINAL)
        assert known.lacks == Amount(2 * round_ + 2, 2 * round_ + 2)
        expected = {0: {"s": WithheldBound(5.0, 1.0)}, 1: {"s": WithheldBound(12.0, 2.0)}, 2: {}}
        assert known.amounts == expected[round_], "an unknown amount stays unknown"


def test_a_correction_has_the_data_and_the_facts_of_the_final_answer_and_a_revision_and_an_id_of_its_own(
    job: Job,
) -> None:
    (final,) = [job.store.answer(REF, 0, 1)]
    assert job.store.correct_at_ms is None
    job.batch(job.frame("a", 3 * MINUTE, m0=100), now_ms=7)
    assert job.store.correct_at_ms == AT_ONCE_MS
    assert (job.store.correct(7), job.store.correct_at_ms) == (1, None)
    record = job.store.answer(REF, 0, 2)
    assert record == replace(
        final, revision=2, data_of=1, data_id=1, answer_id=4, answered_at_ms=7, facts=record.facts
    ) and total(record.synopsis) == 1  # fmt: skip
    assert replace(record.facts, ratio=1.0, deviations=()) == final.facts
    assert (late(record), record.facts.ratio) == (1, 0.5)
    assert job.store.answer(REF, 0, 1) == final, "a revision never changes"
    assert job.store.windows(REF, 0, 1, 9)[0] == [record] == job.store.at(REF, 0)
    changes = job.store.changes_after(3, 9, max_bytes=1)
    assert (changes.records, changes.skipped) == ([record], {4: 0})
    last, _ = job.store.last_windows(REF, 0, 1, 9)
    assert last == [replace(record, synopsis=None)]
    assert stated(job, 1) == [0]


def test_a_window_is_corrected_once_per_minute_and_each_wait_is_twice_as_long(job: Job) -> None:
    for second in range(0, 500, 20):
        job.batch(job.frame("a", 3 * MINUTE, m0=1), now_ms=second * 1_000)
        correct_all(job, second * 1_000)
    given_s = [job.store.answer(REF, 0, r).answered_at_ms / 1_000 for r in job.store.revisions(REF, 0)[1:]]
    assert given_s == [0, 60, 180, 420]
    assert stated(job) == [0, 1, 4, 10, 22]
    due_ms = job.store.correct_at_ms
    assert due_ms == 900_000
    assert correct_all(job, due_ms) == 1 and stated(job)[-1] == 25
    assert job.store.correct_at_ms is None


def test_a_wall_clock_that_was_set_back_delays_no_correction_for_long(job: Job) -> None:
    for now_ms in (LAST, LAST + 1):
        job.batch(job.frame("a", 3 * MINUTE, m0=1), now_ms=now_ms)
        correct_all(job, now_ms)
    assert stated(job) == [0, 1]
    job.batch(job.frame("a", 3 * MINUTE, m0=1), now_ms=0)
    assert correct_all(job, 0) == 1


def test_windows_that_wait_for_different_times_are_all_corrected(job: Job) -> None:
    for window, now_ms in ((0, 0), (2, 30_000)):
        job.batch(job.frame("a", 3 * MINUTE, **{f"m{window}": 1}), now_ms=now_ms)
        correct_all(job, now_ms)
    job.batch(job.frame("a", 3 * MINUTE, m0=1, m1=1, m2=1), now_ms=40_000)
    given = list[tuple[int, int]]()
    now_ms = 40_000
    while (due_ms := job.store.correct_at_ms) is not None:
        now_ms = max(now_ms, due_ms)
        given.append((now_ms, job.store.correct(now_ms)))
    assert given == [(40_000, 1), (60_000, 1), (90_000, 1)]
    assert [stated(job, window) for window in range(3)] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_a_window_with_nothing_new_to_state_gets_no_row(open_job: OpenJob) -> None:
    job = open_job("a", "b", lateness="1m")
    job.batch(job.frame("a", MINUTE, m0=1), job.frame("b", MINUTE))
    reject(job, 0, MINUTE, 3)
    assert job.store.correct_at_ms is None, "no window is final"
    job.batch(job.frame("a", 2 * MINUTE), job.frame("b", 2 * MINUTE))
    final = job.store.latest(REF, Phase.FINAL)
    assert final is not None and final.facts.records_by(Cause.REJECTED) == {"malformed": 3}
    job.batch(job.frame("a", 2 * MINUTE, m0=5), now_ms=9)
    assert correct_all(job, 9) == 1
    record = job.store.answer(REF, 0, final.revision + 1)
    assert record.facts.late_counts == (1, 3, 0), "it states what was known before, too"
    assert record.facts.ratio == 1 / 5
    assert job.count(t.corrections) == 0


def test_sliding_windows_are_corrected_as_far_as_they_are_final(open_job: OpenJob) -> None:
    job = open_job("a", "b", window={"sliding": "3m", "every": "1m"})
    job.batch(job.frame("a", 3 * MINUTE, m0=1, m2=2), job.frame("b", 3 * MINUTE))
    job.batch(job.frame("a", 3 * MINUTE, m2=4), now_ms=5)
    assert correct_all(job, 5) == 1
    assert stated(job, 0) == [0, 1]
    job.batch(job.frame("a", 5 * MINUTE), job.frame("b", 5 * MINUTE), now_ms=6)
    assert correct_all(job, 6) == 0
    assert [stated(job, window) for window in (1, 2)] == [[0], [0]]


@pytest.mark.parametrize("windows", [MOST, 3 * MOST + 2])
def test_a_record_that_may_be_of_any_window_is_stated_by_all_in_bounded_transactions(
    open_job: OpenJob, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("center.results.corrections.MAX_CORRECTED", MOST)
    job = open_job("a")
    for first in range(0, windows, 500):
        minutes = range(first, min(first + 500, windows))
        job.batch(job.frame("a", (minutes[-1] + 1) * MINUTE, **{f"m{minute}": 1 for minute in minutes}))
        while job.ledger.next_deadline() is not None:
            job.store.tick(job.ledger, [], 0)
    reject(job, -(1 << 62), 1 << 62, now_ms=1)
    each = list[int]()
    while job.store.correct_at_ms is not None:
        before = job.store.last_answer_id()
        each.append(job.store.correct(2))
        assert job.store.last_answer_id() - before == each[-1] <= MOST
    assert sum(each) == windows and len(each) <= windows // MOST + 2
    assert {job.store.revisions(REF, minute * MINUTE)[-1] for minute in range(windows)} == {2}


def test_a_window_in_two_ranges_that_wait_is_corrected_once(job: Job) -> None:
    for first in range(2):
        reject(job, first * MINUTE, (first + 2) * MINUTE, now_ms=5)
    assert correct_all(job, 5) == 3
    assert [job.store.revisions(REF, window * MINUTE) for window in range(3)] == [[1, 2]] * 3
    assert job.store.answer(REF, MINUTE, 2).facts.records_by(Cause.REJECTED) == {"malformed": 2}


def test_no_correction_is_lost_or_written_twice_by_kills(job: Job, open_job: OpenJob) -> None:
    job.batch(job.frame("a", 3 * MINUTE, m0=1, m1=1, m2=1), now_ms=1)
    broken = True

    def refuse(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if broken and statement.startswith("INSERT INTO answers"):
            raise OSError("the disk is gone")

    event.listen(engine_of(job.store), "before_cursor_execute", refuse)
    before = job.contents()
    with pytest.raises(OSError):
        job.store.correct(2)
    assert job.contents() == before
    again = open_job("a", "b")
    assert again.store.correct_at_ms == AT_ONCE_MS
    assert correct_all(again, 3) == 3
    assert again.store.correct_at_ms is None
    broken = False
    assert job.store.correct(4) == 0, "another process has written them"
    assert [stated(again, window) for window in range(3)] == [[0, 1]] * 3


def test_corrections_end_with_the_answer_that_has_their_data(job: Job) -> None:
    job.batch(job.frame("a", 3 * MINUTE, m0=1), now_ms=50)
    correct_all(job, 50)
    job.batch(job.frame("a", 4 * MINUTE, m0=1, m3=8), job.frame("b", 4 * MINUTE), now_ms=60)
    assert job.store.trim(1) == 4, "the correction is young, its data are old"
    assert job.store.windows(REF, None, None, 9)[0][0].window_start_ms == 3 * MINUTE
    job.batch(job.frame("a", 4 * MINUTE, m1=1), now_ms=70)
    assert correct_all(job, LAST) == 0, "a window that is no longer stored is not corrected"


def test_a_correction_of_a_deleted_query_ends_with_the_answer_that_has_its_data(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.batch(job.frame("a", 3 * MINUTE, m0=1, m1=1, m2=1), now_ms=50)
    assert correct_all(job, 50) == 3
    job.store.tick(job.ledger, [QueryDeleted(REF)], 60)
    monkeypatch.setattr("center.results.writes.MAX_TRIMMED_WINDOWS", 1)
    left = list[int]()
    while job.store.trim(LAST):
        records = answers_after(job.store, 0, 9)
        assert all(record.synopsis is not None for record in records)
        left.append(len(records))
    assert len(left) > 1 and left[-1] == 0


def test_a_correction_that_a_sink_lacks_stays(job: Job) -> None:
    job.batch(job.frame("a", 3 * MINUTE, m1=1), now_ms=50)
    correct_all(job, 50)
    assert job.store.last_answer_id() == 4
    assert job.store.trim(1, through=3) == 1
    assert job.store.revisions(REF, MINUTE) == [1, 2]
    assert job.store.trim(1, through=4) == 3


def test_answers_of_an_earlier_release_state_in_their_revision_what_they_stated_when_they_were_read(
    job: Job, open_job: OpenJob
) -> None:
    job.batch(job.frame("a", 3 * MINUTE, m0=1, m2=1))
    with engine_of(job.store).begin() as connection:  # as that release had it
        connection.execute(t.corrections.delete())
        connection.execute(insert(t.counters).values(name="late", value=2))
    again = open_job("a", "b")
    assert again.store.correct_at_ms is None
    assert [stated(again, window) for window in range(3)] == [[1], [0], [1]]
    again.position, again.observed = job.position, job.observed
    again.batch(again.frame("a", 3 * MINUTE, m0=1), now_ms=1)
    assert correct_all(again, 1) == 1 and stated(again) == [1, 2]


def test_a_restored_store_gives_no_revision_again(job: Job, open_job: OpenJob) -> None:
    job.store.begin_after_restore(job.store.lineage(), 5_000)
    again = open_job("a", "b")
    again.position, again.observed = job.position, job.observed
    again.batch(again.frame("a", 3 * MINUTE, m0=1), now_ms=6_000)
    correct_all(again, 6_000)
    assert again.store.revisions(REF, 0) == [1, 5_001]
    assert again.store.answer(REF, 0, 5_001).answer_id > 5_000
    again.batch(again.frame("a", 3 * MINUTE, m0=1), now_ms=7_000)
    assert correct_all(again, 7_000) == 0 and again.store.correct_at_ms == 6_000 + MINUTE


def test_a_deleted_query_gets_no_correction(job: Job) -> None:
    job.batch(job.frame("a", 3 * MINUTE, m0=1))
    job.store.tick(job.ledger, [QueryDeleted(REF)], 1)
    assert correct_all(job, 2) == 0 and job.count(t.corrections) == 0


@pytest.mark.nightly
def test_in_any_order_of_late_records_the_newest_statements_have_all_of_them(open_job: OpenJob) -> None:
    rng, windows = np.random.default_rng(11), 12
    job = open_job("a", window={"sliding": "2m", "every": "1m"})
    job.batch(job.frame("a", windows * MINUTE, **{f"m{minute}": 1 for minute in range(windows)}))
    now_ms, given = 0, dict[int, list[int]]()
    for _ in range(60):
        now_ms += int(rng.integers(1, 20_000))
        if rng.random() < 0.5:
            job.batch(job.frame("a", 0, **{f"m{m}": 1 for m in rng.integers(0, windows, 2)}), now_ms=now_ms)
        else:
            start, length = rng.integers(0, windows, 2) * MINUTE
            reject(job, int(start), int(start + length + MINUTE), now_ms=now_ms)
        if rng.random() < 0.7:
            job.store.correct(now_ms)
    while (due_ms := job.store.correct_at_ms) is not None:
        now_ms = max(now_ms, due_ms)
        job.store.correct(now_ms)
    records, _ = job.store.windows(REF, None, None, 100, min_phase=Phase.FINAL)
    with engine_of(job.store).connect() as connection:
        known = late_by_window(connection, KEY, [(r.window_start_ms, r.window_end_ms) for r in records])
    for record in records:
        counts = record.facts.records_by(Cause.AFTER_FINAL) + record.facts.records_by(Cause.REJECTED)
        assert counts == {reason: late.records for reason, late in known.get(record.window_start_ms, {}).items()}
        revisions = job.store.revisions(REF, record.window_start_ms)[1:]
        given[record.window_start_ms] = [
            job.store.answer(REF, record.window_start_ms, r).answered_at_ms for r in revisions
        ]
    waits = [np.diff(each).min() for each in given.values() if len(each) > 1]
    assert waits and min(waits) >= MINUTE


def test_a_store_counts_the_corrections_of_its_own_partition_only(job: Job) -> None:
    job.batch(job.frame("a", 3 * MINUTE, m0=1))
    assert job.store.divide(2, job.store.leases())
    taken = list[bool]()
    for partition, lease in job.store.leases().items():
        assert job.store.take_lease("driver", lease, 1_000, 0, partition)
        job.store.load_ledger(job.ledger)
        taken.append(job.store.correct_at_ms is not None)
        assert (correct_all(job, 5) == 1) is (KEY in partition)
    assert sorted(taken) == [False, True]
