"""The worker over a real durable core, with a clock that advances by what each query is given to cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from edge.core import Configured, EdgeCore, Ingested, Ran, SourcesOpened, StreamSpec
from edge.durability import DurableCore, journal
from edge.durability.event_records import RAN
from edge.records import COALESCE_S, Chunk
from edge.sources.pacing import paced
from edge.worker import OFF, TUNING, Worker
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN, StreamClock
from edgewater.wire import QueryRef

START_MS = 1_767_225_600_000


def query(name: str, window: str = "10s") -> tuple[QueryRef, QuerySpec]:
    measures = {"n": "count()"}
    return QueryRef(name, 1), QuerySpec.from_mapping(
        {"name": name, "from": "s", "measures": measures, "window": {"tumbling": window}, "lateness": "1h"}
    )


class Shop:
    """An agent's core and worker. Each record costs each query `cost_ms` of the clock, which nothing else moves."""

    def __init__(
        self, directory: Path, *names: str, policy: str = "klink", limit_bytes: int = 1 << 20, cost_ms: float = 0.1
    ) -> None:
        self.now_s, self.busy_s, self.costs = 0.0, 0.0, dict.fromkeys(names, cost_ms)
        self.answer_delay_ms = dict.fromkeys((*names, "later", "due", "c"), 0.0)
        self.order: list[tuple[str, int]] = []
        self.on_changed: Callable[[], None] = lambda: None
        self.on_pause: Callable[[], None] = lambda: None
        shop = self

        class Costly(EdgeCore):
            def handle(self, event):  # type: ignore[no-untyped-def]
                if isinstance(event, Ran):
                    shop.order.extend((ref.name, event.through) for ref in event.queries)
                return super().handle(event)

            def _ingest(self, pipeline, records, *rest):  # type: ignore[no-untyped-def]
                shop.now_s += shop.costs.get(pipeline.ref.name, cost_ms) * len(records) / 1000
                return super()._ingest(pipeline, records, *rest)

        def no_reread(*_: object) -> pa.RecordBatch:
            raise AssertionError("nothing is read again")

        streams = {"s": StreamSpec({"x": pa.int64()})}
        self.durable = DurableCore(directory, lambda: Costly(streams), no_reread, "one", now_ms=START_MS)
        if not self.durable.core.configured:
            self.durable.handle(SourcesOpened((("s", "src"),)))
            self.durable.handle(Configured(tuple(query(name) for name in names)))
        self.worker = Worker(
            self.durable, changed=lambda: self.on_changed(), busy_s=lambda _: self.busy_s, policy=policy,
            limit_bytes=limit_bytes, pause=self.pause,
            now_ms=lambda: START_MS + int(1000 * self.now_s), clock=lambda: self.now_s,
            answer_delay_ms=lambda ref: self.answer_delay_ms[ref.name],
        )  # fmt: skip

    async def pause(self, seconds: float) -> None:
        self.on_pause()
        await asyncio.sleep(seconds)

    @property
    def core(self) -> EdgeCore:
        return self.durable.core

    def ingest(self, rows: int, at_ms: int = 0, *, full: bool = False) -> bool:
        self.now_s = max(self.now_s, at_ms / 1000)
        times = np.full(rows, START_MS + at_ms)
        batch = pa.record_batch({"x": pa.array(np.arange(rows)), TIME_COLUMN: pa.array(times)})
        event = Ingested("s", "src", batch, START_MS + int(1000 * self.now_s))
        return self.worker.ingest_payload(event, is_full_read=full)

    def work(self, until: Callable[[], bool] | None = None) -> None:
        """Runs the worker until its queues are empty."""
        done = until or (lambda: not any(p.queue for p in self.core.queries.values()))

        async def run() -> None:
            task = asyncio.create_task(self.worker.run())
            while not done():
                assert not task.done(), task.result()
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(run())

    def counted(self, name: str) -> int:
        return sum(slice_.observed for slice_ in self.core.queries[QueryRef(name, 1)].store.slices.values())

    def learn(self) -> None:
        """The worker measures what the queries cost."""
        self.ingest(10)
        self.now_s += 2.0
        self.ingest(10)


