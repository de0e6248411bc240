"""The rows of a micro-batch in Spark: merged partials, and the positions that a task has read.

Facts of frames are no rows: the driver reads them from the frame index by position (`center.storage.frame_facts`).
Every position that was read is in a READ row. So a frame that cannot be read differs from a gap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import pyarrow as pa

MAX_REASON_BYTES = 2_000


class RowKind(IntEnum):
    PARTIAL = 0
    """`payload` is the synopsis of (query, slice_start_ms)."""
    READ = 1
    """The task has read all frames from `position` through `last`."""
    DAMAGED = 2
    """The frame at this position cannot be read; `payload` is the reason (UTF-8)."""
    REFUSED = 3
    """A partial of this position cannot be merged; `payload` is the reason (UTF-8)."""
    QUARANTINED = 4
    """The frame at this position was set aside, because it could not be applied; `payload` is the reason (UTF-8)."""


ROW_SCHEMA: pa.Schema = pa.schema(
    [
        ("query", pa.string()),
        ("position", pa.int64()),
        ("last", pa.int64()),
        ("kind", pa.int32()),
        ("slice_start_ms", pa.int64()),
        ("partials", pa.int32()),
        ("payload", pa.binary()),
    ]
)

ROW_DDL = "query string, position bigint, last bigint, kind int, slice_start_ms bigint, partials int, payload binary"


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One row. The fields are the columns of `ROW_SCHEMA`; none is ever null.

    Attributes:
        last: the last position of a READ row; in other rows it is `position`.
        partials: the number of partials that were merged into the row. If there are several, `position` is the position
            of one of them.
    """

    query: str
    position: int
    last: int
    kind: RowKind
    slice_start_ms: int = 0
    partials: int = 1
    payload: bytes = field(default=b"", repr=False)


def row_of_partial(key: str, position: int, slice_start_ms: int, synopsis: bytes) -> FrameRow:
    """Returns the row of a partial that was not merged yet."""
    return FrameRow(key, position, position, RowKind.PARTIAL, slice_start_ms, payload=synopsis)


def row_of_damage(key: str, position: int, reason: str, kind: RowKind = RowKind.DAMAGED) -> FrameRow:
    """Returns the row of a frame that cannot be read, or that was set aside."""
    return FrameRow(key, position, position, kind, payload=reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES])


def rows_of_positions(frames: Iterable[tuple[str, int]]) -> list[FrameRow]:
    """Returns a READ row for each run of successive positions.

    Args:
        frames: query key and position of each frame, ordered by position within a query.
    """
    runs: list[tuple[str, int, int]] = []
    for key, position in frames:
        if runs and runs[-1][0] == key and runs[-1][2] + 1 == position:
            runs[-1] = key, runs[-1][1], position
        else:
            runs.append((key, position, position))
    return [FrameRow(key, first, last, RowKind.READ) for key, first, last in runs]


def to_batch(rows: list[FrameRow]) -> pa.RecordBatch:
    columns = [
        pa.array([getattr(row, name) for row in rows], kind)
        for name, kind in zip(ROW_SCHEMA.names, ROW_SCHEMA.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def from_table(table: pa.Table | pa.RecordBatch) -> list[FrameRow]:
    columns = [table.column(name).to_pylist() for name in ROW_SCHEMA.names]
    return [
        FrameRow(query, position, last, RowKind(kind), *rest)
        for query, position, last, kind, *rest in zip(*columns, strict=True)
    ]
