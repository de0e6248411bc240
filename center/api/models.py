"""The API's JSON as pydantic models, for OpenAPI and for most endpoints.

`center/serving/render.py` renders answers as bytes. `Answer` describes these bytes, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue

from center.api.edge_progress import edge_state, watermark
from center.api.measure_models import AnswerRow, ApiModel, IntervalCell, PartShape, Rfc3339, WindowRange
from center.api.waiting import QueryWait
from center.catalog import AlarmRecord, DeclaredStream, SetAside
from center.catalog import QuarantinedFrame as QuarantinedRecord
from center.catalog import SetAsideQuery as SetAsideRecord
from edgewater.model.edge_records import EdgeRecord, QueryStatusRecord
from edgewater.model.json_types import as_document
from edgewater.model.registered_query import RegisteredQuery, query_key
from edgewater.model.replies import (
    Alarm,
    DescribedColumn,
    Edge,
    EdgeProgress,
    QueryEdge,
    QueryStatus,
    Shipped,
    StreamColumns,
)
from edgewater.model.streams import MAX_TIME_MS, MIN_TIME_MS, Delivery, type_name
from edgewater.model.timestamps import rfc3339
from edgewater.runtime.plain_yaml import load_yaml
from edgewater.wire import GUESSES, REJECTIONS, UNCERTAIN

MAX_RECORDS = (1 << 63) - 1
"""The largest sum of counts that edges state. It fits into a column of a table."""
EXAMPLE_SPEC_YAML = """\
name: flights_by_carrier
from: flights                  # a stream that edges serve
group_by: [carrier]
measures:
  flights: count()
  delay: mean(dep_delay)
window: {tumbling: 1d}
budget: {staleness: 2s}        # or {error: {flights: 100}}, {bytes: 50MB per day}, or several; none: exact
lateness: 1h                   # until then a window may be revised
"""
EXAMPLE_SPEC: dict[str, JsonValue] = as_document(load_yaml(EXAMPLE_SPEC_YAML))
EXAMPLE_ANSWER: dict[str, JsonValue] = {
    "query": "flights_by_carrier",
    "version": 1,
    "window": {"start": "2013-01-01T00:00:00Z", "end": "2013-01-02T00:00:00Z"},
    "phase": "early",
    "revision": 1,
    "given_at": "2013-01-02T00:00:01.800Z",
    "data": [{"group": {"carrier": "UA"}, "flights": {"estimate": 165, "lower": 165, "upper": None}}],
    "total": {"flights": {"estimate": 602, "lower": 602, "upper": None}},
    "rest": {"flights": None},
    "shapes": {"flights": [{"name": "", "shape": "interval", "columns": ["flights"]}]},
    "confidence": 1.0,
    "quality": {
        "completeness": {"ratio": 0.667, "expected": 3, "reported": 2, "missing": ["lga"]},
        "records": {"observed": 602, "expected": None, "sampled": 602, "late": 0, "after_final": 0, "rejected": 0},
        "staleness_ms": 1800,
        "first_staleness_ms": 1800,
        "error": {
            "rounding": {"flights": 0},
            "sketch": {"flights": 0},
            "sampling": {"flights": 0},
            "withheld": {},
            "missing": {"flights": None},
        },
    },
    "contract": {
        "requested": {"staleness_ms": 2000},
        "met": False,
        "violations": [
            {
                "code": "missing-edges",
                "message": "2 of 3 expected edges have closed the window with all their records",
            }
        ],
    },
}


class ProblemDetails(ApiModel):
    """RFC 9457. `type` is stable: ``https://edgewater.dev/problems/<code>``."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "https://edgewater.dev/problems/invalid-query",
                "title": "Invalid query",
                "status": 422,
                "detail": "window.tumbling: 'soon' is not accepted; expected a duration such as 500ms, 30s, 5m",
                "instance": "/v1/queries",
                "field": "window.tumbling",
                "value": "soon",
                "accepted": "a duration such as 500ms, 30s, 5m, 1h30m or 1d",
            }
        }
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str
    field: str | None = None
    """Path of the input's field."""
    value: Any = None
    """What was given."""
    accepted: str | None = None
    """What is accepted."""
    reason: str | None = None


