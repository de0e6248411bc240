"""The records of a query that came late, that a source rejected, or that the edge guessed about.

They stay here until a frame reports them to the center.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from edge.core.measure_inputs import MeasureArguments
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.arithmetic import to_float
from edgewater.synopses.late_values import LATE_VALUES
from edgewater.wire import UNCERTAIN, DroppedRecords, DropReason, FrameBody, Withheld

MAX_SLICES = 1_024
"""The largest number of slices for which one frame states dropped records. Beyond it, late records are reported without
their slice, and other records are reported per reason, with the range of their slices."""
COUNTED = DropReason.COUNTED.label
"""The reason of late records that are counted."""
LATE = {reason.label: reason for reason in DropReason if reason.is_late}
"""The reasons of late records that are not counted, by label."""
_REASONS = LATE | UNCERTAIN | {COUNTED: DropReason.COUNTED}

_Place = tuple[int, int, DropReason, str]
"""Slice, end of the last slice (`_ONE`: there is only this slice), reason, and `DroppedRecords.only`."""
_ONE = MIN_TIME_MS
_Amounts = dict[str, Withheld]
"""By measure, by how much late records may move a value; an absent measure is unknown."""


def late_amounts(arguments: MeasureArguments) -> _Amounts:
    """Returns by how much some late records, all together, move the value of any group.

    The effect on measures that are not in `LATE_VALUES`, and no count, is stated by the number of the records only.
    """
    result: _Amounts = {}
    for bound in arguments.bound.measures:
        measure = bound.measure
        function, above, below = measure.function.name, 0.0, 0.0
        unsent: float | None = None
        if measure.is_expensive or function not in ("count", *LATE_VALUES):
            continue
        column = arguments.argument(bound)
        if function == "count":
            above = float(arguments.records.num_rows if column is None else len(column) - column.null_count)
        elif column is not None:
            values = to_float(column.drop_null()).to_numpy(zero_copy_only=False)
            is_exact = pa.types.is_integer(column.type)
            if function in ("max", "min"):
                values = values if function == "max" else -values
                unsent = _largest(values, is_exact=is_exact) if len(values) else None
            elif function == "var":
                with np.errstate(over="ignore"):
                    above = _sum_above(values**2, is_exact=False)
            else:
                above, below = (_sum_above(sign * values, is_exact=is_exact) for sign in (1.0, -1.0))
        result[measure.name] = Withheld(measure.name, above, below, 1, unsent)
    return result


def _largest(values: np.ndarray[Any, np.dtype[np.float64]], *, is_exact: bool) -> float:
    """Returns the largest value, or slightly more if it is a rounded integer; infinite if a value is NaN."""
    largest = float(np.max(values))
    is_rounded = is_exact and abs(largest) >= 2.0**53
    return math.inf if math.isnan(largest) else math.nextafter(largest, math.inf) if is_rounded else largest


def _sum_above(values: np.ndarray[Any, np.dtype[np.float64]], *, is_exact: bool) -> float:
    """Returns the sum of the values above 0, or slightly more if it is rounded; infinite if a value is NaN."""
    total = float(np.sum(values, where=~(values <= 0.0)))
    rounding = 0.0 if is_exact and total < 2.0**53 else total * len(values) * 2.0**-50
    return math.inf if math.isnan(total) else total + rounding


def _both(some: _Amounts, others: _Amounts) -> _Amounts:
    """Returns the amounts of the records of both statements."""
    united = {}
    for name in some.keys() & others.keys():
        a, b = some[name], others[name]
        unsent = max((w.largest_unsent for w in (a, b) if w.largest_unsent is not None), default=None)
        united[name] = Withheld(
            name, a.largest_above + b.largest_above, a.largest_below + b.largest_below, 1, largest_unsent=unsent
        )
    return united


_Report = tuple[DroppedRecords, ...]


def as_recorded(dropped: _Report, late: _Report, recorded: FrameBody) -> tuple[_Report, _Report]:
    """Returns the reports of a replay without what release 0.3.0 did not state, if it has recorded the frame."""
    if not any(each.amounts for each in recorded.dropped):
        dropped = tuple(replace(each, amounts=()) for each in dropped)
    return dropped, late if recorded.late else ()


@dataclass(slots=True)
class UnreportedDrops:
    """The dropped records that no frame has reported.

    Attributes:
        counts: number of records by place.
        amounts: of late records, by place.
        since_ms: wall time of the first unreported record; None: there are none.
        most: the largest number of slices that are stated (`MAX_SLICES`).
    """

    counts: dict[_Place, int] = field(default_factory=dict)
    since_ms: int | None = None
    amounts: dict[_Place, _Amounts] = field(default_factory=dict)
    most: int = MAX_SLICES

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(
        self,
        slice_start_ms: int,
        reason: str,
        records: int,
        until_ms: int | None = None,
        late: MeasureArguments | None = None,
        only: str = "",
    ) -> None:
        """Adds records that came late, or were dropped or guessed for one of the reasons of `DropReason`; other reasons
        are not reported by slice.

        Args:
            until_ms: as in `DroppedRecords`; always given for records that did not come too late.
            late: the arguments of records that came late; None: their amounts are unknown.
            only: as in `DroppedRecords`.
        """
        if reason not in _REASONS:
            return
        key = slice_start_ms, _ONE if until_ms is None else until_ms, _REASONS[reason], only
        if key not in self.counts and len(self.counts) >= self.most:
            key = self._unite(key) if key[2].label in UNCERTAIN else (MIN_TIME_MS, _ONE, key[2], "")
        if key[2].label not in UNCERTAIN:
            added = {} if late is None else late_amounts(late)
            self.amounts[key] = _both(self.amounts.get(key, {}), added) if key in self.counts else added
        self.counts[key] = self.counts.get(key, 0) + records

    def inherit(self, other: UnreportedDrops) -> None:
        """Adds the late records of a removed version. They have no slices here, because no version has these slices."""
        for (_, _, reason, _), records in other.counts.items():
            if not reason.is_rejection and reason is not DropReason.COUNTED:
                self.add(MIN_TIME_MS, reason.label, records)
        self.since_ms = self.since_ms if other.since_ms is None or not self.counts else other.since_ms

    def _unite(self, key: _Place) -> _Place:
        """Replaces all places of a reason by one that covers them and `key`; returns that place."""
        reason = key[2]
        of_reason = [key, *(place for place in self.counts if place[2] is reason)]
        records = sum(self.counts.pop(place, 0) for place in of_reason)
        united = min(place[0] for place in of_reason), max(place[1] for place in of_reason), reason, ""
        self.counts[united] = records
        return united

    def begin(self, arrival_ms: int) -> None:
        """Sets `since_ms` to the wall time `arrival_ms`, if it is not set since the last report."""
        if self.counts and self.since_ms is None:
            self.since_ms = arrival_ms

    def take(self) -> tuple[_Report, _Report]:
        """Returns the reports of dropped records and of late records that are counted, ordered by slice, and begins new
        ones.
        """
        report = [
            DroppedRecords(
                start,
                reason,
                records,
                None if until == _ONE else until,
                self._amounts((start, until, reason, only)),
                only,
            )
            for (start, until, reason, only), records in sorted(self.counts.items())
        ]
        self.counts, self.amounts, self.since_ms = {}, {}, None
        dropped = tuple(each for each in report if each.reason is not DropReason.COUNTED)
        return dropped, tuple(each for each in report if each.reason is DropReason.COUNTED)

    def _amounts(self, place: _Place) -> tuple[Withheld, ...]:
        return tuple(amounts for _, amounts in sorted(self.amounts.get(place, {}).items()))

    def to_state(self) -> list[Any]:
        rows = []
        for place, n in sorted(self.counts.items()):
            start, until, reason, only = place
            more = [only] if only else map(_amount_to_row, self._amounts(place))
            rows.append([start, int(reason), n, until, *more])
        return [self.since_ms, rows]

    def restore(self, state: Sequence[Any]) -> None:
        """Restores what `to_state` returned."""
        self.since_ms = state[0]
        for start, reason, n, until, *more in state[1]:
            is_uncertain = DropReason(reason).label in UNCERTAIN
            place = start, until, DropReason(reason), more[0] if is_uncertain and more else ""
            self.counts[place] = n
            if not is_uncertain:
                self.amounts[place] = {row[0]: _amount_of_row(row) for row in more}


def _amount_to_row(amount: Withheld) -> list[Any]:
    """Returns the amount as JSON, which has no infinity: such a number is a text."""
    numbers: Iterable[float | None] = amount.largest_above, amount.largest_below, amount.largest_unsent
    return [amount.measure, *(str(n) if n is not None and math.isinf(n) else n for n in numbers)]


def _amount_of_row(row: Sequence[Any]) -> Withheld:
    above, below, unsent = (None if n is None else float(n) for n in row[1:])
    assert above is not None and below is not None
    return Withheld(row[0], above, below, 1, unsent)
