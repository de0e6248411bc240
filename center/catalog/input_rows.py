"""Rows of the files that edges read; each function runs inside a transaction of the catalog.

If two sources of a stream read the same file, its records count twice. No answer can show it, because the center sees
only sums. So edges report fingerprints of their files, and equal fingerprints raise an alarm. The alarm ends when a
report no longer has the fingerprint, or when one of the edges is retired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, delete, insert, or_, select

from center.catalog import schema as t
from center.catalog.alarms import add_alarm
from edgewater.base.streams import EdgeId
from edgewater.model.edge_records import InputRecord

EQUAL_INPUTS = "equal-inputs"
MAX_PAIRS = 5
"""Maximum number of alarms that one report raises; each names a pair of sources."""
MAX_COMPARED = 1_000
"""If a file is read by more pairs of sources, no alarm about it ends with a report."""
Place = tuple[str, str]
"""An edge and a source of it."""


def write_inputs(connection: Connection, inputs: Mapping[EdgeId, Sequence[InputRecord]], now_ms: int) -> None:
    """Replaces the reports of these edges. Raises an alarm for each source that reads a file of another source."""
    for edge, records in inputs.items():
        connection.execute(delete(t.inputs).where(t.inputs.c.edge == edge))
        rows = [
            {"stream": record.stream, "fingerprint": fingerprint, "edge": edge, "source": record.source}
            for record in records
            for fingerprint in record.fingerprints
        ]
        if rows:
            connection.execute(insert(t.inputs), rows)
        for message in end_equal_inputs(connection, edge)[:MAX_PAIRS]:
            add_alarm(connection, EQUAL_INPUTS, message, edge, now_ms)


def end_equal_inputs(connection: Connection, edge: EdgeId) -> list[str]:
    """Removes the alarms about files of an edge that no longer hold. Returns the messages of all alarms that hold."""
    pairs = _equal(connection, edge)
    messages = [_message(stream, mine, other) for stream, mine, other in pairs]
    holding = {*messages, *(_message(stream, other, mine) for stream, mine, other in pairs)}
    c = t.alarms.c
    about = or_(c.edge == edge, c.message.contains(_of(edge), autoescape=True))
    stored = connection.execute(select(c.id, c.message).where(c.kind == EQUAL_INPUTS, about)).all()
    for each in stored:
        if each.message not in holding and len(pairs) <= MAX_COMPARED:
            connection.execute(delete(t.alarms).where(c.id == each.id))
    return messages


def _message(stream: str, mine: Place, other: Place) -> str:
    return (
        f"stream {stream}: source {mine[1]}{_of(mine[0])}and source {other[1]}{_of(other[0])}read files that begin with"
        " the same 4 KiB; if they are the same files, their records count twice. Let one source read each file"
    )


def _of(edge: str) -> str:
    return f" of edge {edge} "


def _equal(connection: Connection, edge: EdgeId) -> list[tuple[str, Place, Place]]:
    """Returns (stream, place, other place) of sources that read an equal file. The edges are not retired."""
    mine, other = t.inputs.alias(), t.inputs.alias()
    is_retired = select(t.edges.c.edge).where(t.edges.c.retired)
    is_equal = (mine.c.stream == other.c.stream) & (mine.c.fingerprint == other.c.fingerprint)
    is_another = (other.c.edge != edge) | (other.c.source > mine.c.source)
    rows = (
        select(mine.c.stream, mine.c.source, other.c.edge, other.c.source)
        .join(other, is_equal)
        .where(mine.c.edge == edge, is_another, mine.c.edge.not_in(is_retired), other.c.edge.not_in(is_retired))
        .distinct()
        .order_by(mine.c.stream, mine.c.source, other.c.edge, other.c.source)
        .limit(MAX_COMPARED + 1)
    )
    found = connection.execute(rows)
    return [(stream, (edge, source), (other_edge, name)) for stream, source, other_edge, name in found]
