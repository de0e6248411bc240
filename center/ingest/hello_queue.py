"""Hellos that wait for the catalog. The queue admits them in batches, so that all edges may connect at the same time.

A batch is one transaction and one read of the catalog's changes. After a batch, the queue rests for as long as the
batch took. In this time the gateway indexes frames and answers heartbeats. If an edge would give up before its turn, it
is refused with a time at which to connect again. Each refused edge gets another time, at the rate of admission.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from center.catalog import Catalog, SessionStart
from center.ingest import limits
from center.ingest.metrics import GatewayMetrics
from edgewater.base.errors import EdgewaterError
from edgewater.base.streams import EdgeId

HELLOS_AT_ONCE = 128  # limit: time of a transaction
"""Maximum number of Hellos of one transaction. Each takes 100 µs of CPU."""
MAX_WAIT_S = 2.0
"""How long a Hello waits for its turn. An edge gives a session up after 5 s without a message."""
LATEST_RETRY_S = 60.0  # limit: how long a refused edge waits
_FIRST_RATE = 200.0
_SMOOTHING = 0.3

_Waiting = tuple[SessionStart, "asyncio.Future[int | None]"]


class HelloQueue:
    """Begins sessions while `run` runs.

    Args:
        refresh: reads the catalog's changes. It is awaited after each batch, so that the gateway knows the new edges.
    """

    def __init__(self, catalog: Catalog, refresh: Callable[[], Awaitable[None]], metrics: GatewayMetrics) -> None:
        self._catalog = catalog
        self._refresh = refresh
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._changed = asyncio.Event()
        self._rate = _FIRST_RATE
        self._next_free_s = 0.0

    async def begin(self, start: SessionStart) -> int | None:
        """Waits for its turn, begins a session (`Edges.begin_sessions`), and returns the result for this start.

        Raises:
            EdgewaterError: the result is an error.
            TryLater: too many Hellos wait.
        """
        loop = asyncio.get_running_loop()
        if len(self._waiting) > max(HELLOS_AT_ONCE, self._rate * MAX_WAIT_S):
            raise self._try_later(start.edge, loop.time())
        outcome: asyncio.Future[int | None] = loop.create_future()
        self._waiting.append((start, outcome))
        self._changed.set()
        return await outcome

    def _try_later(self, edge: EdgeId, now_s: float) -> limits.TryLater:
        self._next_free_s = max(self._next_free_s, now_s + MAX_WAIT_S) + 1 / self._rate
        wait_s = min(self._next_free_s - now_s, LATEST_RETRY_S)
        self._metrics.limited.labels("hellos-waiting").inc()
        message = f"edge {edge}: {len(self._waiting)} Hellos are waiting for admission; retry in {wait_s:.1f} s"
        return limits.TryLater(message, round(wait_s * 1000))

    async def run(self) -> None:
        """Begins sessions until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            began_s, batch = loop.time(), self._next_batch()
            if batch:
                await self._begin(batch)
                took_s = loop.time() - began_s
                rate = len(batch) / max(2 * took_s, 1e-3)
                if len(batch) == HELLOS_AT_ONCE:  # smaller batches say little about the rate
                    self._rate += _SMOOTHING * (rate - self._rate)
                if self._waiting:
                    await asyncio.sleep(took_s)

    def _next_batch(self) -> list[_Waiting]:
        """Returns the first Hellos that still wait, at most one per edge."""
        batch: dict[EdgeId, _Waiting] = {}
        again: list[_Waiting] = []
        while self._waiting and len(batch) < HELLOS_AT_ONCE:
            start, outcome = self._waiting.popleft()
            if outcome.done():
                continue  # its call has ended
            if start.edge in batch:
                again.append((start, outcome))
            else:
                batch[start.edge] = start, outcome
        self._waiting.extendleft(reversed(again))
        if not self._waiting:
            self._changed.clear()
        return list(batch.values())

    async def _begin(self, batch: list[_Waiting]) -> None:
        try:
            outcomes = await asyncio.to_thread(self._catalog.edges.begin_sessions, [start for start, _ in batch])
            await self._refresh()
        except Exception as exc:
            for _, outcome in batch:
                if not outcome.done():
                    outcome.set_exception(exc)
            return
        for (_, waiting), result in zip(batch, outcomes, strict=True):
            if waiting.done():
                continue
            if isinstance(result, EdgewaterError):
                waiting.set_exception(result)
            else:
                waiting.set_result(result)
