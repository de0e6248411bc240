"""The job's writes into the result store. Each function is a step within the caller's transaction."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Connection,
    Integer,
    Select,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from center.ledger import Emission, FrameSummary, Ledger, QueryChanges, QueryFailed, QueryTooLarge, state_refusal
from center.results import schema as t
from center.results.late_records import add_late_records, late_by_window, late_to_json
from center.storage.database import MAX_GIVEN, Identifier, given, given_count, given_rows, upsert
from center.storage.delta_segments import Delta, DeltaSegments, SegmentRange, SliceSpan, SpanMerge, shape_of
from edgewater.answers import LateRecords, Phase
from edgewater.answers.stored import facts_to_json
from edgewater.base.errors import CorruptSynopsis, StorageError
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.synopses import GroupedAggregate, merge_what_fits
from edgewater.synopses.encoding import codec
from edgewater.wire import QueryRef

TRIMMED = "trimmed"
"""The counter of the greatest id of an answer that was deleted because of its age."""
MAX_SIDE_BY_SIDE = 8
"""Maximum deltas of one (query, slice) that are stored before they are merged into one."""
MAX_TRIMMED_WINDOWS = 200
"""Maximum final windows, or answers of one deleted query, that one transaction drops. The job waits meanwhile."""
MAX_ANSWER_BYTES = 64 << 20
"""Default limit of the size of an answer."""
COSTLY_MS = 100.0  # limit: how long a transaction holds all queries
"""A merge that takes longer is costly: tasks do it, because all queries wait for the transaction."""
MS_PER_DELTA, MS_PER_KIB = 0.2, 0.02  # measured: bench.scale --only windows
"""What merging takes (`bench.scale --only windows`: 0.2 ms, and 5 to 30 µs)."""
READ_BYTES = 16 << 20  # limit: memory of an apply
"""Bytes of stored deltas that are read at a time, for many windows."""
_CHUNK = 200  # limit: bound parameters of a statement
"""Rows, or values, in one statement: fewer than the bound parameters that any database accepts."""
_SLICE_START = attrgetter("slice_start_ms")
_Span = tuple[int, str, int, int]
"""A window's number and its `SliceSpan`."""
StoredRow: TypeAlias = dict[str, str | int | bytes | None]
"""The columns of an answer, without its id."""
_SPAN = {"n": Integer(), "query": Identifier(96), "begin_ms": BigInteger(), "end_ms": BigInteger()}


@dataclass(frozen=True, slots=True)
class Merging:
    """How deltas are merged in a transaction.

    Attributes:
        segments: has the large deltas.
        max_answer_bytes: size of one answer.
        costly_ms: a merge that takes longer is costly.
    """

    segments: DeltaSegments
    max_answer_bytes: int
    costly_ms: float


@dataclass(frozen=True, slots=True)
class RefusedDelta:
    delta: Delta
    reason: str


_Merge: TypeAlias = tuple[bytes | None, int]
"""A merge, and the bytes of its deltas; of a merge that is too large to be given, None and its own bytes."""


class AnswersCostly(Exception):
    """Answers are due whose merges are costly and not there. Nothing was written."""

    def __init__(self, spans: Sequence[SliceSpan]) -> None:
        super().__init__(f"{len(spans)} costly merges")
        self.spans = tuple(spans)


class DeltasRefused(Exception):
    """Deltas of a slice or a window do not merge. Without the deltas in `refused`, the others merge."""

    def __init__(self, refused: Sequence[RefusedDelta]) -> None:
        super().__init__(f"{len(refused)} merged partials do not merge: {refused[0].reason}")
        self.refused = tuple(refused)


def applicable(
    ledger: Ledger, deltas: Iterable[Delta], frames: Iterable[FrameSummary], through: Mapping[str, int]
) -> list[Delta]:
    """Returns the deltas that belong to an open window: final windows do not change, and deleted queries have none.

    Deltas of other versions' windows, which an edge may send, are dropped too.
    """
    refs = {query_key(f.query): f.query for f in frames}
    touched = {(query_key(f.query), start) for f in frames for start in f.touched}
    kept = []
    for delta in deltas:
        if (delta.query, delta.slice_start_ms) not in touched:
            # No answer would contain it: the data would be lost silently.
            raise StorageError(f"query {delta.query}: a delta of slice {delta.slice_start_ms}, which no frame touches")
        if ledger.takes(refs[delta.query], delta.slice_start_ms):
            kept.append(delta)
    return kept


