"""The API's JSON as pydantic models, for OpenAPI and for most endpoints.

`center/serving/render.py` renders answers as bytes. `Answer` describes these bytes, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from pydantic import ConfigDict, Field, JsonValue, with_config
from typing_extensions import TypedDict

from center.api.edge_progress import edge_state, watermark
from center.api.measure_models import AnswerRow, ApiModel, Rfc3339
from center.api.time_params import border, time_text
from center.catalog import AlarmRecord, DeclaredStream, QuarantinedRecord, SetAside, SetAsideRecord
from edgewater.base.plain_yaml import load_yaml
from edgewater.base.streams import Delivery, type_name
from edgewater.base.timestamps import rfc3339
from edgewater.model import replies
from edgewater.model.edge_records import EdgeRecord, QueryStatusRecord
from edgewater.model.json_types import as_document
from edgewater.model.registered_query import RegisteredQuery, query_key
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


def registered(query: RegisteredQuery) -> replies.Registered:
    """Returns a query as it is registered."""
    return {
        "name": query.ref.name,
        "version": query.ref.version,
        "spec": cast(replies.Spec, query.asked.to_mapping(seed=False)),
        "registered_at": rfc3339(query.registered_at_ms),
        "begins": border(query.windows.from_ms),
        "until": border(query.windows.until_ms),
        "ended_at": time_text(query.ended_at_ms),
    }


def query_version(query: RegisteredQuery) -> replies.QueryVersion:
    """Returns the windows of one version of a query."""
    known = registered(query)
    tables = {lookup.table: lookup.version for lookup in query.spec.lookups}
    return {**{name: known[name] for name in ("version", "begins", "until", "ended_at")}, "tables": tables}  # type: ignore[typeddict-item]


def query_edge(
    progress: replies.EdgeProgress,
    expected: bool,
    status: QueryStatusRecord | None,
    shipped: replies.Shipped | None,
    late: Mapping[str, int],
) -> replies.QueryEdge:
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


def stream_columns(declared: Mapping[str, DeclaredStream], edges: Sequence[EdgeRecord]) -> list[replies.StreamColumns]:
    """Returns all streams, by name."""
    served = [(e.edge, s) for e in edges if not e.retired for s in e.streams]
    streams = list[replies.StreamColumns]()
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
        columns: list[replies.DescribedColumn] = [{"name": n, "type": k, "description": ""} for n, k in found.items()]
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


def edge_json(record: EdgeRecord, now_ms: int) -> replies.Edge:
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


def alarm_json(record: AlarmRecord) -> replies.Alarm:
    return {
        "kind": record.kind,
        "edge": record.edge,
        "query": record.query,
        "message": record.message,
        "first_at": rfc3339(record.first_at_ms),
        "last_at": rfc3339(record.last_at_ms),
        "times": record.times,
    }


class QuarantinedFrame(TypedDict):
    """A frame that could not be applied, and its place in the frame log."""

    query: str
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


@with_config(use_attribute_docstrings=True)
class SetAsideQuery(TypedDict):
    """A query whose frames are kept and not applied."""

    query: str
    """The query's key, `name@version`."""
    state: SetAside
    reason: str
    deaths: int
    """How often the job died while it worked on the query."""
    since: Rfc3339


def frame_json(frame: QuarantinedRecord) -> QuarantinedFrame:
    times = {"quarantined_at": rfc3339(frame.quarantined_at_ms), "received_at": rfc3339(frame.entry.received_at_ms)}
    # Responses leave the other members out.
    return cast(QuarantinedFrame, {**asdict(frame.entry), "query": frame.key, "reason": frame.reason, **times})


def set_aside_json(query: SetAsideRecord) -> SetAsideQuery:
    return {
        "query": query_key(query.query),
        "state": query.state,
        "reason": query.reason,
        "deaths": query.deaths,
        "since": rfc3339(query.since_ms),
    }


class QuarantineList(ApiModel):
    frames: list[QuarantinedFrame]
    """The latest first."""
    queries: list[SetAsideQuery]


class Answer(replies.Members):
    """An answer to one window."""

    data: list[AnswerRow]
    """A row per group."""


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
