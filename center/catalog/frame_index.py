"""The frame index: which frames the center has, in which order, and at which location of the log.

Two row locks keep it consistent with any number of gateways. On SQLite the transaction itself is the lock. Under the
incarnation's row, a frame is checked against all frames acknowledged before it. Under the query's row, positions become
visible in order and without gaps, whichever transaction commits first. Locks of both kinds are taken in sorted order,
incarnations first.

A segment has frames of many queries. Processes drop frames one after another, under the catalog's lock. So the process
that drops the last frame of a segment notices it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from center.catalog import schema as t
from center.catalog.transactions import Transactions
from center.storage.database import MAX_GIVEN, Identifier, given, given_count, given_rows, rows_among
from center.storage.frame_log import FrameEntry, FrameLocation
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.wire import QueryRef

_RANGE = {"name": Identifier(63), "version": BigInteger(), "after": BigInteger(), "through": BigInteger()}
_ENTRY = tuple(c for c in t.frames.c if c.name != "facts")
_COPIED = ("edge", "incarnation", "seq", "crc32c", "wire_bytes", "received_at_ms", "work", "through_ms", "facts")
"""Columns with the names of the members of `UnindexedFrame`."""


class IndexOutcome(StrEnum):
    """The outcome of indexing a frame.

    Frames with the first four outcomes are acknowledged. `DISCARDED`: the query is unknown or deleted. `REFUSED`: the
    edge does not contribute to the query. Frames with the last two outcomes are not acknowledged, and neither are later
    frames of the same incarnation. `CONFLICT`: the index has the identity with another checksum (raises an alarm).
    `OUT_OF_SEQUENCE`: an earlier frame is missing, or the frame's bytes are not in the log although its query is live,
    or its incarnation never sent a Hello.
    """

    NEW = "new"
    DUPLICATE = "duplicate"
    DISCARDED = "discarded"
    REFUSED = "refused"
    CONFLICT = "conflict"
    OUT_OF_SEQUENCE = "out-of-sequence"

    @property
    def acknowledged(self) -> bool:
        return self not in (IndexOutcome.CONFLICT, IndexOutcome.OUT_OF_SEQUENCE)


@dataclass(frozen=True, slots=True)
class UnindexedFrame:
    """A frame that has arrived.

    Attributes:
        location: the durable location in the log. None if the frame was not written: it is a re-delivery, its query is
            unknown or deleted, or the frame is refused.
        plain_bytes: size of the body before compression.
        work: the work that the frame makes for the job, as a number of slices.
        through_ms: event time up to which the edge has answered the query, with this frame.
        refused: whether its edge does not contribute to its query.
        run: the process of the edge that has sent the frame. Only frames of the process that sent the last Hello are
            indexed.
        facts: the statements of the frame beside its partials (`center.storage.frame_facts`).
    """

    query: QueryRef
    edge: EdgeId
    incarnation: str
    seq: int
    crc32c: int
    wire_bytes: int
    received_at_ms: int
    location: FrameLocation | None
    plain_bytes: int = 0
    work: int = 0
    through_ms: int = 0
    refused: bool = False
    run: int = 0
    facts: bytes = field(default=b"", repr=False)


@dataclass(slots=True)
class _SequenceProgress:
    """The progress of an incarnation while a batch is indexed.

    Attributes:
        awaited: the next expected seq; `began_at`: its value before the batch.
        run: the process whose frames are indexed.
        stopped: a frame was not acknowledged, so later frames are not acknowledged either.
        crcs: checksums of indexed frames by seq, as far as the batch needs them.
    """

    awaited: int
    began_at: int
    run: int = 0
    stopped: bool = False
    crcs: dict[int, int] = field(default_factory=dict)


class FrameIndex:
    """The index in the catalog. Its positions are per query, begin at 1 and have no gaps."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def index(self, batch: Sequence[UnindexedFrame]) -> list[IndexOutcome]:
        """Indexes frames of any number of edges in one transaction; returns the outcomes in the order of `batch`.

        After it returns, frames whose outcome is `acknowledged` may be acknowledged. The
        next expected frame of an incarnation is new. An earlier frame is a re-delivery, and a later one is out of
        sequence. New frames get the query's
        next positions, which become visible in order.
        """
        if not batch:
            return []
        with self._transactions.write() as connection:
            progress = _lock_incarnations(connection, batch)
            _load_checksums(connection, batch, progress)
            positions = _lock_positions(connection, {f.query for f in batch})
            began_at = dict(positions)
            outcomes, rows = _check(batch, progress, positions)
            if rows:
                connection.execute(insert(t.frames), rows)
            moved = {query: position for query, position in positions.items() if position != began_at[query]}
            _advance(connection, moved, progress)
        return outcomes

    def oldest(self, after: Mapping[str, int]) -> dict[str, int]:
        """By query key, the arrival time, in ms, of the first frame after a position; only queries with such a frame.

        Args:
            after: a position by query key.
        """
        keys = {query_from_key(key): key for key in after}
        ranges = [(ref.name, ref.version, after[key], after[key] + 1) for ref, key in keys.items()]
        c = t.frames.c
        with self._transactions.read() as connection:
            rows = _in_ranges(connection, ranges, (c.name, c.version, c.received_at_ms))
            return {keys[QueryRef(row.name, row.version)]: int(row.received_at_ms) for row in rows}

    def last_positions(self) -> dict[str, int]:
        """Last position by query key, sorted, of live queries and of deleted queries that still have frames."""
        return dict(self.last_positions_since(None).by_key)

    def last_positions_since(self, known: LastPositions | None) -> LastPositions:
        """As `last_positions`; returns `known` itself if nothing has changed since it was read. Cheap to poll.

        Changes are: a frame was indexed, or a query registered or deleted.
        """
        with self._transactions.read() as connection:
            version, total = connection.execute(_STATE).one()
            state = int(version), int(total)
            if known is not None and known.state == state:
                return known
            return LastPositions(select_last_positions(connection), state)

    def entries(self, key: str, after: int, through: int) -> list[FrameEntry]:
        """A query's frames at positions ``after + 1 … through``, ascending."""
        return self.entries_in({key: (after, through)})[key]

    def entries_in(self, ranges: Mapping[str, tuple[int, int]]) -> dict[str, list[FrameEntry]]:
        """Reads `entries` of many queries from one state of the index.

        Args:
            ranges: by query key, after and through.
        """
        entries: dict[str, list[FrameEntry]] = {key: [] for key in ranges}
        keys = {query_from_key(key): key for key in ranges}
        asked = [(ref.name, ref.version, *ranges[key]) for ref, key in keys.items()]
        with self._transactions.read() as connection:
            for row in _in_ranges(connection, asked, _ENTRY):
                entries[keys[QueryRef(row.name, row.version)]].append(entry_of(row))
        return entries

    def facts(self, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, dict[int, bytes]]:
        """The facts of the frames in ranges of positions, by query key and position (`center.storage.frame_facts`).

        Args:
            ranges: by query key, after and through of each range.
        """
        facts: dict[str, dict[int, bytes]] = {key: {} for key in ranges}
        keys = {query_from_key(key): key for key in ranges}
        asked = [(ref.name, ref.version, *span) for ref, key in keys.items() for span in ranges[key]]
        c = t.frames.c
        with self._transactions.read() as connection:
            for row in _in_ranges(connection, asked, (c.name, c.version, c.position, c.facts)):
                facts[keys[QueryRef(row.name, row.version)]][row.position] = row.facts
        return facts

    def lagging_queries(self, before_ms: int) -> frozenset[QueryRef]:
        """The queries with an indexed frame that arrived before this time, in ms."""
        c = t.frames.c
        rows = select(c.name, c.version).where(c.received_at_ms < before_ms).distinct()
        with self._transactions.read() as connection:
            return frozenset(QueryRef(name, version) for name, version in connection.execute(rows))

    def drop(self, through: Mapping[str, int]) -> list[str]:
        """Retention: drops the index up to a position per query key.

        Returns:
            The segments without indexed frames, sorted. Remove them from the log, then call `forget_segments`. Segments
            with a quarantined frame are not among them.
        """
        refs = {query_from_key(key): position for key, position in through.items()}
        old = sorted((ref.name, ref.version, 0, position) for ref, position in refs.items())
        c = t.frames.c
        with self._transactions.locked() as connection:
            touched = {segment for (segment,) in _in_ranges(connection, old, [c.segment])}
            if old:
                connection.execute(
                    delete(t.frames).where(
                        c.name == bindparam("of"), c.version == bindparam("at"), c.position <= bindparam("through")
                    ),
                    [{"of": name, "at": version, "through": position} for name, version, _, position in old],
                )
            return drop_segments(connection, sorted(touched))

    def removable_segments(self, segments: Sequence[str], queries: Callable[[str], Collection[str]]) -> list[str]:
        """Returns the segments that have no indexed frame now or later; they may be removed from the log.

        These are dropped segments, and segments that were never indexed and have only frames of deleted queries. A
        segment of a live query that was never indexed stays: a catalog restored from a backup does not know its frames.

        Args:
            queries: returns the keys of the queries that have frames in a segment; called for unindexed segments.
        """
        c = t.queries.c
        ended = select(c.name, c.version).where(c.deleted_at_ms.is_not(None))
        with self._transactions.read() as connection:
            # Read first: after a query is deleted, no frame of it is indexed any more.
            deleted = {query_key(QueryRef(name, version)) for name, version in connection.execute(ended)}
            dropped, unindexed = _dropped(connection, segments), set(without_frames(connection, segments))
        return [s for s in segments if s in dropped or (s in unindexed and deleted.issuperset(queries(s)))]

    def forget_segments(self, segments: Sequence[str]) -> None:
        """Deletes segments from the list of segments to remove. Called when they were removed from the log."""
        rows = [{"gone": s} for s in segments]
        if rows:
            gone = t.dropped_segments.c.segment == bindparam("gone")
            with self._transactions.write() as connection:
                connection.execute(delete(t.dropped_segments).where(gone), rows)