def border(time_ms: int) -> str | None:
    """Returns an end of a `WindowRange` as a time in RFC 3339; None: the range has no such end."""
    return None if time_ms in (MIN_TIME_MS, MAX_TIME_MS) else rfc3339(time_ms)


class Query(ApiModel):
    """A registered query."""

    name: str
    version: int
    """Each change makes another version. A number is never used again."""
    spec: dict[str, JsonValue] = Field(examples=[EXAMPLE_SPEC])
    """In canonical form, without the seed."""
    registered_at: Rfc3339
    begins: Rfc3339 | None = None
    """The border to the previous version: this one has the windows that start at it or later."""
    until: Rfc3339 | None = None
    """Its windows start before this time: a later version follows, or the query ends."""
    ended_at: Rfc3339 | None = None
    """When all its windows were final, and edges removed it; null: edges answer it."""

    @classmethod
    def of(cls, query: RegisteredQuery) -> Self:
        windows = query.windows
        return cls(
            name=query.ref.name,
            version=query.ref.version,
            spec=as_document(query.asked.to_mapping(seed=False)),
            registered_at=rfc3339(query.registered_at_ms),
            begins=border(windows.from_ms),
            until=border(windows.until_ms),
            ended_at=None if query.ended_at_ms is None else rfc3339(query.ended_at_ms),
        )


class QueryVersion(ApiModel):
    """The windows of one version of a query."""

    version: int
    begins: Rfc3339 | None
    """Its first window starts then; null: it has no border before it."""
    until: Rfc3339 | None
    """Its windows start before; null: it has no border after it."""
    ended_at: Rfc3339 | None
    """When all its windows were final; null: edges answer it."""

    @classmethod
    def of(cls, query: RegisteredQuery) -> Self:
        return cls(**Query.of(query).model_dump(include=set(cls.model_fields)))


class RegisteredAnswer(Query):
    """A query that has just been registered."""

    notes: list[str] | None = None
    """What the query does not do, if it may be unexpected."""


class QueryList(ApiModel):
    queries: list[Query]


def query_edge(
    progress: EdgeProgress,
    expected: bool,
    status: QueryStatusRecord | None,
    shipped: Shipped | None,
    late: Mapping[str, int],
) -> QueryEdge:
    refused = status is not None and not status.accepted
    return {
        **progress,
        "expected": expected,
        "accepted": status.accepted if status else None,
        "code": status.code if status and refused else None,
        "message": status.message if status and refused else None,
        "shipped": shipped or {"frames": 0, "wire_bytes": 0},
        "after_final": {reason: n for reason, n in late.items() if reason not in UNCERTAIN},
        "rejected": {reason: n for reason, n in late.items() if reason in REJECTIONS},
        "guessed": {reason: n for reason, n in late.items() if reason in GUESSES},
    }


class QueryDetail(Query):
    """A query with each edge's status."""

    edges: list[QueryEdge]
    latest_window: Rfc3339 | None
    """Start of the last window that has an answer."""
    after_final: int
    """Accepted records that came for final windows, over all edges."""
    rejected: int
    """Records that sources rejected, over all edges."""
    guessed: int
    """Records that edges counted or left out on a guess, over all edges."""
    versions: list[QueryVersion]
    """All versions that have, or may have, answers; ascending."""
    alarms: list[Alarm]
    """The latest alarms about this query, the latest first."""


def query_status(query: RegisteredQuery, wait: QueryWait, latest_ms: int | None) -> QueryStatus:
    def shown(millis: int | None) -> str | None:
        return None if millis is None else rfc3339(millis)

    return {
        "query": query.ref.name,
        "version": query.ref.version,
        "state": wait.state,
        "reason": wait.reason,
        "remedy": wait.remedy,
        "since": shown(wait.since_ms),
        "waits_for": [e.edge for e in wait.edges if e.holds_back],
        "edges": [{"edge": e.edge, "cause": e.cause, "text": e.text, "since": shown(e.since_ms)} for e in wait.edges],
        "budget": wait.budget,
        "registered_at": rfc3339(query.registered_at_ms),
        "latest_window": shown(latest_ms),
    }


