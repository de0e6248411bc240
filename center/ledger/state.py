"""The ledger's state of a query, as immutable values with their JSON.

The state is one `QueryState` and many small entries, one per slice or window. A change replaces a value and never
mutates it. So a transaction can list its changes, and the store writes only these changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from functools import reduce
from typing import Any, Generic, TypeVar

from center.ledger.late_history import LateHistory
from center.ledger.sessionize import ObservedSession
from center.ledger.withheld import CloseTotals
from edgewater.answers import Constants, Phase
from edgewater.base.errors import UnsupportedVersion
from edgewater.base.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, Delivery, EdgeId, StreamClock
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.model.windows import Extent
from edgewater.wire import InputLoss, QueryRef, Rest, SliceClose, Withheld

STATE_VERSION = 1  # format: of a state
"""The version of the format of a state. It applies to states in one row and in several rows
(`center.ledger.stored_state`)."""
REFINE_AFTER_MS, REFINE_AFTER_MS_MAX = 1000, 30_000  # limit: answers of one window
"""Wall time after the first answer to a window during which changed data cause no new answer. The time doubles with
each answer, up to `REFINE_AFTER_MS_MAX`.

Late records change a window with nearly every batch, and a revision per batch would be useless. Only revisions of the
same phase wait. These answers do not wait: an answer at a deadline, the first `complete` or `final` answer, an answer
that states a new loss, and the first answer that keeps an error budget."""
MAX_LOSSES = 32
"""The most losses of one edge in the state. If there are more losses, the oldest losses are united."""

EdgeIncarnation = tuple[str, str]
"""(edge, incarnation). Counters of a close are totals per incarnation."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueryState:
    """The part of a query's state that is not per slice or window.

    Attributes:
        expected: edges whose closes the windows need, sorted.
        retired: retired edges of the stream.
        clock: the stream's clock; None if no known edge serves the stream.
        through_ms: per edge, the event time before which the edge has closed all its slices.
        gaps: per edge, the latest range [from, to) of event time for which the edge does not have all records.
        losses: per edge, the input that is lost or may be lost, if it concerns windows that are not final.
        deliveries: by edge that is expected or has left, and does not count each record of the stream exactly once, the
            edge's deliveries.
        final_through_ms: windows that end at or before this event time are final. It never decreases.
        due_from_ms: start of the next window that may become due without data; None if there is no such window.
        after_final: number of records so far that came for a window when the window was final.
        rejected: number of records so far that sources rejected, or that edges counted or left out on a guess.
        sealed_before_ms: for session windows, slices that start before this event time belong only to final sessions.
            It never decreases.
        sessions_cut: number of final sessions so far that were cut at their maximum length.
        lost_states: per edge that has lost its state, two times: the wall time at which the center noticed the loss,
            and the stream's event time at that moment. Windows that began up to this event time, and were not final,
            may lack records of the edge. If the edge has read its sources again, the windows may count records twice.
        reach: per edge, the incarnation of its last frame, and the start of the last slice for which this incarnation
            has sent records.
        left: per edge that is no longer expected, an event time up to which the edge may have accepted records.
        constants: per edge, the columns of `group_by` that have one value in all records of the edge.
        empty_from_ms, empty_through_ms: each window that starts at or after the first event time, ends at or before the
            second one, and has no answer is empty: all expected edges have closed it with all their records.
        late_history: the late records of recent windows.
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
    sealed_before_ms: int = MIN_TIME_MS
    sessions_cut: int = 0
    lost_states: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    losses: Mapping[str, tuple[InputLoss, ...]] = field(default_factory=dict)
    deliveries: Mapping[str, tuple[Delivery, ...]] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    reach: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    constants: Mapping[str, Constants] = field(default_factory=dict)
    rejected: int = 0
    empty_from_ms: int = MIN_TIME_MS
    empty_through_ms: int = MIN_TIME_MS
    late_history: LateHistory = field(default_factory=LateHistory)

    def to_mapping(self) -> dict[str, Any]:
        query = self.query
        return {
            "version": STATE_VERSION,
            "name": query.ref.name,
            "query_version": query.ref.version,
            "spec": query.spec.to_mapping(),
            "registered_at_ms": query.registered_at_ms,
            "deleted_at_ms": query.deleted_at_ms,
            "windows": None if query.windows == ALL_WINDOWS else [query.windows.from_ms, query.windows.until_ms],
            **{name: getattr(self, name) for name in _MEMBERS},
            "clock": None if self.clock is None else asdict(self.clock),
            "losses": {edge: [astuple(loss) for loss in losses] for edge, losses in self.losses.items()},
            "empty": [self.empty_from_ms, self.empty_through_ms],
            "late_history": self.late_history.to_state(),
        }

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> QueryState:
        if value["version"] != STATE_VERSION:
            raise UnsupportedVersion(f"ledger state has version {value['version']}, expected {STATE_VERSION}")
        ref = QueryRef(value["name"], value["query_version"])
        spec = QuerySpec.from_mapping(value["spec"])
        windows = WindowRange(*(value.get("windows") or ()))
        empty_from_ms, empty_through_ms = value.get("empty", (value["final_through_ms"], MIN_TIME_MS))
        members = {name: _READ[name](value[name]) if name in _READ else value[name] for name in _MEMBERS}
        return cls(
            RegisteredQuery(ref, spec, value["registered_at_ms"], value["deleted_at_ms"], windows),
            **members,
            empty_from_ms=empty_from_ms,
            empty_through_ms=empty_through_ms,
            late_history=LateHistory.from_state(value["late_history"]) if "late_history" in value else LateHistory(),
        )

    @property
    def running_clock(self) -> StreamClock:
        return self.clock or LIVE

    def with_losses(self, edge: EdgeId, losses: Iterable[InputLoss]) -> QueryState:
        return replace(self, losses={**self.losses, edge: at_most([*self.losses.get(edge, ()), *losses])})

    def without_losses_before(self, event_ms: int) -> QueryState:
        """Returns the state without losses that concern only windows before an event time."""
        later = {e: tuple(x for x in losses if x.overlaps(event_ms, MAX_TIME_MS)) for e, losses in self.losses.items()}
        later = {edge: losses for edge, losses in later.items() if losses}
        return self if later == self.losses else replace(self, losses=later)


_APART = ("query", "empty_from_ms", "empty_through_ms", "late_history")
_MEMBERS = tuple(f.name for f in fields(QueryState) if f.name not in _APART)
"""The members that have a key of the same name in the JSON."""


def _pairs(value: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    return {edge: tuple(pair) for edge, pair in value.items()}


_READ: Mapping[str, Callable[[Any], Any]] = {
    "expected": lambda value: tuple(map(EdgeId, value)),
    "retired": lambda value: tuple(map(EdgeId, value)),
    "clock": lambda value: None if value is None else StreamClock(**value),
    "gaps": _pairs,
    "lost_states": _pairs,
    "reach": _pairs,
    "losses": lambda value: {edge: tuple(InputLoss(*loss) for loss in losses) for edge, losses in value.items()},
    "deliveries": lambda value: {edge: tuple(map(Delivery, each)) for edge, each in value.items()},
}
"""Reads the members whose JSON differs from their value."""


def at_most(losses: Sequence[InputLoss]) -> tuple[InputLoss, ...]:
    """Returns at most `MAX_LOSSES` losses. If there are more losses, the oldest losses are united."""
    extra = len(losses) - MAX_LOSSES + 1
    return tuple(losses) if extra <= 1 else (reduce(InputLoss.union, losses[:extra]), *losses[extra:])


@dataclass(frozen=True, slots=True)
class SliceState:
    """The closes of a slice, by edge incarnation. The slice belongs to a window that is not final.

    Attributes:
        has_data: whether a close or a partial has reported records.
        totals: union of all closes. It is cached, because every window over the slice needs it.
        by_edge: totals by edge, of the edges whose closes state late or withheld records.
        provisional: the edges whose closes are provisional. It is cached for the same reason.
    """

    closes: Mapping[EdgeIncarnation, SliceClose]
    has_data: bool
    totals: CloseTotals
    by_edge: Mapping[str, CloseTotals]
    provisional: frozenset[str]

    @property
    def extent(self) -> Extent | None:
        """Event times of the first and the last record over all edges; None if no edge has reported them."""
        firsts = [c.first_ms for c in self.closes.values() if c.first_ms is not None]
        lasts = [c.last_ms for c in self.closes.values() if c.last_ms is not None]
        return (min(firsts), max(lasts)) if firsts and lasts else None

    @classmethod
    def of(cls, closes: Mapping[EdgeIncarnation, SliceClose], has_data: bool, spec: QuerySpec) -> SliceState:
        totals = CloseTotals.of_closes(closes.values(), spec)
        stating: dict[str, list[SliceClose]] = {}
        for (edge, _), close in closes.items():
            if close.late or close.withheld:
                stating.setdefault(edge, []).append(close)
        by_edge = {edge: CloseTotals.of_closes(each, spec) for edge, each in stating.items()}
        provisional = frozenset(edge for (edge, _), close in closes.items() if close.provisional)
        return cls(closes, has_data or totals.observed > 0, totals, by_edge, provisional)

    @classmethod
    def from_state(cls, start_ms: int, value: Any, spec: QuerySpec) -> SliceState:
        has_data, closes = value
        read = {
            (edge, incarnation): SliceClose(start_ms, observed, late, tuple(map(_withheld, withheld)), *extent)
            for edge, incarnation, observed, late, withheld, *extent in closes
        }
        return cls.of(read, has_data, spec)


def _withheld(row: Sequence[Any]) -> Withheld:
    rest = None if row[-1] is None else Rest.from_state(row[-1])
    return replace(Withheld(*row[:-1]), rest=rest)


@dataclass(frozen=True, slots=True)
class WindowState:
    """A window that has data or an answer and is not final.

    Attributes:
        revision: revision of the newest answer; 0 if there is no answer.
        phase: phase of the newest answer.
        first_staleness_ms: staleness of the first answer. If a session has no answer, it inherits the smallest
            staleness of the answered sessions that were merged into it.
        session: extent of a session window; None if it was merged into another session.
        merged_into: start of that other session.
        lacks_edges: whether the newest answer keeps the phase ``complete`` of an earlier answer, although an edge has
            not closed the window since the window changed. The window is answered again when all edges have closed it.
        outdated: whether the window has changed since its newest answer. A later transaction gives the next answer
            (`answer_work.MAX_WORK`).
        kept_staleness_ms: under a combined budget, staleness of the first answer that kept the error budget.
        refine_from_ms: wall time before which changed data alone cause no new answer (`REFINE_AFTER_MS`).
        answers: number of answers to the window. After the restore of a backup, revisions are far above this number.
    """

    has_data: bool
    revision: int = 0
    phase: Phase = Phase.EARLY
    first_staleness_ms: int | None = None
    session: ObservedSession | None = None
    merged_into: int | None = None
    lacks_edges: bool = False
    outdated: bool = False
    kept_staleness_ms: int | None = None
    refine_from_ms: int = 0
    answers: int = 0

    @property
    def is_answered(self) -> bool:
        return self.revision > 0

    @property
    def refinement_wait_ms(self) -> int:
        """Wall time after the next answer for which a further answer of the same phase waits."""
        return min(REFINE_AFTER_MS << min(self.answers, 16), REFINE_AFTER_MS_MAX)

    def may_be_refined(self, now_ms: int) -> bool:
        """Returns whether changed data may cause a new answer now.

        If the clock was set back, the wait does not exceed `REFINE_AFTER_MS_MAX`.
        """
        return not self.refine_from_ms - REFINE_AFTER_MS_MAX <= now_ms < self.refine_from_ms

    def to_state(self) -> str:
        values = [self.has_data, self.revision, self.phase, self.first_staleness_ms]
        rest = [self.session and astuple(self.session), self.merged_into, self.lacks_edges, self.outdated]
        return dump([*values, *rest, self.kept_staleness_ms, self.refine_from_ms, self.answers])

    @classmethod
    def from_state(cls, value: Any) -> WindowState:
        has_data, revision, phase, first_staleness_ms, session, *rest = value
        restored = session and ObservedSession(*session)
        return cls(has_data, revision, Phase(phase), first_staleness_ms, restored, *rest)


@dataclass(frozen=True, slots=True)
class SealedSlice:
    """Per edge incarnation, the number of records of a slice whose windows are all final. Further records
    are too late.
    """

    observed: Mapping[EdgeIncarnation, int]

    def to_state(self) -> str:
        return dump([[*origin, n] for origin, n in self.observed.items()])

    @classmethod
    def from_state(cls, value: Any) -> SealedSlice:
        return cls({(edge, incarnation): n for edge, incarnation, n in value})


@dataclass(frozen=True, slots=True)
class EstimatorLogEntry:
    """The changes of the estimator in one transaction, or a snapshot of the estimator, as JSON."""

    text: str

    def to_state(self) -> str:
        return self.text


StateEntry = SliceState | WindowState | SealedSlice | EstimatorLogEntry


class StateTable(Generic[T]):
    """Immutable values by start time. The table records which values have changed since `begin`."""

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._before: dict[int, T | None] = {}

    def __contains__(self, start_ms: int) -> bool:
        return start_ms in self._values

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, start_ms: int) -> T | None:
        return self._values.get(start_ms)

    def put(self, start_ms: int, value: T) -> None:
        self._before.setdefault(start_ms, self._values.get(start_ms))
        self._values[start_ms] = value

    def drop(self, start_ms: int) -> T | None:
        self._before.setdefault(start_ms, self._values.get(start_ms))
        return self._values.pop(start_ms, None)

    def items(self) -> Iterable[tuple[int, T]]:
        return self._values.items()

    def begin(self) -> None:
        self._before.clear()

    def changes(self) -> dict[int, T | None]:
        """Returns the values that have changed since `begin`, by start; None if the value was removed."""
        return {start: self._values.get(start) for start in self._before}

    def before(self, start_ms: int) -> T | None:
        """Returns the value that a changed value had at `begin`; None if there was no value."""
        return self._before[start_ms]


def dump(value: Any) -> str:
    """Returns compact JSON."""
    return json.dumps(value, separators=(",", ":"))
