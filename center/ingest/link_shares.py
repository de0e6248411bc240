"""Stores what the edges of a gateway state about their links, and sends them their shares."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from center.budgets import LinkDivision
from center.catalog import Catalog
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId

EVERY_S = 1.0  # limit: writes to the catalog
log = logging.getLogger(__name__)


class LinkShares:
    """Writes at most once per `EVERY_S`, whatever the number of edges.

    Args:
        now_ms: wall clock.
        send: sends an edge its share in bytes per second; 0: it has the whole link.

    Attributes:
        division: what the edges with sessions in this gateway state.
    """

    def __init__(self, catalog: Catalog, now_ms: Callable[[], int], send: Callable[[EdgeId, float], None]) -> None:
        self._catalog, self._now_ms, self._send = catalog, now_ms, send
        self.division = LinkDivision(now_ms)
        self._is_failing = False

    async def run(self) -> None:
        """Stores and divides until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.sync()

    async def sync(self) -> None:
        """Stores what has changed, and sends the shares that have changed."""
        changed = self.division.take_changed()
        if not changed:
            return
        try:
            sharing = await asyncio.to_thread(self._catalog.links.record, changed, self._now_ms())
            self._is_failing = False
        except StorageError as exc:
            if not self._is_failing:  # once per outage
                log.warning("what edges state about their links cannot be written to the catalog: %s", exc)
            self._is_failing = True
            self.division.put_back(changed)
            return
        for edge, share in self.division.divide(sharing):
            self._send(edge, share)