def _check(
    batch: Sequence[UnindexedFrame],
    progress: Mapping[tuple[EdgeId, str], _SequenceProgress],
    positions: dict[QueryRef, int],
) -> tuple[list[IndexOutcome], list[dict[str, Any]]]:
    """Checks frames in order; returns the outcome of each, and the rows of new frames.

    Advances `progress` and `positions`, which has the last position of each live query.
    """
    outcomes = []
    rows: list[dict[str, Any]] = []
    for frame in batch:
        outcome = _outcome(frame, progress[frame.edge, frame.incarnation], live=frame.query in positions)
        outcomes.append(outcome)
        if outcome is IndexOutcome.NEW:
            positions[frame.query] += 1
            rows.append(_row(frame, positions[frame.query]))
    return outcomes, rows


def _advance(
    connection: Connection, positions: Mapping[QueryRef, int], progress: Mapping[tuple[EdgeId, str], _SequenceProgress]
) -> None:
    """Writes the new last positions of queries, and the next expected frames of incarnations."""
    if positions:
        connection.execute(
            update(t.queries)
            .where(t.queries.c.name == bindparam("of"), t.queries.c.version == bindparam("at"))
            .values(last_position=bindparam("position")),
            [{"of": query.name, "at": query.version, "position": position} for query, position in positions.items()],
        )
    advanced = [(of, state.awaited) for of, state in progress.items() if state.awaited != state.began_at]
    if advanced:
        connection.execute(
            update(t.incarnations)
            .where(t.incarnations.c.edge == bindparam("of"), t.incarnations.c.incarnation == bindparam("name"))
            .values(awaited_seq=bindparam("awaited")),
            [{"of": edge, "name": name, "awaited": awaited} for (edge, name), awaited in advanced],
        )


