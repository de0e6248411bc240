"""The stored form of a query's state, in parts. A transaction writes only the parts of the edges that it changed.

Edges are numbered in the order in which the ledger first sees them. A part has `EDGES_PER_PART` consecutive edges. The
first part is inside the row of the query's state and the rows of the query's slices, so a query with few edges has no
other rows. Further parts are rows of the kinds ``edges`` (by number of the part) and ``slice/n`` (by slice). Values of
the ledger are immutable, so a comparison with the stored values shows the changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from center.ledger.events import LateSlice
from center.ledger.state import (
    EdgeIncarnation,
    EstimatorLogEntry,
    QueryState,
    SealedSlice,
    SliceState,
    StateEntry,
    WindowState,
    dump,
)
from edgewater.answers import LateRecords
from edgewater.base.errors import StorageError
from edgewater.base.streams import MIN_TIME_MS
from edgewater.wire import QueryRef, SliceClose

EDGES_PER_PART = 64  # limit: size of a row
EDGES, SLICE = "edges", "slice"
_LISTS = ("expected", "retired")
_MAPS = ("through_ms", "gaps", "lost_states", "losses", "deliveries", "left", "reach", "constants")
_CLOSE_COLUMNS = 7  # format: of a stored state

EntryRow = tuple[str, int, str | None]
"""Kind, start and JSON of a row. The JSON is None if the row is removed."""


@dataclass(frozen=True, slots=True)
class QueryChanges:
    """The changes of one query's state in a transaction, for the store to write.

    Attributes:
        state: `QueryState` as JSON, with the first part of its edges. If None, the query is deleted with all its
            entries.
        entries: rows of kind, start and JSON. The JSON is None if the entry is removed.
        late: numbers of records that came for a window when the window was final, or that sources rejected.
        open_from_ms: event time. Before the transaction, slices that start at or after it belonged to windows that were
            not final.
        empty_ms: `QueryState.empty_from_ms` and `empty_through_ms`, which readers of answers need.
        final_spans: see `ReportedSlices.final_spans`.
    """

    ref: QueryRef
    state: str | None
    entries: tuple[EntryRow, ...] = ()
    late: Mapping[LateSlice, LateRecords] = field(default_factory=dict)
    open_from_ms: int = MIN_TIME_MS
    empty_ms: tuple[int, int] = (MIN_TIME_MS, MIN_TIME_MS)
    final_spans: Sequence[tuple[int, int]] = ()


class StoredEdges:
    """The numbers of a query's edges, which never change, and the state in the store.

    Args:
        members: the edges by number.
        stored: the state in the store; None if the store has no state.
    """

    def __init__(self, members: Iterable[str] = (), stored: QueryState | None = None) -> None:
        self._members = list(members)
        self._number = {edge: number for number, edge in enumerate(self._members)}
        self._stored, self._stored_count = stored, len(self._members)

    def add(self, edges: Iterable[str]) -> None:
        """Numbers the edges that have no number yet, in this order. The order must depend only on the
        ledger's events.
        """
        for edge in edges:
            if edge not in self._number:
                self._number[edge] = len(self._members)
                self._members.append(edge)

    def set_stored(self, state: QueryState) -> None:
        """Sets the state in the store. Called when the last transaction has stored a state."""
        self._stored, self._stored_count = state, len(self._members)

    def _parts(self) -> int:
        return max(1, -(-len(self._members) // EDGES_PER_PART))

    def _part_of(self, edge: str) -> int:
        return self._number[edge] // EDGES_PER_PART

    def state_json(self, state: QueryState) -> str:
        """Returns the state as JSON, with only the first part of its edges."""
        mapping = state.to_mapping()
        return dump({**mapping, **next(iter(self._split(mapping, [0])))})

    def rows(self, state: QueryState) -> list[EntryRow]:
        """Returns the rows of the parts after the first part that differ from the stored state."""
        parts = range(self._parts()) if self._stored is None else sorted(self._changed(self._stored, state))
        further = [part for part in parts if part > 0]
        if not further:
            return []
        split = self._split(state.to_mapping(), further)
        return [(EDGES, part, dump(value)) for part, value in zip(further, split, strict=True)]

    def _changed(self, before: QueryState, after: QueryState) -> set[int]:
        changed = set(self._members[self._stored_count :])
        for name in _LISTS:
            if getattr(before, name) != getattr(after, name):
                changed.update(set(getattr(before, name)) ^ set(getattr(after, name)))
        for name in _MAPS:
            old, new = getattr(before, name), getattr(after, name)
            if old is not new:
                changed.update(edge for edge, value in new.items() if old.get(edge) != value)
                changed.update(old.keys() - new.keys())
        return {self._part_of(edge) for edge in changed}

    def _split(self, mapping: Mapping[str, Any], parts: Iterable[int]) -> Iterator[dict[str, Any]]:
        if self._parts() == 1:
            yield from ({"members": self._members} for _ in parts)
            return
        listed = {name: frozenset(mapping[name]) for name in _LISTS}
        for part in parts:
            members = self._members[part * EDGES_PER_PART : (part + 1) * EDGES_PER_PART]
            lists = {name: sorted(edge for edge in members if edge in listed[name]) for name in _LISTS}
            maps = {name: {e: mapping[name][e] for e in members if e in mapping[name]} for name in _MAPS}
            yield {"members": members, **lists, **maps}

    def slice_rows(self, start_ms: int, before: SliceState | None, after: SliceState | None) -> list[EntryRow]:
        """Returns the rows of a slice that differ from the stored rows."""
        if after is None:
            stored = {self._part_of(edge) for edge, _ in before.closes} if before is not None else set()
            return [(_kind(part), start_ms, None) for part in sorted({0, *stored})]
        known = before.closes if before is not None else {}
        changed = {self._part_of(o[0]) for o, close in after.closes.items() if known.get(o) is not close}
        if before is None or before.has_data is not after.has_data:
            changed.add(0)
        rows: dict[int, list[list[Any]]] = {part: [] for part in sorted(changed)}
        for rank, (origin, close) in enumerate(after.closes.items()):
            closes = rows.get(self._part_of(origin[0]))
            if closes is not None:
                # Closes are added up in their order, because floats in another order may differ in the last digit.
                closes.append([*_close_to_row(origin, close), *([rank] if self._parts() > 1 else [])])
        return [(_kind(part), start_ms, dump([after.has_data, closes])) for part, closes in rows.items()]


def _kind(part: int) -> str:
    return f"{SLICE}/{part}" if part else SLICE


def _close_to_row(origin: EdgeIncarnation, close: SliceClose) -> list[Any]:
    withheld = [[*astuple(w)[:-1], w.rest and w.rest.to_state()] for w in close.withheld]
    provisional = [True] if close.provisional else []
    return [*origin, close.observed, close.late, withheld, close.first_ms, close.last_ms, *provisional]


def _has_rank(row: list[Any]) -> bool:
    return len(row) > _CLOSE_COLUMNS and row[-1] is not True


def pack_state(state: str, entries: Iterable[tuple[str, int, str]]) -> bytes:
    """Returns a query's snapshot from the JSON of its state and of its rows (kind, start, JSON)."""
    listed = ",".join(f"[{json.dumps(kind)},{start},{text}]" for kind, start, text in entries)
    return f'{{"state":{state},"entries":[{listed}]}}'.encode()