def weigh(ledger: Ledger, deltas: Iterable[Delta]) -> None:
    """Passes the sizes of these deltas' slices to the ledger. It needs them to decide how many windows are answered."""
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    slices: defaultdict[str, set[int]] = defaultdict(set)
    for delta in deltas:
        sizes[delta.query].append(delta.size)
        slices[delta.query].add(delta.slice_start_ms)
    for key, each in sizes.items():
        ledger.weigh(query_from_key(key), sum(each), len(slices[key]))


def without(refused: Iterable[RefusedDelta], deltas: Sequence[Delta], frames: list[FrameSummary]) -> list[Delta]:
    """Returns the deltas that are not refused. Their frames, changed in place, state the loss of the refused ones."""
    bad = {r.delta for r in refused}
    if not bad:
        return list(deltas)
    kept = []
    for delta in deltas:
        if delta in bad:
            state_refusal(frames, query_from_key(delta.query), delta.slice_start_ms, delta.position)
        else:
            kept.append(delta)
    return kept


def add_deltas(
    connection: Connection, deltas: Sequence[Delta], on_query: Callable[[QueryRef], None], merging: Merging
) -> list[SliceSpan]:
    """Adds deltas. If a slice has too many deltas, merges them. Raises DeltasRefused.

    Returns:
        The slices with too many deltas whose merge is costly, or larger than is stored in the database.
    """
    if not deltas:
        return []
    connection.execute(insert(t.deltas), [_row(d) for d in deltas])
    places = sorted({(d.query, d.slice_start_ms) for d in deltas})
    chunks = (places[at : at + _CHUNK] for at in range(0, len(places), _CHUNK))
    return [span for chunk in chunks for span in _fold(connection, chunk, on_query, merging)]


def of_other_shapes(connection: Connection, deltas: Iterable[Delta]) -> list[RefusedDelta]:
    """Returns the deltas of another shape than the query's first delta, whose shape is stored.

    They could never be merged.

    They are detected here, before the ledger counts the frames, because a later refusal costs a transaction.
    """
    shapes: dict[str, str] = dict(connection.execute(select(t.shapes.c.query, t.shapes.c.shape)).all())
    refused = []
    for delta in deltas:
        shape = delta.data.shape if isinstance(delta.data, SegmentRange) else shape_of(delta.data)
        if delta.query not in shapes:
            shapes[delta.query] = shape
            connection.execute(insert(t.shapes).values(query=delta.query, shape=shape))
        elif shapes[delta.query] != shape:
            reason = (
                f"incompatible-synopses: it has shape {shape:.1000}, earlier partials of the query have"
                f" {shapes[delta.query]:.1000}: do all edges declare the same column types?"
            )
            refused.append(RefusedDelta(delta, reason))
    return refused


def _fold(
    connection: Connection, slices: Sequence[tuple[str, int]], on_query: Callable[[QueryRef], None], merging: Merging
) -> list[SliceSpan]:
    c, costly = t.deltas.c, list[SliceSpan]()
    crowded = select(c.query, c.slice_start_ms, func.count(), _BYTES)
    crowded = crowded.where(tuple_(c.query, c.slice_start_ms).in_(slices))
    crowded = crowded.group_by(c.query, c.slice_start_ms).having(func.count() > MAX_SIDE_BY_SIDE)
    for key, start, count, size in connection.execute(crowded).all():
        if merge_ms(count, size) > merging.costly_ms or size > merging.segments.inline_bytes:
            costly.append(SliceSpan(key, start, start + 1))
            continue
        on_query(query_from_key(key))
        here = (c.query == key) & (c.slice_start_ms == start)
        rows = connection.execute(select(*_DELTA).where(here).order_by(c.id)).all()
        folded, _ = _merged([_delta(row) for row in rows], merging.segments)
        assert folded is not None, "there are deltas"
        connection.execute(delete(t.deltas).where(here))
        connection.execute(insert(t.deltas), [_row(Delta(key, start, folded))])
    return costly


