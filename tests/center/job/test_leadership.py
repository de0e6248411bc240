from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from center.job.job_parts import JobParts
from center.job.leadership import Leadership, LeaseWatch, display_name, is_gone, new_owner
from center.job.ledger_writer import DeadlineLoop, LedgerWriter
from center.job.metrics import JobMetrics
from center.ledger import Ledger
from center.results import Lease, LeaseLost, ResultStore
from edgewater.base.errors import StorageError
from edgewater.runtime.tasks import Tasks
from tests.center.job.test_ledger_writer import staleness_spec

LEASE_S = 3.0


class Driver:
    """A driver without Spark: its ledger, its deadlines, its part in the election."""

    def __init__(self, world: Any, name: str, drivers: int = 1) -> None:
        self.now_s, self.metrics, self.terms = 0.0, JobMetrics(), 0
        self.store = ResultStore(world.results_url)
        shared = JobParts(world.catalog, self.store, self.metrics, world.clock)
        self.writer = LedgerWriter(Ledger(), shared)
        self.leadership = Leadership(
            shared,
            monotonic=lambda: self.now_s,
            began=self._begin,
            lease_ms=3_000,
            drivers=drivers,
            owner=f"{name}:1|||",
        )

    def _begin(self) -> None:
        self.terms += 1
        self.writer.begin_term()

    @property
    def leads(self) -> bool:
        return self.leadership.leads.is_set()

    def watch(self, seconds: float, step_s: float = 0.5) -> None:
        """Looks at the lease for some time, on this driver's clock."""
        for _ in range(int(seconds / step_s)):
            self.now_s += step_s
            self.leadership.step()

    def close(self) -> None:
        self.writer.close()
        self.leadership.close()
        self.store.close()


@pytest.fixture
def pair(world: Any) -> Iterator[tuple[Driver, Driver]]:
    drivers = Driver(world, "one"), Driver(world, "two")
    drivers[0].leadership.step()
    yield drivers
    for driver in drivers:
        driver.close()


def test_the_first_driver_leads_and_the_second_is_a_standby_as_long_as_the_lease_is_renewed(
    pair: tuple[Driver, Driver],
) -> None:
    one, two = pair
    for _ in range(20):
        two.watch(1.0)
        one.leadership.step()
    assert (one.leads, two.leads, one.terms) == (True, False, 1)
    assert two.leadership.leader == one.leadership.leader == "one:1"
    assert two.leadership.sees_leader
    assert one.metrics.registry.get_sample_value("edgewater_job_leads") == 1.0
    assert two.metrics.registry.get_sample_value("edgewater_job_leads") == 0.0


def test_a_standby_takes_over_when_the_leader_is_silent_and_the_old_leader_becomes_a_standby(
    world: Any, pair: tuple[Driver, Driver]
) -> None:
    one, two = pair
    world.register("a")
    one.writer.advance()
    two.watch(LEASE_S)
    assert not two.leads
    two.watch(1.0)
    assert two.leads
    assert two.metrics.registry.get_sample_value("edgewater_job_lease_epoch") == 2.0

    # Both believe to lead now. The first one's writes fail, and it notices at its next renewal.
    assert one.leads
    world.register("b")
    with pytest.raises(LeaseLost):
        one.writer.advance()
    with pytest.raises(LeaseLost):
        one.writer.require_lease("a@1")
    two.writer.advance()
    one.leadership.step()
    assert not one.leads
    one.watch(2.0)
    assert one.leadership.leader == "two:1"

    # It takes over again when the second one stops, at once, with what that has written.
    two.close()
    one.watch(0.5)
    assert (one.leads, one.terms) == (True, 2)
    ref = world.catalog.queries.register(staleness_spec("c"), world.now)[0].ref
    world.now += 10_000
    assert ref in {e.query for e in one.writer.advance()} | {e.query for e in one.writer.advance()}


def test_only_time_in_which_the_lease_was_looked_at_counts() -> None:
    watch, held = LeaseWatch(LEASE_S), Lease("one", 1, 5)
    assert not watch.has_ended(held, 0.0)
    assert not watch.has_ended(held, 1_000.0), "this process, or the machine, was paused"
    assert not watch.has_ended(held, 1_001.0)
    assert not watch.renewed
    assert not watch.has_ended(Lease("one", 1, 6), 1_002.0)
    assert watch.renewed
    assert [watch.has_ended(Lease("one", 1, 6), 1_002.0 + s) for s in (1.0, 2.0, 3.0)] == [False, False, True]
    assert watch.has_ended(Lease("", 1, 6), 1_010.0), "it was released"


