"""Two drivers over one store, of which each may believe to lead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

import pytest

from center.ledger import EdgesChanged, Ledger
from center.results import Lease, LeaseLost, ResultStore
from center.results import lease as leases
from center.results.store import FORMAT
from center.storage.database import open_engine, write_transaction
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.base.errors import Conflict
from edgewater.model.registered_query import query_key
from edgewater.wire import QueryRef
from tests.center.results_world import KEY, MINUTE, REF, Job, edge_record, registered, total
from tests.center.snapshots import snapshot

LEASE_MS = 3_000


@dataclass
class Pair:
    """A job that has given an answer as the driver "one", and a second driver's store over the same database."""

    url: str
    one: Job = field(init=False)
    two: ResultStore = field(init=False)

    def __post_init__(self) -> None:
        self.one, self.two = Job(self.url, "a", "b"), ResultStore(self.url)
        assert self.one.store.take_lease("one", self.two.lease(), LEASE_MS, 0)
        self.one.batch(self.one.frame("a", MINUTE, m0=1))

    def depose(self) -> Ledger:
        """The second driver takes over; returns its ledger."""
        assert self.two.take_lease("two", self.two.lease(), LEASE_MS, 10)
        return Ledger()


@pytest.fixture
def pair(url: str) -> Iterator[Pair]:
    pair = Pair(url)
    yield pair
    pair.one.store.close()
    pair.two.close()


def state(store: ResultStore) -> tuple[object, ...]:
    ledger = Ledger()
    store.load_ledger(ledger)
    return store.consumed(), store.last_answer_id(), snapshot(ledger, REF), store.lease()


def test_a_driver_that_was_deposed_commits_nothing_though_it_believes_to_lead(pair: Pair) -> None:
    ledger = pair.depose()
    before = state(pair.two)

    with pytest.raises(LeaseLost):
        pair.one.batch(pair.one.frame("b", MINUTE, m0=2))
    with pytest.raises(LeaseLost):
        pair.one.store.tick(pair.one.ledger, [registered(QueryRef("other", 1))], 10)
    with pytest.raises(LeaseLost):
        pair.one.store.renew_lease(20)
    pair.one.store.release_lease()
    assert state(pair.two) == before

    # The second one goes on where the first one's last commit stands.
    fact, deltas = pair.one.frame("b", MINUTE, m0=2)
    pair.two.load_ledger(ledger)
    (emission,) = pair.two.apply(ledger, deltas, [fact], {KEY: fact.position}, 20)
    assert total(pair.two.answer(REF, emission.window_start_ms, emission.revision).synopsis) == 3


def test_the_first_driver_goes_on_when_it_leads_again(pair: Pair) -> None:
    ledger = pair.depose()
    pair.two.load_ledger(ledger)
    fact, deltas = pair.one.frame("b", 0)
    pair.two.apply(ledger, deltas, [fact], {KEY: fact.position}, 20)
    pair.two.release_lease()

    assert pair.one.store.take_lease("one", pair.two.lease(), LEASE_MS, 30)
    (emission,) = pair.one.batch(pair.one.frame("b", MINUTE, m0=2))
    assert total(pair.two.answer(REF, emission.window_start_ms, emission.revision).synopsis) == 3
    with pytest.raises(LeaseLost):
        pair.two.apply(ledger, [], [], {KEY: 9}, 40)


def test_of_two_that_see_a_lease_end_one_takes_it(pair: Pair) -> None:
    seen = pair.two.lease()
    assert pair.two.take_lease("two", seen, LEASE_MS, 10)
    assert not pair.one.store.take_lease("one", seen, LEASE_MS, 10)
    assert pair.one.store.lease() == Lease("two", 2, 10 + LEASE_MS)


