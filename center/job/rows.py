"""The rows of a frame in Spark.

A frame becomes one row per partial and one control row: its body without the synopses. So the ledger's facts come from
the same pass over the data as the partials. Every position that was read has a row; without it a damaged frame could
not be distinguished from a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

import pyarrow as pa

from center.storage.frame_log import FrameEntry
from edgewater.wire import FrameBody, Partial, body_from_wire, body_to_wire
from edgewater.wire.uplink_pb2 import FrameBody as FrameBodyMessage

MAX_REASON_BYTES = 2_000


class RowKind(IntEnum):
    PARTIAL = 0
    """`payload` is the synopsis of (query, slice_start_ms)."""
    CONTROL = 1
    """`payload` is the frame's body, its partials without their synopses."""
    DAMAGED = 2
    """The frame at this position cannot be read; `payload` is the reason (UTF-8)."""
    REFUSED = 3
    """A partial of this position cannot be merged; `payload` is the reason (UTF-8)."""
    QUARANTINED = 4
    """The frame at this position was set aside, as it could not be applied; `payload` is the reason (UTF-8)."""


FRAME_KINDS = (RowKind.CONTROL, RowKind.DAMAGED, RowKind.QUARANTINED)
"""Each position that was read has one row of one of these kinds."""


ROW_SCHEMA: pa.Schema = pa.schema(
    [
        ("query", pa.string()),
        ("position", pa.int64()),
        ("kind", pa.int32()),
        ("edge", pa.string()),
        ("incarnation", pa.string()),
        ("slice_start_ms", pa.int64()),
        ("payload", pa.binary()),
        ("wire_bytes", pa.int64()),
        ("received_at_ms", pa.int64()),
        ("partials", pa.int32()),
    ]
)

ROW_DDL = (
    "query string, position bigint, kind int, edge string, incarnation string, slice_start_ms bigint, payload binary, "
    " wire_bytes bigint, received_at_ms bigint, partials int"
)


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One row. The fields are the columns of `ROW_SCHEMA`; none is ever null.

    Attributes:
        partials: the number of partials that were merged in it. Of several, the other fields are those of one of them.
    """

    query: str
    position: int
    kind: RowKind
    edge: str
    incarnation: str
    slice_start_ms: int
    payload: bytes = field(repr=False)
    wire_bytes: int = 0
    received_at_ms: int = 0
    partials: int = 1


def rows_of_frame(key: str, entry: FrameEntry, body: FrameBody) -> list[FrameRow]:
    """The rows of a readable frame, the control row first."""
    stubs = tuple(Partial(p.slice_start_ms, b"") for p in body.partials)
    control = body_to_wire(replace(body, partials=stubs)).SerializeToString()
    origin = (str(entry.edge), entry.incarnation)
    partials = [
        FrameRow(key, entry.position, RowKind.PARTIAL, *origin, p.slice_start_ms, p.synopsis) for p in body.partials
    ]
    return [_entry_row(key, entry, RowKind.CONTROL, control), *partials]


def row_of_damage(key: str, entry: FrameEntry, reason: str, kind: RowKind = RowKind.DAMAGED) -> FrameRow:
    """The row of a frame that cannot be read, or that was set aside."""
    return _entry_row(key, entry, kind, reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES])


def control_body(payload: bytes) -> FrameBody:
    """Decodes the body in a control row; its partials have a slice, but no synopsis."""
    return body_from_wire(FrameBodyMessage.FromString(payload))


def to_batch(rows: list[FrameRow]) -> pa.RecordBatch:
    columns = [
        pa.array([getattr(row, name) for row in rows], kind)
        for name, kind in zip(ROW_SCHEMA.names, ROW_SCHEMA.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def from_table(table: pa.Table | pa.RecordBatch) -> list[FrameRow]:
    columns = [table.column(name).to_pylist() for name in ROW_SCHEMA.names]
    return [
        FrameRow(query, position, RowKind(kind), *rest) for query, position, kind, *rest in zip(*columns, strict=True)
    ]


def _entry_row(key: str, entry: FrameEntry, kind: RowKind, payload: bytes) -> FrameRow:
    origin = (str(entry.edge), entry.incarnation)
    return FrameRow(key, entry.position, kind, *origin, 0, payload, entry.wire_bytes, entry.received_at_ms)
