"""Computes increments of cumulative series, such as counters that clients send as totals since their start.

Increments can be added, but totals cannot. The journal record of an increment also has the last total of its series. So
does the checkpoint. A crash therefore preserves both of them or neither, and no increment is lost or counts twice.

The code is pure: it takes times as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgewater.synopses.encoding.state import State
from edgewater.wire import DropReason

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

KEY_BYTES = 16  # derived: of 2^40 series, two have one key with a probability below 2^-48
FORGET_NS = 86_400 * 10**9  # limit: memory of series that have ended
"""When the memory is full, series without a point for this time are removed."""
_ENDED = -1  # format: no row
"""The start of a remembered point after which the end of its series was reported."""
_KIND = "series"
_NAMES = ("start", "time", "bits", "is_int", "extra")  # format: of checkpoints
_DTYPES = (np.int64, np.int64, np.int64, np.bool_, np.float64)  # format: of checkpoints


@dataclass(frozen=True, slots=True)
class Points:
    """Points of cumulative series, in any order. All arrays have the length of `keys`.

    Attributes:
        keys: `KEY_BYTES` that identify the series of each point, such as a digest of its attributes.
        start_ns: time at which the count of the point's total began; 0 if unknown.
        time_ns: time of the point.
        bits: the total, not negative: an integer, or the bits of a float64.
        is_int: whether `bits` is an integer.
        extra: a second total, which may also decrease, such as the sum of a histogram; zeros if there is none.
    """

    keys: Sequence[bytes]
    start_ns: IntArray
    time_ns: IntArray
    bits: IntArray
    is_int: BoolArray
    extra: FloatArray

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays, in the order of the constructor."""
        return self.start_ns, self.time_ns, self.bits, self.is_int, self.extra

    @property
    def floats(self) -> FloatArray:
        return np.where(self.is_int, self.bits.astype(np.float64), self.bits.view(np.float64))


@dataclass(frozen=True, slots=True)
class SeriesUpdate:
    """A change of a `SeriesMemory`: the last point of each series of a batch.

    Attributes:
        since_ns: the new value of `SeriesMemory.since_ns`.
        forget_before_ns: other series whose last point is earlier than this time are removed.
    """

    last: Points
    since_ns: int
    forget_before_ns: int = 0

    def to_bytes(self) -> bytes:
        return _pack(self.last, {"since_ns": self.since_ns, "forget_before_ns": self.forget_before_ns})

    @classmethod
    def from_bytes(cls, data: bytes) -> SeriesUpdate:
        last, numbers = _unpack(data)
        return cls(last, numbers["since_ns"], numbers["forget_before_ns"])


@dataclass(frozen=True, slots=True)
class Increments:
    """The increments of points. All arrays have the length of the points.

    Attributes:
        counts: whether the point has an increment. A point that is rejected, late or repeated has none. The first point
            of a series also has none if its total may have begun before the memory.
        added: the increments, as the totals of points.
        out_of_order: whether the point is rejected, because it is late and has another start, or because another point
            has the same time and another total. Probably two processes send the same series.
        guesses: masks of the points whose increments, or whose lack of increments, are assumed.
        too_many: whether the point is rejected, because the memory is full and the series is new.
        update: the change to apply to the memory when the increments are ingested.
    """

    counts: BoolArray
    added: Points
    out_of_order: BoolArray
    too_many: BoolArray
    guesses: Mapping[DropReason, BoolArray]
    update: SeriesUpdate


def _no_points() -> Points:
    return Points((), *(np.zeros(0, dtype) for dtype in _DTYPES))  # type: ignore[arg-type]


