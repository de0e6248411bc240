"""When an edge states what its link carries, and what queries take of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from edgewater.wire import QueryRef
from edgewater.wire import uplink_pb2 as pb

REPORT_EVERY_MS = 5_000  # limit: bytes of reports on a narrow link
LEAST_CHANGE = 1.2
"""A number is stated again if it has changed by this factor."""


class LinkReports:
    """The reports of one session."""

    def __init__(self) -> None:
        self._bounds = 0.0, 0.0
        self._taken: dict[QueryRef, tuple[float, float]] = {}
        self._at_ms: int | None = None

    def due(
        self, low_bytes_s: float, high_bytes_s: float, taken: Mapping[QueryRef, tuple[float, float]], now_ms: int
    ) -> pb.LinkReport | None:
        """Returns the report to send now; None: nothing has changed, or the last one was sent just before.

        Args:
            low_bytes_s, high_bytes_s: what the link carries; 0: unknown.
            taken: the bytes of a slice that are sent and omitted, by query.
        """
        if self._at_ms is not None and 0 <= now_ms - self._at_ms < REPORT_EVERY_MS:
            return None
        bounds = low_bytes_s, high_bytes_s
        changed = {ref: each for ref, each in taken.items() if _differs(each, self._taken.get(ref))}
        if not changed and not _differs(bounds, self._bounds):
            return None
        self._bounds, self._at_ms = bounds, now_ms
        self._taken = {ref: stated for ref, stated in (self._taken | changed).items() if ref in taken}
        loads = [
            pb.LinkReport.QueryLoad(
                query=ref.name, query_version=ref.version, sent_bytes=round(sent), omitted_bytes=round(omitted)
            )
            for ref, (sent, omitted) in changed.items()
        ]
        return pb.LinkReport(low_bytes_s=round(low_bytes_s), high_bytes_s=round(high_bytes_s), queries=loads)


def _differs(now: tuple[float, float], stated: tuple[float, float] | None) -> bool:
    pairs = [] if stated is None else [sorted(pair) for pair in zip(now, stated, strict=True)]
    return stated is None or any(large >= 1.0 and large > LEAST_CHANGE * small for small, large in pairs)