_DELTA = (
    t.deltas.c.query,
    t.deltas.c.slice_start_ms,
    t.deltas.c.synopsis,
    t.deltas.c.segment,
    t.deltas.c.segment_offset,
    t.deltas.c.segment_bytes,
    t.deltas.c.segment_crc32c,
)
_BYTES = cast(func.sum(func.length(t.deltas.c.synopsis) + t.deltas.c.segment_bytes), BigInteger)


def _delta(row: Sequence[Any]) -> Delta:
    """Returns the delta of the columns `_DELTA`."""
    key, start, synopsis, segment, *place = row
    return Delta(key, start, SegmentRange(segment, *place) if segment else synopsis)


def _row(delta: Delta) -> dict[str, str | int | bytes]:
    data = delta.data
    if isinstance(data, SegmentRange):
        stored: tuple[bytes | str | int, ...] = (b"", data.segment, data.offset, data.size, data.crc32c)
    else:
        stored = (data, "", 0, 0, 0)
    values = (delta.query, delta.slice_start_ms, *stored)
    return dict(zip((column.name for column in _DELTA), values, strict=True))


def merge_ms(count: int, size: int) -> float:
    """Returns about how long the merge of some deltas takes; of one: nothing, because it is the merge."""
    return 0.0 if count < 2 else count * MS_PER_DELTA + size / 1024 * MS_PER_KIB


def read_span(connection: Connection, span: SliceSpan) -> Iterator[tuple[int, Delta]]:
    """Yields the deltas of a span with their ids."""
    c = t.deltas.c
    rows = select(c.id, *_DELTA).where(_in(span)).order_by(c.slice_start_ms, c.id)
    for number, *row in connection.execute(rows):
        yield number, _delta(row)


def _in(span: SliceSpan) -> Any:
    c = t.deltas.c
    return and_(c.query == span.key, c.slice_start_ms >= span.from_ms, c.slice_start_ms < span.to_ms)


def replace_deltas(connection: Connection, merge: SpanMerge) -> bool:
    """Replaces the deltas of a slice by their merge. False: the merge lacks some of them, they are of several slices,
    or they have changed.
    """
    if merge.data is None or merge.refused:
        return False
    c = t.deltas.c
    rows = connection.execute(select(c.id, c.slice_start_ms).where(_in(merge.span))).all()
    if len({start for _, start in rows}) != 1 or not {number for number, _ in rows}.issuperset(merge.ids):
        return False
    for at in range(0, len(merge.ids), _CHUNK):
        connection.execute(delete(t.deltas).where(c.id.in_(merge.ids[at : at + _CHUNK])))
    connection.execute(insert(t.deltas), [_row(Delta(merge.span.key, rows[0].slice_start_ms, merge.data))])
    return True


def named_segments(connection: Connection) -> set[str]:
    """Returns the names of the segments that deltas are in, of all partitions."""
    segment = t.deltas.c.segment
    return set(connection.scalars(select(segment).where(segment != "").distinct()))


def write_ledger(connection: Connection, changes: Iterable[QueryChanges]) -> None:
    """Writes the changes of the ledger's state in a transaction."""
    changes = list(changes)
    rows = [
        {"query": query_key(c.ref), "state": c.state, "empty_from_ms": c.empty_ms[0], "empty_through_ms": c.empty_ms[1]}
        for c in changes
    ]
    upsert(connection, t.ledger_queries, rows)
    entries: dict[tuple[str, str, int], str | None] = {}
    for change in changes:
        key = query_key(change.ref)
        if change.state is None:
            for table in (t.ledger_entries, t.deltas, t.shapes, t.corrections):
                connection.execute(delete(table).where(table.c.query == key))
            continue
        entries.update({(key, kind, start): state for kind, start, state in change.entries})
        if change.late:
            add_late_records(connection, change)
    kept = [
        {"query": q, "kind": kind, "start_ms": s, "state": state} for (q, kind, s), state in entries.items() if state
    ]
    upsert(connection, t.ledger_entries, kept)
    gone = [{"q": q, "k": kind, "s": start} for (q, kind, start), state in entries.items() if not state]
    if gone:
        c = t.ledger_entries.c
        this = (c.query == bindparam("q")) & (c.kind == bindparam("k")) & (c.start_ms == bindparam("s"))
        connection.execute(delete(t.ledger_entries).where(this), gone)


