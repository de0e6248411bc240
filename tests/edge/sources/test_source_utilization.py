"""A source that keeps up is idle at times; one that does not keep up never is."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from edge.codecs.formats import TextFormat
from edge.codecs.schema import EventTime, RecordSchema
from edge.config import EdgeConfig, parse_config
from edge.core.streams import StreamSpec, StreamState
from edge.receivers import PushedSource
from edge.records import COALESCE_S, SHORT_READ_BYTES, Chunk
from edge.source_kinds import SourceContext
from edge.sources.files.reader import FileReader
from edge.sources.files.source import FileSource, text_opener
from edge.sources.http import StreamReceiver
from edge.sources.pacing import paced
from edge.sources.receiving import PushEndpoint, Unavailable
from edge.sources.stdin import StdinSource
from edge.utilization import RECENT_RECORDS, BusyMeter, QueryCosts
from edgewater.base.streams import TIME_COLUMN, StreamClock
from edgewater.wire import QueryRef

WALL_MS = 1_700_000_000_000


class Wall:
    """A clock that work and sleep move."""

    def __init__(self) -> None:
        self.ms = float(WALL_MS)
        self.meter = BusyMeter(lambda: self.ms / 1000)

    async def sleep(self, seconds: float) -> None:
        with self.meter.idle("s"):
            self.ms += seconds * 1000
            await asyncio.sleep(0)


@pytest.mark.parametrize(("work", "share"), [(0.05, 0.05), (0.3, 0.3), (0.8, 0.8), (1.5, 1.0)])
def test_a_replay_is_as_busy_as_its_records_make_it(work: float, share: float) -> None:
    """10 records a ms, so that at any moment some are due. `work`: ms of work per ms of records."""
    wall, batches = Wall(), 0
    times = [i // 10 for i in range(20_000)]

    async def source() -> AsyncIterator[Chunk]:
        for at in range(0, len(times), 5_000):
            batch = pa.record_batch({TIME_COLUMN: pa.array(times[at : at + 5_000], pa.int64())})
            yield Chunk("s", batch, None, None, (), 1)

    async def run() -> int:
        count = 0
        with wall.meter.busy("s"):
            pacing = paced(source(), StreamClock(0, WALL_MS, 1.0), now_ms=lambda: int(wall.ms), sleep=wall.sleep)
            async for one in pacing:
                wall.ms += work * one.batch.num_rows / 10
                count += 1
        return count

    batches = asyncio.run(run())
    assert wall.meter.take_busy_share() == pytest.approx(share, abs=0.05)
    assert batches <= 2_000 / 20 + 2 * 4, "parts are at least the release interval apart"


def test_short_reads_of_a_growing_file_are_coalesced(world: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.log", ndjson(0, 1))
    source, chunks = world.source("a.log", format="ndjson", follow=True), []

    async def run() -> None:
        async for chunk in source.chunks(None):
            chunks.append(chunk)
            if len(chunks) == 40:
                break
            world.append("a.log", ndjson(len(chunks), len(chunks) + 1))  # before the source looks again

    asyncio.run(asyncio.wait_for(run(), 30))
    assert numbers(chunks) == list(range(40))
    assert len(world.slept) >= 37 and set(world.slept) == {COALESCE_S}


def test_a_growing_file_is_read_as_seldom_as_its_records_may_wait(world: Any, ndjson: Any, numbers: Any) -> None:
    world.wait_s, rows = 0.25, 2_000
    world.write("a.log", ndjson(0, rows))
    source, chunks = world.source("a.log", format="ndjson", follow=True), []
    assert SHORT_READ_BYTES < len(ndjson(0, rows)) < SHORT_READ_BYTES * world.wait_s / COALESCE_S

    def append(_: int) -> None:
        world.append("a.log", ndjson(rows * len(chunks), rows * (len(chunks) + 1)))

    async def run() -> None:
        world.on_sleep = append
        async for chunk in source.chunks(None):
            chunks.append(chunk)
            if len(chunks) == 10:
                break

    asyncio.run(asyncio.wait_for(run(), 30))
    assert numbers(chunks) == list(range(10 * rows))
    assert len(world.slept) == 9 and set(world.slept) == {0.25}


def test_a_file_with_much_unread_input_is_read_without_a_pause(world: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.log", ndjson(0, 2_000))
    source, chunks = world.source("a.log", format="ndjson", follow=True), []

    async def run() -> None:
        async for chunk in source.chunks(None):
            chunks.append(chunk)
            if len(chunks) == 10:
                break
            world.append("a.log", ndjson(2_000 * len(chunks), 2_000 * (len(chunks) + 1)))

    asyncio.run(asyncio.wait_for(run(), 30))
    assert numbers(chunks) == list(range(20_000)) and world.slept == []


@pytest.mark.parametrize(("rows", "waits"), [(1, True), (200, False)])
def test_short_reads_of_standard_input_are_coalesced(
    schema: Any, arrival_ms: int, ndjson: Any, rows: int, waits: bool
) -> None:
    """Lines wait as long as the pace permits, but never so long that the pipe would be more than half full."""
    read_end, write_end = os.pipe()
    slept: list[float] = []
    marks: list[str] = []

    async def sleep(seconds: float) -> None:
        assert marks[-1] == "begin", "the source is idle during the pause"
        slept.append(seconds)

    context = SourceContext(
        "flights", schema, lambda: arrival_ms, sleep, lambda name: _marked(marks), lambda stream, source: 0.25
    )
    source = StdinSource("s", TextFormat("ndjson", schema), context, read_end)

    async def run() -> int:
        os.write(write_end, ndjson(0, rows).encode())
        count = 0
        async for _ in source.chunks(None):
            count += 1
            if count < 20:
                os.write(write_end, ndjson(rows * count, rows * (count + 1)).encode())
            elif count == 20:
                os.close(write_end)
        return count

    assert asyncio.run(asyncio.wait_for(run(), 30)) == 20
    assert len(slept) >= 17 and (set(slept) == {0.25} if waits else COALESCE_S < slept[0] < 0.1)
    os.close(read_end)


@contextmanager
def _marked(marks: list[str]) -> Iterator[None]:
    marks.append("begin")
    try:
        yield
    finally:
        marks.append("end")


def test_standard_input_without_a_line_is_idle(schema: Any, arrival_ms: int, ndjson: Any) -> None:
    read_end, write_end = os.pipe()
    marks: list[str] = []
    context = SourceContext("flights", schema, lambda: arrival_ms, idle=lambda name: _marked(marks))
    source = StdinSource("s", TextFormat("ndjson", schema), context, read_end)

    async def run() -> None:
        first = asyncio.ensure_future(anext(source.chunks(None)))
        while not marks and not first.done():
            await asyncio.sleep(0.005)
        assert marks == ["begin"]
        os.write(write_end, ndjson(0, 1).encode())
        await asyncio.wait_for(first, 60)
        assert marks == ["begin", "end"]

    asyncio.run(run())
    os.close(write_end)
    os.close(read_end)


def test_decoding_a_push_is_busy_time_and_waiting_for_the_disk_is_not(ndjson: Any, arrival_ms: int) -> None:
    happened: list[str] = []

    async def accept(chunk: Chunk, stream: str) -> None:
        happened.append(f"accept {chunk.source}")

    routes = PushEndpoint(
        [StreamReceiver.of(pushed())],
        pushed(),
        accept,
        lambda: None,
        lambda: arrival_ms,
        lambda name: _marked(happened),
    ).routes
    assert asyncio.run(push(routes, ndjson(0, 3))) == 200
    assert happened == ["begin", "end", "accept flights:http"]


def test_a_refused_push_counts_as_unread_input(ndjson: Any, arrival_ms: int) -> None:
    wall = Wall()

    async def accept(chunk: Chunk, stream: str) -> None:
        pass

    def routes(unavailable: Unavailable | None) -> list[Route]:
        return PushEndpoint(
            [StreamReceiver.of(pushed())],
            pushed(),
            accept,
            lambda: unavailable,
            lambda: arrival_ms,
            on_refused=wall.meter.on_refused,
        ).routes

    with wall.meter.busy("flights:http"), wall.meter.idle("flights:http"):
        assert asyncio.run(push(routes(None), ndjson(0, 3))) == 200
        assert wall.meter.unread_sources(0.1) == set()
        assert asyncio.run(push(routes(Unavailable("the edge is full")), ndjson(0, 3))) == 503
        wall.ms += 1_500
        assert wall.meter.unread_sources(0.1) == {"flights:http"}, "its sender retries after a second"
        wall.ms += 1_000
        assert wall.meter.unread_sources(0.1) == set(), "or never"


def pushed() -> EdgeConfig:
    return parse_config(
        {
            "edge": "jfk",
            "center": {"address": "127.0.0.1:1"},
            "state_dir": "unused",
            "streams": {
                "flights": {
                    "columns": {"carrier": "string", "distance": "int64", "delay": "float64", "late": "bool"},
                    "time": {"column": "t", "unit": "ms"},
                    "sources": [{"http": None}],
                }
            },
        }
    )


async def push(routes: list[Route], body: bytes) -> int:
    transport = httpx.ASGITransport(app=Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        headers = {"content-type": "application/x-ndjson"}
        return (await client.post("/v1/streams/flights", content=body, headers=headers)).status_code


def test_an_http_source_is_idle_without_pushes(schema: Any) -> None:
    wall = Wall()
    source = PushedSource("s", "flights", schema, wall.meter.idle)

    async def run() -> None:
        with wall.meter.busy("s"):
            waiting = asyncio.ensure_future(anext(source.chunks(None)))
            await asyncio.sleep(0)
            wall.ms += 1_000
            assert wall.meter.take_busy_share() == 0.0
            with wall.meter.busy("s"):
                wall.ms += 250
            wall.ms += 750
            assert wall.meter.take_busy_share() == pytest.approx(0.25)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())


class SlowReader:
    """A `FileReader` of a slow disk: each read takes `seconds`. While it reads, `during` is called each second."""

    def __init__(self, reader: FileReader, wall: Wall, seconds: float, during: Callable[[], None]) -> None:
        self._reader, self._wall, self._seconds, self._during = reader, wall, seconds, during

    def next(self, final: bool, arrival_ms: int) -> Any:
        for _ in range(int(self._seconds)):
            self._wall.ms += 1000
            self._during()
        return self._reader.next(final, arrival_ms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def test_a_file_that_is_read_slowly_is_not_idle_before_it_was_read(tmp_path: Path) -> None:
    """Its records are older than the idle time when the read ends, and their window must still be open."""
    wall, idle_ms = Wall(), 10_000
    stream = StreamState(StreamSpec({"x": pa.int64()}, idle_ms=idle_ms))
    stream.set_sources(["s"], ["s"])
    schema = RecordSchema({"x": pa.int64()}, EventTime("t"))
    (tmp_path / "a.ndjson").write_text("")

    def tick() -> None:
        now_ms = int(wall.ms)
        age_s = wall.meter.empty_for_s("s")
        empty_ms = {"s": now_ms - round(1000 * age_s) if age_s < 1e9 else 0}
        stream.tick(now_ms, (), empty_ms)

    seconds = [0.0]

    def opener(path: str, position: Any) -> Any:
        reader = text_opener(TextFormat("ndjson", schema))(path, position)
        return SlowReader(reader, wall, seconds[0], tick)

    context = SourceContext("events", schema, lambda: int(wall.ms), wall.sleep)
    source = FileSource("s", str(tmp_path / "*.ndjson"), opener, context, follow=True, poll_s=0.2)

    async def run() -> list[int]:
        found: list[int] = []
        with wall.meter.busy("s"):
            reading = source.chunks(None)
            tick()
            written_ms = int(wall.ms) + 300
            seconds[0] = 45.0
            (tmp_path / "b.ndjson").write_text(f'{{"x": 1, "t": {written_ms}}}\n')
            async for chunk in reading:
                tick()
                found += chunk.batch.column(TIME_COLUMN).to_pylist()
                if found:
                    break
            await reading.aclose()  # type: ignore[attr-defined]
        assert int(wall.ms) - written_ms > 3 * idle_ms
        assert stream.watermark_ms <= written_ms
        return found

    assert len(asyncio.run(run())) == 1
    with wall.meter.busy("s"), wall.meter.idle("s"):
        wall.ms += idle_ms + 1
    with wall.meter.busy("s"), wall.meter.idle("s"):
        tick()
    tick()
    assert stream.watermark_ms > WALL_MS + 45_000, "it has had nothing to read for so long"


@pytest.mark.parametrize("pushed", [False, True])
def test_a_source_was_last_empty_when_its_last_wait_began_or_before_a_push_that_is_being_read(pushed: bool) -> None:
    wall = Wall()
    assert wall.meter.empty_for_s("s") == float("inf")
    with wall.meter.busy("s"):
        assert wall.meter.empty_for_s("s") == float("inf")
        with wall.meter.idle("s"):
            wall.ms += 2_000
            assert wall.meter.empty_for_s("s") == 2
        wall.ms += 3_000
        assert wall.meter.empty_for_s("s") == 5
        if pushed:
            with wall.meter.busy("s"):
                wall.ms += 1_000
                with wall.meter.idle("s"):
                    assert wall.meter.empty_for_s("s") == 1
            assert wall.meter.empty_for_s("s") == 0
        wall.meter.on_refused("s")
        assert wall.meter.empty_for_s("s") == float("inf"), "its client comes again"


def test_the_cost_of_a_query_is_the_mean_over_its_recent_records() -> None:
    now_s = [0.0]
    costs, slow, quick = QueryCosts(lambda: now_s[0]), QueryRef("slow", 1), QueryRef("quick", 1)

    def process(records: int, **spent_s: float) -> None:
        costs.begin()
        for ref in (slow, quick):
            now_s[0] += spent_s[ref.name]
            costs.end(ref, records)

    process(0, slow=0.0, quick=0.0)
    assert costs.record_s([slow, quick]) == {}
    process(100, slow=3.0, quick=1.0)
    now_s[0] += 60.0  # other work
    process(100, slow=5.0, quick=1.0)
    assert costs.record_s([slow, quick]) == pytest.approx({slow: 0.04, quick: 0.01})
    for _ in range(20):
        process(RECENT_RECORDS, slow=RECENT_RECORDS, quick=0.0)
    assert costs.record_s([slow]) == pytest.approx({slow: 1.0}), "earlier records hardly count"
    assert costs.record_s([slow, quick]).keys() == {slow}, "it was deleted meanwhile"
