"""The start of sessions: many Hellos in one transaction of the catalog.

After a restart of a gateway all its edges connect at the same time. One transaction per edge would take an fsync and a
dozen statements for each edge, and no frame is indexed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from center.catalog import edge_rows
from center.catalog import schema as t
from center.catalog.alarms import add_alarm
from center.catalog.query_rows import note_older
from center.catalog.streams import DeclaredStream, require_declared
from center.catalog.transactions import count_rows, increment_version
from center.edge_access import UNLIMITED, EdgeAccess
from center.storage.database import upsert
from edgewater.base.errors import Conflict, EdgewaterError, OutdatedState, ProtocolError, Retired
from edgewater.base.streams import EdgeId
from edgewater.model.edge_records import StateDigest, StreamRecord, require_consistent_schema


@dataclass(frozen=True, slots=True)
class SessionStart:
    """The content of a Hello.

    Attributes:
        oldest_seq, next_seq: frames that the edge still holds are ``oldest_seq … next_seq - 1``.
        session: names the session, for `Edges.end_sessions`.
        access: what the edge may serve. It also applies to streams that the edge no longer serves.
        gateway: the gateway that receives the edge's messages from now on, as in `Edges.record_silence`; empty: no
            gateway does.
        state: the state that the edge runs on.
    """

    edge: EdgeId
    incarnation: str
    labels: Mapping[str, str]
    streams: Sequence[StreamRecord]
    oldest_seq: int
    next_seq: int
    now_ms: int
    session: str = ""
    access: EdgeAccess = UNLIMITED
    gateway: str = ""
    state: StateDigest = field(default_factory=StateDigest)


class SessionBatch:
    """Starts sessions of different edges within a transaction that holds the catalog's lock."""

    def __init__(
        self, connection: Connection, starts: Sequence[SessionStart], declared: Mapping[str, DeclaredStream]
    ) -> None:
        edges = [s.edge for s in starts]
        assert len(set(edges)) == len(edges), "one session per edge and transaction"
        self._connection = connection
        self._starts = starts
        self._declared = declared
        # All rows at once, and under the lock: the second of two concurrent first Hellos must see the first.
        rows = connection.execute(select(t.edges).where(t.edges.c.edge.in_(edges)))
        self._known: dict[str, Row[Any]] = {row.edge: row for row in rows}
        self._progress = edge_rows.lock_incarnations(connection, {(s.edge, s.incarnation) for s in starts})
        self._shapes: dict[str, set[EdgeId]] | None = None
        self._room = edge_rows.MAX_EDGES - count_rows(connection, t.edges) if len(self._known) < len(edges) else 0
        self._changed = False
        self._incarnations: list[dict[str, Any]] = []
        self._new: list[dict[str, Any]] = []
        self._again: list[dict[str, Any]] = []
        self._anew: list[dict[str, Any]] = []

    def begin(self) -> list[int | EdgewaterError | None]:
        """Returns the result of each start, as `Edges.begin_sessions`."""
        outcomes = [self._begin(start) for start in self._starts]
        self._flush()
        if self._changed:
            increment_version(self._connection)
        return outcomes

    def _flush(self) -> None:
        connection, this = self._connection, t.edges.c.edge == bindparam("this")
        upsert(connection, t.incarnations, self._incarnations)
        if self._new:
            connection.execute(insert(t.edges), self._new)
        for rows in (self._again, self._anew):
            if rows:
                connection.execute(update(t.edges).where(this), sorted(rows, key=lambda row: str(row["this"])))
        for written in (self._incarnations, self._new, self._again, self._anew):
            written.clear()

    def _begin(self, start: SessionStart) -> int | EdgewaterError | None:
        connection, edge = self._connection, start.edge
        row = self._known.get(edge)
        if row is not None and row.retired:
            return Retired(f"edge {edge} is retired: an admin of the center can reinstate it")
        if row is None and self._room <= 0:
            return Conflict(f"edge {edge}: {edge_rows.MAX_EDGES} edges are known, which is the limit")
        progress = self._progress.get((edge, start.incarnation))
        first, awaited, _ = progress or (start.oldest_seq, start.oldest_seq, 0)
        # Another center has acknowledged the first frames, or this center did before its catalog was restored.
        unknown = row is None and start.oldest_seq > edge_rows.FIRST_SEQ
        refused = self._refusal(start, row, progress)
        if refused is not None:
            if isinstance(refused[1], OutdatedState):
                # No frame will have the records that this process has accepted. The process may never connect again to
                # state this loss.
                edge_rows.record_lost_state(connection, edge, start.now_ms)
            add_alarm(connection, refused[0], refused[1].message, edge, start.now_ms)
            return refused[1]
        if start.oldest_seq > awaited or unknown:
            begin = edge_rows.FIRST_SEQ if unknown else awaited
            lost = f"edge {edge}: frames {begin} to {start.oldest_seq - 1} of incarnation {start.incarnation} are lost"
            add_alarm(connection, "frames-lost", lost, edge, start.now_ms)
            edge_rows.record_lost_state(connection, edge, start.now_ms)
            note_older(connection, start.now_ms)  # before a frame of this session is indexed
            awaited = start.oldest_seq
        if row is not None and row.incarnation != start.incarnation:
            lost_state = _state_lost(edge, start.incarnation, row.incarnation, progress is not None)
            add_alarm(connection, *lost_state, edge, start.now_ms)
            edge_rows.record_lost_state(connection, edge, start.now_ms)
        self._incarnations.append(
            {
                "edge": edge,
                "incarnation": start.incarnation,
                "first_seq": first,
                "awaited_seq": awaited,
                "hello_at_ms": start.now_ms,
                "run": start.state.run,
            }
        )
        self._add_edge(start, row)
        return awaited - 1 if awaited > first else None

    def _refusal(
        self, start: SessionStart, row: Row[Any] | None, progress: tuple[int, int, int] | None
    ) -> edge_rows.Refusal | None:
        edge, incarnation = start.edge, start.incarnation
        try:
            require_declared(self._declared, edge, start.streams)
            undeclared = [s for s in start.streams if s.name not in self._declared]
            if undeclared:
                require_consistent_schema(edge, undeclared, self._others(edge))
        except ProtocolError as exc:
            return "columns-differ", exc
        if progress is None and row is not None:
            refused = edge_rows.forget_incarnations(self._connection, edge, start.now_ms)
            refused = refused or edge_rows.require_new(self._connection, edge, incarnation, start.oldest_seq)
            if refused is not None:
                return refused
        return None if progress is None else self._outdated(start, row, *progress[1:])

    def _outdated(self, start: SessionStart, row: Row[Any] | None, awaited: int, run: int) -> edge_rows.Refusal | None:
        """Refuses an edge that runs on a copy of its state, or on an older state than the center has seen.

        Args:
            awaited: the next frame of the incarnation.
            run: the process that sent the last Hello of the incarnation.
        """
        who, state = f"edge {start.edge}: incarnation {start.incarnation}", start.state
        if run and run not in state.runs:
            return "id-in-use-twice", OutdatedState(
                f"{who}: another process has connected with this state, and this process does not know it: two agents"
                " run from copies of one state directory, or an older copy was restored; give each agent its own id and"
                " its own directory"
            )
        if start.next_seq < awaited:
            return "edge-state-behind", OutdatedState(
                f"{who} is about to build frame {start.next_seq}, but the center has its frames up to {awaited - 1}:"
                " an older copy of the state was restored"
            )
        durable = {} if row is None else row.progress.get("durable", {})
        if durable.get("incarnation") == start.incarnation:
            for stream, known in durable["records"].items():
                if state.records.get(stream, known) < known:
                    return "edge-state-behind", OutdatedState(
                        f"{who} has {state.records[stream]} records of stream {stream}, but it has reported {known}:"
                        " an older copy of the state was restored"
                    )
        checksums = {seq: crc32c for seq, crc32c in state.checksums.items() if seq < awaited}
        seq = (
            edge_rows.other_checksum(self._connection, start.edge, start.incarnation, checksums) if checksums else None
        )
        if seq is not None:
            return "id-in-use-twice", OutdatedState(
                f"{who}: frame {seq} differs from the frame that the center has: two agents run from copies of one"
                " state; give each agent its own id and its own directory"
            )
        return None

    def _others(self, edge: EdgeId) -> list[tuple[EdgeId, tuple[StreamRecord, ...]]]:
        """Returns, for each distinct list of streams that other edges serve, one of these edges with the list."""
        if self._shapes is None:
            self._shapes = edge_rows.select_shapes(self._connection)
        shapes = self._shapes.items()
        return [(min(edges - {edge}), edge_rows.served_streams(text)[0]) for text, edges in shapes if edges != {edge}]

    def _add_edge(self, start: SessionStart, row: Row[Any] | None) -> None:
        """Adds the edge's row to the rows to write. A new incarnation resets the values that heartbeats report."""
        streams = edge_rows.streams_to_json(start.streams)
        values: dict[str, Any] = {
            "incarnation": start.incarnation,
            "labels": dict(start.labels),
            "last_seen_ms": start.now_ms,
            "connected": True,
            "session": start.session,
            "gateway": start.gateway,
        }
        reset = {"progress": edge_rows.NO_PROGRESS, "backlog_bytes": 0}
        if row is None:
            link = {"bandwidth_bytes_s": 0.0, "rtt_ms": 0.0, "clock_offset_ms": 0.0}
            values |= {"streams": streams, "first_seen_ms": start.now_ms, "retired": False, **reset, **link}
            self._new.append({"edge": start.edge, **values})
            self._changed = True
            if self._shapes is not None:
                self._shapes.setdefault(json.dumps(streams), set()).add(start.edge)
            return
        streams += edge_rows.former_streams(row.streams, {s.name for s in start.streams}, start.access)
        values |= {"this": start.edge, "streams": streams}
        if row.incarnation == start.incarnation:
            self._again.append(values)
        else:
            self._anew.append(values | reset)
        if row.streams != streams:
            self._changed = True
            self._flush()
            self._shapes = None  # the edge may have been the only one with its former streams


def _state_lost(edge: EdgeId, incarnation: str, previous: str, returned: bool) -> tuple[str, str]:
    """Returns the kind and the message of the alarm about an incarnation that replaces another incarnation.

    Args:
        returned: whether the center knew the incarnation before.
    """
    if returned:
        pair = " and ".join(sorted((incarnation, previous)))
        return "id-in-use-twice", (
            f"edge {edge}: incarnations {pair} take turns: two agents run under this id, or from copies of one state"
            " directory; give each agent its own id and its own directory"
        )
    return "state-lost", (
        f"edge {edge}: incarnation {incarnation} has replaced {previous} without its state; records that {previous}"
        " had accepted and not shipped are in no answer, and windows that were open are not complete"
    )