def _outcome(frame: UnindexedFrame, incarnation: _SequenceProgress, *, live: bool) -> IndexOutcome:
    if incarnation.stopped or frame.run != incarnation.run:
        return IndexOutcome.OUT_OF_SEQUENCE  # `stopped` is not set, because the batch may have frames of both processes
    if frame.seq < incarnation.awaited:
        # Frames that retention or a deletion removed from the index cannot be compared any more.
        if incarnation.crcs.get(frame.seq, frame.crc32c) == frame.crc32c:
            return IndexOutcome.DUPLICATE
        incarnation.stopped = True
        return IndexOutcome.CONFLICT
    if frame.seq > incarnation.awaited or (live and frame.location is None and not frame.refused):
        incarnation.stopped = True
        return IndexOutcome.OUT_OF_SEQUENCE
    incarnation.awaited += 1
    if not live:
        return IndexOutcome.DISCARDED
    if frame.refused:
        return IndexOutcome.REFUSED
    incarnation.crcs[frame.seq] = frame.crc32c
    return IndexOutcome.NEW


def _lock_incarnations(
    connection: Connection, batch: Sequence[UnindexedFrame]
) -> dict[tuple[EdgeId, str], _SequenceProgress]:
    c = t.incarnations.c
    names = sorted({(f.edge, f.incarnation) for f in batch})
    rows = select(c.edge, c.incarnation, c.awaited_seq, c.run).order_by(c.edge, c.incarnation).with_for_update()
    incarnations = rows_among(connection, rows, tuple_(c.edge, c.incarnation), names)
    known = {(edge, name): _SequenceProgress(seq, seq, run) for edge, name, seq, run in incarnations}
    # A catalog restored from a backup does not know all incarnations. After a refusal the edge sends a Hello again.
    return {name: known.get(name) or _SequenceProgress(0, 0, stopped=True) for name in names}


def _load_checksums(
    connection: Connection, batch: Sequence[UnindexedFrame], progress: Mapping[tuple[EdgeId, str], _SequenceProgress]
) -> None:
    redelivered = [(f.edge, f.incarnation, f.seq) for f in batch if f.seq < progress[f.edge, f.incarnation].awaited]
    c = t.frames.c
    rows, identity = select(c.edge, c.incarnation, c.seq, c.crc32c), tuple_(c.edge, c.incarnation, c.seq)
    for edge, incarnation, seq, crc32c in rows_among(connection, rows, identity, redelivered):
        progress[edge, incarnation].crcs[seq] = crc32c


