"""What a center keeps of a frame, as one body: its partials, and the facts of the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from center.catalog import Catalog
from center.ingest.frame_check import CheckedFrame
from center.job.merge import SlicePartial
from center.storage.frame_facts import read_facts, split_body
from center.storage.frame_log import FrameEntry, FrameLocation, FrameLog, StoredFrame, decode_fetched
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_key
from edgewater.wire import Frame, FrameBody, Partial


def joined(partials: Sequence[Partial], encoded: bytes) -> FrameBody:
    return replace(read_facts(encoded), partials=tuple(partials))


def kept_body(checked: CheckedFrame) -> FrameBody:
    """What a check has kept of a frame."""
    return joined(checked.partials, checked.facts)


def stored_frame(frame: Frame, edge: str = "jfk", incarnation: str = "i1") -> StoredFrame:
    """A frame as the log has it, if nothing of it was refused."""
    return StoredFrame(frame.query, EdgeId(edge), incarnation, frame.seq, frame.unpack().partials)


def stored_body(catalog: Catalog, log: FrameLog, entry: FrameEntry) -> FrameBody:
    """What log and index have of a frame."""
    key, at = query_key(entry.query), entry.position
    facts = catalog.frames.facts({key: [(at - 1, at)]})[key][at]
    return joined(read_frame(log, entry.segment, entry.offset, entry.length).partials, facts)


def partials_of_frame(entry: FrameEntry, body: FrameBody) -> list[SlicePartial]:
    """The partials of a frame that was read."""
    key = query_key(entry.query)
    return [SlicePartial(key, p.slice_start_ms, p.synopsis, entry.position) for p in body.partials]


def facts_of_frame(body: FrameBody) -> bytes:
    """The facts of a frame in the index."""
    return split_body(body)[1]


def read_frame(log: FrameLog, segment: str, offset: int, length: int) -> StoredFrame:
    """Reads the frame at a place of the log. Raises StorageError."""
    location = FrameLocation(segment, offset, length)
    return decode_fetched(location, log.fetch([location])[0])