def stream_columns(declared: Mapping[str, DeclaredStream], edges: Sequence[EdgeRecord]) -> list[StreamColumns]:
    """Returns all streams, by name."""
    served = [(e.edge, s) for e in edges if not e.retired for s in e.streams]
    streams = list[StreamColumns]()
    for name in sorted({*(s.name for _, s in served), *declared}):
        known, here = declared.get(name), [(e, s) for e, s in served if s.name == name]
        found: dict[str, str] = {}
        differing = []
        for edge, stream in here:
            if known is not None:
                differing.append(known.difference(edge, stream))
                continue
            for column, kind in stream.columns.items():
                first = found.setdefault(column, type_name(kind))
                if first != type_name(kind):
                    differing.append(f"column {name}.{column} is {type_name(kind)} at edge {edge}, {first} at others")
        columns: list[DescribedColumn] = [{"name": n, "type": k, "description": ""} for n, k in found.items()]
        if known is not None:
            each = known.columns.items()
            columns = [{"name": n, "type": c.type, "description": c.description} for n, c in each]
        records = {e.edge: e for e in edges}
        marks = [records[edge].watermarks.get(name) for edge, _ in here]
        least = min((m for m in marks if m is not None), default=None) if None not in marks else None
        streams.append({
            "stream": name,
            "source": "edges" if known is None else known.source,
            "columns": columns,
            "differing": [text for text in differing if text],
            "edges": [edge for edge, _ in here],
            "records": min(sum(records[edge].records.get(name, 0) for edge, _ in here), MAX_RECORDS),
            **watermark(least),
        })  # fmt: skip
    return streams


def edge_json(record: EdgeRecord, now_ms: int) -> Edge:
    return {
        "edge": record.edge,
        "state": edge_state(record, now_ms),
        "labels": record.labels,
        "release": record.release or None,
        "incarnation": record.incarnation,
        "incarnations": record.incarnations,
        "first_seen": rfc3339(record.first_seen_ms),
        "last_seen": rfc3339(record.last_seen_ms),
        "streams": [
            {
                "name": s.name,
                "columns": [{"name": n, "type": type_name(t)} for n, t in s.columns.items()],
                "speed": s.clock.speed,
                "delivery": [each.value for each in s.deliveries or (Delivery.EXACTLY_ONCE,)],
                "constants": s.constants,
                "records": record.records.get(s.name, 0),
                "rejected": [
                    {"source": source, "reason": reason, "records": n}
                    for source, reason, n in record.rejected.get(s.name, ())
                ],
                "null_columns": [
                    {"source": source, "column": column} for source, column in record.null_columns.get(s.name, ())
                ],
                "watermark_ms": record.watermarks.get(s.name),
                **watermark(record.watermarks.get(s.name)),
            }
            for s in record.streams
        ],
        "drops": record.drops,
        "backlog_bytes": record.backlog_bytes,
        "bandwidth_bytes_s": record.bandwidth_bytes_s or None,
        "rtt_ms": record.rtt_ms,
        "clock_offset_ms": record.clock_offset_ms,
    }


def alarm_json(record: AlarmRecord) -> Alarm:
    return {
        "kind": record.kind,
        "edge": record.edge,
        "query": record.query,
        "message": record.message,
        "first_at": rfc3339(record.first_at_ms),
        "last_at": rfc3339(record.last_at_ms),
        "times": record.times,
    }


class QuarantinedFrame(ApiModel):
    """A frame that could not be applied, and its place in the frame log."""

    query: str
    """The query's key, `name@version`."""
    position: int
    edge: str
    incarnation: str
    seq: int
    reason: str
    quarantined_at: Rfc3339
    received_at: Rfc3339
    wire_bytes: int
    segment: str
    offset: int
    length: int

    @classmethod
    def of(cls, frame: QuarantinedRecord) -> Self:
        e = frame.entry
        return cls(
            query=frame.key,
            position=e.position,
            edge=e.edge,
            incarnation=e.incarnation,
            seq=e.seq,
            reason=frame.reason,
            quarantined_at=rfc3339(frame.quarantined_at_ms),
            received_at=rfc3339(e.received_at_ms),
            wire_bytes=e.wire_bytes,
            segment=e.segment,
            offset=e.offset,
            length=e.length,
        )


