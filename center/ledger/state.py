"""What the ledger remembers of a query, as immutable values with their JSON.

State is a *head* and many small *parts* (one per slice or window). A change replaces a value and never
alters one, so a transaction knows the values before it by having kept references to them: going back
costs as much as was changed, and only what was changed is written to the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, Generic, Literal, TypeVar

from center.catalog.store import RegisteredQuery
from center.ledger.quality import Phase, Totals
from center.ledger.sessionize import Extent, Run
from edgewater.errors import StorageError, UnsupportedVersion
from edgewater.query import QuerySpec
from edgewater.streams import LIVE, NEVER_MS, EdgeId, StreamClock
from edgewater.wire.frames import QueryRef, SliceClose, Withheld

STATE_VERSION = 1

Origin = tuple[str, str]
"""(edge, incarnation): counters of a close are totals per incarnation."""

PartKind = Literal["slice", "window", "sealed", "accuracy"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Head:
    """What there is once per query.

    Attributes:
        expected: edges that are waited for, sorted.
        retired: edges of the stream that are declared gone.
        clock: of the stream, None as long as no edge is known that serves it.
        through_ms: by edge, event time up to which it has closed.
        gaps: by edge, the last piece of event time [from, to) of which it said that it has not all records.
        final_through_ms: windows that end at or before it are final. Never goes back.
        due_from_ms: start of the next window that may be due without any data; None: none is.
        after_final: records, so far, that came for a window that was final already.
        sealed_before_ms: of sessions, slices that start before it are in final ones only. Never goes back.
        sessions_cut: final sessions, so far, that their greatest length ended.
    """

    query: RegisteredQuery
    expected: tuple[EdgeId, ...]
    retired: tuple[EdgeId, ...]
    clock: StreamClock | None
    through_ms: Mapping[str, int]
    gaps: Mapping[str, tuple[int, int]]
    final_through_ms: int
    due_from_ms: int | None
    after_final: int
    sealed_before_ms: int = NEVER_MS
    sessions_cut: int = 0

    def to_json(self) -> str:
        query = self.query
        return _dump(
            {
                "version": STATE_VERSION,
                "name": query.ref.name,
                "query_version": query.ref.version,
                "spec": query.spec.to_mapping(),
                "registered_at_ms": query.registered_at_ms,
                "deleted_at_ms": query.deleted_at_ms,
                "expected": self.expected,
                "retired": self.retired,
                "clock": None if self.clock is None else asdict(self.clock),
                "through_ms": dict(self.through_ms),
                "gaps": dict(self.gaps),
                "final_through_ms": self.final_through_ms,
                "due_from_ms": self.due_from_ms,
                "after_final": self.after_final,
                "sealed_before_ms": self.sealed_before_ms,
                "sessions_cut": self.sessions_cut,
            }
        )

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Head:
        if given["version"] > STATE_VERSION:
            raise UnsupportedVersion(f"ledger state of version {given['version']}; this release reads {STATE_VERSION}")
        ref = QueryRef(given["name"], given["query_version"])
        spec = QuerySpec.from_mapping(given["spec"])
        return cls(
            RegisteredQuery(ref, spec, given["registered_at_ms"], given["deleted_at_ms"]),
            tuple(map(EdgeId, given["expected"])),
            tuple(map(EdgeId, given["retired"])),
            None if given["clock"] is None else StreamClock(**given["clock"]),
            given["through_ms"],
            {edge: (begin, end) for edge, (begin, end) in given["gaps"].items()},
            given["final_through_ms"],
            given["due_from_ms"],
            given["after_final"],
            given.get("sealed_before_ms", NEVER_MS),
            given.get("sessions_cut", 0),
        )

    @property
    def running_clock(self) -> StreamClock:
        return self.clock or LIVE


@dataclass(frozen=True, slots=True)
class SliceState:
    """What edges say of a slice of which some window is not final.

    Attributes:
        has_data: records of it have been seen, by a close or by a partial.
        totals: of all closes, kept because each window over the slice asks for them again.
    """

    closes: Mapping[Origin, SliceClose]
    has_data: bool
    totals: Totals

    @property
    def extent(self) -> Extent | None:
        """Where the records of all edges begin and end; None: nobody has said so."""
        firsts = [c.first_ms for c in self.closes.values() if c.first_ms is not None]
        lasts = [c.last_ms for c in self.closes.values() if c.last_ms is not None]
        return (min(firsts), max(lasts)) if firsts and lasts else None

    @classmethod
    def of(cls, closes: Mapping[Origin, SliceClose], has_data: bool, spec: QuerySpec) -> SliceState:
        totals = Totals.of_closes(closes.values(), spec)
        return cls(closes, has_data or totals.observed > 0, totals)

    def to_json(self) -> str:
        closes = [
            [*origin, c.observed, c.late, [list(astuple(w)) for w in c.withheld], *_extent_of(c)]
            for origin, c in self.closes.items()
        ]
        return _dump([self.has_data, closes])

    @classmethod
    def from_value(cls, start_ms: int, given: Any, spec: QuerySpec) -> SliceState:
        has_data, closes = given
        read = {
            (edge, incarnation): SliceClose(start_ms, observed, late, tuple(Withheld(*w) for w in withheld), *extent)
            for edge, incarnation, observed, late, withheld, *extent in closes
        }
        return cls.of(read, has_data, spec)


@dataclass(frozen=True, slots=True)
class WindowState:
    """A window that has data or an answer, and is not final.

    Attributes:
        revision: of its newest answer, 0 as long as there is none.
        phase: of its newest answer.
        first_staleness_ms: of its first answer; of a session without one, that of the first session
            it has taken in, if any.
        run: of a session, what it is made of; None: it is merged into another.
        merged_into: the start of that one.
        lacks: its newest answer says ``complete``, since an earlier one was, but some edge has not
            closed it as it is now. It is answered again when all have.
    """

    has_data: bool
    revision: int = 0
    phase: Phase = Phase.EARLY
    first_staleness_ms: int | None = None
    run: Run | None = None
    merged_into: int | None = None
    lacks: bool = False

    @property
    def is_answered(self) -> bool:
        return self.revision > 0

    def to_json(self) -> str:
        stated = [self.has_data, self.revision, self.phase, self.first_staleness_ms]
        if self.run is None and self.merged_into is None and not self.lacks:
            return _dump(stated)
        return _dump([*stated, self.run and astuple(self.run), self.merged_into, self.lacks])

    @classmethod
    def from_value(cls, given: Any) -> WindowState:
        has_data, revision, phase, first_staleness_ms, *more = given
        run, merged_into, *lacks = more or (None, None)
        # An older release wrote 0 where there was no answer.
        first = None if revision == 0 and not more else first_staleness_ms
        return cls(has_data, revision, Phase(phase), first, run and Run(*run), merged_into, lacks == [True])


@dataclass(frozen=True, slots=True)
class SealedSlice:
    """How many records each edge had stated of a slice whose windows are all final: what lies above
    has come too late."""

    observed: Mapping[Origin, int]

    def to_json(self) -> str:
        return _dump([[*origin, n] for origin, n in self.observed.items()])

    @classmethod
    def from_value(cls, given: Any) -> SealedSlice:
        return cls({(edge, incarnation): n for edge, incarnation, n in given})


@dataclass(frozen=True, slots=True)
class BookNotes:
    """What `AccuracyBook` noted in a transaction, or a snapshot of it, as JSON."""

    text: str

    def to_json(self) -> str:
        return self.text


Part = SliceState | WindowState | SealedSlice | BookNotes


class Parts(Generic[T]):
    """Immutable values by start time, which can tell what a transaction changed, and undo it."""

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._before: dict[int, T | None] | None = None

    def __contains__(self, start_ms: int) -> bool:
        return start_ms in self._values

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, start_ms: int) -> T | None:
        return self._values.get(start_ms)

    def put(self, start_ms: int, value: T) -> None:
        self._note(start_ms)
        self._values[start_ms] = value

    def drop(self, start_ms: int) -> T | None:
        self._note(start_ms)
        return self._values.pop(start_ms, None)

    def items(self) -> Iterable[tuple[int, T]]:
        return self._values.items()

    def _note(self, start_ms: int) -> None:
        if self._before is not None:
            self._before.setdefault(start_ms, self._values.get(start_ms))

    def begin(self) -> None:
        self._before = {}

    def changes(self) -> dict[int, T | None]:
        """Start -> value now, None for one that is gone; of all that changed since `begin`."""
        return {start: self._values.get(start) for start in self._before or {}}

    def commit(self) -> None:
        self._before = None

    def rollback(self) -> None:
        for start, value in (self._before or {}).items():
            if value is None:
                self._values.pop(start, None)
            else:
                self._values[start] = value
        self._before = None


def pack_state(head: str, parts: Iterable[tuple[str, int, str]]) -> bytes:
    """A query's whole state from the JSON of its head and of its parts (kind, start, JSON)."""
    listed = ",".join(f"[{json.dumps(kind)},{start},{text}]" for kind, start, text in parts)
    return f'{{"head":{head},"parts":[{listed}]}}'.encode()


def unpack_state(state: bytes) -> tuple[Head, list[tuple[PartKind, int, Part]]]:
    """Raises StorageError for what `pack_state` did not make, UnsupportedVersion for a newer release's."""
    try:
        given = json.loads(state)
        head = Head.from_mapping(given["head"])
        return head, [(kind, start, _part(kind, start, value, head)) for kind, start, value in given["parts"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise StorageError(f"ledger state cannot be read: {type(exc).__name__}: {exc}") from exc


def _part(kind: str, start_ms: int, value: Any, head: Head) -> Part:
    if kind == "slice":
        return SliceState.from_value(start_ms, value, head.query.spec)
    if kind == "window":
        return WindowState.from_value(value)
    if kind == "sealed":
        return SealedSlice.from_value(value)
    if kind == "accuracy":
        return BookNotes(_dump(value))
    raise ValueError(f"part of unknown kind {kind!r}")


def _extent_of(close: SliceClose) -> tuple[int, int] | tuple[()]:
    return () if close.first_ms is None or close.last_ms is None else (close.first_ms, close.last_ms)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
