"""Hellos are admitted in batches, and edges that cannot be admitted soon are told when to come again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from center.catalog import Catalog, SessionStart
from center.ingest import hello_queue
from center.ingest.hello_queue import HelloQueue
from center.ingest.limits import TryLater
from center.ingest.metrics import GatewayMetrics
from edgewater.base.errors import EdgewaterError, Retired, StorageError
from edgewater.base.streams import EdgeId
from tests.center.catalog_world import begin_session


class HeldCatalog(Catalog):
    """A catalog whose transactions of Hellos wait until `open` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}/catalog.db")
        self.open = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[str]] = []
        self._begin, self.edges.begin_sessions = self.edges.begin_sessions, self._held_begin  # type: ignore[method-assign]

    def _held_begin(self, starts: Sequence[SessionStart]) -> list[int | EdgewaterError | None]:
        self.batches.append([start.edge for start in starts])
        self.entered.set()
        self.open.wait(20)
        return self._begin(starts)


@contextlib.asynccontextmanager
async def queue(catalog: Catalog) -> AsyncIterator[tuple[HelloQueue, list[str]]]:
    refreshes: list[str] = []

    async def refresh() -> None:
        refreshes.append("refreshed")

    hellos = HelloQueue(catalog, refresh, GatewayMetrics())
    running = asyncio.create_task(hellos.run())
    try:
        yield hellos, refreshes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        catalog.close()


def start(edge: str, incarnation: str = "i1", oldest: int = 1) -> SessionStart:
    return SessionStart(EdgeId(edge), incarnation, {}, (), oldest, oldest, 1_000, f"session of {edge}")


async def test_hellos_that_wait_are_begun_together_each_with_its_own_outcome(tmp_path: Path) -> None:
    catalog = HeldCatalog(tmp_path)
    catalog.open.set()
    begin_session(catalog, SessionStart(EdgeId("gone"), "i1", {}, (), oldest_seq=1, next_seq=1, now_ms=1))
    catalog.edges.retire(EdgeId("gone"))
    catalog.open.clear()
    catalog.entered.clear()
    catalog.batches.clear()
    async with queue(catalog) as (hellos, refreshes):
        first = asyncio.create_task(hellos.begin(start("a")))
        await asyncio.to_thread(catalog.entered.wait)
        others = [
            asyncio.create_task(hellos.begin(s)) for s in (start("b"), start("gone"), start("c"), start("b", "i2"))
        ]
        ended = asyncio.create_task(hellos.begin(start("d")))
        await asyncio.sleep(0)
        ended.cancel()
        catalog.open.set()
        assert await first is None
        outcomes = await asyncio.gather(*others, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), Retired, type(None), type(None)]
    assert catalog.batches == [["a"], ["b", "gone", "c"], ["b"]]  # one Hello of each edge, none of a call that ended
    assert refreshes == ["refreshed"] * 3


async def test_a_catalog_that_refuses_fails_the_hellos_of_the_batch_and_the_next_ones_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = HeldCatalog(tmp_path)
    catalog.open.set()
    async with queue(catalog) as (hellos, _):
        with monkeypatch.context() as broken:
            broken.setattr(catalog.edges, "begin_sessions", _refuse)
            with pytest.raises(StorageError):
                await hellos.begin(start("a"))
        assert await hellos.begin(start("a")) is None


def _refuse(_starts: Sequence[SessionStart]) -> list[int | EdgewaterError | None]:
    raise StorageError("disk is full")


async def test_hellos_beyond_those_that_are_admitted_soon_get_different_times_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hello_queue, "HELLOS_AT_ONCE", 4)
    monkeypatch.setattr(hello_queue, "_FIRST_RATE", 2.0)
    catalog = HeldCatalog(tmp_path)
    async with queue(catalog) as (hellos, _):
        waiting = [asyncio.create_task(hellos.begin(start(f"e{n}"))) for n in range(1)]
        await asyncio.to_thread(catalog.entered.wait)
        waiting += [asyncio.create_task(hellos.begin(start(f"f{n}"))) for n in range(5)]
        await asyncio.sleep(0)
        hints = []
        for n in range(3):
            with pytest.raises(TryLater) as refused:
                await hellos.begin(start(f"g{n}"))
            hints.append(refused.value.retry_after_ms)
        assert hints[0] >= 2_000 and hints == sorted(hints)
        assert all(400 <= later - earlier <= 501 for earlier, later in itertools.pairwise(hints))  # 2/s
        catalog.open.set()
        assert await asyncio.gather(*waiting) == [None] * 6
