"""How long records wait for each other, over a real core, with a clock that only the tests move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pyarrow as pa
import pytest

from edge.core.events import Configured, Ingested, SourcesOpened
from edge.core.streams import StreamSpec
from edge.read_pace import LONGEST_WAIT_S, MOST_WAITING, SHORTER_WAIT_S, ReadPace
from edge.records import COALESCE_S, Chunk
from edge.sources.pacing import paced
from edgewater.base.streams import TIME_COLUMN, StreamClock
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
from tests.cores import open_core

START_MS = 1_767_225_600_000


def query(name: str, window: str = "10s", budget: dict[str, str] | None = None) -> tuple[QueryRef, QuerySpec]:
    spec = {"name": name, "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": window}, "lateness": "1h"}
    return QueryRef(name, 1), QuerySpec.from_mapping({**spec, **({"budget": budget} if budget else {})})


class Shop:
    """A core and the pace of its source."""

    def __init__(self, *queries: tuple[QueryRef, QuerySpec], replayable: bool = True) -> None:
        self.now_s = 0.0
        self.core = open_core(StreamSpec({"x": pa.int64()}), source="src")
        self.core.handle(SourcesOpened((("s", "src"),), ("src",) if replayable else ()))
        self.core.handle(Configured(queries))
        self.pace = ReadPace(self.core)

    def now_ms(self) -> int:
        return START_MS + round(1000 * self.now_s)

    def ingest(self, batch: pa.RecordBatch) -> None:
        self.core.handle(Ingested("s", "src", batch, self.now_ms()))
        self.pace.count("s", batch.num_rows)

    def wait_ms(self, at_ms: int, rows: int = 10) -> int:
        """How long records may wait after the batch with the newest record at this time."""
        self.now_s = max(self.now_s, at_ms / 1000)
        times = pa.array(np.full(rows, START_MS + at_ms))
        self.ingest(pa.record_batch({"x": pa.array(np.arange(rows)), TIME_COLUMN: times}))
        return round(1000 * self.pace.wait_s("s", "src"))


def test_records_wait_for_each_other_until_a_window_is_about_to_end() -> None:
    shop = Shop(query("a"))
    longest, shortest = round(1000 * LONGEST_WAIT_S), round(1000 * COALESCE_S)
    assert [shop.wait_ms(at_ms) for at_ms in (0, 40, 120, 300, 700, 1400)] == [40, 80, 160, 320, 640, longest]
    assert [shop.wait_ms(at_ms) for at_ms in (9_000, 9_900, 9_990, 9_999)] == [longest, 100, shortest, shortest]
    assert [shop.wait_ms(at_ms) for at_ms in (10_000, 19_900)] == [longest, 100]


@pytest.mark.parametrize(("budget", "replayable"), [(None, False), ({"staleness": "2s"}, True)])
def test_records_that_cannot_be_read_again_or_are_sent_all_the_time_wait_less(
    budget: dict[str, str] | None, replayable: bool
) -> None:
    shop = Shop(query("a", budget=budget), replayable=replayable)
    longest = round(1000 * SHORTER_WAIT_S)
    assert [shop.wait_ms(at_ms) for at_ms in (0, 40, 120, 300, 700)] == [40, 80, 160, longest, longest]


def test_records_that_come_late_wait_by_the_watermark_of_their_source() -> None:
    shop = Shop(query("a"))
    shop.now_s = 3600.0  # the newest record is an hour old
    assert [shop.wait_ms(at_ms) for at_ms in (0,) * 6 + (9_900, 10_100)][5:] == [1000, 100, 1000]


def test_batches_of_very_many_records_wait_less() -> None:
    shop = Shop(query("a"))
    for at_ms in range(6):
        shop.wait_ms(at_ms)
    assert [shop.wait_ms(10, MOST_WAITING) for _ in range(2)] == [1000, 1000]
    assert [shop.wait_ms(10, MOST_WAITING + 1) for _ in range(6)] == [500, 250, 125, 62, 31, 20]


def test_short_windows_let_records_wait_less() -> None:
    shop = Shop(query("due", "1s"), query("later", "1h"))
    assert [shop.wait_ms(at_ms) for at_ms in (0, 0, 0, 0, 700, 950)][3:] == [100, 100, 50]


def test_records_of_a_query_with_an_accuracy_do_not_wait_for_each_other() -> None:
    ref, spec = query("c")
    accurate = QuerySpec.from_mapping(
        {**spec.to_mapping(), "lateness": "0s", "accuracy": {"error": "5%", "confidence": "95%"}}
    )
    shop = Shop((ref, accurate))
    assert {shop.wait_ms(at_ms) for at_ms in (0, 0, 0, 0, 1000)} == {round(1000 * COALESCE_S)}


def test_no_window_closes_later_because_records_wait() -> None:
    """A replay of a record per ms, in virtual time: few batches, and each window closes as its next record is there."""
    shop = Shop(query("due", "1s"), query("later", "3s"))
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
        wait = lambda: round(1000 * shop.pace.wait_s("s", "src"))  # noqa: E731
        async for chunk in paced(source(), clock, now_ms=shop.now_ms, sleep=sleep, interval_ms=wait):
            batches += 1
            shop.ingest(chunk.batch)
            for end in range(1_000, shop.core.streams["s"].watermark_ms - START_MS + 1, 1_000):
                closed_ms.setdefault(end, shop.now_ms() - START_MS)
        return batches

    batches = asyncio.run(replay())
    assert max(at - end for end, at in closed_ms.items()) <= 1000 * COALESCE_S and len(closed_ms) == 11
    assert batches <= 12_000 / 80