def read_counter(connection: Connection, name: str) -> int:
    """Returns the value of a counter of the store."""
    return int(connection.execute(select(t.counters.c.value).where(t.counters.c.name == name)).scalar_one())


def write_answers(
    connection: Connection,
    ledger: Ledger,
    emissions: Sequence[Emission],
    spent: Sequence[Delta],
    merges: Mapping[SliceSpan, SpanMerge],
    merging: Merging,
) -> None:
    """Writes the answers, and drops the slices that no open window needs.

    Raises DeltasRefused, QueryFailed, AnswersCostly.

    Args:
        spent: from `split_spent`.
        merges: the costly merges that are there. A merge of other deltas than the present ones is ignored.
    """
    if not emissions:
        return
    late = _late_now(connection, ledger, emissions)
    rows = []
    for e, found in zip(emissions, _deltas_of(connection, emissions, spent, merges, merging), strict=True):
        ledger.on_query(e.query)
        merged, size = _merged(found, merging.segments) if isinstance(found, list) else found
        if (answer_bytes := max(len(merged or b""), size if merged is None else 0)) > merging.max_answer_bytes:
            has, most = (f"{each / (1 << 20):.1f} MiB" for each in (answer_bytes, merging.max_answer_bytes))
            raise QueryTooLarge(e.query, f"an answer has {has}; expected at most spark.max_answer_bytes, {most}")
        ledger.weigh(e.query, size)
        rows.append(_answer(e, merged, late.get((e.query, e.window_start_ms), {})))
    sealed = {query_key(ref): before_ms for ref, before_ms in _sealed(ledger, emissions).items()}
    if sealed:
        gone = (t.deltas.c.query == bindparam("of")) & (t.deltas.c.slice_start_ms < bindparam("before"))
        ended = [{"of": key, "before": before_ms} for key, before_ms in sealed.items()]
        connection.execute(delete(t.deltas).where(gone), ended)
    insert_answers(connection, rows)


def insert_answers(connection: Connection, rows: Sequence[StoredRow]) -> None:
    """Inserts answers with the next ids.

    Called last in a transaction: the drivers of other partitions wait for the counter's row until the transaction ends.
    """
    counter = t.counters.c.name == "answer"
    connection.execute(update(t.counters).where(counter).values(value=t.counters.c.value + len(rows)))
    first = read_counter(connection, "answer") - len(rows) + 1
    connection.execute(insert(t.answers), [{**row, "answer_id": first + i} for i, row in enumerate(rows)])


def _sealed(ledger: Ledger, emissions: Iterable[Emission]) -> dict[QueryRef, int]:
    """Returns, for queries with a final answer, the event time before which slices have only final windows."""
    return {e.query: ledger.sealed_before(e.query) for e in emissions if e.phase is Phase.FINAL}


def split_spent(
    ledger: Ledger, emissions: Sequence[Emission], deltas: Iterable[Delta]
) -> tuple[list[Delta], list[Delta]]:
    """Splits a batch's deltas into deltas that later answers need, and deltas that only its own answers need.

    The latter would be stored, read and dropped in one transaction.
    """
    sealed = {query_key(ref): before_ms for ref, before_ms in _sealed(ledger, emissions).items()}
    kept: list[Delta] = []
    spent: list[Delta] = []
    for delta in deltas:
        (spent if delta.slice_start_ms < sealed.get(delta.query, MIN_TIME_MS) else kept).append(delta)
    return kept, spent