def test_a_database_that_cannot_be_reached_is_reported_and_costs_the_leader_nothing(
    pair: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    two.watch(1.0)

    def away(*_: object) -> None:
        raise StorageError("no connection")

    with monkeypatch.context() as broken:
        broken.setattr(one.store, "renew_lease", away)
        broken.setattr(two.store, "leases", away)
        one.leadership.step()
        two.watch(60.0)
    assert one.leads and "no connection" in one.leadership.problem
    two.watch(1.0)
    one.leadership.step()
    two.watch(2.0)
    assert (one.leads, two.leads, one.leadership.problem, two.leadership.problem) == (True, False, "", "")


def test_a_driver_that_cannot_begin_to_lead_says_why_and_tries_again(
    pair: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    one.close()

    def full() -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(two.leadership, "_began", full)
        two.leadership.step()
    assert not two.leads and "no space left" in two.leadership.problem
    two.watch(2 * LEASE_S)
    assert two.leads and not two.leadership.problem


def test_each_partition_has_a_driver_and_a_standby_takes_over_any_of_them(world: Any) -> None:
    one, two, three = drivers = [Driver(world, name, drivers=2) for name in ("one", "two", "three")]
    for driver in (one, *drivers):  # the first look divides the queries, the next one takes a lease
        driver.watch(0.5)
    assert [driver.leads for driver in drivers] == [True, True, False]
    assert {str(one.store.partition), str(two.store.partition)} == {"1 of 2", "2 of 2"}
    assert three.leadership.leader == "one:1, two:1"

    # Each registers the queries of its partition, and no other.
    refs = [world.catalog.queries.register(staleness_spec(f"q{n}"), world.now)[0].ref for n in range(6)]
    world.now += 10_000
    given = [{e.query for e in [*driver.writer.advance(), *driver.writer.advance()]} for driver in (one, two)]
    assert given[0] | given[1] == set(refs) and not given[0] & given[1] and all(given)

    for _ in range(10):
        three.watch(0.5)
        one.leadership.step()  # the second one is silent
    assert three.leads and three.store.partition == two.store.partition
    assert three.metrics.registry.get_sample_value("edgewater_job_lease_epoch") == 2.0
    two.leadership.step()
    assert not two.leads
    three.close()
    two.watch(0.5)
    assert two.leads and two.terms == 2
    for driver in (one, two):
        driver.close()


def test_queries_are_divided_anew_when_no_driver_of_the_other_division_leads(
    world: Any, pair: tuple[Driver, Driver]
) -> None:
    one, _ = pair
    more = Driver(world, "more", drivers=2)
    more.watch(1.0)
    one.leadership.step()
    more.watch(1.0)
    assert not more.leads
    assert "spark.drivers is 2 here; expected 1, as for the drivers that lead (one:1)" in more.leadership.problem
    assert one.leads

    one.close()
    more.watch(1.0)
    assert (more.leads, more.leadership.problem, str(more.store.partition)) == (True, "", "1 of 2")
    more.close()


def test_drivers_that_disagree_about_their_number_do_not_divide_the_queries_in_turn(world: Any) -> None:
    drivers = [Driver(world, "one", drivers=2), Driver(world, "two", drivers=1)]
    for _ in range(4):
        for driver in drivers:
            driver.watch(0.5)
    assert [driver.leads for driver in drivers] == [True, False]
    assert "spark.drivers is 1 here; expected 2" in drivers[1].leadership.problem
    for driver in drivers:
        driver.close()


def test_a_lease_that_is_not_renewed_for_its_time_is_a_problem_though_no_call_has_failed(
    pair: tuple[Driver, Driver],
) -> None:
    one, _ = pair
    one.watch(1.0)
    assert one.leadership.problem == ""
    one.now_s += LEASE_S + 1  # a step takes long
    assert one.leadership.problem == ""
    one.now_s += 4 * LEASE_S  # a call to the database hangs
    assert one.leadership.problem == "the driver's lease was renewed last 16 s ago"
    one.leadership.step()
    assert one.leadership.problem == ""


@pytest.mark.slow
def test_an_owner_that_has_ended_on_this_machine_is_known_to_be_gone() -> None:
    mine = new_owner()
    assert not is_gone(mine)
    assert not is_gone("") and not is_gone("one:1|||") and not is_gone("one:1")
    program = "from center.job.leadership import new_owner; print(new_owner(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        owner = process.stdout.readline().strip()
        assert display_name(owner).endswith(f":{process.pid}")
        assert not is_gone(owner)
        process.kill()
    assert is_gone(owner)
    # The same process number again, or one of another machine or container.
    name, start, where, _ = mine.split("|")
    assert is_gone(f"{name}|1{start}|{where}|x")
    assert not is_gone(f"{name}|1{start}|{where}1|x")


def test_a_standby_takes_over_from_a_dead_process_at_once(world: Any, pair: tuple[Driver, Driver]) -> None:
    _, two = pair
    name, start, where, _ = new_owner().split("|")
    dead = ResultStore(world.results_url)
    assert dead.take_lease(f"{name}|1{start}|{where}|x", dead.lease(), 3_000, world.now)
    dead.close()
    two.leadership.step()
    assert two.leads


def test_a_standby_keeps_no_deadlines(world: Any, pair: tuple[Driver, Driver]) -> None:
    _, two = pair
    stop, advanced = threading.Event(), threading.Event()

    class Noting:
        def advance(self) -> None:
            advanced.set()

        def wait(self) -> None:
            stop.wait(0.01)

        def rest(self) -> None:
            pass

    deadlines = DeadlineLoop(Noting(), two.metrics, stop, two.leadership.leads)  # type: ignore[arg-type]
    thread = Tasks().thread("deadlines", deadlines.run)
    assert not advanced.wait(0.3)
    two.leadership.leads.set()
    assert advanced.wait(20)
    stop.set()
    thread.join(20)
