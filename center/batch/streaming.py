"""Windows of a streaming DataFrame. Spark's state has the synopsis of each open window. Every micro-batch that adds
records to a window emits the next revision of the window.

The partials of a task are emitted once per window that they belong to. So a key of the state is a window. For sessions,
a key is a stratum, because a late record may join two sessions. Synopses that merge are commutative or have event
times. So a late record counts like any other record until the watermark has passed the end of its window. Then the
window is final and its state is dropped. Later records are counted, but not added.

Only one row per task has an event time: the latest event time that the task has seen. Spark derives the watermark from
this row. Since the other rows have no event time, Spark never drops a row. A dropped row would be lost silently.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from center.batch.compute_phase import BatchJob
from center.batch.layout import SPARK_TYPES
from center.batch.merge_phase import SlicePartial, bounds_of, piece_of, session_windows, union
from center.spark.workers import settle
from edgewater.model.windows import SessionWindow

EmittedSessions = dict[tuple[int, int], tuple[int, int, int]]
"""Emitted sessions: revision, records and nulls by (start, end)."""

_OUT = ("window_start", "window_end", "synopsis", "records", "nulls", "revision", "late")
_OUT_DDL = (
    "window_start bigint, window_end bigint, synopsis binary,"
    " records bigint, nulls bigint, revision bigint, late bigint"
)
_WINDOW_STATE = "synopsis binary, first_ms bigint, last_ms bigint, records bigint, nulls bigint, revision bigint"
_SESSION_STATE = "slices binary, emitted string"
_SLICES = pa.schema(
    [(n, pa.int64()) for n in ("start", "first_ms", "last_ms", "records", "nulls")] + [("data", pa.binary())]
)


def keep_state(partials: DataFrame, job: BatchJob, lateness: str | None) -> DataFrame:
    """Returns the revisions of windows as a streaming DataFrame in append mode.

    Args:
        lateness: `lateness` of `build`; None without a window.
    """
    layout = job.layout
    keys = list(layout.keys)
    # As strings: pandas would convert integers to floats in a column with nulls.
    for key in keys:
        partials = partials.withColumn(key, F.col(key).cast("string"))
    timeout = "NoTimeout"
    if lateness is not None:
        partials, timeout = partials.withWatermark("event_time", lateness), "EventTimeTimeout"
    step: Any = _SessionStep(job) if isinstance(job.window, SessionWindow) else _WindowStep(job)
    ddl = ", ".join([*(f"{k} string" for k in keys), _OUT_DDL])
    grouped = partials.groupBy(*keys, "block")
    result = grouped.applyInPandasWithState(step, ddl, step.state, "append", timeout)
    for key, (_, kind) in zip(keys, layout.strata, strict=True):
        result = result.withColumn(key, F.col(key).cast(SPARK_TYPES[kind]))
    for name in ("window_start", "window_end"):
        result = result.withColumn(name, F.timestamp_millis(F.col(name)))
    return result


class _StatefulStep:
    """The function that Spark calls with the new rows of a key, or after the timeout of the key."""

    state: str

    def __init__(self, job: BatchJob) -> None:
        self._job = job

    def __call__(self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        settle()
        strata = key[:-1]
        rows = self._rows(frames, state)
        if rows:
            columns = {k: [s] * len(rows) for k, s in zip(self._job.layout.keys, strata, strict=True)}
            columns |= {name: pd.Series([row.get(name) for row in rows], dtype=object) for name in _OUT}
            yield pd.DataFrame(columns)

    def _rows(self, frames: Iterable[pd.DataFrame], state: Any) -> list[dict[str, Any]]:
        if state.hasTimedOut:
            self._retire(state)
            return []
        pieces, untimed = _read(frames)
        rows = [] if not untimed else [{"records": untimed, "nulls": 0, "revision": 1, "late": 0}]
        return rows + (self._grow(pieces, state) if pieces else [])

    def _grow(self, pieces: list[SlicePartial], state: Any) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _retire(self, state: Any) -> None:
        raise NotImplementedError

    def _watermark(self, state: Any) -> int | None:
        """Returns the watermark in ms, or None if there is no watermark yet. Spark reports 0 in this case."""
        return (state.getCurrentWatermarkMs() or None) if self._job.window is not None else None


class _WindowStep(_StatefulStep):
    """The step for windows whose borders do not depend on records. A key is a window."""

    state = _WINDOW_STATE

    def _grow(self, pieces: list[SlicePartial], state: Any) -> list[dict[str, Any]]:
        watermark = self._watermark(state)
        _, end = bounds_of(self._job, pieces[0])
        if watermark is not None and end is not None and end <= watermark:
            return [_late(self._job, pieces)]
        revision = 0
        if state.exists:
            synopsis, first_ms, last_ms, records, nulls, revision = state.get
            held = SlicePartial(pieces[0].start, first_ms, last_ms, records, nulls, bytes(synopsis))
            pieces = [held, *pieces]
        whole = union(pieces)
        data = whole.to_bytes()
        state.update((data, whole.first_ms, whole.last_ms, whole.records, whole.nulls, revision + 1))
        if self._job.window is not None and end is not None and end > max(watermark or 0, 0):
            state.setTimeoutTimestamp(end)
        return [_result_row(*bounds_of(self._job, whole), whole, data, revision + 1)]

    def _retire(self, state: Any) -> None:
        state.remove()


class _SessionStep(_StatefulStep):
    """The step for sessions. A key is a stratum, and the key's state has the slices of its open sessions."""

    state = _SESSION_STATE

    def _grow(self, pieces: list[SlicePartial], state: Any) -> list[dict[str, Any]]:
        watermark = self._watermark(state)
        slices, emitted = self._open(state, watermark)
        by_start: dict[int, list[SlicePartial]] = {}
        for piece in [*slices, *pieces]:
            by_start.setdefault(piece.start, []).append(piece)
        slices = [union(by_start[start]) for start in sorted(by_start)]
        rows, now = [], {}
        for whole in self._sessions(slices):
            start, end = bounds_of(self._job, whole)
            assert start is not None and end is not None
            if watermark is not None and end <= watermark:
                # This session has no stored slice, because stored slices belong to open sessions.
                rows.append(_late(self._job, [whole]))
                slices = [s for s in slices if not whole.first_ms <= s.first_ms <= whole.last_ms]
                continue
            revision, *numbers = emitted.get((start, end), (0, -1, -1))
            if numbers != [whole.records, whole.nulls]:
                revision += 1
                rows.append(_result_row(start, end, whole, whole.to_bytes(), revision))
            now[start, end] = (revision, whole.records, whole.nulls)
        for (start, end), (revision, _, _) in emitted.items():
            if (start, end) not in now:
                rows.append(_result_row(start, end, None, None, revision + 1))
        self._keep(state, slices, now, watermark)
        return rows

    def _retire(self, state: Any) -> None:
        watermark = self._watermark(state)
        slices, emitted = self._open(state, watermark)
        self._keep(state, slices, emitted, watermark)

    def _sessions(self, slices: list[SlicePartial]) -> Iterator[SlicePartial]:
        assert isinstance(self._job.window, SessionWindow)
        return session_windows(iter(slices), self._job.window)

    def _open(self, state: Any, watermark: int | None) -> tuple[list[SlicePartial], EmittedSessions]:
        """Returns the stored slices and the emitted sessions that end after the watermark."""
        if not state.exists:
            return [], {}
        stored, text = state.get
        with pa.ipc.open_stream(bytes(stored)) as reader:
            slices = [SlicePartial(**row) for row in reader.read_all().to_pylist()]
        emitted: EmittedSessions = {(s, e): (r, n, m) for s, e, r, n, m in json.loads(text)}
        if watermark is None:
            return slices, emitted
        emitted = {span: values for span, values in emitted.items() if span[1] > watermark}
        return [s for s in slices if any(a <= s.first_ms < b for a, b in emitted)], emitted

    def _keep(self, state: Any, slices: list[SlicePartial], emitted: EmittedSessions, watermark: int | None) -> None:
        if not emitted:
            if state.exists:
                state.remove()
            return
        rows = [{name: getattr(s, name) for name in _SLICES.names} | {"data": s.to_bytes()} for s in slices]
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, _SLICES) as writer:
            writer.write_table(pa.Table.from_pylist(rows, _SLICES))
        state.update((sink.getvalue(), json.dumps([[*span, *values] for span, values in emitted.items()])))
        due = min(end for _, end in emitted)
        if due > max(watermark or 0, 0):
            state.setTimeoutTimestamp(due)


def _read(frames: Iterable[pd.DataFrame]) -> tuple[list[SlicePartial], int]:
    """Returns the partials, and the number of records without a time."""
    pieces, untimed = [], 0
    columns = ("slice_start", "first_ms", "last_ms", "records", "nulls")
    for frame in frames:
        for row in frame[[*columns, "synopsis"]].to_dict("records"):
            if row["synopsis"] is None:
                untimed += int(row["records"])
            else:
                pieces.append(piece_of(row | {"synopsis": bytes(row["synopsis"])}))
    return pieces, untimed


def _result_row(
    start: int | None, end: int | None, piece: SlicePartial | None, data: bytes | None, revision: int
) -> dict[str, Any]:
    return {
        "window_start": start,
        "window_end": end,
        "synopsis": data,
        "records": piece.records if piece else 0,
        "nulls": piece.nulls if piece else 0,
        "revision": revision,
        "late": 0,
    }


def _late(job: BatchJob, pieces: list[SlicePartial]) -> dict[str, Any]:
    """Returns a row with the number of records, nulls included, that arrived after their window was final."""
    start, end = bounds_of(job, pieces[0])
    row = _result_row(start, end, None, None, 0)
    return row | {"revision": None, "late": sum(p.records + p.nulls for p in pieces)}