class SetAsideQuery(ApiModel):
    """A query whose frames are kept and not applied."""

    query: str
    """The query's key, `name@version`."""
    state: SetAside
    reason: str
    deaths: int
    """How often the job died while it worked on the query."""
    since: Rfc3339

    @classmethod
    def of(cls, query: SetAsideRecord) -> Self:
        return cls(
            query=query_key(query.query),
            state=query.state,
            reason=query.reason,
            deaths=query.deaths,
            since=rfc3339(query.since_ms),
        )


class QuarantineList(ApiModel):
    frames: list[QuarantinedFrame]
    """The latest first."""
    queries: list[SetAsideQuery]


class Answer(ApiModel):
    """An answer to one window. (query, window, revision) never changes."""

    model_config = ConfigDict(json_schema_extra={"example": EXAMPLE_ANSWER})

    query: str
    version: int
    """The version of the query that has the window."""
    window: WindowRange
    phase: Literal["early", "complete", "final"]
    revision: int = Field(ge=1)
    data_of: int | None = None
    """Of a correction: the revision of the final answer whose data it has. Records came late, so its quality and its
    bounds differ."""
    given_at: Rfc3339
    """Wall time at which the center gave it."""
    data: list[AnswerRow]
    """A row per group."""
    total: dict[str, IntervalCell]
    """Each `count`, `sum`, `min`, `max`, `mean` and `var` over all groups, with what edges withhold of the groups. It
    is exact if every edge has closed the window, whatever the budget. The parameter `group` does not change it. Empty:
    the session was merged into another one."""
    rest: dict[str, float | int | None]
    """The part of the total of each `count` and `sum` that is in no group. Null: unknown."""
    notes: list[str] | None = None
    """If edges withhold values: how much is in no group."""
    shapes: dict[str, list[PartShape]]
    """By measure: what the members of its cells in `data` are."""
    confidence: float | None
    """Probability that a value of `data` lies in [lower, upper]. 1: the bounds always hold. The bounds of totals always
    hold. Null: no bound is known."""
    quality: dict[str, JsonValue]
    """Completeness (with the `delivery` of edges that do not count each record exactly once, and stated `losses` of
    input), records, staleness (until `given_at`, without the way to a reader), and the error by cause. A session window
    also has `session`: whether it was `cut` at its maximum length, and the number of such sessions (`cuts`).
    `merged_into`: start of the session that this one was merged into; its window is empty and has no data."""
    contract: dict[str, JsonValue]
    """What was requested, whether it is met, and the violations. `uncovered`: the measures that have a value without a
    bound. A met contract says nothing about the errors of these measures."""


class EffectiveRange(ApiModel):
    start: Rfc3339 | None
    """Inclusive; null: from the first window on."""
    end: Rfc3339 | None
    """Exclusive; null: up to the last window."""
    limit: int


class AnswerList(ApiModel):
    query: str
    version: int
    answers: list[Answer]
    """The newest revision of each window, by window."""


class AnswerPage(AnswerList):
    range: EffectiveRange
    next_cursor: str | None
    """`cursor` of the next page; null: this is the last one."""


class Revisions(ApiModel):
    query: str
    window_start: Rfc3339
    revisions: list[int]
    """Ascending."""


class ComponentReadiness(ApiModel):
    ready: bool
    reason: str | None
    """Why not."""
    address: str | None
    instances: int
    leader: str | None
    """Of the job: the processes (`host:pid`) that lead, with commas between."""
    standbys: int
    """Of the job: processes that are ready to take over."""


class Readiness(ApiModel):
    ready: bool
    missing: list[str] = Field(examples=[["job: no heartbeat for 12 s"]])
    """What is not ready, and why."""
    components: dict[str, ComponentReadiness]
    set_aside: dict[str, SetAside] = {}
    """Queries whose frames are kept and not applied, by key; the others go on. `paused`: the job tries the query again
    at its next start. `quarantined`: the job died of it, and an operator may retry it."""
    sinks: dict[str, str] = {}
    """Sinks that write nothing, and why. They make the center not unready."""
