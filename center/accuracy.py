"""What the center knows of the arrivals at the edges of one query, and what its windows come to. Pure.

Edges tell of arrivals up to *points* (`edgewater.accuracy`). Time advances from point to point: to the last one that
all edges which can be heard have told, so that the numbers of all of them are of the same moment. An edge that has told
nothing for `patience` cannot be heard. It stands still, the watermark expects of it what it usually does, and when
it speaks again it catches up.

All that changes this state goes through `apply`, as a note of JSON. The notes since a snapshot are the state's log:
applying them to the snapshot again gives the same state, and so the same answers.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from center.prediction import Prediction
from center.seats import reseated
from center.tallies import Report, Tallies
from edgewater.accuracy import Accuracy, Clockwork
from edgewater.synopses.base import IntArray
from edgewater.watermarks.monitor import SubstreamStatistics
from edgewater.watermarks.watermark import Answer, TopUp, Wait, Watermark

PATIENCE_MS = 1_000
"""Event time, besides a sub-stream, after which an edge that has told nothing cannot be heard."""
MAX_BEHIND, MAX_LEAP = 8, 16
"""In longest lags: after how much silence an edge, or a query, is begun with anew."""
RECORD = 400
"""Windows over which coverage is measured."""

Note = list[Any]


class AccuracyBook:
    """One query's arrivals and windows. Slots are counted as the query's clockwork has them.

    Args:
        latest_slots: after a window's end the answer is given at the latest so many slots later.
        speed: event ms per wall ms.
    """

    def __init__(self, accuracy: Accuracy, clockwork: Clockwork, latest_slots: int | None, speed: float = 1.0) -> None:
        self.accuracy, self.clockwork, self._latest = accuracy, clockwork, latest_slots
        self.patience_ms = clockwork.grid.substream_ms + round(PATIENCE_MS * speed)
        self.edges: list[str] = []
        self.mark: Watermark | None = None
        self._base = 0  # the watermark's slot 0
        self._first: dict[str, int] = {}  # by edge: what was born before is not in the watermark
        self._applied: dict[str, int] = {}
        self._reports: dict[str, list[Report]] = {}
        self._ahead: dict[str, list[list[int]]] = {}  # (slot, lag, count) of arrivals with a time to come
        self._tallies = Tallies(accuracy.kind, clockwork)
        self._waits: dict[int, int] = {}
        self._given: dict[int, tuple[Prediction, Prediction, bool]] = {}  # the first answer, the last, was it early
        self.now_ms = 0
        self.notes: list[Note] = []
        self.outcomes: deque[bool] = deque(maxlen=RECORD)

    # What it is told

    def apply(self, note: Note) -> None:
        """The one way to change it; the note is kept in `notes` for the log."""
        kind, *rest = note
        change: dict[str, Callable[..., None]] = {
            "expect": self._expect, "report": self._report, "advance": self._advance, "wait": self._wait,
            "given": self._note_given, "finish": self._finish,
        }  # fmt: skip
        change[kind](*rest)
        self.notes.append(note)

    def expect(self, edges: Iterable[str]) -> None:
        if list(edges) != self.edges:
            self.apply(["expect", list(edges)])

    def report(self, edge: str, through_ms: int, substreams: Iterable[bytes]) -> None:
        """Raises SynopsisError for statistics that cannot be read; nothing is changed then."""
        self.apply(["report", edge, through_ms, [base64.b64encode(s).decode() for s in substreams]])

    def advance(self, now_ms: int, *, force: bool = False) -> None:
        """Event time has come to `now_ms`. With `force`, edges that have not told of it yet are not waited for."""
        self.now_ms = max(self.now_ms, now_ms)
        target, heard = self._next_point(force)
        if target is not None:
            self.apply(["advance", target, heard])

    def given(self, start_ms: int, prediction: Prediction, *, early: bool) -> None:
        """The window has been answered so; or, not early, it has been answered with all there is."""
        self.apply(["given", start_ms, early, *astuple(prediction)])

    def finish(self, start_ms: int) -> bool | None:
        """The window is final; whether its first early answer's interval holds the truth, if that can be told."""
        first = self._given.get(start_ms)
        truth = self._tallies.truth(start_ms, self.edges) if first is not None and first[2] else None
        covered = None if first is None or truth is None else bool(
            first[0].lower - 1e-9 * abs(truth) <= truth <= first[0].upper + 1e-9 * abs(truth)
        )  # fmt: skip
        if first is not None or start_ms in self._waits:
            self.apply(["finish", start_ms, covered])
        return covered

    # What it says

    @property
    def slot(self) -> int:
        """All that is said is of what had arrived by the beginning of this slot."""
        return self._base + self.mark.slot if self.mark is not None else -(1 << 62)

    @property
    def coverage(self) -> float | None:
        return sum(self.outcomes) / len(self.outcomes) if self.outcomes else None

    def is_seen(self, start_ms: int) -> bool:
        """Whether the window has begun since arrivals are known."""
        return self.mark is not None and self.clockwork.slot_at(start_ms) >= self._base

    def has_ended(self, start_ms: int) -> bool:
        return self._end_slot(start_ms) <= self.slot

    def last_given(self, start_ms: int) -> Prediction | None:
        given = self._given.get(start_ms)
        return given[1] if given else None

    def judge(self, start_ms: int) -> Prediction | None:
        """The answer, if it is to be given now."""
        if not self.is_seen(start_ms) or not self.has_ended(start_ms) or self._waits.get(start_ms, 0) > self.slot:
            return None
        assert self.mark is not None
        sampled = self._tallies.sampled(start_ms, self.edges)
        end = self._end_slot(start_ms) - self._base
        verdict = self.mark.judge(end, sampled)
        if isinstance(verdict, Wait):
            # No waiting makes an interval a part of nothing.
            if zero := self._tallies.may_be_zero(sampled, self.accuracy.of):
                return self.predict(start_ms, zero)
            self.apply(["wait", start_ms, self._base + verdict.until])
            return None
        if isinstance(verdict, TopUp):
            return self.predict(start_ms, "the edges were asked for too small a sample")
        return self.predict(start_ms, verdict.reason)

    def predict(self, start_ms: int, reason: str = "") -> Prediction:
        """The window as it looks now, good enough or not."""
        assert self.mark is not None
        mark, sampled = self.mark, self._tallies.sampled(start_ms, self.edges)
        end = self._end_slot(start_ms)
        offset = max(self.slot - end, 0)
        stragglers, model = mark.window_model(offset, sampled)
        estimate = float(model.estimate[0])
        straggler = float(model.straggler_width[0])
        sampling = float(model.sampling_width(sampled.count, mark.quantile)[0])
        behind = mark.triangle.behind > 0
        variance = stragglers.deviation**2
        of_silent = float(variance[behind].sum() / variance.sum()) if variance.sum() > 0 else 0.0
        width = math.hypot(sampling, straggler)
        silent = tuple(e for e, b in zip(self.edges, behind, strict=True) if b)
        unheard = [e for e in self.edges if e not in self._applied]
        met = bool(stragglers.known and width <= self.accuracy.error * abs(estimate)) and not unheard
        if not met and unheard:
            reason = f"nothing has ever come from {', '.join(unheard)}"
        elif not met and not reason:
            reason = "the interval is wider than the error"
        arrived = float(sampled.arrived.sum())
        lower = estimate - width
        if self.accuracy.kind == "count":
            lower = max(lower, arrived)
        return Prediction(
            estimate, lower, estimate + width, sampling, straggler * math.sqrt(1 - of_silent),
            straggler * math.sqrt(of_silent), met, "" if met else reason, arrived, float(model.size[0]),
            float(sampled.count.sum()), silent, offset,
        )  # fmt: skip

    def is_sampled(self, start_ms: int) -> bool:
        """Whether some of the window's records were counted and not processed."""
        if self.accuracy.kind == "count" or self.mark is None:
            return False
        sampled = self._tallies.sampled(start_ms, self.edges)
        return bool((sampled.count < sampled.arrived).any())

    def rates(self) -> dict[str, float]:
        """By edge, what part of its records the next window needs, as the watermark plans it."""
        if self.mark is None:
            return {}
        return dict(zip(self.edges, self.mark.plan().rates[:, 0].tolist(), strict=True))

    # Changes

    def _expect(self, edges: Sequence[str]) -> None:
        before, self.edges = self.edges, list(edges)
        for table in (self._applied, self._reports, self._ahead, self._first):
            for edge in [e for e in table if e not in self.edges]:
                del table[edge]
        if not self.edges:
            self.mark = None
        elif self.mark is not None:
            self._reseat([before.index(e) if e in before else None for e in self.edges])

    def _reseat(self, rows: Sequence[int | None]) -> None:
        """The watermark over other sources: row i is what was row `rows[i]`, or a new one."""
        assert self.mark is not None
        slot = self.slot
        self.mark = reseated(self.mark, rows, self._fresh)
        for edge, row in zip(self.edges, rows, strict=True):
            if row is None:
                self._first[edge] = slot

    def _fresh(self, sources: int) -> Watermark:
        clock = self.clockwork
        return Watermark(
            sources, clock.grid, clock.window_slots, self.accuracy.target, self.accuracy.kind, latest_slots=self._latest
        )

    def _report(self, edge: str, through_ms: int, substreams: Sequence[str]) -> None:
        grid = self.clockwork.grid
        read = [SubstreamStatistics.from_state(base64.b64decode(s), grid) for s in substreams]
        if edge in self.edges:
            self._reports.setdefault(edge, []).append(Report(self.clockwork.slot_at(through_ms), read))

    def _points(self, edge: str) -> list[int]:
        """The points that the edge has told and that lie ahead of what was applied."""
        points = [r.point for r in self._reports.get(edge, ())]
        return [*points, self._applied[edge]] if edge in self._applied else points

    def _late(self, slot: int) -> list[str]:
        """Edges that stood still and have told of all before the slot by now."""
        assert self.mark is not None
        behind = self.mark.triangle.behind
        return [
            e
            for e, b in zip(self.edges, behind, strict=True)
            if b and any(r.point == slot for r in self._reports.get(e, ()))
        ]

    def _next_point(self, force: bool) -> tuple[int | None, list[str]]:
        """The slot to advance to, and the edges that have told of it."""
        # A point that lies further ahead is of a clock that cannot be believed.
        believed = self.clockwork.slot_at(self.now_ms + self.patience_ms)
        points = {e: frozenset(p for p in self._points(e) if p <= believed) for e in self.edges}
        told = {e: max(p) for e, p in points.items() if p}
        if not told:
            return None, []
        patient = self.clockwork.slot_at(self.now_ms - self.patience_ms)
        heard = [e for e, point in told.items() if point > patient]
        if force:
            latest = max(told.values())
            heard = [e for e in heard if told[e] >= latest] or heard
        slot = self.slot
        if not heard:
            # Nobody can be heard: time goes on without anybody, for as long as anything is known.
            last = max(told.values())
            target = min(self.clockwork.slot_at(self.now_ms), last + self.clockwork.grid.lags)
            return (target, [e for e in told if target in points[e]]) if target > slot and self.mark else (None, [])
        common = frozenset.intersection(*(points[e] for e in heard))
        target = max((p for p in common if p > slot), default=slot)
        if target > slot:
            return target, [e for e in self.edges if target in points[e]]
        late = self._late(slot) if self.mark is not None else []
        return (slot, late) if late else (None, [])

    def _advance(self, target: int, heard: Sequence[str]) -> None:
        if self.mark is None or target - self.slot > MAX_LEAP * self.clockwork.grid.lags:
            self._begin(target, heard)
            return
        mark, slot = self.mark, self.slot
        reporting = np.array([e in heard for e in self.edges])
        rows: list[IntArray] = []
        for source, edge in enumerate(self.edges):
            if edge in heard:
                rows.append(self._arrivals(source, edge, slot, target))
        table = np.concatenate(rows) if rows else np.zeros((0, 4), np.int64)
        table = table[np.argsort(table[:, 0], kind="stable")]
        cuts = np.searchsorted(table[:, 0], np.arange(slot, target + 1))
        arrived = np.zeros((len(self.edges), self.clockwork.grid.lags))
        for i in range(target - slot):
            now = table[cuts[i] : cuts[i + 1]]
            arrived[:] = 0
            np.add.at(arrived, (now[:, 1], now[:, 2]), now[:, 3])
            mark.on_slot(arrived, reporting)

    def _begin(self, target: int, heard: Sequence[str]) -> None:
        """Starts at `target`, or anew after a time of which nothing is known."""
        slots = self.clockwork.grid.substream_slots
        self._base = target // slots * slots
        self.mark = self._fresh(len(self.edges))
        # What has come before has no lag that could be learnt from, for what came with it is not known.
        self._first = dict.fromkeys(self.edges, self._base)
        self._given, self._waits = {}, {}
        self._applied = dict.fromkeys(heard, self._base)
        self._advance(target, heard)

    def _arrivals(self, source: int, edge: str, slot: int, target: int) -> IntArray:
        """Takes in an edge's reports up to `target`; what it tells of slots before `slot` it catches up with.

        Returns:
            (slot, source, lag, count) of arrivals in [slot, target).
        """
        assert self.mark is not None
        lags = self.clockwork.grid.lags
        reports = self._reports.get(edge, [])
        taken = [r for r in reports if r.point <= target]
        self._reports[edge] = [r for r in reports if r.point > target]
        parts = [np.array(self._ahead.pop(edge, []), np.int64).reshape(-1, 3)]
        for report in taken:
            self._tallies.add(edge, report.substreams)
            parts += [np.stack(s.arrivals(), axis=1) for s in report.substreams if len(s.cells)]
        found = np.concatenate(parts)
        found = found[found[:, 0] - found[:, 1] >= self._first[edge]]
        later = found[:, 0] >= target
        self._ahead[edge] = found[later].tolist()
        found = found[~later]
        behind = int(self.mark.triangle.behind[source])
        if behind > MAX_BEHIND * lags:
            self._reseat([None if e == edge else i for i, e in enumerate(self.edges)])
            found = found[found[:, 0] - found[:, 1] >= slot]
        elif behind:
            old = found[found[:, 0] < slot]
            missed = np.zeros((behind, lags))
            at = np.maximum(old[:, 0] - (slot - behind), 0)
            np.add.at(missed, (at, old[:, 1]), old[:, 2])
            self.mark.on_return(source, missed)
            found = found[found[:, 0] >= slot]
        self._applied[edge] = target
        # A lag longer than the longest was cut to it: the arrival is now, whatever slot that comes to.
        found[:, 0] = np.maximum(found[:, 0], slot)
        return np.stack([found[:, 0], np.full(len(found), source), found[:, 1], found[:, 2]], axis=1)

    def _wait(self, start_ms: int, until: int) -> None:
        self._waits[start_ms] = until

    def _note_given(self, start_ms: int, early: bool, *parts: Any) -> None:
        prediction, first = Prediction.read(parts), self._given.get(start_ms)
        self._given[start_ms] = (first[0], prediction, first[2]) if first else (prediction, prediction, early)
        self._waits.pop(start_ms, None)
        if first is None and self.mark is not None:
            p = prediction
            widths = (np.array([x]) for x in (p.estimate, p.sampling, p.straggler, p.expected))
            estimate, sampling, straggler, size = widths
            answer = Answer(estimate, sampling, straggler, size, p.met)
            sampled = self._tallies.sampled(start_ms, self.edges)
            if sampled.arrived.sum() > 0:
                self.mark.on_answered(sampled, answer, self._tallies.by_lag(start_ms, self.edges))

    def _finish(self, start_ms: int, covered: bool | None) -> None:
        self._waits.pop(start_ms, None)
        if self._given.pop(start_ms, None) is not None and covered is not None:
            self.outcomes.append(covered)

    def forget_before(self, start_ms: int) -> None:
        """Sub-streams before it are of final windows only. Not noted: it follows from the ledger's state."""
        self._tallies.forget_before(start_ms)

    # Sums

    def _end_slot(self, start_ms: int) -> int:
        return self.clockwork.slot_at(start_ms) + self.clockwork.window_slots

    # Snapshots

    def to_state(self) -> dict[str, Any]:
        """JSON. With the notes behind it, it is all there is."""
        return {
            "edges": self.edges, "base": self._base, "now_ms": self.now_ms, "first": self._first,
            "applied": self._applied, "ahead": self._ahead,
            "mark": None if self.mark is None else base64.b64encode(self.mark.to_state()).decode(),
            "reports": {
                e: [[r.point, [base64.b64encode(s.to_state()).decode() for s in r.substreams]] for r in reports]
                for e, reports in self._reports.items()
            },
            "tallies": self._tallies.to_state(),
            "waits": list(self._waits.items()), "outcomes": list(self.outcomes),
            "given": [[s, astuple(a), astuple(b), early] for s, (a, b, early) in self._given.items()],
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts a new book into the state that `to_state` gave; raises what damaged JSON or bytes raise."""
        grid = self.clockwork.grid
        self.edges, self._base, self.now_ms = list(state["edges"]), state["base"], state["now_ms"]
        self._first, self._applied, self._ahead = dict(state["first"]), dict(state["applied"]), dict(state["ahead"])
        if state["mark"] is not None:
            self.mark = Watermark.from_state(base64.b64decode(state["mark"]))
        for edge, reports in state["reports"].items():
            self._reports[edge] = [
                Report(p, [SubstreamStatistics.from_state(base64.b64decode(s), grid) for s in each])
                for p, each in reports
            ]
        self._tallies.restore(state["tallies"])
        self._waits = dict(map(tuple, state["waits"]))
        self.outcomes.extend(state["outcomes"])
        self._given = {start: (Prediction.read(a), Prediction.read(b), early) for start, a, b, early in state["given"]}
