"""The check of a frame before it is acknowledged, against what its query expects. Pure.

A frame's body is parsed here, and nowhere else at the center. If a partial or a close cannot be right, it is refused,
and the frame states the loss of its slice instead. The other parts of the frame stay. A body that cannot be read is
replaced by the statement that it is lost. So the job reads only checked parts, and answers say which records they lack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self

import pyarrow as pa
from google.protobuf.message import DecodeError

from center.ingest.validation import bounded_text
from center.ledger.events import FRAMES, refusal
from center.storage.frame_facts import split_body, split_message
from edgewater.arrivals import read_report
from edgewater.base.errors import InvalidQuery, named
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.base.timestamps import EARLIEST_MS
from edgewater.guard.frame_work import FIELDS_PER_UNIT, MAX_FRAME_WORK, STATEMENTS_PER_UNIT, FrameWork
from edgewater.guard.partial_check import PartialCheck
from edgewater.model.accuracy import report_schedule
from edgewater.model.query import MAX_MEASURES, QuerySpec
from edgewater.model.windows import SlicedWindow
from edgewater.synopses.rests import FUNCTIONS, MAX_PARTS
from edgewater.wire import Frame, FrameBody, InputLoss, LossReason, Partial, groups_of
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import loss_from_wire, parse_body

MAX_STATEMENTS = 4_096
"""Maximum number of counts of dropped records in a frame, and maximum number of sub-streams."""
MAX_LOSSES = 512
"""Maximum number of losses that a frame states; further losses are united. An edge has a few losses per source."""
OPEN_WINDOWS = "open-windows"
"""The reason of a refusal: see `center.ingest.open_windows`."""
TOO_MANY_OPEN = (
    "its edge keeps too many windows of the query open: it has sent slices that it has not closed, or records of slices"
    " that it had closed, beyond gateway.open_windows and the windows of the query's lateness"
)
MAX_COUNT = 1 << 53  # format: integers that float64 has exactly
MAX_SOURCE = 4_096  # limit: length of a name in a frame
_SHOWN = 500  # limit: length of a message


TooOpen = Callable[[int, list[int]], Collection[int]]


@dataclass(frozen=True, slots=True)
class CheckedFrame:
    """The parts of a frame that the center keeps.

    Attributes:
        partials: the partials that were not refused.
        facts: the other statements of the frame (`center.storage.frame_facts`), with the losses of refused parts.
        reason, message: why parts of the frame were refused; None: no part was refused.
        work: the work that the frame makes for the job (`FrameWork`).
        checking: the work of the check, in the same units.
        through_ms: event time up to which the edge has answered the query, with this frame.
    """

    partials: tuple[Partial, ...] = field(repr=False)
    facts: bytes = field(repr=False)
    reason: str | None = None
    message: str = ""
    work: int = 0
    through_ms: int = MIN_TIME_MS
    checking: int = 0

    @classmethod
    def lost(cls, reason: str | None = None, message: str = "") -> Self:
        """Returns the result for a frame whose body cannot be used: only the statement that the frame is lost."""
        body = FrameBody(MIN_TIME_MS, losses=(InputLoss(FRAMES, LossReason.FRAME_DAMAGED),))
        return cls(*split_body(body), reason, message)


@dataclass(slots=True)
class _Faults:
    """The parts that were removed from a body: the first reason, their number, and the losses that the body states."""

    first: str = ""
    reason: str = LossReason.PARTIAL_REFUSED
    count: int = 0
    slices: set[int] = field(default_factory=set)
    unknown: bool = False

    def add(self, why: str, slice_start_ms: int | None = None, reason: str = LossReason.PARTIAL_REFUSED) -> None:
        """Adds a fault that loses records. Without a slice, it is unknown which records are lost."""
        self.reason = self.reason if self.first else reason
        self.first = self.first or why[:_SHOWN]
        self.count += 1
        if slice_start_ms is None:
            self.unknown = True
        else:
            self.slices.add(slice_start_ms)

    def note(self, why: str) -> None:
        """Adds a fault that loses no records."""
        self.first = self.first or why[:_SHOWN]
        self.count += 1


class FrameCheck:
    """The check of the frames of one query.

    Args:
        columns: the columns of the query's stream. If the query does not fit them, partials may have any types.

    Attributes:
        schedule: when edges report their arrivals; None: the query has no accuracy.
    """

    def __init__(self, spec: QuerySpec, columns: Mapping[str, pa.DataType] | None = None) -> None:
        assert isinstance(spec.window, SlicedWindow), "edges answer no other queries"
        self._spec, self._window = spec, spec.window
        try:
            self._partials = PartialCheck.of(spec, columns)
            bound = spec.bind(columns).measures if columns is not None else ()
        except InvalidQuery:
            self._partials, bound = PartialCheck.of(spec), ()
        self._types = {m.measure.name: m.argument.type for m in bound if m.argument is not None}
        self._withholds = spec.may_withhold
        self._kinds = {m.name: m.function.name for m in spec.measures}
        self.schedule = report_schedule(spec.window, spec.accuracy, spec.lateness_ms)
        self._grouped = spec.accuracy is not None and spec.accuracy.scope is not None

    def check(self, frame: Frame, latest_ms: int, too_open: TooOpen | None = None) -> CheckedFrame:
        """Checks a frame.

        Args:
            latest_ms: the latest event time that its edge can have read.
            too_open: called with the event time up to which the frame closes slices, and its slices. Returns the slices
                that open too many windows. None: there is no limit.

        Raises:
            CorruptFrame: the body was damaged in transit.
        """
        plain = frame.plain_body()
        try:
            body, fields = parse_body(plain)
        except (DecodeError, ValueError) as exc:
            return CheckedFrame.lost(LossReason.FRAME_DAMAGED, f"the body cannot be read: {exc}"[:_SHOWN])
        if body.HasField("report"):  # from here on, reports of all releases are in one field
            body.arrivals.CopyFrom(body.report)
            body.ClearField("report")
        work, checking = FrameWork.of(self._spec), _checking(body, fields)
        faults = self._take_out(body, latest_ms, work, too_open)
        reason, message = None, ""
        if faults.count:
            reason = faults.reason
            message = faults.first + (f", and {faults.count - 1} more" if faults.count > 1 else "")
        through_ms = body.through_ms
        return CheckedFrame(*split_message(body), reason, message, work.units, through_ms, checking)

    def _take_out(self, body: pb.FrameBody, latest_ms: int, work: FrameWork, too_open: TooOpen | None) -> _Faults:
        """Removes invalid parts from a body, and adds the losses that this causes. Adds up the work of the other
        parts."""
        faults = _Faults()
        self._bound_times(body, latest_ms, faults)
        unusable, reported = self._read_arrivals(body, latest_ms)
        wrong, open_slices = self._wrong_slices(body, reported, latest_ms, work, too_open)
        checks: tuple[tuple[Any, Callable[[Any], str]], ...] = (
            (body.partials, self._fault_of_partial),
            (body.closes, self._fault_of_close),
        )
        for items, fault_of in checks:
            kept = []
            for item in items:
                start_ms = item.slice_start_ms
                why = wrong.get(start_ms) or fault_of(item)
                if not why:
                    kept.append(item)
                elif EARLIEST_MS <= start_ms <= latest_ms:
                    reason = OPEN_WINDOWS if why is TOO_MANY_OPEN else LossReason.PARTIAL_REFUSED
                    faults.add(f"slice {start_ms}: {why}", start_ms, reason)
                else:
                    faults.note(f"slice {start_ms}: {why}")
            _keep(items, kept)
        self._bound_statements(body, latest_ms, faults)
        if unusable or not open_slices.isdisjoint(reported):
            body.ClearField("arrivals")
            reason = LossReason.PARTIAL_REFUSED if unusable else OPEN_WINDOWS
            faults.add(f"arrivals: {unusable or TOO_MANY_OPEN}", reason=reason)
        for loss in _stated(faults):
            _state(body, loss)
        return faults

    def _wrong_slices(
        self, body: pb.FrameBody, reported: set[int], latest_ms: int, work: FrameWork, too_open: TooOpen | None
    ) -> tuple[dict[int, str], set[int]]:
        """Returns two groups of slices, and adds up the work of the other slices.

        The first group are slices that the query does not have, or cannot have yet, or that are too much work for one
        frame, each with the reason. The second group are slices that would open too many windows.

        Args:
            reported: the slices for which the frame has arrivals.
        """
        parts = Counter[int]()
        for partial in body.partials:
            parts[partial.slice_start_ms] += work.of_partial(len(partial.synopsis))
        for close in body.closes:
            parts[close.slice_start_ms] += work.of_close(len(close.withheld))
        wrong = {}
        right = {s for s in parts if EARLIEST_MS <= s <= latest_ms and self._window.slice_start(s) == s}
        refused = set(too_open(body.through_ms, sorted(right | reported)) if too_open is not None else ())
        for start_ms, units in sorted(parts.items()):
            if not EARLIEST_MS <= start_ms <= latest_ms:
                wrong[start_ms] = f"is not between {EARLIEST_MS} and {latest_ms}, the latest event time by now"
            elif self._window.slice_start(start_ms) != start_ms:
                wrong[start_ms] = f"is not the start of a slice; expected {self._window.slice_start(start_ms)}"
            elif start_ms in refused:
                wrong[start_ms] = TOO_MANY_OPEN
            elif not work.add_slice(start_ms, units, MAX_FRAME_WORK):
                wrong[start_ms] = (
                    f"{units} units of work, besides {work.units} of the frame's other slices; expected at most"
                    f" {MAX_FRAME_WORK} in a frame"
                )
        return wrong, refused

    def _fault_of_partial(self, partial: pb.Partial) -> str:
        try:
            self._partials.check(partial.synopsis)
        except Exception as exc:  # foreign bytes may trigger any fault in the decoders
            return named(exc)
        return ""

    def _fault_of_close(self, close: pb.SliceClose) -> str:
        if not close.late <= close.observed <= MAX_COUNT:
            return f"{close.observed} records observed, {close.late} late; expected late ≤ observed ≤ {MAX_COUNT}"
        extent = close.HasField("first_ms"), close.HasField("last_ms")
        end_ms = self._window.slice_end(close.slice_start_ms)
        if any(extent) and not (all(extent) and close.slice_start_ms <= close.first_ms <= close.last_ms < end_ms):
            return f"first_ms {close.first_ms}, last_ms {close.last_ms}; expected both in the slice, in this order"
        if len(close.withheld) > MAX_MEASURES:
            return f"{len(close.withheld)} withheld; expected at most {MAX_MEASURES}"
        if len({w.measure for w in close.withheld}) < len(close.withheld):
            return "withheld of one measure is stated twice; expected once for each measure"
        faults = (self._fault_of_withheld(w) or self._fault_of_rest(w, close.observed) for w in close.withheld)
        return next(filter(None, faults), "")

    def _fault_of_rest(self, w: pb.Withheld, observed: int) -> str:
        """Returns the fault of a rest; empty: there is no fault."""
        name, function, parts = w.measure, self._kinds[w.measure], w.rest_parts
        shown = f"the rest of {name}: {w.rest_values} values {list(parts[:MAX_PARTS])}, squares {w.rest_squares}"
        if (w.HasField("rest_values") or parts) and not self._withholds:
            return f"{shown}; expected none: the query has no budget"
        if w.rest_values > observed or len(parts) > MAX_PARTS:
            return f"{shown}; expected at most {observed} values, with {MAX_PARTS} parts"
        if (function == "count" or function not in FUNCTIONS) and parts:
            return f"{shown}; expected no parts of a {function}"
        if function in ("min", "max") and w.rest_values != bool(parts):
            return f"{shown}; expected one value, or none"
        if w.rest_squares < 0 or (function != "var" and w.rest_squares != 0):
            return f"{shown}; expected squares of at least 0, and only of a variance"
        if function not in ("sum", "min", "max") or name not in self._types:
            return ""
        if pa.types.is_integer(self._types[name]):
            is_right = all(math.isfinite(part) and part == int(part) for part in parts)
            is_right &= function == "sum" or -(1 << 63) <= sum(map(int, parts if is_right else ())) < 1 << 63
        else:
            is_right = function == "sum" or len(parts) <= 1
        return "" if is_right else f"{shown}; expected a value of type {self._types[name]}"

    def _fault_of_withheld(self, w: pb.Withheld) -> str:
        """Returns the fault of a withheld amount; empty: there is no fault. NaN fails each comparison, so it is a
        fault."""
        amounts = (w.largest_above, w.largest_below)
        what = f"withheld of {w.measure:.100}: {amounts} of {w.groups} groups"
        if w.measure not in self._kinds:
            return f"{what}; expected a measure of the query"
        if not all(amount >= 0 for amount in (*amounts, w.above_share, w.below_share)):
            shares = f" (shares {w.above_share}, {w.below_share})"
            return f"{what}{shares}; expected amounts from 0 to infinity"
        if w.groups > MAX_COUNT or (not w.groups and any(amounts)):
            return f"{what}; expected 1 to {MAX_COUNT} groups where an amount is above 0"
        if w.HasField("largest_unsent") and not (
            self._kinds[w.measure] in ("max", "min") and not math.isnan(w.largest_unsent)
        ):
            return f"{what}, the largest unsent is {w.largest_unsent}; expected a number, and only of an extremum"
        return ""

    def _read_arrivals(self, body: pb.FrameBody, latest_ms: int) -> tuple[str, set[int]]:
        """Returns why the arrivals of a frame cannot be used (empty: they can be used), and the slices of the
        arrivals."""
        slices = set[int]()
        if not body.HasField("arrivals"):
            return "", slices
        arrivals, schedule = body.arrivals, self.schedule
        if schedule is None:
            return "the query is not answered early; expected none", slices
        if not (arrivals.through_ms <= latest_ms or arrivals.through_ms == MAX_TIME_MS):
            return f"through_ms {arrivals.through_ms}; expected at most {latest_ms}", slices
        if len(arrivals.substreams) > MAX_STATEMENTS:
            return f"{len(arrivals.substreams)} sub-streams; expected at most {MAX_STATEMENTS}", slices
        slots = schedule.grid.substream_slots
        try:
            read = [s for each in arrivals.substreams for s in read_report(each, schedule.grid, grouped=self._grouped)]
        except Exception as exc:  # as for partials
            return named(exc), set()
        for each in read:
            starts_ms, events = schedule.starts_at(each.index * slots), sum(map(int, each.counts))
            if not EARLIEST_MS <= starts_ms <= latest_ms or events > MAX_COUNT:
                why = f"{events} events from {starts_ms} on; expected at most {MAX_COUNT}, not after {latest_ms}"
                return why, set()
            slices.add(self._window.slice_start(starts_ms))
        return "", slices

    def _bound_times(self, body: pb.FrameBody, latest_ms: int, faults: _Faults) -> None:
        if latest_ms < body.through_ms < MAX_TIME_MS or body.through_ms > MAX_TIME_MS:
            faults.note(f"through_ms {body.through_ms}; expected at most {latest_ms}, or {MAX_TIME_MS}")
            body.through_ms = latest_ms
        body.through_ms = max(body.through_ms, MIN_TIME_MS)
        if body.HasField("since_ms") and abs(body.since_ms) > MAX_TIME_MS:
            faults.note(f"since_ms {body.since_ms}; expected at most {MAX_TIME_MS}")
            body.since_ms = MAX_TIME_MS

    def _bound_statements(self, body: pb.FrameBody, latest_ms: int, faults: _Faults) -> None:
        """Limits the number of losses that the edge states, and of its counts of dropped records."""
        dropped, late = (
            [d for d in each if _is_countable(d, latest_ms)][:MAX_STATEMENTS] for each in (body.dropped, body.late)
        )
        for each in (*dropped, *late):
            is_usable = len(each.amounts) <= MAX_MEASURES and not any(map(self._fault_of_withheld, each.amounts))
            if not is_usable:  # they are unknown then
                faults.note(f"slice {each.slice_start_ms}: amounts of late records that are none")
                each.ClearField("amounts")
            if not groups_of(each.only):  # they may be in any group then
                each.ClearField("only")
        losses = [x for x in body.losses if not x.HasField("from_ms") or x.from_ms <= latest_ms]
        united = reduce(InputLoss.union, map(loss_from_wire, losses[MAX_LOSSES:])) if losses[MAX_LOSSES:] else None
        for items, kept in ((body.dropped, dropped), (body.late, late), (body.losses, losses[:MAX_LOSSES])):
            if len(kept) < len(items):
                faults.note(f"{len(items) - len(kept)} statements are too many, or of times after {latest_ms}")
                _keep(items, kept)
        if united is not None:
            _state(body, united)
        for loss in body.losses:
            if loss.HasField("to_ms") and loss.to_ms > latest_ms + 1:
                loss.to_ms = latest_ms + 1
            if loss.records > MAX_COUNT:
                loss.ClearField("records")
            loss.source, loss.reason = bounded_text(loss.source, MAX_SOURCE), bounded_text(loss.reason)


def _checking(body: pb.FrameBody, fields: int) -> int:
    """Returns the work of the check of a body, in units. It counts refused parts, too."""
    lists = (body.partials, body.closes, body.losses, body.dropped, body.late, body.arrivals.substreams)
    return max(sum(len(each) for each in lists) // STATEMENTS_PER_UNIT, fields // FIELDS_PER_UNIT)


def _state(body: pb.FrameBody, loss: InputLoss) -> None:
    body.losses.add(source=loss.source, reason=loss.reason, from_ms=loss.from_ms, to_ms=loss.to_ms)


def _keep(items: Any, kept: Sequence[Any]) -> None:
    """Removes all but `kept` from a repeated field."""
    if len(kept) < len(items):
        copies = [type(item).FromString(item.SerializeToString()) for item in kept]  # removed items are invalid
        del items[:]
        items.extend(copies)


def _is_countable(dropped: pb.DroppedRecords, latest_ms: int) -> bool:
    start_ms = dropped.slice_start_ms
    known = start_ms == MIN_TIME_MS or EARLIEST_MS <= start_ms <= latest_ms
    ends = not dropped.HasField("until_ms") or start_ms < dropped.until_ms <= MAX_TIME_MS
    return known and ends and dropped.records <= MAX_COUNT


def _stated(faults: _Faults) -> Iterator[InputLoss]:
    """Yields the losses that a body states for its removed parts."""
    if len(faults.slices) <= MAX_LOSSES:
        yield from map(refusal, sorted(faults.slices))
    else:
        yield refusal(min(faults.slices)).union(refusal(max(faults.slices)))
    if faults.unknown:
        yield InputLoss(FRAMES, LossReason.FRAME_DAMAGED)
