"""A job over a real result store, without Spark: batches of frames become deltas and facts."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from sqlalchemy import func, select

from center.ledger import EdgesChanged, Emission, FrameSummary, Ledger, QueryRegistered
from center.results import AnswerReader, AnswerRecord, ResultStore
from center.results import answers as reading
from center.results import schema as t
from center.storage.delta_segments import Delta
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery, query_key
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef, SliceClose
from tests.insides import engine_of

REF = QueryRef("q", 1)
KEY = "q@1"
MINUTE = 60_000
EVENTS = StreamRecord("events", {"x": pa.int64()}, LIVE)


def edge_record(
    name: str, stream: StreamRecord = EVENTS, *, retired: bool = False, incarnation: str = "i"
) -> EdgeRecord:
    """Returns a connected edge with one stream, which has told nothing of itself."""
    numbers: dict[str, Any] = {"backlog_bytes": 0, "bandwidth_bytes_s": 0.0, "rtt_ms": 0.0, "clock_offset_ms": 0.0}
    return EdgeRecord(
        EdgeId(name), incarnation, {}, (stream,), 0, 0, True, {}, {}, {}, **numbers, retired=retired, incarnations=1
    )


def registered(ref: QueryRef = REF, **parts: object) -> QueryRegistered:
    given = {"name": ref.name, "from": "events", "measures": {"s": "sum(x)"}, "window": {"tumbling": "1m"}, **parts}
    return QueryRegistered(RegisteredQuery(ref, QuerySpec.from_mapping(given), 0, None))


def partial(*values: int) -> bytes:
    measure = Measure.parse("s", "sum(x)")
    aggregate = GroupedAggregate({}, {"s": measure.function.make((), pa.int64())})
    aggregate.update([], {"s": pa.array(values, pa.int64())}, len(values))
    return aggregate.to_bytes()


def total(synopsis: bytes | None) -> int | None:
    return None if synopsis is None else int(GroupedAggregate.from_bytes(synopsis).query("s").value[0])


def answers_after(store: AnswerReader, answer_id: int, limit: int, query: QueryRef | None = None) -> list[AnswerRecord]:
    """Returns all answers with a greater id, ascending; of one query or of all."""
    rows = reading._rows().where(t.answers.c.answer_id > answer_id)
    if query is not None:
        rows = rows.where(t.answers.c.query == query_key(query))
    return store._answers(rows.order_by(t.answers.c.answer_id).limit(limit))


class Job:
    """What the Spark job does with the store: batches of frames become deltas and facts."""

    def __init__(self, url: str, *edges: str, ref: QueryRef = REF, **query: object) -> None:
        self.store = ResultStore(url)
        self.ledger = Ledger()
        self.ref = ref
        self.position = 0
        self.observed: dict[tuple[str, int], int] = {}
        self.store.load_ledger(self.ledger)
        self.store.tick(self.ledger, [EdgesChanged(tuple(map(edge_record, edges))), registered(ref, **query)], 0)

    def frame(self, edge: str, through_ms: int, **slices: int) -> tuple[FrameSummary, list[Delta]]:
        """A frame with one record of value v in minute n per ``mn=v``."""
        self.position += 1
        starts = {int(name[1:]) * MINUTE: value for name, value in slices.items()}
        for start in starts:
            self.observed[edge, start] = self.observed.get((edge, start), 0) + 1
        closes = tuple(SliceClose(s, self.observed[edge, s], 0) for s in starts)
        fact = FrameSummary(self.ref, self.position, EdgeId(edge), through_ms, closes, tuple(starts), 100, 0)
        return fact, [Delta(query_key(self.ref), s, partial(v)) for s, v in starts.items()]

    def batch(self, *frames: tuple[FrameSummary, list[Delta]], now_ms: int = 0) -> list[Emission]:
        facts = [fact for fact, _ in frames]
        parts: dict[int, list[bytes]] = {}
        for _, deltas in frames:
            for delta in deltas:
                assert isinstance(delta.data, bytes)
                parts.setdefault(delta.slice_start_ms, []).append(delta.data)
        merged = [Delta(query_key(self.ref), start, GroupedAggregate.merge_bytes(p)) for start, p in parts.items()]
        return self.store.apply(
            self.ledger, merged, facts, {f"{self.ref.name}@{self.ref.version}": facts[-1].position}, now_ms
        )

    def contents(self) -> dict[str, list[Any]]:
        """All rows of all tables."""
        with engine_of(self.store).connect() as connection:
            return {
                table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
                for table in t.metadata.sorted_tables
            }

    def count(self, table: Any) -> int:
        with engine_of(self.store).connect() as connection:
            return int(connection.execute(select(func.count()).select_from(table)).scalar_one())
