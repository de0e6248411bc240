"""The whole state of an `EdgeCore` as bytes, and back: what a checkpoint holds.

Layout: a JSON document, in which blobs are named by number, and the blobs behind it. Queries are
written as specs and bound again on reading, so a checkpoint survives a release that changes how
they are evaluated.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.history import GroupHistory
from edge.cache.send_queue import Ranking
from edge.core.arrival_reports import ArrivalMonitor
from edge.core.budget_schedule import ShareSchedule
from edge.core.core import EdgeCore
from edge.core.events import QueryRefused
from edge.core.query import QueryPipeline
from edge.core.slices import Progress, Slice
from edgewater.errors import InvalidQuery, StorageError
from edgewater.query import QuerySpec
from edgewater.streams import MIN_TIME_MS
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import Frame, QueryRef

VERSION = 1
_LENGTH = struct.Struct("<I")


def snapshot(core: EdgeCore) -> bytes:
    """Equal states give equal bytes."""
    blobs: list[bytes] = []
    document = {
        "version": VERSION,
        "configured": core.configured,
        "next_seq": core.next_seq,
        "source": core.source,
        "touch": core._touch,
        "now_ms": core._now_ms,
        "streams": {name: stream.snapshot() for name, stream in core.streams.items()},
        "queries": [_query(p, blobs) for p in core.queries.values()],
        "refused": [[r.query.name, r.query.version, r.code, r.message] for r in core.refused.values()],
        "unacked": [_blob(f.to_wire().SerializeToString(deterministic=True), blobs) for f in core.unacked],
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    return b"".join(part for piece in (text, *blobs) for part in (_LENGTH.pack(len(piece)), piece))


def restore(core: EdgeCore, data: bytes) -> None:
    """Puts a fresh core into the state that `snapshot` wrote.

    Streams that the configuration no longer names are dropped with the queries that read them.

    Raises:
        StorageError: bytes of a newer release, or damaged ones; a query needs a column that the
            configuration no longer has.
    """
    try:
        text, *blobs = _pieces(data)
        document = json.loads(text)
    except (struct.error, ValueError) as exc:
        raise StorageError(f"the checkpoint cannot be read: {exc}") from exc
    if document["version"] != VERSION:
        raise StorageError(f"a checkpoint of version {document['version']}; this release reads {VERSION}")
    core.configured = document["configured"]
    core.source = document["source"]  # records keep the identities they were given, also if the edge is renamed
    core.next_seq, core._touch, core._now_ms = document["next_seq"], document["touch"], document["now_ms"]
    for name, state in document["streams"].items():
        if name in core.streams:
            core.streams[name].restore(state)
    for state in document["queries"]:
        _restore_query(core, state, blobs)
    for name, version, code, message in document["refused"]:
        ref = QueryRef(name, version)
        core.refused[ref] = QueryRefused(ref, code, message)
    core.unacked.extend(Frame.from_wire(pb.Frame.FromString(blobs[i])) for i in document["unacked"])


def _pieces(data: bytes) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ValueError(f"a piece of {length} bytes at {at} runs past the end, {len(data)}")
        pieces.append(data[at : at + length])
        at += length
    return pieces


def _blob(data: bytes, blobs: list[bytes]) -> int:
    blobs.append(data)
    return len(blobs) - 1


def _query(pipeline: QueryPipeline, blobs: list[bytes]) -> dict[str, Any]:
    return {
        "name": pipeline.ref.name,
        "version": pipeline.ref.version,
        "spec": pipeline.spec.to_mapping(),
        "since_ms": pipeline.since_ms,
        "shares": pipeline.schedule.to_json(),
        "through_ms": pipeline.progress.through_ms,
        "entry_bytes": pipeline.progress.entry_bytes,
        "drawn_at": pipeline.drawn_at,
        "slices_drawn_at": [[start, held.drawn_at] for start, held in pipeline.slices.items() if held.drawn_at < 1],
        "told_by": [
            [start, held.told_by_ms] for start, held in pipeline.slices.items() if held.told_by_ms > MIN_TIME_MS
        ],
        "slices": [
            [
                start,
                *held.counters,
                held.flags,
                _ranking(held, blobs),
                [_blob(b, blobs) for b in held.entries.snapshot()],
            ]
            for start, held in sorted(pipeline.slices.items())
        ],
        "history": _history(pipeline, blobs),
        "spent": [[start, *counters] for start, counters in sorted(pipeline.spent.items())],
        **_monitor(pipeline, blobs),
    }


def _history(pipeline: QueryPipeline, blobs: list[bytes]) -> dict[str, Any]:
    document, arrays = pipeline.history.snapshot()
    return {**document, "blobs": [_blob(array, blobs) for array in arrays]}


def _monitor(pipeline: QueryPipeline, blobs: list[bytes]) -> dict[str, Any]:
    if pipeline.monitor is None:
        return {}
    document, arrays = pipeline.monitor.snapshot()
    return {"monitor": {**document, "blobs": [_blob(array, blobs) for array in arrays]}}


def _ranking(held: Slice, blobs: list[bytes]) -> list[Any]:
    document, groups = held.ranking.snapshot()
    return [*document, _blob(groups.astype("<i4").tobytes(), blobs)]


def _restore_query(core: EdgeCore, state: dict[str, Any], blobs: list[bytes]) -> None:
    spec = QuerySpec.from_mapping(state["spec"])
    stream = core.streams.get(spec.stream)
    if stream is None:
        return
    ref = QueryRef(state["name"], state["version"])
    schedule = ShareSchedule.from_json(state["shares"])
    try:
        bound = spec.bind(stream.spec.columns)
    except InvalidQuery as exc:
        # What it has not shipped yet would be lost.
        raise StorageError(
            f"the columns of stream {spec.stream} no longer serve query {ref.name}, which this edge answers: {exc}. "
            "Put them back, delete the query at the center, and change them then"
        ) from exc
    pipeline = QueryPipeline(ref, bound, state["since_ms"], schedule)
    pipeline.source = core.source
    if pipeline.monitor is not None and "monitor" in state:
        pipeline.monitor = ArrivalMonitor(pipeline.monitor.schedule, core.source, pipeline.monitor.key_types)
        pipeline.monitor.restore(state["monitor"], [blobs[n] for n in state["monitor"]["blobs"]])
    pipeline.progress = Progress(state["through_ms"], state["entry_bytes"])
    history = state["history"]
    pipeline.history = GroupHistory.restore(history, [blobs[n] for n in history["blobs"]])
    for start, *counters, flags, (*ranking, ranked), numbers in state["slices"]:
        entries = SliceEntries.restore([blobs[n] for n in numbers], pipeline.bounded_measures)
        pipeline.slices[start] = Slice(entries, *counters)
        pipeline.slices[start].flags = flags
        pipeline.slices[start].ranking = Ranking.restore(ranking, np.frombuffer(blobs[ranked], "<i4"))
    pipeline.drawn_at = state["drawn_at"]
    for start, rate in state["slices_drawn_at"]:
        pipeline.slices[start].drawn_at = rate
    for start, came_ms in state["told_by"]:
        pipeline.slices[start].told_by_ms = came_ms
    for start, *counters in state["spent"]:
        pipeline.spent[start] = tuple(counters)
    core.queries[ref] = pipeline
