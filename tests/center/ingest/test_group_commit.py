"""When a gateway commits: at once after a pause, and not more often than `COMMIT_EVERY_S` under load."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251  (what `VirtualLoop` takes)
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from center.catalog import Catalog
from center.ingest.assignments import AssignmentPlan
from center.ingest.group_commit import COMMIT_EVERY_S, MAX_BATCH_BYTES, GroupCommit, ReceivedFrame
from center.ingest.metrics import GatewayMetrics
from center.storage.frame_log import FrameLog
from center.storage.wake import Topic, Waker
from edgewater.model.registered_query import query_key
from edgewater.model.streams import EdgeId
from edgewater.wire import Frame, FrameBody
from tests.center.catalog_world import hello, spec
from tests.center.kept_frames import stored_frame
from tests.simulation.virtual import VirtualLoop

TOOK_S = 0.002


class Threads(VirtualLoop):
    """Virtual time in which a call of a thread takes `TOOK_S`."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        self.call_later(TOOK_S, lambda: future.set_result(func(*args)))
        return future


class CountedWaker(Waker):
    wakes = 0

    def wake(self) -> None:
        self.wakes += 1


@pytest.mark.parametrize("every_s", [0.001, 0.2])
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
        received = ReceivedFrame(stored, b"", frame.crc32c, size, size, 1_000, False, 0, 0, loop)
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


def test_a_small_frame_does_not_wait_for_all_large_frames_of_another_edge(catalog: Catalog, tmp_path: Path) -> None:
    query = catalog.queries.register(spec(), 1)[0].ref
    for edge in ("small", "large"):
        assert hello(catalog, EdgeId(edge)) is None
    loop = Threads(random.Random(1))
    commits = GroupCommit(
        catalog, FrameLog(tmp_path / "log"), GatewayMetrics(), max_pending_bytes=1 << 40, read_plan=lambda p: p,
        waker=Waker(None, Topic.FRAMES), on_stall=lambda: None, retry_ms=1, retry_max_ms=1,
    )  # fmt: skip
    commits.plan = AssignmentPlan.of(catalog.version(), catalog.queries.all(), catalog.edges.all(), {})
    ended: list[tuple[str, int]] = []

    def submit(edge: str, seq: int, size: int) -> None:
        frame = Frame.pack(seq, query, FrameBody(seq + 1))
        stored = stored_frame(frame, edge)
        received = ReceivedFrame(stored, b"", frame.crc32c, 1, size, 1_000, False, 0, 0, edge)
        commits.submit(received, lambda _outcome: ended.append((edge, seq)))

    async def ship() -> None:
        for seq in range(20):
            submit("large", seq, MAX_BATCH_BYTES // 2)
        submit("small", 0, 1)
        commits.close()
        await commits.run()

    try:
        loop.run_until_complete(ship())
    finally:
        loop.close()
    assert ended.index(("small", 0)) <= 2, "it is in the first commit"
    assert [seq for edge, seq in ended if edge == "large"] == list(range(20))
