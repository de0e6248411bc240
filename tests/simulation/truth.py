"""What is true: the records that edges were given, and the exact values of every window, computed record by record.

Nothing here uses a synopsis, a slice or the ledger. Sums are exact (`fractions.Fraction`), so that a rounding in the
system is a difference and not a matter of taste.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any

import pyarrow as pa

from edgewater.base.streams import TIME_COLUMN
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.model.windows import SessionWindow, SlidingWindow

Group = tuple[Any, ...]
"""The values of the `group_by` columns, in their order."""


class Fate(StrEnum):
    """What must be true of a record that an edge was given, for one query."""

    COUNTED = "counted"
    """Every complete or final answer has it; if it was late, the last one does."""
    EITHER = "either"
    """It came too late: the last answer has it, or counts it (`after_final`) and is not complete."""
    UNCERTAIN = "uncertain"
    """Its push got no positive reply: it may be in the answers or not, and nothing needs to be said about it."""
    LOST = "lost"
    """It was accepted, and its edge lost its state, had no memory for it, or states impossible numbers: an answer has
    it, or says that it is not complete."""
    DROPPED = "dropped"
    """It was refused, or dropped on purpose and counted by reason: no answer has it."""


@dataclass(frozen=True, slots=True)
class TrueRecord:
    """A record as it was given to an edge.

    Attributes:
        values: by column; a column may be absent or None.
        late: it came when its edge had closed its slice, so that an earlier revision may lack it.
        watermark_ms: the watermark of its edge when it came; windows that were final at the edge by then need not have
            it, but a counter has. None: it came in time for all its windows.
        unread: its edge died for good without having read it. Windows that were final at the edge by then need not
            have it, and no counter can have it; the others lack it and are not complete.
    """

    edge: str
    event_ms: int
    values: Mapping[str, Any]
    fate: Fate = Fate.COUNTED
    late: bool = False
    watermark_ms: int | None = None
    unread: bool = False


@dataclass(slots=True)
class TrueWindow:
    """The records of one window."""

    start_ms: int
    end_ms: int
    records: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values that a measure may truly have, from the least to the greatest; equal: there is only one.

    Attributes:
        low, high: exact numbers; None: the measure has no value (no record with a value). NaN and infinity as floats.
        magnitude: sum of the absolute values, on which the rounding of a float sum depends.
        floats: whether values are floats.
        count: number of non-null values.
    """

    low: Any
    high: Any
    magnitude: float = 0.0
    floats: bool = False
    count: int = 0

    @property
    def is_one(self) -> bool:
        return bool(self.low == self.high) or (self.low is None and self.high is None)


SETTLED = (Fate.COUNTED, Fate.DROPPED)
UNKNOWN = Bounds(-math.inf, math.inf)