@dataclass(slots=True)
class SeriesMemory:
    """The last point of each series of a source.

    Attributes:
        since_ns: every series with a point after this time is in the memory. The first total of an unknown series is an
            increment only if the series began after this time. Otherwise the total may have been counted before.
    """

    since_ns: int
    _rows: dict[bytes, int] = field(default_factory=dict)
    _last: Points = field(default_factory=_no_points)

    def __len__(self) -> int:
        return len(self._rows)

    def increments(
        self, points: Points, now_ns: int, max_series: int, ended: Mapping[bytes, Sequence[int]] | None = None
    ) -> Increments:
        """Returns the increments of points. Changes nothing. O(n log n).

        A series begins anew when its start is not before the time of its last point. Its total is then the increment.
        A smaller total is assumed to begin the series anew, too. Otherwise the increment is the difference of totals.
        If two such points have different starts, their intervals overlap, so this is an assumption.

        Args:
            now_ns: wall time, to find series that can be removed.
            max_series: the largest number of series in the memory.
            ended: by series, the times in ns at which its end was reported.
        """
        ended = ended or {}
        ids, first_of = self._numbered(points.keys)
        known, forget_before_ns = len(self), 0
        stale = np.zeros(known, np.bool_)
        if known + len(first_of) > max_series:
            forget_before_ns = now_ns - FORGET_NS
            stale = self._last.time_ns[:known] < forget_before_ns
            stale[ids[ids < known]] = False
        too_many = ids >= known + max(max_series - known + int(stale.sum()), 0)
        in_memory = ids < known
        since_ns = max(self.since_ns, forget_before_ns)
        order, previous, has_previous, out_of_order, late = self._ordered(points, ids, in_memory, too_many)
        if ended:
            spans = zip(order.tolist(), previous.time_ns.tolist(), points.time_ns[order].tolist(), strict=True)
            has_end = [any(begin < t < end for t in ended.get(points.keys[at], ())) for at, begin, end in spans]
            previous = replace(previous, start_ns=np.where(has_end, _ENDED, previous.start_ns))
        counts, added, guesses = _added(points, order, previous, has_previous, since_ns)
        guesses[DropReason.LATE_TOTAL] = late & (points.floats != 0)
        last = _take(points, order[np.append(ids[order][1:] != ids[order][:-1], True)[: len(order)]])
        update = SeriesUpdate(self._with_ends(last, ended), since_ns, forget_before_ns)
        return Increments(counts, added, out_of_order, too_many, guesses, update)

    def last_ns(self, keys: Sequence[bytes]) -> IntArray:
        """Returns the times of the last points of series; -1 for a series that is not in the memory."""
        rows = np.array([self._rows.get(key, -1) for key in keys], np.int64)
        return np.where(rows < 0, -1, self._points(rows).time_ns)

    def _with_ends(self, last: Points, ended: Mapping[bytes, Sequence[int]]) -> Points:
        """Returns the last points of a batch, and the remembered points of further series that have ended."""
        has_end = [max(ended.get(key, (0,))) > t for key, t in zip(last.keys, last.time_ns, strict=True)]
        start_ns = np.where(has_end, _ENDED, 0)
        last = replace(last, start_ns=np.where(start_ns == 0, last.start_ns, start_ns).astype(np.int64))
        keys = [key for key in ended.keys() - set(last.keys) if key in self._rows]
        known = self._points(np.array([self._rows[key] for key in keys], np.int64))
        known = replace(known, start_ns=np.full(len(keys), _ENDED))
        joined = map(np.concatenate, zip(last.columns, known.columns, strict=True))
        return Points([*last.keys, *keys], *joined)

    def _numbered(self, keys: Sequence[bytes]) -> tuple[IntArray, dict[bytes, int]]:
        """Returns a number for each point's series, and the new series. The number is the row, or follows all rows for
        a new series.
        """
        rows, new, known = self._rows, dict[bytes, int](), len(self._rows)
        ids = [rows.get(key, -1) for key in keys]
        for at, row in enumerate(ids):
            if row < 0:
                ids[at] = new.setdefault(keys[at], known + len(new))
        return np.array(ids, np.int64), new

    def _ordered(
        self, points: Points, ids: IntArray, in_memory: BoolArray, too_many: BoolArray
    ) -> tuple[IntArray, Points, BoolArray, BoolArray, BoolArray]:
        """Returns (order, previous, has_previous, out_of_order, late).

        `order` has the indices of the points that may count, by series and time. `previous` has the point before each
        of them, if `has_previous`. `out_of_order` and `late` are masks of all points.
        """
        n = len(points)
        before = self._points(np.where(in_memory, ids, -1))
        earlier = in_memory & (points.time_ns <= before.time_ns)
        # The increment of a late point is part of the increment of the later point of the same process.
        is_late = earlier & (points.time_ns < before.time_ns)
        is_process = (points.start_ns == before.start_ns) | (points.start_ns == 0) | (before.start_ns <= 0)
        out_of_order = np.where(is_late, ~is_process, earlier & (points.floats != before.floats))
        is_included = (points.start_ns > 0) & (points.start_ns == before.start_ns) & (points.floats <= before.floats)
        order = np.lexsort((np.arange(n), points.time_ns, ids))
        order = order[~(earlier | too_many)[order]]
        follows = np.append(False, ids[order][1:] == ids[order][:-1])[: len(order)]
        repeated = follows & (np.append(0, points.time_ns[order][:-1])[: len(order)] == points.time_ns[order])
        first = np.maximum.accumulate(np.where(repeated, 0, np.arange(len(order))))
        out_of_order[order[repeated & (points.floats[order] != points.floats[order][first])]] = True
        order, follows = order[~repeated], follows[~repeated]
        shifted = np.append(order[:1], order[:-1])
        pairs = zip(points.columns, before.columns, strict=True)
        previous = Points((), *(np.where(follows, of_batch[shifted], of_row[order]) for of_batch, of_row in pairs))
        return order, previous, follows | in_memory[order], out_of_order, is_late & is_process & ~is_included

    def _points(self, rows: IntArray) -> Points:
        """Returns the last points of series by row. Row -1 gives a point with start 0 and time 0."""

        def of(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if not len(column):
                return np.zeros(len(rows), column.dtype)
            return np.where(rows < 0, np.zeros(1, column.dtype), column[rows])

        return Points((), *map(of, self._last.columns))

    def apply(self, update: SeriesUpdate) -> None:
        self.since_ns = update.since_ns
        if update.forget_before_ns:
            self._forget(update.forget_before_ns, update.last.keys)
        rows = self._rows
        at = np.array([rows.setdefault(key, len(rows)) for key in update.last.keys], np.int64)
        if (more := len(rows) - len(self._last.bits)) > 0:
            free = more + len(rows) // 4
            self._last = Points((), *(np.append(each, np.zeros(free, each.dtype)) for each in self._last.columns))
        # A point without a start does not replace the known start.
        known_ns, start_ns = self._last.start_ns[at], update.last.start_ns
        last = replace(update.last, start_ns=np.where((start_ns != 0) | (known_ns < 0), start_ns, known_ns))
        for remembered, new in zip(self._last.columns, last.columns, strict=True):
            remembered[at] = new

    def _forget(self, before_ns: int, but: Sequence[bytes]) -> None:
        stays = self._last.time_ns[: len(self)] >= before_ns
        stays[[self._rows[key] for key in but if key in self._rows]] = True
        left = np.flatnonzero(stays)
        keys = list(self._rows)
        self._rows = {keys[row]: at for at, row in enumerate(left.tolist())}
        self._last = Points((), *(column[left] for column in self._last.columns))

    def to_bytes(self) -> bytes:
        """Returns all series. O(n)."""
        last = replace(self._points(np.arange(len(self))), keys=list(self._rows))
        return _pack(last, {"since_ns": self.since_ns})

    @classmethod
    def from_bytes(cls, data: bytes) -> SeriesMemory:
        last, numbers = _unpack(data)
        result = cls(numbers["since_ns"])
        result.apply(SeriesUpdate(last, numbers["since_ns"]))
        return result


def _added(
    points: Points, order: IntArray, previous: Points, has_previous: BoolArray, since_ns: int
) -> tuple[BoolArray, Points, dict[DropReason, BoolArray]]:
    """Returns a mask of the points with an increment, the increments, and masks of the guesses. All have the length of
    `points`.
    """
    now = _take(points, order)
    both_int = now.is_int & previous.is_int
    smaller = np.where(both_int, now.bits < previous.bits, now.floats < previous.floats)
    has_other_start = (previous.start_ns != 0) & (now.start_ns != 0) & (now.start_ns != previous.start_ns)
    begins = (now.start_ns != 0) & (now.start_ns != previous.start_ns) & (now.start_ns >= previous.time_ns)
    # If the start equals the point's time, the true start is unknown.
    has_start = (now.start_ns != 0) & (now.start_ns < now.time_ns)
    counts = np.zeros(len(points), np.bool_)
    counts[order] = np.where(has_previous, has_start | ~begins, has_start & (now.start_ns >= since_ns))
    overlaps = has_previous & ~begins & ~smaller & (has_other_start | (previous.start_ns < 0)) & (previous.floats != 0)
    guesses = {
        DropReason.FIRST_TOTAL: ~counts[order] & (now.floats != 0),
        DropReason.OVERLAPPING_TOTAL: overlaps,
        DropReason.ASSUMED_RESET: has_previous & ~begins & smaller,
    }
    difference = np.where(both_int, now.bits - previous.bits, (now.floats - previous.floats).view(np.int64))
    differs = has_previous & ~begins & ~smaller
    added = replace(points, bits=points.bits.copy(), is_int=points.is_int.copy(), extra=points.extra.copy())
    added.bits[order] = np.where(differs, difference, now.bits)
    added.is_int[order] = np.where(differs, both_int, now.is_int)
    with np.errstate(invalid="ignore"):  # an infinite sum grows by an unknown number, NaN
        added.extra[order] = np.where(differs, now.extra - previous.extra, now.extra)
    for reason, at_order in guesses.items():
        guesses[reason] = np.zeros(len(points), np.bool_)
        guesses[reason][order] = at_order
    return counts, added, guesses


def _take(points: Points, at: IntArray) -> Points:
    return Points([points.keys[each] for each in at.tolist()], *(column[at] for column in points.columns))


def _pack(last: Points, numbers: dict[str, int]) -> bytes:
    arrays = dict(zip(_NAMES, last.columns, strict=True))
    return State({**numbers, "count": len(last)}, {"keys": b"".join(last.keys), **arrays}).pack(_KIND)


def _unpack(data: bytes) -> tuple[Points, dict[str, int]]:
    state = State.unpack(data, _KIND)
    keys = [state.arrays["keys"][at : at + KEY_BYTES] for at in range(0, state.numbers["count"] * KEY_BYTES, KEY_BYTES)]
    return Points(keys, *(state.arrays[name] for name in _NAMES)), state.numbers