def test_an_edge_that_keeps_up_queues_nothing(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b")
    shop.learn()
    for at_ms in range(0, 60_000, 1000):
        shop.ingest(int(TUNING.block_ms / 0.2) - 1, at_ms)
        shop.now_s = at_ms / 1000
    assert shop.order == []
    assert not any(p.queue for p in shop.core.queries.values())
    shop.durable.sync()
    (path,) = tmp_path.glob("journal-*.log")
    assert RAN not in {record.kind for record in journal.scan(path.read_bytes()).records}


def test_a_long_batch_is_processed_in_pieces(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", cost_ms=1.0)
    shop.learn()
    shop.ingest(1000)
    assert shop.counted("a") == 20
    shop.work()
    assert shop.counted("a") == 1020
    pieces = np.diff([20, *(through for _, through in shop.order)])
    assert pieces.max() <= 1.2 * TUNING.piece_ms


def test_a_slow_query_holds_an_answer_up_for_no_more_than_its_cycle(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "quick", "slow")
    shop.costs["slow"] = 10.0
    shop.learn()
    shop.ingest(500, 3000)
    shop.work(until=lambda: len(shop.order) >= 1)
    shop.ingest(10, 10_500)  # the windows of both have ended
    began_s = shop.now_s
    shop.work(until=lambda: not shop.core.queries[QueryRef("quick", 1)].queue)
    assert shop.now_s - began_s <= 0.5
    assert shop.counted("slow") < 100
    shop.work()
    assert shop.counted("slow") == shop.counted("quick") == 530


def test_a_query_that_always_overruns_its_cycle_delays_each_of_the_others_by_one_record_at_most(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b", "slow")
    shop.costs["slow"] = 500.0  # four cycles, and a record cannot be divided
    shop.learn()
    shop.ingest(300, 3000)
    shop.ingest(10, 10_500)
    began_s = shop.now_s
    shop.work(until=lambda: not any(shop.core.queries[QueryRef(name, 1)].queue for name in "ab"))
    ran = [name for name, _ in shop.order]
    assert ran.count("slow") <= 2
    assert shop.now_s - began_s <= 2 * 0.5 + 0.2
    shop.work(until=lambda: shop.worker.loads()[QueryRef("slow", 1)].overruns >= 3)
    shop.ingest(10, 20_500)  # while it has a debt, and a queue of minutes
    began_s = shop.now_s
    shop.work(until=lambda: not any(shop.core.queries[QueryRef(name, 1)].queue for name in "ab"))
    assert shop.now_s - began_s <= 2 * 0.5 + 0.2
    loads = shop.worker.loads()
    assert loads[QueryRef("slow", 1)].overruns >= 3 and loads[QueryRef("a", 1)].overruns == 0
    assert loads[QueryRef("slow", 1)].late_ms > 0


def test_an_edge_is_short_of_cpu_while_a_due_query_is_late_and_no_longer(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b", cost_ms=1.0)
    shop.learn()
    assert shop.worker.take_short_share() == 0.0
    shop.ingest(500, 3000)  # nothing is due
    shop.work()
    assert shop.worker.take_short_share() == 0.0
    shop.ingest(500, 10_500)
    shop.work()
    share = shop.worker.take_short_share()
    assert 0.0 < share < 1.0
    shop.now_s += 10
    assert shop.worker.take_short_share() == 0.0
    shop.ingest(int(TUNING.read_every_ms), 15_000)
    while shop.worker.pace.may_read.is_set():
        shop.ingest(int(TUNING.read_every_ms), 15_000)
    shop.worker.take_short_share()
    shop.now_s += 1
    assert shop.worker.take_short_share() == 1.0, "the queues are full"


def test_sources_that_have_read_little_wait_while_batches_are_queued(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b")
    shop.learn()
    shop.busy_s = 1.0
    assert shop.ingest(10), "it is queued"
    assert not shop.worker.pace.may_read.is_set()
    assert shop.worker.take_short_share() == 0.0, "waiting for a larger batch is no lack of CPU"
    shop.now_s += TUNING.read_every_ms / 1000
    shop.ingest(int(1.2 * TUNING.read_every_ms / 0.2))
    assert shop.worker.pace.may_read.is_set(), "large batches may follow each other"
    shop.ingest(10)
    assert not shop.worker.pace.may_read.is_set()
    at_s = shop.now_s
    shop.work(until=lambda: shop.worker.pace.may_read.is_set())
    assert TUNING.read_every_ms <= 1000 * (shop.now_s - at_s) <= TUNING.read_every_ms + 2 * TUNING.piece_ms
    assert any(p.queue for p in shop.core.queries.values())
    shop.work()
    shop.ingest(10)
    at_s = shop.now_s
    shop.work()
    assert shop.worker.pace.may_read.is_set() and 1000 * (shop.now_s - at_s) < TUNING.read_every_ms, "nothing is queued"


def test_sources_do_not_wait_for_a_clock_that_was_set_back(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b")
    shop.learn()
    shop.busy_s = 1.0
    shop.ingest(1000)
    shop.ingest(10)
    shop.now_s -= 3600.0
    shop.work(until=lambda: len(shop.order) >= 1)
    assert shop.worker.pace.may_read.is_set() and any(p.queue for p in shop.core.queries.values())


def test_the_query_whose_window_has_ended_runs_first(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.durable.handle(Configured((query("later", "1h"), query("due", "10s"))))
    shop.learn()
    shop.ingest(300, 3000)
    shop.ingest(300, 10_500)  # the window of `due` has ended
    shop.work()
    done = [name for name, through in shop.order if through == 620]
    assert done == ["due", "later"]


def test_several_queries_of_a_source_that_is_never_idle_are_queued(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b")
    shop.learn()
    shop.busy_s = 1.0
    shop.ingest(10)
    assert all(p.queue.records == 10 for p in shop.core.queries.values())
    shop.busy_s = 0.0
    shop.ingest(10)  # behind the first
    assert all(p.queue.records == 20 for p in shop.core.queries.values())
    shop.work()
    shop.ingest(10)
    assert shop.counted("a") == shop.counted("b") == 50


def test_queries_of_a_source_that_is_behind_by_more_than_a_read_process_it_at_once(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b")
    shop.learn()
    shop.busy_s = 1.0
    assert not shop.ingest(1000, full=True)
    assert not shop.ingest(10), "the rest of what was behind"
    assert shop.ingest(10)
    assert shop.ingest(1000, full=True), "behind what is queued"
    shop.work()
    assert shop.ingest(3000, full=True), "600 ms would hold the event loop for too long"
    shop.work()
    assert shop.counted("a") == shop.counted("b") == 5040


def test_queries_that_are_due_run_together_first_and_then_all_others(tmp_path: Path) -> None:
    shop = Shop(tmp_path, cost_ms=0.01)
    due, later = [f"due{i}" for i in range(3)], [f"later{i}" for i in range(60)]
    shop.answer_delay_ms |= dict.fromkeys((*due, *later, "slow"), 0.0)
    queries = [*(query(name, "1h") for name in later), *(query(name) for name in due), query("slow", "1h")]
    shop.durable.handle(Configured(tuple(queries)))
    shop.costs["slow"] = 10.0
    shop.learn()
    shop.busy_s = 1.0
    pauses, told = list[int](), list[int]()
    shop.on_pause = lambda: pauses.append(len(shop.order))
    shop.on_changed = lambda: told.append(len(shop.order))
    shop.ingest(100, 10_500)
    shop.work()
    assert {name for name, _ in shop.order[:3]} == set(due) and pauses[0] == told[0] == 3
    others = [name for name, _ in shop.order[3:] if name != "slow"]
    assert sorted(others) == sorted(later), "each once"
    turns = np.diff(pauses)
    assert turns[: TUNING.frame_turns - 1].max() <= 2, "2 ms each while the frames are under way"
    assert turns.max() >= 40, "then all that are left in one turn"
    assert shop.counted("slow") == shop.counted("due0") == 120


def test_no_batch_is_queued_if_scheduling_is_off(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b", policy=OFF, cost_ms=10.0)
    shop.busy_s = 10.0
    shop.learn()
    shop.ingest(1000)
    assert shop.counted("a") == 1020


def test_a_deleted_query_takes_its_queue_with_it_and_others_go_on(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b", cost_ms=5.0)
    shop.learn()
    shop.ingest(200)
    shop.work(until=lambda: len(shop.order) >= 2)
    shop.durable.handle(Configured((query("b"), query("c"))))
    shop.work()
    assert shop.counted("b") == 220
    assert shop.core.queued_bytes == 0
    assert set(shop.worker.loads()) == {QueryRef("b", 1), QueryRef("c", 1)}


def test_sources_are_held_back_while_the_queues_are_full(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b", cost_ms=5.0, limit_bytes=3000)
    shop.learn()
    while shop.worker.pace.has_room.is_set():
        shop.ingest(50)
    assert 3000 < shop.core.queued_bytes <= 3000 + 50 * 16
    assert shop.core.pending_bytes > shop.core.queued_bytes  # the agent's memory limit has them too
    shop.work(until=shop.worker.pace.has_room.is_set)
    shop.work()
    assert shop.counted("a") == shop.counted("b")


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_delays_no_query(tmp_path: Path, jump_s: float) -> None:
    shop = Shop(tmp_path, "a", "b", cost_ms=5.0)
    shop.learn()
    shop.ingest(100, 1000)
    shop.now_s += jump_s
    shop.ingest(100, 11_000)
    shop.work()
    assert shop.counted("a") == shop.counted("b") == 220
    assert all(load.queued_records == 0 and load.late_ms == 0 for load in shop.worker.loads().values())


def test_a_restarted_worker_goes_on_with_the_queues(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", "b", cost_ms=5.0)
    shop.learn()
    shop.ingest(200)
    shop.work(until=lambda: len(shop.order) >= 3)
    shop.durable.sync()
    shop.durable.close()
    again = Shop(tmp_path, "a", "b")
    counted = [again.counted("a"), again.counted("b")]
    assert counted == [shop.counted("a"), shop.counted("b")]
    assert min(counted) < 220
    again.work()
    assert again.counted("a") == again.counted("b") == 220


def test_figures_state_what_a_query_has_not_processed(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", cost_ms=2.0)
    assert shop.worker.loads()[QueryRef("a", 1)].cost_us is None
    shop.learn()
    shop.ingest(100, 11_000)
    load = shop.worker.loads()[QueryRef("a", 1)]
    assert load.queued_records == 100
    assert load.queued_bytes == 1600
    assert load.cost_us == pytest.approx(2000.0)
    assert load.slack_ms == pytest.approx(-200.0)
    shop.now_s += 3.0
    assert shop.worker.loads()[QueryRef("a", 1)].late_ms == 3000.0


@pytest.mark.parametrize("absurd_ms", [1e12, -5.0, float("nan"), float("inf")])
def test_slack_contains_the_way_to_the_answer_and_an_absurd_one_changes_nothing(
    tmp_path: Path, absurd_ms: float
) -> None:
    shop = Shop(tmp_path, "a", cost_ms=2.0)
    shop.learn()
    shop.ingest(100, 11_000)
    assert shop.worker.loads()[QueryRef("a", 1)].slack_ms == pytest.approx(-200.0)
    for given_ms in (700.0, absurd_ms):
        shop.answer_delay_ms["a"] = given_ms
        assert shop.worker.loads()[QueryRef("a", 1)].slack_ms == pytest.approx(-900.0)


def wait_ms(shop: Shop, at_ms: int, rows: int = 10) -> int:
    """How long records may wait after the batch with the newest record at this time."""
    shop.ingest(rows, at_ms)
    return round(1000 * shop.worker.wait_s("s", "src"))


def test_records_wait_for_each_other_until_a_window_is_about_to_end(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", cost_ms=0.0)
    longest, shortest = round(1000 * TUNING.longest_wait_s), round(1000 * COALESCE_S)
    assert [wait_ms(shop, at_ms) for at_ms in (0, 40, 120, 300)] == [40, 80, 160, longest]
    assert [wait_ms(shop, at_ms) for at_ms in (9_000, 9_900, 9_990, 9_999)] == [longest, 100, shortest, shortest]
    assert [wait_ms(shop, at_ms) for at_ms in (10_000, 19_900)] == [longest, 100]


def test_records_that_come_late_wait_by_the_watermark_of_their_source(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", cost_ms=0.0)
    shop.now_s = 3600.0  # the newest record is an hour old
    assert [wait_ms(shop, at_ms) for at_ms in (0, 0, 0, 0, 9_900, 10_100)][3:] == [250, 100, 250]


def test_batches_of_very_many_records_wait_less(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "a", policy=OFF, cost_ms=0.0)
    for at_ms in range(4):
        wait_ms(shop, at_ms)
    assert [wait_ms(shop, 10, TUNING.most_waiting) for _ in range(2)] == [250, 250]
    assert [wait_ms(shop, 10, TUNING.most_waiting + 1) for _ in range(4)] == [125, 62, 31, 20]


def test_short_windows_let_records_wait_less(tmp_path: Path) -> None:
    shop = Shop(tmp_path, cost_ms=0.0)
    shop.durable.handle(Configured((query("due", "1s"), query("later", "1h"))))
    assert [wait_ms(shop, at_ms) for at_ms in (0, 0, 0, 0, 700, 950)][3:] == [100, 100, 50]


def test_records_of_a_query_with_an_accuracy_do_not_wait_for_each_other(tmp_path: Path) -> None:
    shop = Shop(tmp_path, cost_ms=0.0)
    ref, spec = query("c")
    accurate = QuerySpec.from_mapping(
        {**spec.to_mapping(), "lateness": "0s", "accuracy": {"error": "5%", "confidence": "95%"}}
    )
    shop.durable.handle(Configured(((ref, accurate),)))
    assert {wait_ms(shop, at_ms) for at_ms in (0, 0, 0, 0, 1000)} == {round(1000 * COALESCE_S)}


def test_no_window_closes_later_because_records_wait(tmp_path: Path) -> None:
    """A replay of a record per ms, in virtual time: few batches, and each window closes as its next record is there."""
    shop = Shop(tmp_path, cost_ms=0.0)
    shop.durable.handle(Configured((query("due", "1s"), query("later", "3s"))))
    times = pa.array(np.arange(START_MS, START_MS + 12_000))
    recorded = Chunk("src", pa.record_batch({"x": times, TIME_COLUMN: times}), None, None, (), 12_000)
    closed_ms: dict[int, int] = {}

    async def source() -> AsyncIterator[Chunk]:
        yield recorded

    async def sleep(seconds: float) -> None:
        shop.now_s += seconds

    async def replay() -> int:
        batches = 0
        clock = StreamClock(START_MS, START_MS, 1.0)
        wait = lambda: round(1000 * shop.worker.wait_s("s", "src"))  # noqa: E731
        now_ms = lambda: START_MS + round(1000 * shop.now_s)  # noqa: E731
        async for chunk in paced(source(), clock, now_ms=now_ms, sleep=sleep, interval_ms=wait):
            batches += 1
            shop.worker.ingest_payload(Ingested("s", "src", chunk.batch, now_ms()))
            for end in range(1_000, shop.core.watermark_ms("s") - START_MS + 1, 1_000):
                closed_ms.setdefault(end, now_ms() - START_MS)
        return batches

    batches = asyncio.run(replay())
    assert max(at - end for end, at in closed_ms.items()) <= 1000 * COALESCE_S and len(closed_ms) == 11
    assert batches <= 12_000 / 80
