"""Edges: their sessions, heartbeats and retirement, and the files that they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import bindparam, delete, select, update

from center.catalog import schema as t
from center.catalog.alarms import end_alarms_about
from center.catalog.edge_rows import heartbeat_to_row, select_changed, select_edges
from center.catalog.input_rows import end_equal_inputs, write_inputs
from center.catalog.session_rows import SessionBatch, SessionStart
from center.catalog.streams import Streams
from center.catalog.transactions import Transactions, increment_version
from center.storage.database import upsert
from edgewater.base.errors import EdgewaterError, NotFound
from edgewater.base.streams import EdgeId
from edgewater.model.edge_records import EdgeRecord, HeartbeatRecord, InputRecord


class Edges:
    """The edges in the catalog. An edge is in the catalog when it has sent a Hello."""

    def __init__(self, transactions: Transactions, streams: Streams) -> None:
        self._transactions = transactions
        self._streams = streams

    def begin_sessions(self, starts: Sequence[SessionStart]) -> list[int | EdgewaterError | None]:
        """Records the starts of sessions of different edges, in one transaction.

        In two cases an alarm is added and `EdgeRecord.state_lost_at_ms` is set. First: frames are lost on both sides,
        because the center's state is older than its last acknowledgement. Second: another incarnation of the edge was
        in use, and the records that it had accepted and not shipped are unknown. If two incarnations take turns, the
        alarm says that two agents have one id.

        Returns:
            For each start, the highest durable seq of its incarnation (None: there is none), or an error:

            - Retired: the edge is retired, and an admin has not reinstated it.
            - OutdatedState: the edge runs on a copy of its state, or on an older state than the center has seen. Also
              adds an alarm and sets `EdgeRecord.state_lost_at_ms`.
            - ProtocolError: the type of a column differs from the declared type or, without a declaration, from the
              type at another edge that serves the stream. Their partials would not merge. Also adds an alarm.
            - LimitExceeded: see `edge_rows.forget_incarnations`. Also adds an alarm.
        """
        with self._transactions.locked() as connection:
            return SessionBatch(connection, starts, self._streams.select(connection)).begin()

    def record_heartbeats(self, records: Iterable[HeartbeatRecord]) -> None:
        """Records heartbeats of any number of edges in one transaction; unknown edges are ignored."""
        with self._transactions.write() as connection:
            # Sorted, or two gateways that each hold a row lock could deadlock.
            rows = [{"this": r.edge, **heartbeat_to_row(r)} for r in sorted(records, key=lambda r: r.edge)]
            if rows:
                connection.execute(update(t.edges).where(t.edges.c.edge == bindparam("this")), rows)

    def record_silence(
        self, gateway: str, heard: Mapping[EdgeId, tuple[bool, int]], *, silence_ms: int, now_ms: int
    ) -> None:
        """Records that a gateway works, and which of its edges have become silent or have come back.

        Args:
            heard: by edge that has become silent or has come back: whether the gateway receives messages from it again,
                and the wall time of its last message.
            silence_ms: every other edge of the gateway has sent a message within this time.
        """
        c = t.edges.c
        # SQLAlchemy cannot expand the parameters of `in_` in a statement that is executed for many rows.
        of_edge = (c.edge == bindparam("this")) & ((c.gateway == "") | (c.gateway == bindparam("by")))
        with self._transactions.write() as connection:
            rows = [
                {"this": edge, "by": gateway, "gateway": gateway if again else "", "last_seen_ms": at_ms}
                for edge, (again, at_ms) in sorted(heard.items())
            ]
            if rows:
                connection.execute(update(t.edges).where(of_edge), rows)
            beat = {"gateway": gateway, "beat_at_ms": now_ms, "silence_ms": silence_ms}
            upsert(connection, t.gateways, [beat])

    def forget_gateways(self) -> None:
        """Deletes the rows of gateways that no edge's row names as its last gateway."""
        in_use = select(t.edges.c.gateway).distinct()
        with self._transactions.write() as connection:
            connection.execute(delete(t.gateways).where(t.gateways.c.gateway.not_in(in_use)))

    def end_sessions(self, ends: Mapping[EdgeId, tuple[str, int]]) -> None:
        """Records the ends of sessions. An edge with a newer session stays connected.

        Args:
            ends: by edge, the name of the session that has ended and the wall time.
        """
        c = t.edges.c
        this = (c.edge == bindparam("this")) & (c.session == bindparam("ended"))
        rows = [{"this": edge, "ended": name, "last_seen_ms": at_ms} for edge, (name, at_ms) in sorted(ends.items())]
        if rows:
            with self._transactions.write() as connection:
                connection.execute(update(t.edges).where(this).values(connected=False), rows)

    def retire(self, edge: EdgeId) -> None:
        """Declares an edge gone for good: answers no longer wait for it, it has no session, and alarms about it end.

        Raises NotFound.
        """
        self._set_retired(edge, True)

    def reinstate(self, edge: EdgeId) -> None:
        """Cancels a retirement: queries expect the edge again. Raises NotFound."""
        self._set_retired(edge, False)

    def _set_retired(self, edge: EdgeId, retired: bool) -> None:
        with self._transactions.locked() as connection:
            row = update(t.edges).where(t.edges.c.edge == edge).values(retired=retired)
            if connection.execute(row).rowcount == 0:
                raise NotFound(f"edge {edge} has never connected")
            if retired:
                end_alarms_about(connection, edge)
                end_equal_inputs(connection, edge)
            increment_version(connection)

    def retired(self) -> set[EdgeId]:
        """The edges that are retired."""
        with self._transactions.read() as connection:
            return {
                EdgeId(edge) for edge in connection.execute(select(t.edges.c.edge).where(t.edges.c.retired)).scalars()
            }

    def all(self, known: Mapping[EdgeId, EdgeRecord] | None = None) -> list[EdgeRecord]:
        """All edges that have ever sent a Hello, by id.

        Args:
            known: records that may be reused, for callers that do not need progress. An edge is not read again if it
                is not retired and its streams have not changed.
        """
        with self._transactions.read() as connection:
            return select_changed(connection, known) if known else select_edges(connection)

    def get(self, edge: EdgeId | str) -> EdgeRecord:
        """Raises NotFound."""
        with self._transactions.read() as connection:
            records = select_edges(connection, [edge])
        if not records:
            raise NotFound(f"edge {edge} has never connected")
        return records[0]

    def record_inputs(self, inputs: Mapping[EdgeId, Sequence[InputRecord]], now_ms: int) -> None:
        """Stores which files edges read, in one transaction; raises and ends alarms about files that are read twice."""
        with self._transactions.locked() as connection:  # if two edges read one file, the second report sees the first
            write_inputs(connection, inputs, now_ms)
