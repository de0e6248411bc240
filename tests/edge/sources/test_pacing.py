import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.config import ReplayConfig
from edge.records import Chunk
from edge.sources.pacing import RELEASE_INTERVAL_MS, PacedSource, paced, replay_clock
from edgewater.base.streams import LIVE, TIME_COLUMN, StreamClock
from tests.examples import examples

WALL_MS = 1_700_000_000_000
DAY_MS = 86_400_000


class Wall:
    """A wall clock that only sleeping moves; notes when each chunk was released."""

    def __init__(self) -> None:
        self.now_ms = WALL_MS
        self.sleeps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        assert len(self.sleeps) < 100_000, "it does not come to an end"
        self.sleeps.append(seconds)
        self.now_ms += round(seconds * 1000)
        await asyncio.sleep(0)


def chunk(times: list[int]) -> Chunk:
    return Chunk("s", pa.record_batch({TIME_COLUMN: pa.array(times, pa.int64())}), None, None, (), 10 * len(times))


def release(chunks: list[Chunk], clock: StreamClock, wall: Wall, **more: Any) -> list[tuple[int, Chunk]]:
    async def source() -> AsyncIterator[Chunk]:
        for one in chunks:
            yield one

    async def run() -> list[tuple[int, Chunk]]:
        pacing = paced(source(), clock, now_ms=lambda: wall.now_ms, sleep=wall.sleep, **more)
        return [(wall.now_ms, one) async for one in pacing]

    return asyncio.run(run())


def times_of(one: Chunk) -> list[int]:
    return list(one.batch.column(TIME_COLUMN).to_pylist())


def test_records_are_released_when_the_clock_reaches_their_event_time() -> None:
    clock = StreamClock(0, WALL_MS, 1000.0)  # a second of event time per ms
    wall = Wall()
    released = release([chunk([0, 1_000, 500_000, 500_001, 2_000_000])], clock, wall)
    assert [(at - WALL_MS, times_of(one)) for at, one in released] == [
        (0, [0]),
        (RELEASE_INTERVAL_MS, [1_000]),
        (500, [500_000]),
        (500 + RELEASE_INTERVAL_MS, [500_001]),
        (2_000, [2_000_000]),
    ]


def test_what_is_due_together_is_released_together() -> None:
    clock = StreamClock(0, WALL_MS - 10_000, 1.0)
    wall = Wall()
    released = release([chunk(list(range(100)))], clock, wall)
    assert len(released) == 1
    assert wall.sleeps == []


def test_a_record_waits_for_every_record_before_it() -> None:
    clock = StreamClock(0, WALL_MS, 1.0)
    released = release([chunk([1_000, 10]), chunk([20])], clock, Wall())
    assert [(at - WALL_MS, times_of(one)) for at, one in released] == [(1_000, [1_000, 10]), (1_000, [20])]


def test_a_long_wait_asks_the_wall_clock_again_and_again() -> None:
    wall = Wall()
    release([chunk([5_500])], StreamClock(0, WALL_MS, 1.0), wall)
    assert wall.sleeps == [1.0] * 5 + [0.5]


def test_a_clock_that_stands_still_is_never_a_busy_loop() -> None:
    """As if rounding said "due" and the clock "not yet"."""
    wall = Wall()
    release([chunk([1])], StreamClock(0, WALL_MS, 0.001), wall)
    assert min(wall.sleeps) * 1000 >= RELEASE_INTERVAL_MS


def test_records_wait_as_long_as_they_may_after_each_release() -> None:
    wall, waits = Wall(), iter([200, 20, 50, 0, 0])
    released = release([chunk(list(range(300)))], StreamClock(0, WALL_MS, 1.0), wall, interval_ms=lambda: next(waits))
    assert [(at - WALL_MS, len(times_of(one))) for at, one in released] == [
        (0, 1), (200, 200), (220, 20), (270, 50), (290, 20), (310, 9),
    ]  # fmt: skip


def test_chunks_without_records_pass_at_once() -> None:
    wall = Wall()
    assert len(release([chunk([])], StreamClock(0, WALL_MS, 1.0), wall)) == 1
    assert wall.sleeps == []


@examples(60)
@given(
    st.lists(st.lists(st.integers(0, 30 * DAY_MS), max_size=20), max_size=4), st.sampled_from([60_000.0, 86_400.0, 1e9])
)
def test_nothing_is_lost_doubled_reordered_or_early(blocks: list[list[int]], speed: float) -> None:
    clock = StreamClock(0, WALL_MS, speed)
    released = release([chunk(block) for block in blocks], clock, Wall())
    assert [t for _, one in released for t in times_of(one)] == [t for block in blocks for t in block]
    assert sum(one.nbytes for _, one in released) == sum(10 * len(block) for block in blocks)
    assert all(max(times_of(one), default=0) <= clock.to_event_ms(at) for at, one in released)


def test_a_paced_file_goes_on_where_it_was_stopped_inside_a_block(
    world: Any, read: Any, ndjson: Any, numbers: Any
) -> None:
    world.write("a.ndjson", ndjson(0, 50))
    clock = StreamClock(world.now_ms, world.now_ms, 0.1)  # records lie 1 ms, so 10 ms of wall time, apart

    def source() -> PacedSource:
        return PacedSource(world.source("a.ndjson"), clock, world.context)

    first = read(source(), limit=7)
    assert 0 < len(numbers(first)) < 50
    rest = read(source(), first[-1].end)
    assert numbers([*first, *rest]) == list(range(50))
    again = source()
    for one in [*first, *rest]:
        assert again.reread(one.start, one.end).batch.equals(one.batch)


@pytest.mark.parametrize(("at", "origin"), [(None, WALL_MS), ("2023-11-14T22:13:21Z", WALL_MS + 1000)])
def test_the_clock_of_a_replay_begins_now_or_at_its_time(at: str | None, origin: int) -> None:
    given = {"speed": 86400, "start": "2013-01-01T00:00:00Z", "at": at}
    clock = replay_clock(ReplayConfig.model_validate(given), WALL_MS)
    assert clock == StreamClock(1_356_998_400_000, origin, 86_400.0)


def test_speed_max_has_no_clock_and_a_live_stream_the_wall_clock() -> None:
    assert replay_clock(ReplayConfig.model_validate({"speed": "max"}), WALL_MS) is None
    assert replay_clock(None, WALL_MS) == LIVE
