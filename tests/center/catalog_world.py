"""What a catalog is told in tests: a query, an edge's Hello, a frame that has arrived."""

from __future__ import annotations

import pyarrow as pa
from sqlalchemy import select

from center.catalog import Catalog, SessionStart, UnindexedFrame
from center.catalog import schema as t
from center.storage.frame_log import FrameLocation
from edgewater.base.errors import EdgewaterError
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
from tests.insides import engine_of

FLIGHTS = StreamRecord("flights", {"carrier": pa.string(), "distance": pa.int64()}, LIVE)
SOMEWHERE = FrameLocation("miles@1/w-1.frames", 0, 10)
JFK, LGA = EdgeId("jfk"), EdgeId("lga")


def spec(name: str = "miles", **changes: object) -> QuerySpec:
    mapping = {
        "name": name,
        "from": "flights",
        "group_by": ["carrier"],
        "measures": {"miles": "sum(distance)", "flights": "count()"},
        "window": {"tumbling": "60s"},
    }
    return QuerySpec.from_mapping(mapping | changes)


def hello(
    catalog: Catalog,
    edge: EdgeId = JFK,
    incarnation: str = "i1",
    *,
    streams: tuple[StreamRecord, ...] = (FLIGHTS,),
    oldest_seq: int = 0,
    next_seq: int = 0,
    now_ms: int = 1_000,
    session: str = "s1",
) -> int | None:
    start = SessionStart(
        edge,
        incarnation,
        labels={"city": "New York"},
        streams=streams,
        oldest_seq=oldest_seq,
        next_seq=next_seq,
        now_ms=now_ms,
        session=session,
    )
    return begin_session(catalog, start)


def begin_session(catalog: Catalog, start: SessionStart) -> int | None:
    """Begins the session of one edge. Raises the error with which it is refused."""
    (outcome,) = catalog.edges.begin_sessions([start])
    if isinstance(outcome, EdgewaterError):
        raise outcome
    return outcome


def known_query(catalog: Catalog, name: str = "miles") -> QueryRef:
    """Registers a query, and begins the session of an edge that serves its stream."""
    ref = catalog.queries.register(spec(name), 1)[0].ref
    hello(catalog)
    return ref


def acked_through(catalog: Catalog, edge: EdgeId, incarnation: str) -> int | None:
    """The highest seq up to which all frames of an incarnation are durable; None: there is none."""
    with engine_of(catalog).connect() as connection:
        row = connection.execute(
            select(t.incarnations).where(t.incarnations.c.edge == edge, t.incarnations.c.incarnation == incarnation)
        ).first()
    return None if row is None or row.awaited_seq <= row.first_seq else int(row.awaited_seq) - 1


def frame(
    query: QueryRef,
    seq: int,
    *,
    edge: EdgeId = JFK,
    incarnation: str = "i1",
    crc32c: int = 7,
    location: FrameLocation | None = SOMEWHERE,
) -> UnindexedFrame:
    return UnindexedFrame(query, edge, incarnation, seq, crc32c, 100, 5_000, location)
