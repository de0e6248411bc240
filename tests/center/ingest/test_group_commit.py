"""When a gateway commits: at once after a pause, and not more often than `COMMIT_EVERY_S` under load."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251  (what `VirtualLoop` takes)
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from center.catalog import Catalog, IndexOutcome, UnindexedFrame
from center.ingest.assignments import AssignmentPlan
from center.ingest.group_commit import COMMIT_EVERY_S, LARGE_BYTES, MAX_BATCH_BYTES, GroupCommit, ReceivedFrame
from center.ingest.metrics import GatewayMetrics
from center.storage.frame_log import FrameLocation, FrameLog, StoredFrame
from center.storage.wake import Topic, Waker
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_key
from edgewater.wire import Frame, FrameBody
from tests.cells import at_night
from tests.center.catalog_world import hello, spec
from tests.center.kept_frames import stored_frame
from tests.simulation.virtual import VirtualLoop

TOOK_S = 0.002


def received_frame(stored: StoredFrame, crc32c: int, wire_bytes: int, size: int, session: object) -> ReceivedFrame:
    identity = stored.query, stored.edge, stored.incarnation, stored.seq
    return ReceivedFrame(stored, UnindexedFrame(*identity, crc32c, wire_bytes, 1_000, None, size), False, session)


class Threads(VirtualLoop):
    """Virtual time in which a call of a thread takes `TOOK_S`, and of one thread another time."""

    slow: tuple[Any, float] = None, TOOK_S

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future, (slow, slow_s) = self.create_future(), self.slow

        def run() -> None:
            try:
                future.set_result(func(*args))
            except Exception as exc:
                future.set_exception(exc)

        self.call_later(slow_s if executor is slow else TOOK_S, run)
        return future


class CountedWaker(Waker):
    wakes = 0

    def wake(self) -> None:
        self.wakes += 1


@pytest.mark.slow
@pytest.mark.parametrize("every_s", [0.001, *at_night(0.2)])
def test_the_load_sets_how_many_frames_a_commit_has_and_a_frame_after_a_pause_is_committed_at_once(
    catalog: Catalog, tmp_path: Path, every_s: float
) -> None:
    query, frames = catalog.queries.register(spec(), 1)[0].ref, 100
    assert hello(catalog) is None
    plan = AssignmentPlan.of(catalog.version(), catalog.queries.all(), catalog.edges.all(), {})
    loop, metrics, waker = Threads(random.Random(1)), GatewayMetrics(), CountedWaker(None, Topic.FRAMES)
    commits = GroupCommit(
        catalog, FrameLog(tmp_path / "log"), metrics, max_pending_bytes=1 << 20, read_plan=lambda p: p,
        waker=waker, on_stall=lambda: None, retry_ms=1, retry_max_ms=1,
    )  # fmt: skip
    commits.plan = plan
    waited_s: list[float] = []

    async def ship() -> None:
        running = asyncio.ensure_future(commits.run())
        for seq in range(frames):
            await asyncio.sleep(every_s)
            await submit(seq)
        await asyncio.sleep(2 * COMMIT_EVERY_S)
        commits.close()
        await running

    async def submit(seq: int) -> None:
        frame, came_s = Frame.pack(seq, query, FrameBody(seq + 1)), loop.time()
        await commits.reserve(frame.wire_bytes)
        stored = stored_frame(frame)
        size = frame.wire_bytes
        received = received_frame(stored, frame.crc32c, size, size, loop)
        commits.submit(received, lambda _outcome: waited_s.append(loop.time() - came_s))

    try:
        loop.run_until_complete(ship())
    finally:
        loop.close()
    made = metrics.registry.get_sample_value("edgewater_gateway_commits_total")
    assert waker.wakes == made, "the drivers are woken after each commit"
    assert made is not None and [e.seq for e in catalog.frames.entries(query_key(query), 0, 1 << 40)] == list(
        range(frames)
    )
    if every_s > COMMIT_EVERY_S:
        assert made == frames and max(waited_s) < 2 * TOOK_S + 1e-3
    else:
        assert made <= frames * every_s / COMMIT_EVERY_S + 2 and max(waited_s) <= COMMIT_EVERY_S + 2 * TOOK_S + 1e-3


class Commits:
    """A gateway's commits in virtual time. A commit of large frames takes `large_s` for each of its two calls."""

    def __init__(self, catalog: Catalog, path: Path, edges: Sequence[str], large_s: float = TOOK_S) -> None:
        self.query = catalog.queries.register(spec(), 1)[0].ref
        for edge in edges:
            assert hello(catalog, EdgeId(edge)) is None
        self.loop = Threads(random.Random(1))
        self.log = FrameLog(path / "log")
        self.commits = GroupCommit(
            catalog, self.log, GatewayMetrics(), max_pending_bytes=8 * LARGE_BYTES, read_plan=lambda p: p,
            waker=Waker(None, Topic.FRAMES), on_stall=lambda: None, retry_ms=1, retry_max_ms=1,
        )  # fmt: skip
        self.commits.plan = AssignmentPlan.of(catalog.version(), catalog.queries.all(), catalog.edges.all(), {})
        self.loop.slow = self.commits._large.thread, large_s
        self.ended: list[tuple[str, int]] = []
        self.at_s: dict[tuple[str, int], float] = {}

    def submit(self, edge: str, seq: int, size: int) -> None:
        frame = Frame.pack(seq, self.query, FrameBody(seq + 1))
        received = received_frame(stored_frame(frame, edge), frame.crc32c, 1, size, edge)
        self.commits.submit(received, lambda outcome: self._end(edge, seq, outcome))

    def _end(self, edge: str, seq: int, outcome: IndexOutcome | Exception) -> None:
        assert outcome is IndexOutcome.NEW
        self.ended.append((edge, seq))
        self.at_s[edge, seq] = self.loop.time()

    def run(self, ship: Callable[[], Awaitable[None]]) -> None:
        async def shipped() -> None:
            running = asyncio.ensure_future(self.commits.run())
            await ship()
            self.commits.close()
            await running

        try:
            self.loop.run_until_complete(shipped())
        finally:
            self.loop.close()


