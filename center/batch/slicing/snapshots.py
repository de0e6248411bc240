"""Snapshots of a slicer: ``EWSN`` + CRC32C of the rest + length of the index + the index as JSON + blobs.

Blobs are synopses, and records as Arrow IPC. The index refers to blobs by number. Merges of slices are not stored. They
are computed again after a restore.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from center.batch.slicing.counts import CountSlice, CountSlices
from center.batch.slicing.merging import GridWindows
from center.batch.slicing.rows import PendingRecords, TimedRows
from center.batch.slicing.sessions import OpenRun
from center.batch.slicing.time_slices import TimeSlice, TimeSlices
from center.batch.slicing.watermarks import SiteWatermarks
from edgewater.model.errors import Conflict, StorageError

MAGIC = b"EWSN"
VERSION = 1
_HEADER = struct.Struct("<4sI")
_LENGTH = struct.Struct("<Q")


@dataclass(slots=True)
class SlicerState:
    """The part of a slicer that changes.

    Attributes:
        clocks: watermarks of the sites.
        time, count: slices by event time, and slices by rank.
        number: number of records so far.
        waiting: records of order-based synopses that the watermark has not passed.
    """

    clocks: SiteWatermarks
    time: list[TimeSlices]
    count: list[CountSlices]
    number: int
    waiting: PendingRecords


def to_bytes(state: SlicerState, identity: dict[str, Any]) -> bytes:
    """Serialises the state of a slicer.

    Args:
        identity: the arguments of the slicer, as JSON.
    """
    blobs: list[bytes] = []
    index = {
        "version": VERSION,
        "of": identity,
        "number": state.number,
        "watermark": state.clocks.watermark,
        "first": state.clocks.first,
        "sites": state.clocks.sites,
        "idle": sorted(state.clocks.idle),
        "waiting": _waiting(state.waiting, blobs),
        "time": [_time(store, blobs) for store in state.time],
        "count": [_count(store, blobs) for store in state.count],
    }
    index["blobs"] = [len(blob) for blob in blobs]
    text = json.dumps(index, separators=(",", ":")).encode()
    body = b"".join([_LENGTH.pack(len(text)), text, *blobs])
    return _HEADER.pack(MAGIC, google_crc32c.value(body)) + body


def restore_into(state: SlicerState, identity: dict[str, Any], data: bytes) -> None:
    """Sets the state of an empty slicer from the result of `to_bytes`.

    Raises:
        Conflict: the snapshot has another identity or version.
        StorageError: the bytes cannot be read.
    """
    index, blobs = _opened(data)
    if index["version"] != VERSION or index["of"] != identity:
        raise Conflict(f"a snapshot of {index['of']} cannot be restored into {identity}")
    state.number = index["number"]
    clocks = state.clocks
    clocks.watermark, clocks.sites, clocks.idle = index["watermark"], dict(index["sites"]), set(index["idle"])
    clocks.first = index["first"]
    try:
        state.waiting = _waiting_from(index["waiting"], blobs)
        for store, values in zip(state.time, index["time"], strict=True):
            _restore_time(store, values, blobs)
        for number, values in zip(state.count, index["count"], strict=True):
            _restore_count(number, values, blobs)
    except (LookupError, ValueError, TypeError, pa.ArrowInvalid) as exc:
        raise StorageError(f"a snapshot with a correct checksum cannot be read: {exc}") from exc


def _opened(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    if len(data) < _HEADER.size + _LENGTH.size:
        raise StorageError(f"{len(data)} bytes are too few for a snapshot of a slicer")
    magic, checksum = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != MAGIC or google_crc32c.value(body) != checksum:
        raise StorageError("not a snapshot of a slicer, or a corrupt one")
    (length,) = _LENGTH.unpack_from(body)
    at = _LENGTH.size + length
    index, blobs = json.loads(body[_LENGTH.size : at]), []
    for size in index["blobs"]:
        blobs.append(body[at : at + size])
        at += size
    return index, blobs


def _blob(data: bytes, blobs: list[bytes]) -> int:
    blobs.append(data)
    return len(blobs) - 1


def _rows(rows: TimedRows, blobs: list[bytes]) -> list[int | str]:
    form = "batch" if isinstance(rows.values, pa.RecordBatch) else "array"
    if isinstance(rows.values, np.ndarray):
        form = "numpy"
    values = rows.values if form == "batch" else pa.record_batch({"values": pa.array(rows.values)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, values.schema) as writer:
        writer.write_batch(values)
    numbers = np.stack([rows.times, rows.numbers]).astype("<i8").tobytes()
    return [form, _blob(sink.getvalue().to_pybytes(), blobs), _blob(numbers, blobs)]


def _rows_from(state: list[Any], blobs: list[bytes]) -> TimedRows:
    form, at, numbers = state
    table = pa.ipc.open_stream(blobs[at]).read_all()
    batches = table.combine_chunks().to_batches()
    batch = batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
    values = batch if form == "batch" else batch.column(0)
    if form == "numpy":
        values = values.to_numpy(zero_copy_only=False)
    times, order = np.frombuffer(blobs[numbers], "<i8").astype(np.int64).reshape(2, -1)
    return TimedRows(values, times, order)


def _waiting(waiting: PendingRecords, blobs: list[bytes]) -> list[list[int | str]]:
    return [_rows(part, blobs) for part in waiting.parts]


def _waiting_from(state: list[list[Any]], blobs: list[bytes]) -> PendingRecords:
    waiting = PendingRecords()
    waiting.parts = [_rows_from(part, blobs) for part in state]
    return waiting


def _windows(windows: GridWindows) -> dict[str, Any]:
    return {"pending": sorted(windows.pending), "answered": sorted(windows.answered.items())}


def _restore_windows(windows: GridWindows, state: dict[str, Any]) -> None:
    windows.pending = set(state["pending"])
    windows.answered = dict(state["answered"])


def _time(store: TimeSlices, blobs: list[bytes]) -> dict[str, Any]:
    return {
        "windows": [_windows(w) for w in store.windows],
        "sessions": [
            [sessions.sealed, [[r.first, r.last, sorted(r.changed), sorted(r.answered.items())] for r in sessions.open]]
            for sessions in store.sessions
        ],
        "slices": [
            [s.start, s.end, s.first, s.last, s.live, s.records, _blob(s.state.to_bytes(), blobs)] for s in store.slices
        ],
    }


def _restore_time(store: TimeSlices, state: dict[str, Any], blobs: list[bytes]) -> None:
    for windows, values in zip(store.windows, state["windows"], strict=True):
        _restore_windows(windows, values)
    for sessions, (sealed, rows) in zip(store.sessions, state["sessions"], strict=True):
        sessions.sealed, sessions.open = sealed, [_run(*row) for row in rows]
    store.slices = [_slice(store, blobs, *row) for row in state["slices"]]


def _run(first: int, last: int, changed: list[int], answered: list[tuple[list[int], int]]) -> OpenRun:
    return OpenRun(first, last, set(changed), {(start, end): revision for (start, end), revision in answered})


def _slice(
    store: TimeSlices, blobs: list[bytes], start: int, end: int, first: int, last: int, live: int, records: int, at: int
) -> TimeSlice:
    return TimeSlice(start, end, first, last, live, records, store.kernel.from_bytes(blobs[at]))


def _count(store: CountSlices, blobs: list[bytes]) -> dict[str, Any]:
    return {
        "windows": [_windows(w) for w in store.windows],
        "settled": store.settled,
        "waiting": _waiting(store.waiting, blobs),
        "slices": [
            [s.start, s.end, _rows(s.rows, blobs), None if s.state is None else _blob(s.state.to_bytes(), blobs)]
            for s in store.slices
        ],
    }


def _restore_count(store: CountSlices, state: dict[str, Any], blobs: list[bytes]) -> None:
    for windows, values in zip(store.windows, state["windows"], strict=True):
        _restore_windows(windows, values)
    store.settled, store.waiting = state["settled"], _waiting_from(state["waiting"], blobs)
    store.slices = [
        CountSlice(start, end, _rows_from(rows, blobs), None if at is None else store.kernel.from_bytes(blobs[at]))
        for start, end, rows, at in state["slices"]
    ]