def test_every_step_and_renewal_extends_the_lease_and_one_that_was_extended_is_not_taken(pair: Pair) -> None:
    seen = pair.two.lease()
    pair.one.batch(pair.one.frame("b", 0), now_ms=500)
    assert pair.two.lease() == Lease("one", 1, 500 + LEASE_MS)
    assert not pair.two.take_lease("two", seen, LEASE_MS, 10)

    seen = pair.two.lease()
    pair.one.store.renew_lease(400)  # the wall clock was set back
    assert pair.two.lease().until_ms > seen.until_ms
    assert not pair.two.take_lease("two", seen, LEASE_MS, 10)


def test_a_lease_is_not_taken_while_a_step_is_under_way(pair: Pair, url: str) -> None:
    seen = pair.two.lease()
    engine, taken = open_engine(url), list[bool]()
    waiting = threading.Thread(target=lambda: taken.append(pair.two.take_lease("two", seen, LEASE_MS, 10)))
    with write_transaction(engine) as connection:
        leases.hold(connection, ALL_QUERIES, 1, 600 + LEASE_MS)
        waiting.start()
        waiting.join(0.1)
        assert taken == [], "it waits for the step's end"
    waiting.join(30)
    engine.dispose()
    assert taken == [False]


def test_a_store_that_no_driver_has_led_needs_no_lease_until_one_does(url: str) -> None:
    job, other = Job(url, "a"), ResultStore(url)
    job.batch(job.frame("a", 0))
    assert other.take_lease("other", other.lease(), LEASE_MS, 0)
    with pytest.raises(LeaseLost):
        job.batch(job.frame("a", MINUTE, m0=1))
    job.store.close()
    other.close()


HALVES = QueryPartition.all(2)
REFS = {half: next(QueryRef(f"q{n}", 1) for n in range(9) if f"q{n}@1" in half) for half in HALVES}
"""A query of each partition."""


class HalfJob(Job):
    """A driver that leads one of two partitions, and its query."""

    def __init__(self, url: str, half: QueryPartition) -> None:
        self.store, self.ledger, self.ref = ResultStore(url), Ledger(), REFS[half]
        self.position, self.observed = 0, {}
        assert self.store.take_lease(f"driver {half}", self.store.lease(half), LEASE_MS, 0, half)
        self.store.tick(self.ledger, [EdgesChanged((edge_record("a"),)), registered(self.ref)], 0)

    def foreign_frame(self, ref: QueryRef) -> None:
        """Applies a frame of another query, as a batch would that began before the partition changed."""
        fact, deltas = self.frame("a", MINUTE, m0=1)
        fact, delta = replace(fact, query=ref), replace(deltas[0], query=ref)
        self.store.apply(self.ledger, [delta], [fact], {query_key(ref): fact.position}, 0)


@pytest.fixture
def halves(url: str) -> Iterator[tuple[HalfJob, HalfJob]]:
    with closing(ResultStore(url)) as store:
        assert store.divide(2, store.leases())
    jobs = HalfJob(url, HALVES[0]), HalfJob(url, HALVES[1])
    yield jobs
    for job in jobs:
        job.store.close()


def test_drivers_of_different_partitions_answer_side_by_side(halves: tuple[HalfJob, HalfJob]) -> None:
    ids = []
    for minute in range(3):
        for number, job in enumerate(halves):
            value = 10 * minute + number
            (emission,) = job.batch(job.frame("a", (minute + 1) * MINUTE, **{f"m{minute}": value}))
            answer = job.store.answer(job.ref, emission.window_start_ms, emission.revision)
            assert total(answer.synopsis) == value
            ids.append(answer.answer_id)
    assert ids == sorted(ids), "answers become visible in the order of their ids"
    assert halves[0].store.consumed() == {query_key(job.ref): 3 for job in halves}
    for job in halves:
        ledger = Ledger()
        job.store.load_ledger(ledger)
        assert list(ledger.queries()) == [job.ref], "a driver loads the queries of its partition only"


