"""`ObservedArrivals` stores the reports of the edges of one query, and the time up to which the edges have reported.

Edges report arrivals up to *report slots* (`edgewater.arrivals.ReportSchedule`). Time advances from report slot to
report slot. The next time is the last slot that all edges have reported, except for silent edges. So the counts of all
edges are from the same moment. An edge is silent if it has not reported for `silence_timeout_ms`. The state of a silent
edge does not advance, and the trigger expects the edge to send at its usual rate. When the edge reports again, its
state catches up.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from center.early.groups import Groups
from center.early.sampling import SamplingReasonHistory
from center.early.trigger import EarlyTrigger
from edgewater.arrivals import DEFAULT_MAX_SKEW_MS, ReportSchedule, SubstreamStatistics, read_report
from edgewater.model.accuracy import Accuracy
from edgewater.synopses import IntArray
from edgewater.synopses.encoding.state import State
from edgewater.wire import SamplingReason

SILENCE_TIMEOUT_MS = 1_000  # limit: how late a silent edge is noticed
"""Wall time without a report, in addition to the event time of one sub-stream, after which an edge is silent."""
MAX_SILENCE_LAGS, MAX_LEAP_LAGS = 8, 16
"""Two times, in longest lags.

An edge starts anew after a silence of more than `MAX_SILENCE_LAGS`. The query starts anew after a leap of time of more
than `MAX_LEAP_LAGS`."""

_UNKNOWN_SLOT = -(1 << 62)  # format: below all slots

Inherited = Sequence[Any]
"""`Delays` as JSON; `sums` is base64."""


class Delays(NamedTuple):
    """The observed delays of an edge's records.

    Attributes:
        slots: number of slots for which the delays have been observed.
        sums: the edge's part of `ArrivalTriangle.sums`, float32 [arrivals or at risk, memory, lag].
    """

    slots: int
    sums: NDArray[np.float32]

    def to_list(self) -> list[Any]:
        """Returns the delays as JSON of type `Inherited`."""
        return [self.slots, *to_base64([self.sums.tobytes()])]


@dataclass(frozen=True, slots=True)
class EdgeReport:
    """Arrivals up to a report slot, from one frame of an edge.

    Attributes:
        slot: the report slot.
        substreams: statistics of the arrivals, one per sub-stream.
        unread: whether the edge may have unread input.
    """

    slot: int
    substreams: list[SubstreamStatistics]
    unread: bool = False


@dataclass(slots=True)
class _Edge:
    """The state of an expected edge.

    Attributes:
        reports: reports that are not applied yet.
        future: applied arrivals in slots after the current slot, as (slot, lag, count, group number).
        known_from: lags are known for events born in this slot or later.
        silent_slots: slots since the edge's last report; 0 if the edge is not silent.
        applied: the last applied report slot; None if no report has been applied.
        unread: whether the edge may have had unread input at its last applied report.
        checked_from: events born before this slot may have waited for the edge. Declared delays do not apply to them.
        gap: slots between the edge's last two reports; 0 before the second report.
    """

    reports: list[EdgeReport] = field(default_factory=list)
    future: list[list[int]] = field(default_factory=list)
    known_from: int = 0
    silent_slots: int = 0
    applied: int | None = None
    unread: bool = False
    checked_from: int = _UNKNOWN_SLOT
    gap: int = 0

    @property
    def reported_slots(self) -> list[int]:
        slots = [r.slot for r in self.reports]
        return slots if self.applied is None else [*slots, self.applied]

    def add(self, report: EdgeReport, resumed: bool) -> None:
        """Adds a report.

        Args:
            resumed: whether the report ends a silence that is unusually long for the edge.
        """
        had_unread = self.reports[-1].unread if self.reports else self.unread
        if report.unread or resumed or had_unread:
            self.checked_from = max(self.checked_from, report.slot)
        if self.reported_slots:
            self.gap = report.slot - max(self.reported_slots)
        self.reports.append(report)

    def take_reports(self, target: int) -> list[EdgeReport]:
        """Removes and returns the reports up to the slot `target`."""
        applied = [r for r in self.reports if r.slot <= target]
        self.reports = [r for r in self.reports if r.slot > target]
        if applied:
            self.unread = applied[-1].unread
        return applied

    def to_list(self) -> list[Any]:
        """Returns the state as JSON."""
        reports = [[r.slot, to_base64(s.to_state() for s in r.substreams), r.unread] for r in self.reports]
        lags = self.future, self.known_from, self.silent_slots
        return [reports, *lags, self.applied, self.unread, self.checked_from, self.gap]


class ObservedArrivals:
    """Stores the reports of the edges of one query. All slots are slots of the report schedule.

    Args:
        max_wait_slots: slots after a window's end at which the window is answered at the latest; None if there is no
            limit.
        speed: event ms per wall ms. It may be set when the speed of the stream's clock becomes known.

    Attributes:
        groups: the arrivals and the estimators by group.
        now_ms: event time that the query has reached.
        known_from: lags are known for events born in this slot or later.
        exceeding: by edge, the number of records that came later than the declared delays. After the first such record,
            the declared delays no longer apply.
        inherited: by edge, the delays that another query has observed. An edge is removed when its first report is
            applied.
    """

    # Attributes whose values are JSON. A snapshot has them unchanged.
    _PLAIN = ("_slot", "_previous_slot", "known_from", "_counted_from", "_sampled_before", "now_ms")

    def __init__(self, accuracy: Accuracy, schedule: ReportSchedule, max_wait_slots: int | None, speed: float) -> None:
        self._accuracy, self._schedule, self._max_wait_slots = accuracy, schedule, max_wait_slots
        self.speed = speed
        self._edges: dict[str, _Edge] = {}
        self._slot: int | None = None  # None if no time is known yet
        self._previous_slot = 0
        self.known_from = 0
        self._counted_from = _UNKNOWN_SLOT  # events born from this slot on are counted
        self._sampled_before = _UNKNOWN_SLOT  # uncounted events born before this slot may have been sampled
        self.groups = Groups(self._new_trigger, accuracy, schedule)
        self._reasons = SamplingReasonHistory()
        self.exceeding: dict[str, int] = {}
        self.inherited: dict[str, Inherited] = {}
        self.now_ms = 0

    # What is known

    @property
    def silence_timeout_ms(self) -> int:
        """Event time after which an edge that has not reported is silent."""
        return self._schedule.grid.substream_ms + round(SILENCE_TIMEOUT_MS * self.speed)

    @property
    def edges(self) -> list[str]:
        """The expected edges. The index of an edge is the number of the edge's source."""
        return list(self._edges)

    @property
    def slot(self) -> int:
        """The current slot. Estimates use the arrivals before this slot."""
        return self._slot if self._slot is not None else _UNKNOWN_SLOT

    @property
    def has_begun(self) -> bool:
        """Whether the query has a current slot."""
        return self._slot is not None

    @property
    def unread(self) -> list[str]:
        """The edges that may have unread input. The reports of these edges do not cover all arrivals."""
        return [name for name, edge in self._edges.items() if edge.unread]

    @property
    def silent(self) -> dict[str, int]:
        """By silent edge, the slots since the edge's last report."""
        return {name: edge.silent_slots for name, edge in self._edges.items() if edge.silent_slots}

    @property
    def never_reported(self) -> list[str]:
        """The edges without an applied report."""
        return [name for name, edge in self._edges.items() if edge.applied is None]

    @property
    def waits_for_readers(self) -> bool:
        """Whether an edge that is not silent has unread input, so that the edge will report more arrivals."""
        return any(edge.unread and not edge.silent_slots for edge in self._edges.values())

    @property
    def has_too_many_groups(self) -> bool:
        """Whether there are, or recently were, more than `MAX_GROUPS` groups."""
        return self.groups.overflow_until is not None

    def has_observed(self, start_ms: int) -> bool:
        """Returns whether the lags of all events of the window are known."""
        began = self._schedule.slot_at(start_ms)
        return self._slot is not None and not self.has_too_many_groups and began >= self.known_from

    def has_counted(self, start_ms: int) -> bool:
        """Returns whether all events of the window are counted. Their lags may be unknown."""
        began = self._schedule.slot_at(start_ms)
        return self._slot is not None and not self.has_too_many_groups and began >= self._counted_from

    def has_ended(self, start_ms: int) -> bool:
        """Returns whether the current slot is at or after the window's end."""
        return self._schedule.slot_at(start_ms) + self._schedule.window_slots <= self.slot

    def has_reached(self, start_ms: int, offsets: Iterable[int]) -> bool:
        """Returns whether the last advance reached one of `offsets`, which are numbers of slots after the
        window's end.
        """
        end = self._schedule.slot_at(start_ms) + self._schedule.window_slots
        return any(self._previous_slot < end + offset <= self.slot for offset in offsets)

    def has_unknown_sample(self, start_ms: int) -> bool:
        """Returns whether the number of records that sampling left out of the window may be unknown.

        This is so if an edge may have sampled without counting the records, or if a retired edge has sampled.
        """
        lost = self.groups.lost_sample or self._schedule.slot_at(start_ms) < self._sampled_before
        return lost or self.groups.from_other_edges(start_ms, self.edges)[1]

    def sampling_reasons(self, start_ms: int) -> dict[str, frozenset[SamplingReason]]:
        """Returns, for each edge that sampled the window, the reasons that the edge reported."""
        began = self._schedule.slot_at(start_ms)
        sampled = self.groups.sampled_edges(start_ms, self.edges)
        return self._reasons.in_window(sampled, began, began + self._schedule.window_slots)

    def including_all_reports(self) -> AbstractContextManager[None]:
        """Adds the reports that are not applied yet to the counts for the duration of a `with` block."""
        reports = (
            (name, statistics)
            for name, edge in self._edges.items()
            for report in edge.reports
            for statistics in report.substreams
        )
        return self.groups.including(reports, self.slot, len(self._edges))

    def delays(self) -> dict[str, Delays]:
        """Returns the delays of edges that are neither silent nor have unread input. The result is empty for a query
        with groups.
        """
        if self._accuracy.scope is not None or not len(self.groups):
            return {}
        trigger = next(iter(self.groups)).trigger
        observed, sums = trigger.triangle.observed.tolist(), trigger.triangle.sums
        return {
            name: Delays(observed[i], np.asarray(sums[:, :, i]))
            for i, (name, edge) in enumerate(self._edges.items())
            if edge.applied is not None and not edge.silent_slots and not edge.unread
        }

    def resumes(self, name: str, through_ms: int) -> bool:
        """Returns whether a report ends a silence that is unusually long for the edge. The edge may have been down."""
        edge = self._edges.get(name)
        if edge is None or not edge.gap:
            return False
        gap = self._schedule.slot_at(through_ms) - max(edge.reported_slots)
        return gap * self._schedule.grid.slot_ms > self.silence_timeout_ms and gap > 2 * edge.gap

    def next_slot(self, *, force: bool) -> tuple[int | None, list[str]]:
        """Returns `next_report_slot` at `now_ms`."""
        return next_report_slot(
            self._schedule,
            {name: edge.reported_slots for name, edge in self._edges.items()},
            {name: edge.silent_slots for name, edge in self._edges.items()},
            self._slot,
            self.now_ms,
            self.silence_timeout_ms,
            force=force,
        )

    # Changes

    def expect(self, edges: Sequence[str]) -> None:
        """Sets the expected edges. The index of an edge becomes the number of its source."""
        before, old = self.edges, self._edges
        for name in [name for name in old if name not in edges]:
            for statistics in (s for report in old[name].reports for s in report.substreams):
                self.groups.add_counts(name, statistics)
        self._edges = {name: old.get(name) or _Edge() for name in edges}
        self._reasons.keep(edges)
        if not edges:
            self._stop_counting(self.slot)
            self._slot = None
            self.groups.clear()
        elif self._slot is not None:
            self._remap_sources([before.index(name) if name in before else None for name in edges])

    def lose_sample_before(self, slot: int) -> None:
        """Notes that records that were sampled out before a slot may not be counted."""
        self._sampled_before = slot

    def inherit(self, delays: Mapping[str, Inherited]) -> None:
        """Sets the delays that another query has observed. The delays of an edge apply from the edge's first
        report on.
        """
        self.inherited = dict(delays)

    def add_report(
        self, edge: str, through_ms: int, substreams: Sequence[bytes], reason: int, unread: bool, resumed: bool = False
    ) -> None:
        """Adds an edge's report. If the edge is not expected, the report is only checked.

        Args:
            through_ms: event time up to which the edge reports arrivals.
            substreams: statistics of the arrivals, in encodings that `read_report` reads.
            reason: number of a `SamplingReason`.
            unread: whether the edge may have unread input.
            resumed: the result of `resumes`.
        """
        report = EdgeReport(self._schedule.slot_at(through_ms), self._decode(substreams), unread)
        if edge in self._edges:
            self._edges[edge].add(report, resumed)
            self._check_delays(edge, report)
            self._reasons.add(edge, report.slot, SamplingReason.from_number(reason))

    def advance(self, target: int, reporting: Sequence[str]) -> bool:
        """Advances to a slot.

        Args:
            target: the slot.
            reporting: the edges that have reported up to `target`.

        Returns:
            Whether the query has started, or has started anew after a leap of time.
        """
        begins = self._slot is None or target - self._slot > MAX_LEAP_LAGS * self._schedule.grid.lags
        if begins:
            self._begin(target)
        slot = self.slot
        joining = [name for name in reporting if self._edges[name].applied is None]
        arrived = [self._arrivals(i, name, target) for i, name in enumerate(self._edges) if name in reporting]
        rows = np.concatenate(arrived) if arrived else np.zeros((0, 5), np.int64)
        self.groups.advance(slot, target, rows, np.array([name in reporting for name in self._edges]))
        for name, edge in self._edges.items():
            edge.silent_slots = 0 if name in reporting else edge.silent_slots + target - slot
        self._previous_slot, self._slot = slot, target
        if joining:
            self._observe_joining(joining)
        if self.groups.overflow_until is not None and target >= self.groups.overflow_until:
            self._stop_counting(target)
            self.groups.clear()
            self.known_from = self._counted_from
            for edge in self._edges.values():
                edge.known_from = self.known_from
        return begins

    def forget_before(self, start_ms: int) -> list[str]:
        """Drops sub-streams that only windows before `start_ms` need, and returns the groups that may be removed.

        All these windows must be final. The change is not logged, because it follows from the ledger's state.
        """
        self.groups.forget_before(start_ms)
        self._reasons.forget_before(self._schedule.slot_at(start_ms))
        return self.groups.idle(self.slot)

    def _begin(self, target: int) -> None:
        self._slot = self.known_from = self._substream_border(target)
        # The model does not learn from earlier arrivals, because some arrivals of that time are not known.
        for edge in self._edges.values():
            edge.known_from, edge.silent_slots, edge.applied = self.known_from, 0, None
        if self.has_too_many_groups:
            self._stop_counting(self._slot)
        self.groups.begin(self._slot, len(self._edges))

    def _observe_joining(self, joining: Sequence[str]) -> None:
        """Starts to observe edges at their first reports, because it is not known when an edge began to count."""
        self._remap_sources([None if name in joining else i for i, name in enumerate(self._edges)])
        for i, name in enumerate(self._edges):
            if name in joining and name in self.inherited:
                slots, sums, *_ = self.inherited.pop(name)  # release 0.3.0 has logged four values
                self.groups.inherit(i, np.frombuffer(base64.b64decode(sums), np.float32), slots)

    def _remap_sources(self, rows: Sequence[int | None]) -> None:
        """Renumbers the sources.

        Args:
            rows: per new source, the index of the old source whose state it gets; None if the new source starts empty.
        """
        self.groups.remap_sources(rows)
        for edge, row in zip(self._edges.values(), rows, strict=True):
            if row is None:
                edge.known_from, edge.silent_slots = self.slot, 0

    def _new_trigger(self, sources: int) -> EarlyTrigger:
        schedule, accuracy = self._schedule, self._accuracy
        return EarlyTrigger(
            sources,
            schedule.grid,
            schedule.window_slots,
            accuracy.target,
            accuracy.early_kind,
            max_wait_slots=self._max_wait_slots,
            horizon=None if self.exceeding else self._declared_lags,
        )

    @property
    def _declared_lags(self) -> int | None:
        """The number of lags that the declared delays allow. A delay may begin and end anywhere within a slot."""
        delays_ms = self._accuracy.delays_ms
        return None if delays_ms is None else -(-delays_ms // self._schedule.grid.slot_ms) + 1

    def _check_delays(self, name: str, report: EdgeReport) -> None:
        """Withdraws the declared delays if a record has arrived later than they allow.

        The declared delays do not apply to records that have waited for the edge. Such records were born before one of
        these reports: the edge's first report, its first report after a silence, a report with unread input, or the
        next report after a report with unread input.
        """
        edge, allowed = self._edges[name], self._declared_lags
        if allowed is None or edge.applied is None:
            return
        for statistics in report.substreams:
            slots, lags, counts, _ = statistics.arrivals().T
            checked = slots - lags >= max(edge.known_from, edge.checked_from)
            count = int(counts[(lags >= allowed) & checked].sum())
            if count:
                if not self.exceeding:
                    self.groups.undeclare()
                self.exceeding[name] = self.exceeding.get(name, 0) + count

    def _decode(self, substreams: Iterable[bytes]) -> list[SubstreamStatistics]:
        grid, grouped = self._schedule.grid, self._accuracy.scope is not None
        return [each for state in substreams for each in read_report(state, grid, grouped=grouped)]

    def _stop_counting(self, slot: int) -> None:
        """Drops the counts of events born before a slot."""
        if self._slot is None:
            return
        skew_slots = DEFAULT_MAX_SKEW_MS // self._schedule.grid.slot_ms
        self._counted_from = self._substream_border(slot + skew_slots, up=True)
        if self.groups.lost_sample or self.groups.is_sampled:
            self._sampled_before = self._counted_from

    def _substream_border(self, slot: int, *, up: bool = False) -> int:
        """Returns the last border of sub-streams at or before a slot. With `up`, returns the first border at or after
        the slot.
        """
        slots = self._schedule.grid.substream_slots
        return -(-slot // slots) * slots if up else slot // slots * slots

    def _arrivals(self, source: int, name: str, target: int) -> IntArray:
        """Applies an edge's reports up to `target`. Arrivals before the current slot are added to the edge's silence.

        Returns:
            The arrivals from the current slot to `target`, as (slot, source, lag, count, group number).
        """
        edge, slot, lags = self._edges[name], self.slot, self._schedule.grid.lags
        applied = edge.take_reports(target)
        parts = [np.array(edge.future, np.int64).reshape(-1, 4)]
        reporting = np.array([not e.silent_slots for e in self._edges.values()])
        since = np.array([e.known_from for e in self._edges.values()])
        parts += [
            self.groups.add_report(name, s, slot, reporting, since) for report in applied for s in report.substreams
        ]
        rows = np.concatenate(parts)
        rows = rows[rows[:, 0] - rows[:, 1] >= edge.known_from]
        is_future = rows[:, 0] >= target
        edge.future = rows[is_future].tolist()
        rows = rows[~is_future]
        if edge.applied is None:  # slots before the first report are not silence, because the edge did not count then
            edge.silent_slots = 0
            rows = rows[:0]
        elif edge.silent_slots > MAX_SILENCE_LAGS * lags:
            self._remap_sources([None if i == source else i for i in range(len(self._edges))])
            rows = rows[rows[:, 0] - rows[:, 1] >= slot]
        elif edge.silent_slots:
            self.groups.catch_up(source, rows[rows[:, 0] < slot], slot)
            edge.silent_slots = 0  # new groups in the reports of other edges then treat this edge as reporting
            rows = rows[rows[:, 0] >= slot]
        edge.applied = target
        # A lag longer than the longest was reduced to the longest. The sum may then be an earlier slot than the current
        # slot, in which the event has arrived.
        rows[:, 0] = np.maximum(rows[:, 0], slot)
        return np.insert(rows, 1, source, axis=1)

    # Snapshots

    def to_state(self) -> State:
        numbers = {
            **{name: getattr(self, name) for name in self._PLAIN},
            "edges": [[name, edge.to_list()] for name, edge in self._edges.items()],
            "reasons": self._reasons.to_state(), "exceeding": self.exceeding, "inherited": self.inherited,
        }  # fmt: skip
        return State(numbers, {}, {"groups": self.groups.to_state()})

    def restore(self, state: State) -> None:
        """Sets the state of a new object from the result of `to_state`. A damaged state may raise any exception."""
        numbers = state.numbers
        for name in self._PLAIN:
            setattr(self, name, numbers[name])
        self.exceeding, self.inherited = dict(numbers["exceeding"]), dict(numbers["inherited"])
        for name, (reports, *rest) in numbers["edges"]:
            decoded = [EdgeReport(slot, self._decode(from_base64(each)), unread) for slot, each, unread in reports]
            self._edges[name] = _Edge(decoded, *rest)
        self.groups.restore(state.components["groups"])
        self._reasons.restore(numbers["reasons"])


def next_report_slot(
    schedule: ReportSchedule,
    reported: Mapping[str, Collection[int]],
    silent_slots: Mapping[str, int],
    current: int | None,
    now_ms: int,
    timeout_ms: int,
    *,
    force: bool,
) -> tuple[int | None, list[str]]:
    """Returns the slot to advance to, or None to stay, and the edges that have reported up to this slot.

    The slot is the last slot that all edges have reported, except for silent edges. So the counts of all edges are from
    one moment. If all edges are silent, time advances without reports for one longest lag.

    Args:
        reported: by edge, the last applied report slot and all later report slots.
        silent_slots: by edge, the number of slots that the edge has missed.
        current: the center's slot; None if the query has not begun.
        timeout_ms: event time after which an edge that has not reported is silent.
        force: whether to go on without the edges that have not reported the latest slot.
    """
    # A slot further in the future comes from a wrong clock.
    limit = schedule.slot_at(now_ms + timeout_ms)
    slots = {edge: frozenset(s for s in each if s <= limit) for edge, each in reported.items()}
    last = {edge: max(each) for edge, each in slots.items() if each}
    if not last:
        return None, []
    silent_before = schedule.slot_at(now_ms - timeout_ms)
    reporting = [edge for edge, slot in last.items() if slot > silent_before]
    if force:
        latest = max(last.values())
        reporting = [edge for edge in reporting if last[edge] >= latest] or reporting
    since = current if current is not None else -(1 << 62)
    if not reporting:
        target = min(schedule.slot_at(now_ms), max(last.values()) + schedule.grid.lags)
        if current is None or target <= current:
            return None, []
        return target, [edge for edge in last if target in slots[edge]]
    common = frozenset.intersection(*(slots[edge] for edge in reporting))
    target = max((slot for slot in common if slot > since), default=since)
    if target > since:
        return target, [edge for edge in slots if target in slots[edge]]
    catching_up = [edge for edge in slots if silent_slots.get(edge) and current in slots[edge]]
    return (current, catching_up) if catching_up else (None, [])


def to_base64(states: Iterable[bytes]) -> list[str]:
    """Returns each state as base64 text, for JSON."""
    return [base64.b64encode(state).decode() for state in states]


def from_base64(texts: Iterable[str]) -> list[bytes]:
    """Returns the states from the result of `to_base64`."""
    return [base64.b64decode(text) for text in texts]
