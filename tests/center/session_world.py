"""Edges, frames and a ledger for session queries, and what sessions are by their definition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from edge.core.core import EdgeCore
from edge.core.events import Ingested, PullEvent, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.model.windows import SessionWindow
from edgewater.wire import FrameBody, QueryRef
from tests.cores import open_core, pulled
from tests.query_specs import query_spec

REF = QueryRef("q", 1)
GAP = 1000
OPEN = {"events": 999_999}


def spec(**parts: object) -> QuerySpec:
    return query_spec(parts, stream="events", measures={"s": "sum(x)"}, window={"session": "1s"})


def brute_force(times: Iterable[int], window: SessionWindow) -> dict[tuple[int, int], list[int]]:
    """(start, end) -> the times in it. By the definition, record by record."""
    sessions: dict[tuple[int, int], list[int]] = {}
    current: list[int] = []
    most = window.slices_per_window
    for time in [*sorted(times), None]:
        if current and (time is None or time - current[-1] >= window.gap_ms):
            sessions[current[0], current[-1] + window.gap_ms] = current
            current = []
        elif current and time // window.gap_ms - current[0] // window.gap_ms >= most:
            sessions[current[0], time // window.gap_ms * window.gap_ms] = current
            current = []
        if time is not None:
            current = [*current, time]
    return sessions


@dataclass
class Edge:
    """A real core; its frames as bodies."""

    name: str
    query: QuerySpec
    core: EdgeCore = field(init=False)

    def __post_init__(self) -> None:
        self.core = open_core(StreamSpec({"x": pa.int64()}), (REF, self.query), stream="events")

    @property
    def id(self) -> EdgeId:
        return EdgeId(self.name)

    def reads(self, *times: int) -> list[Any]:
        columns = {"x": pa.array([1] * len(times), pa.int64()), TIME_COLUMN: pa.array(times, pa.int64())}
        return self.core.handle(Ingested("events", "file", pa.record_batch(columns), 1 << 40))

    def ends(self) -> None:
        self.core.handle(SourceEnded("events", "file"))

    def ships(self, *, early: bool = False, capacity: int = 1 << 20, at_most: int = 1000) -> list[FrameBody]:
        bodies: list[FrameBody] = []
        while len(bodies) < at_most:
            built = pulled(self.core, PullEvent(capacity, OPEN if early else {}))
            if not built:
                break
            bodies += [frame.unpack() for frame in built]
        return bodies


def sums(answers: Mapping[tuple[int, int], int], sessions: Mapping[tuple[int, int], Sequence[int]]) -> bool:
    return dict(answers) == {window: len(times) for window, times in sessions.items()}