def test_a_driver_whose_partition_has_changed_writes_nothing_of_the_queries_that_it_had(
    halves: tuple[HalfJob, HalfJob],
) -> None:
    one, two = halves
    two.store.release_lease()
    before = two.contents()
    # Its other threads may still have frames and events of the first partition.
    assert one.store.take_lease("one", one.store.lease(HALVES[1]), LEASE_MS, 0, HALVES[1])
    with pytest.raises(Conflict):
        one.foreign_frame(one.ref)
    with pytest.raises(Conflict):
        one.store.tick(one.ledger, [registered(QueryRef(one.ref.name, 2))], 0)
    after = two.contents()
    assert {name: rows for name, rows in after.items() if name not in ("leases", "result_counters")} == {
        name: rows for name, rows in before.items() if name not in ("leases", "result_counters")
    }
    # And goes on with those that it has.
    one.ref, one.position, one.observed = two.ref, two.position, two.observed
    (emission,) = one.batch(one.frame("a", MINUTE, m0=7))
    assert total(one.store.answer(two.ref, emission.window_start_ms, emission.revision).synopsis) == 7


def test_another_division_ends_all_leases_of_the_one_before(halves: tuple[HalfJob, HalfJob], url: str) -> None:
    seen = halves[0].store.leases()
    halves[1].batch(halves[1].frame("a", MINUTE, m0=1))
    with closing(ResultStore(url)) as store:
        assert not store.divide(1, seen), "a lease was renewed meanwhile"
        assert list(store.leases()) == list(HALVES)

        assert store.divide(1, store.leases())
        assert store.leases() == {ALL_QUERIES: Lease("", 1, 1)}
        for job in halves:
            with pytest.raises(LeaseLost):
                job.batch(job.frame("a", 2 * MINUTE, m1=1))
        with pytest.raises(LeaseLost):
            halves[0].store.renew_lease(1)

        # One driver goes on with all queries, and the next division begins with new leases.
        ledger = Ledger()
        assert store.take_lease("all", store.lease(), LEASE_MS, 0)
        store.load_ledger(ledger)
        assert set(ledger.queries()) == set(REFS.values())
        store.release_lease()
        assert store.divide(2, store.leases())
        assert all(lease.owner == "" and lease.epoch > 1 for lease in store.leases().values())


def test_what_is_done_outside_of_a_transaction_needs_the_lease_of_the_querys_partition(
    halves: tuple[HalfJob, HalfJob],
) -> None:
    one, two = halves
    one.store.renew_lease(0, query_key(one.ref))
    with pytest.raises(LeaseLost):
        one.store.renew_lease(0, query_key(two.ref))


def test_the_driver_of_all_queries_that_was_stalled_learns_that_they_have_been_divided(pair: Pair) -> None:
    assert pair.two.divide(2, pair.two.leases())
    for write in (lambda: pair.one.batch(pair.one.frame("b", MINUTE, m0=2)), lambda: pair.one.store.renew_lease(20)):
        with pytest.raises(LeaseLost):
            write()
    pair.one.store.release_lease()
    assert [lease.owner for lease in pair.two.leases().values()] == ["", ""]


@pytest.mark.parametrize("name", ["driver", "driver 1 of 1"])  # the second one while the queries are divided
def test_a_standby_of_release_0_3_finds_no_lease_and_its_leader_has_lost_it(pair: Pair, name: str) -> None:
    seen, engine = pair.two.lease(), open_engine(pair.url)
    with write_transaction(engine) as connection:
        connection.exec_driver_sql("UPDATE releases SET format = 1 WHERE store = 'results'")
        connection.exec_driver_sql(f"UPDATE leases SET name = '{name}'")
    with closing(ResultStore(pair.url)) as store:
        assert store.lease() == replace(seen, owner="", epoch=seen.epoch + 1)
    with write_transaction(engine) as connection:
        names = connection.exec_driver_sql("SELECT name FROM leases").scalars().all()
        assert not [name for name in names if name.startswith("driver")]
        formats = connection.exec_driver_sql("SELECT format FROM releases WHERE store = 'results'")
        assert formats.scalars().all() == [FORMAT]
    engine.dispose()
    with pytest.raises(LeaseLost):
        pair.one.store.renew_lease(20)