def _answer(e: Emission, synopsis: bytes | None, late: Mapping[str, LateRecords]) -> StoredRow:
    """Returns the columns of an answer except its id. Raises QueryFailed for facts that cannot be written."""
    try:
        text = facts_to_json(e.facts)
    except ValueError as exc:
        raise QueryFailed(e.query) from exc
    return {
        "query": query_key(e.query),
        "window_start_ms": e.window_start_ms,
        "window_end_ms": e.window_end_ms,
        "revision": e.revision,
        "phase": e.phase.value,
        "answered_at_ms": e.answered_at_ms,
        "staleness_ms": e.facts.staleness_ms,
        "quality": text,
        "synopsis": synopsis,
        "late": late_to_json(late),
    }


def _late_now(
    connection: Connection, ledger: Ledger, emissions: Iterable[Emission]
) -> dict[tuple[QueryRef, int], dict[str, LateRecords]]:
    """Returns, by query and window start, the late records that are known."""
    windows: dict[QueryRef, list[tuple[int, int]]] = {}
    for e in emissions:
        if e.window_end_ms > e.window_start_ms and ledger.states_late(e.query):
            windows.setdefault(e.query, []).append((e.window_start_ms, e.window_end_ms))
    return {
        (ref, start): counts
        for ref, each in windows.items()
        for start, counts in late_by_window(connection, query_key(ref), each).items()
    }


def _deltas_of(
    connection: Connection,
    emissions: Sequence[Emission],
    spent: Iterable[Delta],
    merges: Mapping[SliceSpan, SpanMerge],
    merging: Merging,
) -> Iterator[list[Delta] | _Merge]:
    """Yields the deltas of each emission's window, both stored ones and `spent`, or their merge if it is costly.

    One statement reads the deltas of several windows. Raises AnswersCostly, DeltasRefused.
    """
    unstored: defaultdict[str, list[Delta]] = defaultdict(list)
    for delta in sorted(spent, key=_SLICE_START):
        unstored[delta.query].append(delta)
    for begin in range(0, len(emissions), MAX_GIVEN):
        chunk = emissions[begin : begin + MAX_GIVEN]
        spans = [(n, query_key(e.query), e.slices_from_ms, e.slices_to_ms) for n, e in enumerate(chunk)]
        sizes, _ = _span_statements(given_count(len(spans)))
        stored = {n: (count, size) for n, count, size in connection.execute(sizes, _given_spans(spans))}
        found = {n: _within(unstored.get(key, ()), from_ms, to_ms) for n, key, from_ms, to_ms in spans}
        costly: dict[int, SliceSpan] = {}
        for n, key, from_ms, to_ms in spans:
            count, size = stored.get(n, (0, 0))
            if merge_ms(count + len(found[n]), size + sum(d.size for d in found[n])) > merging.costly_ms:
                costly[n] = SliceSpan(key, from_ms, to_ms)
        merged = _require_merges(connection, costly, merges, found, merging.segments)
        held, position = {n: size for n, (_, size) in stored.items()}, 0
        for part in _bounded([span for span in spans if span[0] not in costly], held):
            wanted = [span for span in part if span[0] in stored]
            if wanted:
                _, rows = _span_statements(given_count(len(wanted)))
                new = {n: found[n] for n, *_ in wanted}
                found |= {n: [] for n in new}
                for n, *row in connection.execute(rows, _given_spans(wanted)):
                    found[n].append(_delta(row))
                for n, deltas in new.items():
                    # In the order in which they would be read if they were stored, because float results depend on it.
                    found[n] = sorted([*found[n], *deltas], key=_SLICE_START)
            end = part[-1][0] + 1
            yield from (merged[n] if n in merged else found.pop(n) for n in range(position, end))
            position = end
        yield from (merged[n] for n in range(position, len(chunk)))