def test_small_frames_do_not_wait_for_the_large_frames_of_other_edges(catalog: Catalog, tmp_path: Path) -> None:
    large = [f"large{n}" for n in range(8)]
    world = Commits(catalog, tmp_path, ["small", *large], large_s=1.0)

    async def ship() -> None:
        for seq in range(5):
            for edge in large:
                world.submit(edge, seq, MAX_BATCH_BYTES // 2)
        for seq in range(10):
            world.submit("small", seq, LARGE_BYTES)
            await asyncio.sleep(0.5)
        await asyncio.sleep(60)

    began_s = world.loop.time()
    world.run(ship)
    for seq in range(10):
        assert world.at_s["small", seq] - began_s <= 0.5 * seq + COMMIT_EVERY_S + 2 * TOOK_S + 1e-3
    assert 28 < world.at_s["large7", 1] - began_s < 32, "8 commits of 2 s, with as much time between them"
    of_large = [each for each in world.ended if each[0] != "small"]
    assert of_large == [(edge, seq) for seq in range(5) for edge in large], "the others take turns"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *at_night(1, 2, 3, 4)])
def test_small_and_large_frames_of_an_edge_keep_their_order(catalog: Catalog, tmp_path: Path, seed: int) -> None:
    world, rng = Commits(catalog, tmp_path, ["a", "b", "c"], large_s=0.05), random.Random(seed)

    async def ship() -> None:
        for seq in range(60):
            for edge in ("a", "b", "c"):
                world.submit(edge, seq, rng.choice([1, LARGE_BYTES, LARGE_BYTES + 1, MAX_BATCH_BYTES]))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.2)

    world.run(ship)
    for edge in ("a", "b", "c"):
        assert [seq for each, seq in world.ended if each == edge] == list(range(60))
    assert len(catalog.frames.entries(query_key(world.query), 0, 1 << 40)) == 180


def test_a_disk_that_has_no_room_for_large_frames_delays_no_small_one(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, append, full = (
        Commits(catalog, tmp_path, ["large", "small"]),
        FrameLog.append,
        [OSError(28, "no space")] * 50,
    )

    def appended(log: FrameLog, frames: Sequence[StoredFrame]) -> list[FrameLocation]:
        if frames[0].edge == "large" and full:
            raise full.pop()
        return append(log, frames)

    monkeypatch.setattr(FrameLog, "append", appended)
    stalled: list[str | None] = []

    async def ship() -> None:
        world.submit("large", 0, MAX_BATCH_BYTES)
        for seq in range(3):
            await asyncio.sleep(0.03)
            world.submit("small", seq, 1)
        stalled.append(world.commits.stalled)
        while full:
            await asyncio.sleep(0.1)

    world.run(ship)
    assert world.ended == [("small", 0), ("small", 1), ("small", 2), ("large", 0)]
    assert stalled == ["[Errno 28] no space"] and world.commits.stalled is None


def test_the_last_pending_bytes_are_for_small_frames(catalog: Catalog, tmp_path: Path) -> None:
    world = Commits(catalog, tmp_path, ["a"])

    async def ship() -> None:
        commits = world.commits
        for _ in range(4):
            await commits.reserve(2 * LARGE_BYTES - 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await commits.reserve(LARGE_BYTES + 1)
        async with asyncio.timeout(5):
            await commits.reserve(LARGE_BYTES)

    world.run(ship)
