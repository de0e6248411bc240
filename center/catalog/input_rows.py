"""Rows of the files that edges read; each function runs inside a transaction of the catalog.

If two sources of a stream read the same file, its records count twice. No answer can show it, because the center sees
only sums. So edges report fingerprints of their files, and equal fingerprints raise an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, delete, insert, select

from center.catalog import schema as t
from center.catalog.alarms import add_alarm
from edgewater.model.edge_records import InputRecord
from edgewater.model.streams import EdgeId

EQUAL_INPUTS = "equal-inputs"
MAX_PAIRS = 5
"""Maximum number of alarms that one report raises; each names a pair of sources."""


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
        for mine, other_edge, other in _equal(connection, edge)[:MAX_PAIRS]:
            message = (
                f"stream {mine[0]}: source {mine[1]} of edge {edge} and source {other} of edge {other_edge} read files"
                " that begin with the same 4 KiB; if they are the same files, their records count twice. Let one"
                " source read each file"
            )
            add_alarm(connection, EQUAL_INPUTS, message, edge, now_ms)


def _equal(connection: Connection, edge: EdgeId) -> list[tuple[tuple[str, str], str, str]]:
    """Returns ((stream, source), other edge, other source) of sources that read an equal file."""
    mine, other = t.inputs.alias(), t.inputs.alias()
    is_equal = (mine.c.stream == other.c.stream) & (mine.c.fingerprint == other.c.fingerprint)
    is_another = (other.c.edge != edge) | (other.c.source > mine.c.source)
    rows = (
        select(mine.c.stream, mine.c.source, other.c.edge, other.c.source)
        .join(other, is_equal)
        .join(t.edges, t.edges.c.edge == other.c.edge)
        .where(mine.c.edge == edge, is_another, t.edges.c.retired.is_(False))
        .distinct()
        .order_by(mine.c.stream, mine.c.source, other.c.edge, other.c.source)
        .limit(MAX_PAIRS)
    )
    return [((stream, source), other_edge, name) for stream, source, other_edge, name in connection.execute(rows)]
