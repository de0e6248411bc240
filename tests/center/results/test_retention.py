from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
from sqlalchemy import insert

from center.ledger import AT_ONCE_MS, QueryDeleted
from center.results import ResultStore, trimming
from center.results import schema as t
from center.results.writes import MAX_TRIMMED_WINDOWS
from edgewater.base.errors import StorageError
from tests.center.results_world import MINUTE, REF, Job, answers_after
from tests.insides import engine_of

OpenJob = Callable[..., Job]
DAY = 1 << 40
"""Later than whatever the tests do."""


def windows(job: Job) -> list[tuple[int, str]]:
    records, _ = job.store.windows(REF, None, None, 1_000)
    return [(r.window_start_ms // MINUTE, r.phase.value) for r in records]


def test_a_window_is_dropped_with_all_its_revisions_once_its_final_answer_is_old(open_job: OpenJob) -> None:
    job = open_job("a", lateness="1m")
    job.batch(job.frame("a", 2 * MINUTE, m0=1, m1=2), now_ms=100)
    job.batch(job.frame("a", 3 * MINUTE, m2=4), now_ms=200)
    assert windows(job) == [(0, "final"), (1, "final"), (2, "complete")]
    assert job.store.trim(100) == 0
    assert job.store.trim(200) == 1, "it was final with its first answer"
    assert windows(job) == [(1, "final"), (2, "complete")]
    assert job.store.trim(201) == 2
    assert job.store.revisions(REF, MINUTE) == []
    assert windows(job) == [(2, "complete")]


def test_a_window_that_is_not_final_is_never_dropped(open_job: OpenJob) -> None:
    job = open_job("a", "b", lateness="1m")
    job.batch(job.frame("a", 9 * MINUTE, m0=1), job.frame("b", MINUTE, m0=2))
    assert windows(job) == [(0, "complete")]
    assert job.store.trim(DAY) == 0
    job.batch(job.frame("b", 2 * MINUTE), now_ms=5)
    assert job.store.trim(DAY) == 2


def test_dropped_answers_are_not_given_again_and_do_not_affect_later_ones(open_job: OpenJob) -> None:
    job = open_job("a")
    job.batch(job.frame("a", MINUTE, m0=1))
    assert job.store.trim(DAY) == 1
    again = open_job("a")
    again.position = job.position
    assert [e.window_start_ms for e in again.batch(again.frame("a", 2 * MINUTE, m0=1, m1=2))] == [MINUTE]
    assert [r.answer_id for r in answers_after(again.store, 0, 10)] == [2]


def test_a_merged_session_is_dropped_with_the_final_one_after_it(job: Job) -> None:
    rows = [(1, 0, 30, 1, "complete"), (2, 0, 60, 2, "final"), (3, 20, 30, 1, "complete"), (4, 20, 20, 2, "complete")]
    rows += [(5, 90, 99, 1, "final"), (6, 95, 99, 1, "complete"), (7, 95, 95, 2, "complete")]
    with engine_of(job.store).begin() as connection:
        for answer_id, start, end, revision, phase in rows:
            values = {"window_start_ms": start, "window_end_ms": end, "revision": revision, "phase": phase}
            values |= {"answer_id": answer_id, "query": "q@1", "answered_at_ms": answer_id, "staleness_ms": 0}
            connection.execute(insert(t.answers).values(**values, quality=json.dumps({})))
    assert job.store.trim(5) == 2
    assert job.store.revisions(REF, 20) == [1, 2], "no later window is old enough, so it waits for one"
    assert job.store.trim(6) == 3
    assert job.store.revisions(REF, 95) == [1, 2]


@pytest.fixture
def job(open_job: OpenJob) -> Job:
    return open_job("a", lateness="1m")


def test_a_deleted_querys_answers_are_dropped_once_the_newest_is_old(job: Job) -> None:
    job.batch(job.frame("a", MINUTE, m0=1), now_ms=100)
    job.batch(job.frame("a", MINUTE, m0=1), now_ms=2000)
    job.store.tick(job.ledger, [QueryDeleted(REF)], 0)
    assert job.store.trim(2000) == 0
    assert job.store.trim(2001) == 2
    assert job.store.shipped(REF) != {}
    assert job.store.trim(2001) == 0
    assert job.store.shipped(REF) == {}
    assert job.store.last_answer_id() == 2, "ids are never given twice"


@pytest.mark.slow
def test_one_transaction_drops_a_bounded_number_of_windows(open_job: OpenJob) -> None:
    job, count = open_job("a"), MAX_TRIMMED_WINDOWS + 50
    job.batch(job.frame("a", count * MINUTE, **{f"m{n}": 1 for n in range(count)}))
    while job.ledger.next_deadline() == AT_ONCE_MS:
        job.store.tick(job.ledger, [], 0)
    assert [job.store.trim(DAY) for _ in range(3)] == [MAX_TRIMMED_WINDOWS, 50, 0]


def test_old_answers_are_dropped_beside_the_job_and_failures_are_retried(url: str, job: Job) -> None:
    job.batch(job.frame("a", 2 * MINUTE, m0=1), now_ms=1_000)

    class Watched(ResultStore):
        asked, done = 0, threading.Event()

        def trim(self, before_ms: int, through: int | None = None) -> int:
            self.asked += 1
            if self.asked == 1:
                raise StorageError("database is locked")
            dropped = super().trim(before_ms, through)
            if not dropped:
                self.done.set()
            return dropped

    store = Watched(url)
    with trimming(store, 500, lambda: 1_600, every_s=0.01):
        assert store.done.wait(20)
    assert windows(job) == []
    asked = store.asked
    assert asked >= 3
    store.close()
