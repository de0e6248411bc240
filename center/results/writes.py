"""What the job writes into the result store. Each function is a step inside the caller's transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from sqlalchemy import Connection, delete, func, insert, select, update

from center.catalog.store import query_key
from center.ledger.ledger import Emission, FrameFact, Ledger, Phase, QueryChanges
from center.results import schema as t
from center.results.partials import merge_partials, shape_of
from edgewater.errors import IncompatibleSynopses

MAX_SIDE_BY_SIDE = 8
"""Deltas of one (query, slice, shard) that may lie side by side before they are folded into one."""
_CHUNK = 500
"""Values in one IN list."""


@dataclass(frozen=True, slots=True)
class Delta:
    query: str
    slice_start_ms: int
    shard: int
    synopsis: bytes = field(repr=False)


def add_deltas(connection: Connection, deltas: Sequence[Delta]) -> None:
    """Adds deltas, and folds those slices of which too many have come together.

    Raises:
        IncompatibleSynopses: a delta that does not merge with the query's others. Told now, while its
            query can be set aside: when a window is due, all queries' deadlines would fail with it.
    """
    if not deltas:
        return
    _check_shapes(connection, deltas)
    connection.execute(insert(t.deltas), [asdict(d) for d in deltas])
    touched: dict[str, set[int]] = {}
    for delta in deltas:
        touched.setdefault(delta.query, set()).add(delta.slice_start_ms)
    for key, slices in touched.items():
        starts = sorted(slices)
        for at in range(0, len(starts), _CHUNK):
            _fold(connection, key, starts[at : at + _CHUNK])


def _check_shapes(connection: Connection, deltas: Sequence[Delta]) -> None:
    shapes: dict[str, str] = dict(connection.execute(select(t.shapes.c.query, t.shapes.c.shape)).all())
    for delta in deltas:
        shape = shape_of(delta.synopsis)
        if delta.query not in shapes:
            shapes[delta.query] = shape
            connection.execute(insert(t.shapes).values(query=delta.query, shape=shape))
        elif shapes[delta.query] != shape:
            raise IncompatibleSynopses(
                f"query {delta.query}: a partial of slice {delta.slice_start_ms} is {shape}, those before it are"
                f" {shapes[delta.query]}: do its edges declare the same types for the columns?"
            )


def _fold(connection: Connection, key: str, slices: Sequence[int]) -> None:
    place = (t.deltas.c.slice_start_ms, t.deltas.c.shard)
    mine = t.deltas.c.query == key
    crowded = select(*place).where(mine, t.deltas.c.slice_start_ms.in_(slices)).group_by(*place)
    for start, shard in connection.execute(crowded.having(func.count() > MAX_SIDE_BY_SIDE)).all():
        here = mine & (place[0] == start) & (place[1] == shard)
        parts = connection.execute(select(t.deltas.c.synopsis).where(here).order_by(t.deltas.c.id)).scalars().all()
        folded = merge_partials(parts)
        connection.execute(delete(t.deltas).where(here))
        connection.execute(insert(t.deltas).values(query=key, slice_start_ms=start, shard=shard, synopsis=folded))


def write_ledger(connection: Connection, changes: Iterable[QueryChanges]) -> None:
    """Writes what a transaction changed of the ledger's state, and no more."""
    for change in changes:
        key = query_key(change.ref)
        connection.execute(delete(t.heads).where(t.heads.c.query == key))
        connection.execute(insert(t.heads).values(query=key, state=change.head))
        if change.head is None:
            for table in (t.parts, t.deltas, t.shapes):
                connection.execute(delete(table).where(table.c.query == key))
            continue
        by_kind: dict[str, dict[int, str | None]] = {}
        for part_kind, start, state in change.parts:
            by_kind.setdefault(part_kind, {})[start] = state
        for kind, states in by_kind.items():
            _replace_parts(connection, key, kind, states)


def _replace_parts(connection: Connection, key: str, kind: str, states: Mapping[int, str | None]) -> None:
    starts = list(states)
    for at in range(0, len(starts), _CHUNK):
        chunk = t.parts.c.start_ms.in_(starts[at : at + _CHUNK])
        connection.execute(delete(t.parts).where(t.parts.c.query == key, t.parts.c.kind == kind, chunk))
    rows = [{"query": key, "kind": kind, "start_ms": s, "state": state} for s, state in states.items() if state]
    if rows:
        connection.execute(insert(t.parts), rows)


def write_answers(connection: Connection, ledger: Ledger, emissions: Sequence[Emission]) -> None:
    """Writes the answers that the ledger decided on, and drops slices that no open window is made of."""
    if not emissions:
        return
    counter = t.counters.c.name == "answer"
    connection.execute(update(t.counters).where(counter).values(value=t.counters.c.value + len(emissions)))
    last = int(connection.execute(select(t.counters.c.value).where(counter)).scalar_one())
    first = last - len(emissions) + 1
    connection.execute(
        insert(t.answers),
        [
            {
                "answer_id": first + i,
                "query": query_key(e.query),
                "window_start_ms": e.window_start_ms,
                "window_end_ms": e.window_end_ms,
                "revision": e.revision,
                "phase": e.phase.value,
                "given_at_ms": e.given_at_ms,
                "staleness_ms": e.quality.staleness_ms,
                "quality": json.dumps(e.quality.to_mapping(), separators=(",", ":"), allow_nan=False),
                "synopsis": _window(connection, e),
            }
            for i, e in enumerate(emissions)
        ],
    )
    for ref in {e.query for e in emissions if e.phase is Phase.FINAL}:
        spent = t.deltas.c.slice_start_ms < ledger.sealed_before(ref)
        connection.execute(delete(t.deltas).where(t.deltas.c.query == query_key(ref), spent))


def _window(connection: Connection, emission: Emission) -> bytes | None:
    """The merge of a window's slices; None if there are none."""
    start = t.deltas.c.slice_start_ms
    rows = select(t.deltas.c.synopsis).where(
        t.deltas.c.query == query_key(emission.query),
        start >= emission.slices_from_ms,
        start < emission.slices_to_ms,
    )
    parts = connection.execute(rows.order_by(start, t.deltas.c.shard, t.deltas.c.id)).scalars().all()
    return merge_partials(parts) if parts else None


def add_shipped(connection: Connection, facts: Iterable[FrameFact]) -> None:
    """Counts the frames and bytes of each edge."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for fact in facts:
        at = (query_key(fact.query), str(fact.edge))
        frames, size = totals.get(at, (0, 0))
        totals[at] = (frames + 1, size + fact.wire_bytes)
    for (key, edge), (frames, size) in totals.items():
        row = update(t.shipped).where(t.shipped.c.query == key, t.shipped.c.edge == edge)
        more = {"frames": t.shipped.c.frames + frames, "wire_bytes": t.shipped.c.wire_bytes + size}
        if connection.execute(row.values(**more)).rowcount == 0:
            connection.execute(insert(t.shipped).values(query=key, edge=edge, frames=frames, wire_bytes=size))


def set_consumed(connection: Connection, through: Mapping[str, int]) -> None:
    for key, position in through.items():
        connection.execute(delete(t.consumed).where(t.consumed.c.query == key))
        connection.execute(insert(t.consumed).values(query=key, position=position))
