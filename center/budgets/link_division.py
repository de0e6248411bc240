"""Divides links that several edges share. Pure.

An edge has its share from the beginning of its session until `LEASE_MS` after its last heartbeat. The edges of one link
may have sessions with different gateways, so each gateway stores the records of its edges, and divides over all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from edgewater.base.streams import EdgeId
from edgewater.model.link_forecast import LinkRecord, divide
from edgewater.wire import QueryRef

LEASE_MS = 10_000  # limit: time for which a cut edge keeps its share
LEASE_HEARTBEATS = 3.5  # derived: from `MOST_INTERVALS` of edges, and the delay of a heartbeat
"""An edge with rare heartbeats has its share for so many of their intervals."""
BEST_MS = 60_000
"""An edge's largest estimate is divided for this time. It sees less of the link while others use it."""
LEAST_CHANGE = 1.1
"""A share is stated again if it has changed by this factor."""


class LinkDivision:
    """The links of the edges with sessions in one gateway.

    Args:
        now_ms: wall clock.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._records: dict[EdgeId, LinkRecord] = {}
        self._best_at_ms: dict[EdgeId, int] = {}
        self._shares: dict[EdgeId, float] = {}
        self._changed = set[EdgeId]()

    def begin(self, edge: EdgeId, link: str) -> None:
        """Called at the beginning of a session. The edge uses all of the link until it has a share.

        Args:
            link: the name of the link that it shares; empty: it shares none.
        """
        self._records[edge] = LinkRecord(edge, link, self._now_ms() + LEASE_MS)
        self._best_at_ms[edge], self._shares[edge] = 0, 0.0
        if link:
            self._changed.add(edge)

    def heard(self, edge: EdgeId, every_ms: int) -> None:
        """Called at each heartbeat.

        Args:
            every_ms: the interval at which the edge has to send heartbeats.
        """
        record = self._records.get(edge)
        if record is not None and record.link:
            until_ms = self._now_ms() + max(LEASE_MS, round(LEASE_HEARTBEATS * every_ms))
            self._records[edge] = replace(record, until_ms=until_ms)
            self._changed.add(edge)

    def stated(
        self, edge: EdgeId, low_bytes_s: float, high_bytes_s: float, loads: Mapping[QueryRef, tuple[float, float]]
    ) -> None:
        """Takes what an edge states.

        Args:
            low_bytes_s, high_bytes_s, loads: as in `LinkRecord`.
        """
        record = self._records.get(edge)
        if record is None:
            return  # another session has replaced this one and ended
        now_ms, best = self._now_ms(), record.best_bytes_s
        if low_bytes_s >= best or not 0 <= now_ms - self._best_at_ms[edge] < BEST_MS:
            best, self._best_at_ms[edge] = low_bytes_s, now_ms
        stated = replace(record, low_bytes_s=low_bytes_s, high_bytes_s=high_bytes_s, loads=loads, stated_at_ms=now_ms)
        self._records[edge] = replace(stated, best_bytes_s=best)
        self._changed.add(edge)

    def end(self, edge: EdgeId) -> None:
        """Called at the end of a session. The edge keeps its share until the lease ends: it may come back."""
        for each in (self._records, self._best_at_ms, self._shares):
            each.pop(edge, None)

    def take_changed(self) -> list[LinkRecord]:
        """Returns the records that have changed since the last call."""
        changed, self._changed = self._changed, set()
        return [self._records[edge] for edge in sorted(changed & self._records.keys())]

    def put_back(self, records: Iterable[LinkRecord]) -> None:
        """Takes back records that could not be stored, for the next call of `take_changed`."""
        self._changed |= {record.edge for record in records}

    def divide(self, sharing: Iterable[LinkRecord]) -> list[tuple[EdgeId, float]]:
        """Returns the edges of this gateway whose share has changed, with its bytes per second; 0: all of the link.

        Args:
            sharing: of all edges that share a link now.
        """
        result = list[tuple[EdgeId, float]]()
        for edge, share in divide(sharing).items():
            small, large = sorted((share, self._shares.get(edge, share)))
            if large > LEAST_CHANGE * small:
                self._shares[edge] = share
                result.append((edge, share))
        return result