class QueryTruth:
    """The truth about one query.

    Args:
        records: everything that edges were given of the query's stream.
        columns: the stream's columns.
        own: the windows of this version of the query.
    """

    def __init__(
        self,
        spec: QuerySpec,
        records: Sequence[TrueRecord],
        columns: Mapping[str, pa.DataType],
        own: WindowRange = ALL_WINDOWS,
    ) -> None:
        self.spec, self.own = spec, own
        if isinstance(spec.window, SessionWindow):  # a border cuts sessions
            records = [r for r in records if r.event_ms in own]
        bound = spec.bind(columns)
        batch = pa.record_batch(
            {
                **{name: pa.array([r.values.get(name) for r in records], t) for name, t in columns.items()},
                TIME_COLUMN: pa.array([r.event_ms for r in records], pa.int64()),
            }
        )
        passed = bound.where.array(batch).to_pylist() if bound.where is not None else [True] * len(records)
        kept = [i for i, (record, p) in enumerate(zip(records, passed, strict=True)) if p]
        self.records = [records[i] for i in kept]
        batch = batch.take(pa.array(kept, pa.int64()))
        self.groups: list[Group] = list(zip(*(keys.to_pylist() for keys in bound.key_arrays(batch)), strict=True))
        if not spec.group_by:
            self.groups = [()] * len(self.records)
        self._arguments: dict[str, list[Any]] = {
            m.measure.name: m.argument.array(batch).to_pylist() if m.argument is not None else [1] * len(self.records)
            for m in bound.measures
        }
        self._floats = {
            m.measure.name: m.argument is not None and pa.types.is_floating(m.argument.type) for m in bound.measures
        }
        self.windows = self._windows()

    @property
    def has_doubt(self) -> bool:
        """Whether the sessions of the query depend on records that may be in the answers or not."""
        window = self.spec.window
        gap_ms = window.gap_ms if isinstance(window, SessionWindow) else 0
        return any(self.fate(i, r.event_ms + gap_ms) not in SETTLED for i, r in enumerate(self.records))

    def fate(self, i: int, end_ms: int) -> Fate:
        """The fate of record i in a window that ends at `end_ms`."""
        record = self.records[i]
        came_ms = record.watermark_ms
        if came_ms is None or end_ms + self.spec.lateness_ms > came_ms:
            return record.fate
        if record.fate is Fate.COUNTED:
            return Fate.UNCERTAIN if record.unread else Fate.EITHER
        # Of a lost record, the count that would say that it came too late is lost too.
        return Fate.UNCERTAIN if record.fate is Fate.LOST else record.fate

    def _windows(self) -> dict[int, TrueWindow]:
        windows: dict[int, TrueWindow] = {}
        window = self.spec.window
        live = [i for i, r in enumerate(self.records) if r.fate is not Fate.DROPPED]
        if isinstance(window, SlidingWindow):
            for i in live:
                time = self.records[i].event_ms
                last = (time - window.offset_ms) // window.every_ms * window.every_ms + window.offset_ms
                for start in range(last, time - window.size_ms, -window.every_ms):
                    if start not in self.own:
                        continue
                    found = windows.setdefault(start, TrueWindow(start, start + window.size_ms))
                    found.records.append(i)
        elif isinstance(window, SessionWindow):
            for start, end, members in sessions(live, self.records, window):
                windows[start] = TrueWindow(start, end, members)
        return dict(sorted(windows.items()))

    def by_group(self, members: Iterable[int]) -> dict[Group, list[int]]:
        result: defaultdict[Group, list[int]] = defaultdict(list)
        for i in members:
            result[_same_nan(self.groups[i])].append(i)
        return dict(result)

    def bounds(self, measure: Measure, members: Sequence[int], sure: Sequence[bool]) -> Bounds:
        """The values that `measure` may have over `members`, of which those not `sure` may be absent."""
        values = self._arguments[measure.name]
        given = [(values[i], s) for i, s in zip(members, sure, strict=True) if values[i] is not None]
        must, may = [v for v, s in given if s], [v for v, s in given if not s]
        floats, name = self._floats[measure.name], measure.function.name
        if name == "count":
            return Bounds(len(must), len(must) + len(may), count=len(must))
        if any(isinstance(v, float) and not math.isfinite(v) for v in (*must, *may)):
            if may:
                return UNKNOWN
            return _of_non_finite(name, must)
        if name == "distinct":
            sure_items = set(must)
            return Bounds(len(sure_items), len(sure_items | set(may)), count=len(must))
        if name not in ("sum", "min", "max", "mean", "var"):
            return UNKNOWN
        magnitude = float(sum(abs(Fraction(v)) for v in (*must, *may)))
        if not must and not may:
            return Bounds(None, None, floats=floats)
        if may and name in ("mean", "var"):
            return UNKNOWN
        if name == "sum":
            whole = sum((Fraction(v) for v in must), Fraction(0))
            low = whole + sum((Fraction(v) for v in may if v < 0), Fraction(0))
            high = whole + sum((Fraction(v) for v in may if v > 0), Fraction(0))
            return Bounds(low, high, magnitude, floats, len(must))
        if name in ("min", "max"):
            if not must:
                return UNKNOWN
            low, high = (min, max)[name == "max"](must), (min, max)[name == "max"]([*must, *may])
            return Bounds(Fraction(min(low, high)), Fraction(max(low, high)), magnitude, floats, len(must))
        mean = sum((Fraction(v) for v in must), Fraction(0)) / len(must)
        if name == "mean":
            return Bounds(mean, mean, magnitude / len(must), True, len(must))
        if len(must) < 2:
            return Bounds(None, None, floats=True, count=len(must))
        squares = sum(((Fraction(v) - mean) ** 2 for v in must), Fraction(0)) / (len(must) - 1)
        scale = float(sum(Fraction(v) ** 2 for v in must)) / (len(must) - 1)
        return Bounds(squares, squares, scale, True, len(must))

    def quantile_range(self, measure: Measure, members: Sequence[int], q: float) -> tuple[float, float] | None:
        """The values between which any common definition of the quantile lies; None: there is none."""
        values = sorted(v for i in members if (v := self._arguments[measure.name][i]) is not None and math.isfinite(v))
        if not values:
            return None
        rank = q * (len(values) - 1)
        low, high = max(math.floor(rank) - 1, 0), min(math.ceil(rank) + 1, len(values) - 1)
        return float(values[low]), float(values[high])

    def has_non_finite(self, measure: Measure, members: Iterable[int]) -> bool:
        values = self._arguments[measure.name]
        return any(isinstance(values[i], float) and not math.isfinite(values[i]) for i in members)


def sessions(
    members: Sequence[int], records: Sequence[TrueRecord], window: SessionWindow
) -> list[tuple[int, int, list[int]]]:
    """Sessions by their definition, record by record: (start, end, records)."""
    result: list[tuple[int, int, list[int]]] = []
    current: list[int] = []
    for i in sorted(members, key=lambda m: records[m].event_ms):
        time = records[i].event_ms
        if current:
            first, last = records[current[0]].event_ms, records[current[-1]].event_ms
            cut_ms = first // window.gap_ms * window.gap_ms + window.slices_per_window * window.gap_ms
            if time - last >= window.gap_ms:
                result.append((first, last + window.gap_ms, current))
                current = []
            elif time >= cut_ms:
                result.append((first, cut_ms, current))
                current = []
        current = [*current, i]
    if current:
        result.append((records[current[0]].event_ms, records[current[-1]].event_ms + window.gap_ms, current))
    return result


def _of_non_finite(name: str, values: Sequence[Any]) -> Bounds:
    """The value over values among which are NaN or infinities."""
    floats = [float(v) for v in values]
    if name in ("min", "max") and not any(map(math.isnan, floats)):
        value = min(floats) if name == "min" else max(floats)
        return Bounds(Fraction(value), Fraction(value), 0.0, True, len(floats)) if math.isfinite(value) else Bounds(
            value, value, 0.0, True, len(floats)
        )  # fmt: skip
    if name in ("sum", "mean") and not any(map(math.isnan, floats)):
        infinite = {v for v in floats if math.isinf(v)}
        value = infinite.pop() if len(infinite) == 1 else math.nan
        return Bounds(value, value, 0.0, True, len(floats))
    return Bounds(math.nan, math.nan, 0.0, True, len(floats))


def _same_nan(group: Group) -> Group:
    """All NaNs of a group's key as one value; -0.0 as 0.0."""
    return tuple("NaN" if isinstance(v, float) and math.isnan(v) else v for v in group)