def _lock_positions(connection: Connection, refs: Collection[QueryRef]) -> dict[QueryRef, int]:
    """Locks and returns the last position of each live query among `refs`."""
    c = t.queries.c
    names = sorted((ref.name, ref.version) for ref in refs)
    live = select(c.name, c.version, c.last_position).where(c.deleted_at_ms.is_(None))
    rows = live.order_by(c.name, c.version).with_for_update()
    positions = rows_among(connection, rows, tuple_(c.name, c.version), names)
    return {QueryRef(name, version): int(last) for name, version, last in positions}


def _row(frame: UnindexedFrame, position: int) -> dict[str, Any]:
    assert frame.location is not None, "a frame without a location is never NEW"
    return {
        "name": frame.query.name,
        "version": frame.query.version,
        "position": position,
        "segment": frame.location.segment,
        "offset": frame.location.offset,
        "length": frame.location.length,
        "plain_bytes": max(frame.plain_bytes, frame.wire_bytes),
        **{name: getattr(frame, name) for name in _COPIED},
    }


@dataclass(frozen=True, slots=True)
class LastPositions:
    """The last positions of queries, and the state of the catalog at which they were read.

    Attributes:
        state: the catalog's version, and the sum of the positions of live queries. The version changes with the set of
            live queries, and every indexed frame increases the sum.
    """

    by_key: Mapping[str, int]
    state: tuple[int, int]


_STATE = select(
    select(t.counters.c.value).where(t.counters.c.name == "catalog").scalar_subquery(),
    func.coalesce(func.sum(t.queries.c.last_position), 0),
).where(t.queries.c.deleted_at_ms.is_(None))


def select_last_positions(connection: Connection) -> dict[str, int]:
    """Last position by key, sorted by key, of live queries and of deleted queries that still have frames."""
    table = t.queries.c
    has_frames = exists().where(t.frames.c.name == table.name, t.frames.c.version == table.version)
    rows = select(table.name, table.version, table.last_position).where(or_(table.deleted_at_ms.is_(None), has_frames))
    # The same text as `query_key`, without an object per query.
    return dict(sorted((f"{name}@{version}", last) for name, version, last in connection.execute(rows).all()))


def _in_ranges(
    connection: Connection, ranges: Sequence[tuple[str, int, int, int]], columns: Iterable[ColumnElement[Any]]
) -> Iterator[Row[Any]]:
    """Yields these columns of the frames in ranges (name, version, after, through), by query and position."""
    columns = tuple(columns)
    for begin in range(0, len(ranges), MAX_GIVEN):
        part = ranges[begin : begin + MAX_GIVEN]
        statement = _range_statement(given_count(len(part)), columns)
        yield from connection.execute(statement, given_rows(_RANGE, part, ("", 0, 0, 0)))


@cache
def _range_statement(count: int, columns: tuple[ColumnElement[Any], ...]) -> Select[Any]:
    c, asked = t.frames.c, given(_RANGE, count).c
    is_in = and_(
        c.name == asked.name, c.version == asked.version, c.position > asked.after, c.position <= asked.through
    )
    return select(*columns).join_from(asked.name.table, t.frames, is_in).order_by(c.name, c.version, c.position)


_SAME = tuple(f.name for f in fields(FrameEntry) if f.name not in ("query", "edge", "plain_bytes"))


def entry_of(row: Row[Any]) -> FrameEntry:
    """Returns the entry of a row that has the columns of the table ``frames`` without the facts."""
    same = {name: getattr(row, name) for name in _SAME}
    plain_bytes = max(row.plain_bytes, row.wire_bytes)
    return FrameEntry(query=QueryRef(row.name, row.version), edge=EdgeId(row.edge), plain_bytes=plain_bytes, **same)


def without_frames(connection: Connection, segments: Sequence[str]) -> list[str]:
    """Returns the segments that have no indexed and no quarantined frame."""
    columns = (t.frames.c.segment, t.quarantine.c.segment)
    used = {row.segment for c in columns for row in rows_among(connection, select(c).distinct(), c, segments)}
    return [segment for segment in segments if segment not in used]


def drop_segments(connection: Connection, segments: Sequence[str]) -> list[str]:
    """Lists segments without a frame for removal, and returns them. The caller has the catalog's lock."""
    unused = without_frames(connection, segments)
    listed = _dropped(connection, unused)
    if rows := [{"segment": s} for s in unused if s not in listed]:
        connection.execute(insert(t.dropped_segments), rows)
    return unused


def _dropped(connection: Connection, segments: Sequence[str]) -> set[str]:
    """Returns the segments that the catalog lists for removal, among the given segments."""
    segment = t.dropped_segments.c.segment
    return {row.segment for row in rows_among(connection, select(segment), segment, segments)}
