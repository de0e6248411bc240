"""What the center knows of the arrivals at the edges of one query, and what its windows come to. Pure.

Edges tell of arrivals up to *points* (`edgewater.accuracy`). Time advances from point to point: to the last one that
all edges which can be heard have told, so that the numbers of all of them are of the same moment. An edge that has told
nothing for `patience` cannot be heard. It stands still, the watermark expects of it what it usually does, and when
it speaks again it catches up.

Each group of a query with groups is a `Stratum` with a watermark of its own; without groups there is one. With more
groups than `MAX_GROUPS` at a time all are let go, and for a while windows wait until they are complete.

All that changes this state goes through `apply`, as a note of JSON. The notes since a snapshot are the state's log:
applying them to the snapshot again gives the same state, and so the same answers.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from center.early_trigger.trigger import Watermark
from center.estimation.alignment import next_point
from center.estimation.arrival_counts import Report
from center.estimation.conformal import IntervalRecord
from center.estimation.group_batch import Look
from center.estimation.groups import Groups
from center.estimation.prediction import Outlook, Prediction, assembled
from center.sampling import SamplingReasonHistory
from edgewater.accuracy import Accuracy
from edgewater.arrivals import DEFAULT_MAX_SKEW_MS, GroupedSubstream, ReportSchedule, SubstreamStatistics
from edgewater.synopses import IntArray
from edgewater.wire.frames import SamplingReason

PATIENCE_MS = 1_000
"""Event time, besides a sub-stream, after which an edge that has told nothing cannot be heard."""
MAX_BEHIND, MAX_LEAP = 8, 16
"""In longest lags: after how much silence an edge, or a query, is begun with anew."""
RECORD = 400
"""Windows over which coverage is measured."""
FURTHEST = 10.0
"""In half-widths: beyond it an error is as bad as any."""
LOOKS = tuple(5 << n for n in range(12))
"""Slots after a window's end at which an early answer with groups is looked at again."""

GONE = "the window has records of edges that are not expected any more, which the estimate leaves out"

Note = list[Any]


