"""The records of the journal: how each event of the core is written and read.

An event is JSON, with two exceptions. A batch whose records the journal stores also has these records. A pull also has
the frames that it built.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from functools import cache
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.lib.introspect import opt_func_info

from edge.core.core import QUEUED
from edge.core.events import (
    Acked,
    BackfillEnded,
    BackfillIngested,
    BudgetSet,
    Configured,
    Event,
    FrameBuilt,
    Ingested,
    InputLost,
    MemoryLimited,
    PullEvent,
    PullReplayed,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
    TickEvent,
)
from edge.core.memory import MemoryAction
from edge.durability.journal import Record
from edge.records import Position, PushId, RejectedRecords, batch_from_bytes, batch_to_bytes
from edge.series import SeriesUpdate
from edgewater.base.errors import StorageError
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import WindowRange
from edgewater.runtime.state_release import RELEASE
from edgewater.wire import Frame, QueryRef, SamplingReason
from edgewater.wire import uplink_pb2 as pb

# Kinds of journal records. Numbers are never reused. `RAN` is only in journals of earlier releases.
CONFIGURED, SOURCES_OPENED, RANGE, PAYLOAD, SOURCE_ENDED, TICK, PULL, ACKED, BUDGET, SAMPLING, LOST = range(1, 12)
BACKFILL, BACKFILL_ENDED, MEMORY_LIMITED, RAN, RUN = range(12, 17)

# `json.dumps` would make an encoder for each record.
_encode_json = json.JSONEncoder(
    separators=(",", ":"), default=lambda value: dict(value) if isinstance(value, Mapping) else astuple(value)
).encode


@cache
def platform_id() -> int:
    """Returns a hash of all that may change the last bit of a value.

    It covers releases, the C library, and the processor features that NumPy and Arrow use.
    """
    releases = RELEASE, np.__version__, pa.__version__, platform.python_version()
    machine = platform.machine(), platform.libc_ver(), pa.runtime_info().simd_level, opt_func_info()
    return int(google_crc32c.value(repr((releases, machine)).encode()))


def _time_range(batch: pa.RecordBatch) -> tuple[int | None, int | None]:
    """Returns the first and the last event time of a batch in ms; None for a batch without rows."""
    if not batch.num_rows:
        return None, None
    times = batch.column(TIME_COLUMN).to_numpy()
    return int(times.min()), int(times.max())


def _json(kind: int, document: Mapping[str, Any]) -> Record:
    return Record(kind, _encode_json(document).encode())


def run_record(number: int) -> Record:
    """Encodes that the process with this number runs on the state from now on."""
    return _json(RUN, {"number": number})


def read_run(record: Record) -> int:
    """Returns the number of the process in a record of `run_record`."""
    return int(json.loads(record.payload)["number"])


_EVENTS: dict[int, type[Event]] = {
    SOURCES_OPENED: SourcesOpened,
    SOURCE_ENDED: SourceEnded,
    TICK: TickEvent,
    ACKED: Acked,
    BUDGET: BudgetSet,
    SAMPLING: SamplingSet,
    LOST: InputLost,
    BACKFILL_ENDED: BackfillEnded,
    MEMORY_LIMITED: MemoryLimited,
}
"""The events whose records have their fields by name."""
_KINDS = {event: kind for kind, event in _EVENTS.items()}
_READERS: dict[object, Callable[[Any], Any]] = {
    "QueryRef": lambda value: QueryRef(*value),
    "tuple[str, ...]": tuple,
    "tuple[tuple[str, str], ...]": lambda value: tuple(map(tuple, value)),
    "SamplingReason": SamplingReason.from_number,
    "MemoryAction": MemoryAction,
}
"""By type of a field, what reads its JSON."""


def encode_event(event: Event) -> Record:
    """Encodes an event other than a pull and a batch, which have records of their own."""
    if not isinstance(event, Configured):
        return _json(_KINDS[type(event)], {each.name: getattr(event, each.name) for each in fields(event)})
    ranges = [[r.name, r.version, w.from_ms, w.until_ms] for r, w in event.windows.items()]
    specs = [[r.name, r.version, s.to_mapping()] for r, s in event.queries]
    head = {"queries": specs, "counts_earlier": event.counts_earlier, "now_ms": event.now_ms}
    return _json(CONFIGURED, {**head, **({"windows": ranges} if ranges else {})})


def decode_event(record: Record) -> Event:
    """Decodes a record of `encode_event`.

    Raises:
        KeyError: the kind of the record is unknown to this release.
    """
    stored = json.loads(record.payload)
    if record.kind != CONFIGURED:
        kind = _EVENTS[record.kind]
        each = {f.name: _READERS.get(f.type, _unchanged)(stored[f.name]) for f in fields(kind) if f.name in stored}
        return kind(**each)
    return Configured(
        tuple((QueryRef(n, v), QuerySpec.from_mapping(spec)) for n, v, spec in stored["queries"]),
        {QueryRef(n, v): WindowRange(*borders) for n, v, *borders in stored.get("windows", ())},
        stored.get("counts_earlier", False),
        stored.get("now_ms", 0),
    )


def _unchanged(value: Any) -> Any:
    return value


def range_record(event: Ingested, start: Position | None, end: Position) -> Record:
    head = {"stream": event.stream, "source": event.source, "arrival_ms": event.arrival_ms}
    # They are needed to state a loss if the range can no longer be read.
    content = {"rows": event.batch.num_rows, "times": _time_range(event.batch)}
    return _json(RANGE, {**head, **content, "start": start, "end": end, **_rejected(event)})


def _rejected(event: Ingested | BackfillIngested) -> dict[str, list[Any]]:
    """Returns the rejected records as JSON. They are part of the batch's record, so that both count together."""
    return {"rejected": [astuple(each) for each in event.rejected]} if event.rejected else {}