def _require_merges(
    connection: Connection,
    costly: Mapping[int, SliceSpan],
    merges: Mapping[SliceSpan, SpanMerge],
    unstored: Mapping[int, Sequence[Delta]],
    segments: DeltaSegments,
) -> dict[int, _Merge]:
    """Returns the merges of spans, which tasks have made.

    Raises AnswersCostly, also if a merge cannot be read any more, and DeltasRefused for a merge that lacks deltas.
    """
    c, present, bad = t.deltas.c, dict[int, _Merge](), dict[int, str]()
    for n, span in costly.items():
        merge = merges.get(span)
        ids = connection.scalars(select(c.id).where(_in(span)).order_by(c.slice_start_ms, c.id))
        if merge is not None and not unstored[n] and tuple(ids) == merge.ids:
            with contextlib.suppress(CorruptSynopsis):
                present[n] = None if merge.data is None else segments.read(merge.data), merge.size
            bad |= dict(merge.refused)
    if len(present) < len(costly):
        raise AnswersCostly([span for n, span in costly.items() if n not in present])
    if bad:
        rows = select(c.id, *_DELTA).where(c.id.in_(bad))
        raise DeltasRefused([RefusedDelta(_delta(row), bad[n]) for n, *row in connection.execute(rows)])
    return present


def _within(deltas: Sequence[Delta], from_ms: int, to_ms: int) -> list[Delta]:
    """Returns the deltas in [from_ms, to_ms). `deltas` are ascending by slice."""
    begin, end = (bisect_left(deltas, at, key=_SLICE_START) for at in (from_ms, to_ms))
    return list(deltas[begin:end])


def _given_spans(spans: Sequence[_Span]) -> dict[str, str | int]:
    return given_rows(_SPAN, spans, (-1, "", 0, 0))


@cache
def _span_statements(count: int) -> tuple[Select[Any], Select[Any]]:
    """Returns two statements, by span: for number and bytes of its deltas, and for the deltas."""
    c, asked = t.deltas.c, given(_SPAN, count)
    within = and_(c.query == asked.c.query, c.slice_start_ms >= asked.c.begin_ms, c.slice_start_ms < asked.c.end_ms)
    sizes = select(asked.c.n, func.count(), _BYTES).join_from(asked, t.deltas, within)
    rows = select(asked.c.n, *_DELTA).join_from(asked, t.deltas, within)
    return sizes.group_by(asked.c.n), rows.order_by(c.slice_start_ms, c.id)


def _bounded(spans: Sequence[_Span], held: Mapping[int, int]) -> Iterator[list[_Span]]:
    """Yields spans in their order, as many at a time as `READ_BYTES` allow, and at least one."""
    part: list[_Span] = []
    size = 0
    for span in spans:
        if part and size + held.get(span[0], 0) > READ_BYTES:
            yield part
            part, size = [], 0
        part.append(span)
        size += held.get(span[0], 0)
    if part:
        yield part


def _merged(found: Sequence[Delta], segments: DeltaSegments) -> _Merge:
    """Returns the merge of a query's deltas (None: there are none), and their bytes.

    Raises DeltasRefused, QueryFailed, and StorageError if segments cannot be read at the moment.

    A task has decoded each delta before. So of a single delta only the checksum is verified.
    """
    size, data, lost = sum(d.size for d in found), list[bytes](), list[RefusedDelta]()
    for delta in found:
        try:
            data.append(segments.read(delta.data))
        except CorruptSynopsis as exc:
            lost.append(RefusedDelta(delta, f"{exc.code}: {exc}"))
    if lost:
        raise DeltasRefused(lost)
    try:
        if len(data) == 1:
            codec.require_intact(data[0])
            return data[0], size
        return GroupedAggregate.merge_bytes(data) if data else None, size
    except MemoryError as exc:  # the memory of all deltas says nothing about a single delta
        raise QueryFailed(query_from_key(found[0].query)) from exc
    except Exception as exc:
        _, left_out = merge_what_fits(data)
        refused = [RefusedDelta(found[n], f"{type(failure).__name__}: {failure}") for n, failure in left_out.items()]
        if not refused:  # in another order they merge
            refused = [RefusedDelta(found[-1], f"{type(exc).__name__}: {exc}")]
        raise DeltasRefused(refused) from exc


