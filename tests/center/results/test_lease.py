"""Two drivers over one store, of which each may believe to lead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from center.ledger import Ledger
from center.results import Lease, LeaseLost, ResultStore
from center.results import lease as leases
from center.storage.database import open_engine, write_transaction
from edgewater.wire import QueryRef
from tests.center.results_world import KEY, MINUTE, REF, Job, registered, total

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
    return store.consumed(), store.last_answer_id(), ledger.snapshot(REF), store.lease()


def test_a_driver_that_was_deposed_commits_nothing_though_it_believes_to_lead(pair: Pair) -> None:
    ledger = pair.depose()
    before = state(pair.two)

    with pytest.raises(LeaseLost, match="held by two"):
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
        leases.hold(connection, 1, 600 + LEASE_MS)
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