def read_ingested(head: Mapping[str, Any], batch: pa.RecordBatch) -> Ingested:
    """Returns the event of a batch from the head of its record.

    Raises:
        StorageError: an earlier release has queued the batch (`QUEUED`).
    """
    if head.get("queued"):
        raise StorageError(QUEUED)
    return Ingested(head["stream"], head["source"], batch, head["arrival_ms"], read_rejected(head))


def read_rejected(head: Mapping[str, Any]) -> tuple[RejectedRecords, ...]:
    return tuple(RejectedRecords(*each) for each in head.get("rejected", ()))


def backfill_record(event: BackfillIngested, start: Position | None, end: Position, keep: bool) -> Record:
    """Encodes a range of a backfill: a line of JSON, then the records if `keep` is true."""
    head = {"query": [event.query.name, event.query.version], "source": event.source, "arrival_ms": event.arrival_ms}
    rows = event.batch.num_rows
    line = _json(BACKFILL, {**head, "rows": rows, "start": start, "end": end, **_rejected(event)})
    if not keep:
        return line
    return Record(BACKFILL, b"\n".join((line.payload, batch_to_bytes(event.batch))))


def payload_record(event: Ingested, push: PushId | None, end: Position | None, series: SeriesUpdate | None) -> Record:
    """Encodes a batch: the length of the head in 4 bytes, the head in JSON, the series, and the records."""
    fields = {"stream": event.stream, "source": event.source, "arrival_ms": event.arrival_ms}
    identity = {} if push is None else {"push": push.to_hex()}
    position = {} if end is None else {"end": end}
    totals = b"" if series is None else series.to_bytes()
    length = {"series": len(totals)} if totals else {}
    head = json.dumps({**fields, **_rejected(event), **identity, **position, **length}).encode()
    return Record(PAYLOAD, len(head).to_bytes(4, "little") + head + totals + batch_to_bytes(event.batch))


def read_payload(payload: bytes) -> tuple[Ingested, PushId | None, Position | None, SeriesUpdate | None]:
    length = int.from_bytes(payload[:4], "little")
    head = json.loads(payload[4 : 4 + length])
    begin = 4 + length + head.get("series", 0)
    series = SeriesUpdate.from_bytes(payload[4 + length : begin]) if "series" in head else None
    event = read_ingested(head, batch_from_bytes(payload[begin:]))
    return event, PushId.from_hex(head["push"]) if "push" in head else None, head.get("end"), series


def pull_record(pull: PullEvent, built: Sequence[FrameBuilt]) -> Record:
    """Encodes a pull: a line of JSON, then the frames in their wire format."""
    names = "unread", "bandwidth_bytes_s", "path_delay_ms", "max_frames", "mid_bytes_s", "now_ms"
    head: dict[str, Any] = {name: getattr(pull, name) for name in names}
    head |= {
        "capacity": pull.capacity_bytes,
        "drain_windows": {stream: (now_ms, now_ms) for stream, now_ms in pull.times_ms.items()},
        "processing_ms": [(ref.name, ref.version, ms) for ref, ms in pull.processing_ms.items()],
        "least_bytes_s": 0.0,  # 0.3.0 requires it
    }
    frames = [b.frame.to_wire().SerializeToString() for b in built]
    if frames:
        parts = [(len(frame), b.closed) for frame, b in zip(frames, built, strict=True)]
        head |= {"frames": parts, "platform": platform_id(), "counts_only": [b.counts_only for b in built]}
    return Record(PULL, b"\n".join((_json(PULL, head).payload, b"".join(frames))))


def read_pull(record: Record) -> tuple[PullReplayed, int]:
    """Returns the pull, and the `platform_id` of the process that built its frames; 0 if it built none."""
    text, _, data = record.payload.partition(b"\n")
    fields = json.loads(text)
    times_ms = {s: now_ms for s, (now_ms, _) in fields["drain_windows"].items()}
    link = fields["bandwidth_bytes_s"], fields["path_delay_ms"], tuple(fields["unread"])
    processing_ms = {QueryRef(name, version): ms for name, version, ms in fields["processing_ms"]}
    mid_bytes_s = fields.get("mid_bytes_s", 0.0)  # 0.3.0 has a lower bound of an unknown bandwidth instead
    now_ms = fields.get("now_ms", 0)
    pull = PullEvent(fields["capacity"], times_ms, *link, fields["max_frames"], processing_ms, mid_bytes_s, now_ms)
    parts = fields.get("frames", ())
    counts_only = fields.get("counts_only", [None] * len(parts))  # 0.3.0 does not write it
    built, at = list[FrameBuilt](), 0
    for (length, closed), no_groups in zip(parts, counts_only, strict=True):
        frame = Frame.from_wire(pb.Frame.FromString(data[at : at + length]))
        built.append(FrameBuilt(frame, tuple(closed), no_groups))
        at += length
    return PullReplayed(pull, tuple(built)), fields.get("platform", 0)