def drop_deltas(connection: Connection, like: Delta, *, exactly: bool) -> int:
    """Drops the stored deltas of a slice, or only the deltas with the same data. Returns their number."""
    names = _row(like) if exactly else ("query", "slice_start_ms")
    same = [t.deltas.c[name] == value for name, value in _row(like).items() if name in names]
    return connection.execute(delete(t.deltas).where(*same)).rowcount


def add_shipped(connection: Connection, frames: Iterable[FrameSummary]) -> None:
    """Adds frames and bytes to the totals per edge."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for summary in frames:
        at = (query_key(summary.query), str(summary.edge))
        count, size = totals.get(at, (0, 0))
        totals[at] = (count + 1, size + summary.wire_bytes)
    rows = [{"query": q, "edge": e, "frames": count, "wire_bytes": size} for (q, e), (count, size) in totals.items()]
    upsert(connection, t.shipped, rows, added=["frames", "wire_bytes"])


def set_consumed(connection: Connection, through: Mapping[str, int]) -> None:
    upsert(connection, t.consumed, [{"query": key, "position": position} for key, position in through.items()])


def drop_answers(connection: Connection, before_ms: int, through: int | None = None) -> tuple[int, int]:
    """Drops old answers; see `ResultStore.trim`.

    Windows become final in the order of their starts. When one is final, no answer follows for an earlier start:
    neither for a window, nor for a session that was merged into another session and never gets a final answer. So with
    an old final answer, all answers of its query are dropped whose windows start no later.

    Returns:
        The number of answers, and the greatest id of a live query's answer among them; 0: there is none.
    """
    a = t.answers.c
    old = select(a.query, a.window_start_ms).where(a.phase == Phase.FINAL.value, a.answered_at_ms < before_ms)
    if through is not None:
        old = old.where(a.answer_id <= through)
    last: dict[str, int] = {}
    for key, start in connection.execute(old.order_by(a.answered_at_ms).limit(MAX_TRIMMED_WINDOWS)):
        last[key] = max(start, last.get(key, start))
    dropped = newest = 0
    for key, start in last.items():
        if through is not None:  # sinks lack these corrections
            lacking = (a.query == key) & (a.answer_id > through) & (a.data_of > 0)
            first = connection.execute(select(func.min(a.window_start_ms)).where(lacking)).scalar_one()
            start = start if first is None else min(start, first - 1)
        ids = select(func.max(a.answer_id)).where(a.query == key, a.window_start_ms <= start)
        newest = max(newest, int(connection.execute(ids).scalar_one() or 0))
        dropped += connection.execute(delete(t.answers).where(a.query == key, a.window_start_ms <= start)).rowcount
        late = t.late_slices.c
        connection.execute(delete(t.late_slices).where(late.query == key, late.slice_end_ms <= start))
    return dropped + _drop_deleted(connection, before_ms), newest


def _drop_deleted(connection: Connection, before_ms: int) -> int:
    """Drops answers of deleted queries when their newest answer is old enough. Their windows never become final."""
    a, queries = t.answers.c, t.ledger_queries.c
    left = or_(exists().where(a.query == queries.query), exists().where(t.shipped.c.query == queries.query))
    dropped = 0
    for key in connection.execute(select(queries.query).where(queries.state.is_(None), left)).scalars().all():
        newest = select(a.answered_at_ms).where(a.query == key).order_by(a.answer_id.desc()).limit(1)
        answered_at_ms = connection.execute(newest).scalar_one_or_none()
        if answered_at_ms is None:
            for table in (t.shipped, t.late_slices, t.late_records):
                connection.execute(delete(table).where(table.c.query == key))
        elif answered_at_ms < before_ms:
            # Whole windows, because a correction is read with the answer that it corrects.
            first = select(a.window_start_ms).where(a.query == key).distinct().order_by(a.window_start_ms)
            of_first = (a.query == key) & a.window_start_ms.in_(first.limit(MAX_TRIMMED_WINDOWS))
            dropped += connection.execute(delete(t.answers).where(of_first)).rowcount
    return dropped