def unpack_state(snapshot: bytes) -> tuple[QueryState, list[tuple[str, int, StateEntry]], StoredEdges]:
    """Returns a query's state, its entries and its edges from the result of `pack_state`.

    Raises:
        StorageError: the bytes are not the result of `pack_state`.
        UnsupportedVersion: the bytes have another format.
    """
    try:
        value = json.loads(snapshot)
        parts: dict[int, Mapping[str, Any]] = {}
        slices: dict[int, dict[int, Any]] = {}
        others: list[tuple[str, int, Any]] = []
        for kind, start_ms, row in value["entries"]:
            name, _, part = kind.partition("/")
            if kind == EDGES:
                parts[start_ms] = row
            elif name == SLICE:
                slices.setdefault(start_ms, {})[int(part or 0)] = row
            else:
                others.append((kind, start_ms, row))
        whole = _unite(value["state"], [row for _, row in sorted(parts.items())])
        state = QueryState.from_mapping(whole)
        entries: list[tuple[str, int, StateEntry]] = []
        for start_ms, rows in sorted(slices.items()):
            entries.append((SLICE, start_ms, _slice(start_ms, rows, state)))
        entries += [(kind, start_ms, _entry(kind, row)) for kind, start_ms, row in others]
        return state, entries, StoredEdges(whole["members"], state)
    except (ValueError, KeyError, TypeError) as exc:
        raise StorageError(f"ledger state cannot be read: {type(exc).__name__}: {exc}") from exc


def _unite(state: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    united = dict(state)
    for part in parts:
        united["members"] = [*united["members"], *part["members"]]
        for name in _LISTS:
            united[name] = sorted([*united[name], *part[name]])
        for name in _MAPS:
            united[name] = {**united.get(name, {}), **part.get(name, {})}
    return united


def _slice(start_ms: int, rows: Mapping[int, Any], state: QueryState) -> SliceState:
    ranked: list[tuple[int, list[Any]]] = []
    for _, (_, closes) in sorted(rows.items()):
        ranked += [(row.pop() if _has_rank(row) else n, row) for n, row in enumerate(closes)]
    ranked.sort(key=lambda each: each[0])
    has_data = any(has_data for has_data, _ in rows.values())
    return SliceState.from_state(start_ms, [has_data, [row for _, row in ranked]], state.query.spec)


def _entry(kind: str, value: Any) -> StateEntry:
    if kind == "window":
        return WindowState.from_state(value)
    if kind == "sealed":
        return SealedSlice.from_state(value)
    if kind == "estimator":
        return EstimatorLogEntry(dump(value))
    raise ValueError(f"unknown kind of entry: {kind!r}")