class AccuracyBook:
    """One query's arrivals and windows. Slots are counted as the report schedule does.

    Args:
        latest_slots: after a window's end the answer is given at the latest so many slots later.
        speed: event ms per wall ms.
    """

    def __init__(
        self, accuracy: Accuracy, schedule: ReportSchedule, latest_slots: int | None, speed: float = 1.0
    ) -> None:
        self.accuracy, self.schedule, self._latest = accuracy, schedule, latest_slots
        self.patience_ms = schedule.grid.substream_ms + round(PATIENCE_MS * speed)
        self.edges: list[str] = []
        self._slot: int | None = None  # None: nothing is known of any time
        self._before = 0  # the slot before time last went on
        self._base = 0  # of windows that began before it nothing is known of when their records came
        self._counted = -(1 << 62)  # and of those before this one, not how many came
        self._lost = -(1 << 62)  # and of those before this one, some were not processed
        self._groups = Groups(self._fresh, accuracy, schedule)
        self._first: dict[str, int] = {}  # by edge: what was born before is in no watermark
        self._behind: dict[str, int] = {}  # by edge: slots since it was last heard
        self._applied: dict[str, int] = {}
        self._reports: dict[str, list[Report]] = {}
        self._ahead: dict[str, list[list[int]]] = {}  # (slot, lag, count, stratum) of arrivals with a time to come
        self._reasons = SamplingReasonHistory()
        self._intervals = IntervalRecord(accuracy.confidence, accuracy.scope)
        self._unread: dict[str, bool] = {}  # by edge: it may have input that it had not read when it told last
        self._waits: dict[int, int] = {}
        self._given: dict[int, tuple[Prediction, Prediction, bool]] = {}  # the first answer, the last, was it early
        self.now_ms = 0
        self.notes: list[Note] = []
        self.outcomes: deque[float] = deque(maxlen=RECORD)

    # What it is told

    def apply(self, note: Note) -> None:
        """The one way to change it; the note is kept in `notes` for the log."""
        kind, *rest = note
        change: dict[str, Callable[..., None]] = {
            "expect": self._expect, "report": self._report, "advance": self._advance, "wait": self._wait,
            "given": self._note_given, "finish": self._finish, "idle": self._groups.let_go,
        }  # fmt: skip
        change[kind](*rest)
        self.notes.append(note)

    def expect(self, edges: Iterable[str]) -> None:
        if list(edges) != self.edges:
            self.apply(["expect", list(edges)])

    def report(
        self, edge: str, through_ms: int, substreams: Iterable[bytes], sampled: SamplingReason = SamplingReason.NONE,
        unread: bool = False,
    ) -> None:  # fmt: skip
        """What `Arrivals` says. Raises SynopsisError for statistics that cannot be read; nothing is changed then."""
        more = [int(sampled), unread] if sampled or unread else []
        self.apply(["report", edge, through_ms, _in_base64(substreams), *more])

    def advance(self, now_ms: int, *, force: bool = False) -> None:
        """Event time has come to `now_ms`. With `force`, edges that have not told of it yet are not waited for."""
        self.now_ms = max(self.now_ms, now_ms)
        told = {e: self._points(e) for e in self.edges}
        target, heard = next_point(
            self.schedule, told, self._behind, self._slot, self.now_ms, self.patience_ms, force=force
        )
        if target is not None:
            self.apply(["advance", target, heard])

    def given(self, start_ms: int, prediction: Prediction, *, early: bool) -> None:
        """The window has been answered so; or, not early, it has been answered with all there is."""
        self.apply(["given", start_ms, early, *prediction.to_list()])

    def finish(self, start_ms: int) -> bool | None:
        """The window is final; whether its first early answer's intervals hold the truth, if that can be told."""
        first = self._given.get(start_ms)
        held: list[bool] = []
        ratios: list[float] = []
        if first is not None and first[2] and not self._groups.others(start_ms, self.edges)[0]:
            known = [o for o in first[0].outlooks if o.promised]
            with self._groups.told_ahead(self._told_ahead(), self.slot, len(self.edges)):
                truths = self._groups.truths(start_ms, self.edges)
            told = [(o, truth) for o in known if (truth := truths.get(o.key)) is not None]
            if len(told) == len(known):
                held = [_holds(o, truth) for o, truth in told]
                ratios = [_ratio(o, truth, first[0].widening) for o, truth in told] if first[0].bounded else []
        if first is not None or start_ms in self._waits:
            self.apply(["finish", start_ms, self._share(held), ratios])
        return all(held) if held else None

    def _share(self, held: Sequence[bool]) -> float | None:
        """What the window counts in the record of coverage."""
        if not held:
            return None
        return float(all(held)) if self.accuracy.scope == "all" else sum(held) / len(held)

    # What it says

    @property
    def slot(self) -> int:
        """All that is said is of what had arrived by the beginning of this slot."""
        return self._slot if self._slot is not None else -(1 << 62)

    @property
    def coverage(self) -> float | None:
        """Of a query whose scope is each group, the part of intervals; else of windows."""
        return sum(self.outcomes) / len(self.outcomes) if self.outcomes else None

    @property
    def is_crowded(self) -> bool:
        """There are more groups than can be told apart, or were until lately."""
        return self._groups.crowded_until is not None

    @property
    def groups(self) -> int:
        return len(self._groups)

    def is_seen(self, start_ms: int) -> bool:
        """Whether the window has begun since arrivals are known."""
        return self._slot is not None and not self.is_crowded and self.schedule.slot_at(start_ms) >= self._base

    def has_ended(self, start_ms: int) -> bool:
        return self.schedule.slot_at(start_ms) + self.schedule.window_slots <= self.slot

    def may_revise(self, start_ms: int) -> bool:
        """Whether an early answer is to be looked at again.

        With groups that is at ever longer intervals, for each has a watermark to be asked. And it is not if a silent
        edge may have what is older than the longest lag, for no model has that.
        """
        began = self.schedule.slot_at(start_ms)
        if self._waits_for_readers:
            return False
        if min(max(self._behind.values(), default=0), self.slot - began) > self.schedule.grid.lags:
            return False
        end = began + self.schedule.window_slots
        return self.accuracy.scope is None or any(self._before < end + at <= self.slot for at in LOOKS)

    def last_given(self, start_ms: int) -> Prediction | None:
        given = self._given.get(start_ms)
        return given[1] if given else None

    def judge(self, start_ms: int) -> Prediction | None:
        """The answer, if it is to be given now: each group with a promise is good enough, or will not be."""
        if not self.is_seen(start_ms) or not self.has_ended(start_ms) or self._waits.get(start_ms, 0) > self.slot:
            return None
        if self._waits_for_readers:
            return None
        looks, reasons, until = self._groups.judge(start_ms, self.edges, self._intervals.widening)
        if until is not None:
            self.apply(["wait", start_ms, until])
        if not reasons or until is not None:
            return None
        return self._predicted(start_ms, looks, reasons, self.unread, widened=True)

    def predict(self, start_ms: int) -> Prediction:
        """The window as it looks now, good enough or not."""
        looks = self._groups.looks(start_ms, self.edges, widening=self._intervals.widening)
        return self._predicted(start_ms, looks, {}, self.unread, widened=True)

    def settled(self, start_ms: int) -> tuple[Prediction | None, dict[str, frozenset[SamplingReason]]]:
        """What a complete window comes to of which some records were not processed; None: the data say it. And by edge
        that did not, why: none if it did not say.

        All of the window has been told, if not of the times that all edges have told of. So it need not have ended
        here, as when sources end in its midst, nor have begun since arrivals are known, as after a long silence.
        """
        if self._slot is None or self.is_crowded or self.schedule.slot_at(start_ms) < self._counted:
            return None, {}
        with self._groups.told_ahead(self._told_ahead(), self.slot, len(self.edges)):
            because = self.sampled_because(start_ms)
            if not because:
                return None, {}
            return self._predicted(start_ms, self._groups.looks(start_ms, self.edges, complete=True), {}), because

    def _told_ahead(self) -> Iterator[tuple[str, SubstreamStatistics | GroupedSubstream]]:
        """What edges have told of times to which not all have told."""
        return ((e, s) for e in self.edges for report in self._reports.get(e, ()) for s in report.substreams)

    def _predicted(
        self, start_ms: int, looks: Sequence[Look], reasons: Mapping[str, str], unread: Sequence[str] = (), *,
        widened: bool = False,
    ) -> Prediction:  # fmt: skip
        outlooks = [outlook for look in looks for outlook in look.outlooks(reasons)]
        silent = tuple(e for e in self.edges if self._behind.get(e))
        unheard = [e for e in self.edges if e not in self._applied]
        waited = max(self.slot - self.schedule.slot_at(start_ms) - self.schedule.window_slots, 0)
        said = assembled(outlooks, self.accuracy.scope is not None, unheard, silent, waited, unread,
                         self._intervals.widening if widened else 1.0)  # fmt: skip
        has_others, _ = self._groups.others(start_ms, self.edges)
        return replace(said, met=False, reason=GONE) if said.met and has_others else said

    @property
    def unread(self) -> list[str]:
        """Edges that may have had input which they had not read: what they told is not all that had come."""
        return [edge for edge in self.edges if self._unread.get(edge)]

    @property
    def _waits_for_readers(self) -> bool:
        """An edge that can be heard has not read all, and will say what has come."""
        return any(not self._behind.get(edge) for edge in self.unread)

    def sampled_because(self, start_ms: int) -> dict[str, frozenset[SamplingReason]]:
        """By edge that counted some of the window's records and did not process them, why: none if it did not say."""
        lacking = self._groups.lacking(start_ms, self.edges)
        began = self.schedule.slot_at(start_ms)
        edges = [edge for edge, lacks in zip(self.edges, lacking, strict=True) if lacks]
        return self._reasons.in_window(edges, began, began + self.schedule.window_slots)

    def rates(self) -> dict[str, float]:
        """By edge, what part of its records the next window needs, as the watermarks plan it."""
        if not len(self._groups):
            return dict.fromkeys(self.edges, 1.0) if self.is_crowded else {}
        last = self._given[max(self._given)][1] if self._given else None
        rates = self._groups.rates({o.key for o in last.outlooks if o.promised} if last is not None else set())
        return dict(zip(self.edges, rates, strict=True)) if rates else dict.fromkeys(self.edges, 1.0)

    @property
    def has_lost_sample(self) -> bool:
        """Whether windows may lack records that edges did not process, and nothing can be said of how many."""
        return self._groups.lost_sample

    def may_lack(self, start_ms: int) -> bool:
        """Whether that is so of the window, or an edge that is not expected any more has sampled it."""
        lost = self.has_lost_sample or self.schedule.slot_at(start_ms) < self._lost
        return lost or self._groups.others(start_ms, self.edges)[1]

    # Changes

    def _expect(self, edges: Sequence[str]) -> None:
        before, self.edges = self.edges, list(edges)
        self._reasons.keep(self.edges)
        for edge in [e for e in self._reports if e not in self.edges]:
            for told in (s for report in self._reports[edge] for s in report.substreams):
                self._groups.add_up(edge, told)
        for table in (self._applied, self._reports, self._ahead, self._first, self._behind, self._unread):
            for edge in [e for e in table if e not in self.edges]:
                del table[edge]
        if not self.edges:
            self._uncount(self.slot)
            self._slot = None
            self._groups.clear()
        elif self._slot is not None:
            self._reseat([before.index(e) if e in before else None for e in self.edges])

    def _reseat(self, rows: Sequence[int | None]) -> None:
        """Other sources: row i is what was row `rows[i]`, or a new one."""
        self._groups.reseat(rows)
        for edge, row in zip(self.edges, rows, strict=True):
            if row is None:
                self._first[edge] = self.slot
                self._behind[edge] = 0

    def _fresh(self, sources: int) -> Watermark:
        clock = self.schedule
        target, kind = self.accuracy.target, self.accuracy.early_kind
        return Watermark(sources, clock.grid, clock.window_slots, target, kind, latest_slots=self._latest)

    def _report(
        self, edge: str, through_ms: int, substreams: Sequence[str], sampled: int = 0, unread: bool = False
    ) -> None:
        """An older release noted no reason, and did not know what was unread."""
        read = self._read(substreams)
        if edge in self.edges:
            point = self.schedule.slot_at(through_ms)
            self._reports.setdefault(edge, []).append(Report(point, read, unread))
            self._reasons.add(edge, point, SamplingReason.from_number(sampled))

    def _read(self, substreams: Sequence[str]) -> list[SubstreamStatistics | GroupedSubstream]:
        kind = SubstreamStatistics if self.accuracy.scope is None else GroupedSubstream
        return [kind.from_state(base64.b64decode(s), self.schedule.grid) for s in substreams]

    def _points(self, edge: str) -> list[int]:
        """The points that the edge has told and that lie ahead of what was applied."""
        points = [r.point for r in self._reports.get(edge, ())]
        return [*points, self._applied[edge]] if edge in self._applied else points

    def _advance(self, target: int, heard: Sequence[str]) -> None:
        if self._slot is None or target - self._slot > MAX_LEAP * self.schedule.grid.lags:
            self._begin(target, heard)
            return
        slot = self._slot
        told = [self._arrivals(source, edge, slot, target) for source, edge in enumerate(self.edges) if edge in heard]
        rows = np.concatenate(told) if told else np.zeros((0, 5), np.int64)
        self._groups.advance(slot, target, rows, np.array([e in heard for e in self.edges]))
        for edge in self.edges:
            self._behind[edge] = 0 if edge in heard else self._behind.get(edge, 0) + target - slot
        self._before, self._slot = slot, target
        if self._groups.crowded_until is not None and target >= self._groups.crowded_until:
            self._uncount(target)
            self._groups.clear()
            self._base = self._counted
            self._first = dict.fromkeys(self.edges, self._base)

    def _begin(self, target: int, heard: Sequence[str]) -> None:
        """Starts at `target`, or anew after a time of which nothing is known."""
        self._slot = self._base = self._rounded(target)
        # What has come before has no lag that could be learnt from, for what came with it is not known.
        self._first = dict.fromkeys(self.edges, self._base)
        self._behind = dict.fromkeys(self.edges, 0)
        if self.is_crowded:
            self._uncount(self._slot)
        self._groups.begin(self._slot, len(self.edges))
        self._given, self._waits = {}, {}
        self._applied = dict.fromkeys(heard, self._base)
        self._advance(target, heard)

    def _uncount(self, slot: int) -> None:
        """What came up to a slot is not counted any more."""
        if self._slot is None:
            return
        self._counted = self._rounded(slot + DEFAULT_MAX_SKEW_MS // self.schedule.grid.slot_ms, up=True)
        if self._groups.lost_sample or self._groups.lacks_values:
            self._lost = self._counted

    def _rounded(self, slot: int, *, up: bool = False) -> int:
        """The border of sub-streams at or before a slot; with `up`, at or after it."""
        slots = self.schedule.grid.substream_slots
        return -(-slot // slots) * slots if up else slot // slots * slots

    def _arrivals(self, source: int, edge: str, slot: int, target: int) -> IntArray:
        """Takes in an edge's reports up to `target`; what it tells of slots before `slot` it catches up with.

        Returns:
            (slot, source, lag, count, stratum) of arrivals in [slot, target).
        """
        lags = self.schedule.grid.lags
        reports = self._reports.get(edge, [])
        taken = [r for r in reports if r.point <= target]
        self._reports[edge] = [r for r in reports if r.point > target]
        if taken:
            self._unread[edge] = taken[-1].unread
        parts = [np.array(self._ahead.pop(edge, []), np.int64).reshape(-1, 4)]
        reporting = np.array([not self._behind.get(e) for e in self.edges])
        parts += [self._groups.tell(edge, s, slot, reporting) for report in taken for s in report.substreams]
        found = np.concatenate(parts)
        found = found[found[:, 0] - found[:, 1] >= self._first[edge]]
        later = found[:, 0] >= target
        self._ahead[edge] = found[later].tolist()
        found = found[~later]
        behind = self._behind.get(edge, 0)
        if behind > MAX_BEHIND * lags:
            self._reseat([None if e == edge else i for i, e in enumerate(self.edges)])
            found = found[found[:, 0] - found[:, 1] >= slot]
        elif behind:
            self._groups.come_back(source, found[found[:, 0] < slot], slot)
            self._behind[edge] = 0  # so that groups which others tell of next take it as reporting
            found = found[found[:, 0] >= slot]
        self._applied[edge] = target
        # A lag longer than the longest was cut to it: the arrival is now, whatever slot that comes to.
        found[:, 0] = np.maximum(found[:, 0], slot)
        return np.insert(found, 1, source, axis=1)

    def _wait(self, start_ms: int, until: int) -> None:
        self._waits[start_ms] = until

    def _note_given(self, start_ms: int, early: bool, *parts: Any) -> None:
        prediction, first = Prediction.read(parts), self._given.get(start_ms)
        self._given[start_ms] = (first[0], prediction, first[2]) if first else (prediction, prediction, early)
        self._waits.pop(start_ms, None)
        if first is None and self._slot is not None:
            self._groups.learn(start_ms, self.edges, prediction.outlooks)

    def _finish(self, start_ms: int, covered: float | None, ratios: Sequence[float] = ()) -> None:
        """An older release did not note how far off the intervals were."""
        self._intervals.note(ratios)
        self._waits.pop(start_ms, None)
        if self._given.pop(start_ms, None) is not None and covered is not None:
            self.outcomes.append(covered)

    def forget_before(self, start_ms: int) -> None:
        """Sub-streams before it are of final windows only. Not noted: it follows from the ledger's state."""
        self._groups.forget_before(start_ms)
        self._reasons.forget_before(self.schedule.slot_at(start_ms))
        if idle := self._groups.idle(self.slot):
            self.apply(["idle", idle])

    # Snapshots

    def to_state(self) -> dict[str, Any]:
        """JSON. With the notes behind it, it is all there is."""
        return {
            "edges": self.edges, "slot": self._slot, "before": self._before, "base": self._base,
            "counted": self._counted, "lost": self._lost, "now_ms": self.now_ms, "first": self._first,
            "behind": self._behind, "unread": self._unread, "applied": self._applied, "ahead": self._ahead,
            "groups": self._groups.to_state(), "reasons": self._reasons.to_state(),
            "reports": {
                e: [[r.point, _in_base64(s.to_state() for s in r.substreams), r.unread] for r in reports]
                for e, reports in self._reports.items()
            },
            "waits": list(self._waits.items()), "outcomes": list(self.outcomes),
            "intervals": self._intervals.to_state(),
            "given": [[s, a.to_list(), b.to_list(), early] for s, (a, b, early) in self._given.items()],
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts a new book into the state that `to_state` gave; raises what damaged JSON or bytes raise."""
        self.edges, self._base, self.now_ms = list(state["edges"]), state["base"], state["now_ms"]
        self._slot, self._before = state["slot"], state["before"]
        self._counted = state.get("counted", self._base)  # an older release counted anew as well
        self._lost = state.get("lost", self._lost)
        self._groups.restore(state["groups"])
        self._reasons.restore(state["reasons"])
        self._first, self._behind = dict(state["first"]), dict(state["behind"])
        self._unread = dict(state.get("unread", {}))
        self._applied, self._ahead = dict(state["applied"]), dict(state["ahead"])
        for edge, reports in state["reports"].items():
            self._reports[edge] = [Report(point, self._read(each), *unread) for point, each, *unread in reports]
        self._waits = dict(map(tuple, state["waits"]))
        self.outcomes.extend(state["outcomes"])
        self._intervals.restore(state.get("intervals", []))
        self._given = {start: (Prediction.read(a), Prediction.read(b), early) for start, a, b, early in state["given"]}


def _holds(outlook: Outlook, truth: float) -> bool:
    return bool(outlook.lower - 1e-9 * abs(truth) <= truth <= outlook.upper + 1e-9 * abs(truth))


def _ratio(outlook: Outlook, truth: float, widening: float) -> float:
    """How far off the estimate was, in half-widths as the model had them; rounded, for it goes into the log."""
    off, half = abs(outlook.estimate - truth), outlook.half_width / widening
    if off <= 1e-9 * abs(truth):
        return 0.0
    return round(min(off / half, FURTHEST), 3) if half > 0 else FURTHEST


def _in_base64(each: Iterable[bytes]) -> list[str]:
    return [base64.b64encode(b).decode() for b in each]
