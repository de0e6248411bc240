"""Our watermark under a virtual clock: slot by slot, the production decision on a workload's arrivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgewater.synopses.base import BoolArray, FloatArray, IntArray
from edgewater.watermarks.estimate import Sampled
from edgewater.watermarks.grid import Grid
from edgewater.watermarks.target import MeasureKind, Target
from edgewater.watermarks.watermark import Answer, Policy, TopUp, Wait, Watermark
from sim.watermarks.workload import Events, Workload

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One window's answer and the truth. Arrays are per group.

    Attributes:
        latency_ms: from the window's end until the answer stands, processing included.
        processed: events that went through the query's operator; missed: those that came too late for it.
        half_width: NaN where the algorithm states none.
        met: whether the answer claims to keep the contract.
    """

    estimate: FloatArray
    truth: FloatArray
    half_width: FloatArray
    straggler_width: FloatArray
    latency_ms: float
    processed: int
    missed: int
    events: int
    met: bool = True


@dataclass(frozen=True, slots=True)
class Silence:
    """A source that cannot be heard in windows [first, last), though it goes on; its news come at the end."""

    source: int
    first: int
    last: int


def truth_of(events: Events, measure: MeasureKind, groups: int) -> FloatArray:
    count = np.asarray(np.bincount(events.group, minlength=groups), np.float64)
    if measure == "count":
        return count
    total = np.asarray(np.bincount(events.group, weights=events.value, minlength=groups), np.float64)
    if measure == "sum":
        return total
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count, np.float64)


def queue_end_ms(arrivals_ms: FloatArray, cost_ms: float, until_ms: float) -> float:
    """When a server that takes `cost_ms` per event has finished those that arrived until `until_ms`."""
    at = np.sort(arrivals_ms[arrivals_ms <= until_ms])
    if not len(at):
        return until_ms
    # Lindley's recursion: finish_i = max over j ≤ i of arrival_j + (i - j + 1)·cost.
    return float((at - np.arange(len(at)) * cost_ms).max() + len(at) * cost_ms)


class OpenWindow:
    """A window's events as they become visible, and its sample by thresholds on the marks."""

    def __init__(self, events: Events, end_slot: int, grid: Grid, lag_groups: IntArray, rates: FloatArray) -> None:
        self.events, self.end_slot, self.rates = events, end_slot, rates
        self.shape = rates.shape
        born = np.floor_divide(events.born_ms, grid.slot_ms).astype(np.int64)
        self.born_slot = born
        self.lag = np.minimum(np.floor_divide(events.arrival_ms, grid.slot_ms).astype(np.int64) - born, grid.lags - 1)
        self.heard_slot = born + self.lag
        self.lag_group = lag_groups[self.lag]
        self.lag_groups = int(lag_groups[-1]) + 1
        self.cell = events.source * self.shape[1] + events.group
        self.planned = events.mark < rates.ravel()[self.cell]
        self.topped_up = 0

    def visible(self, slot: int) -> BoolArray:
        return np.asarray(self.heard_slot < slot)

    def _by_cell(self, chosen: BoolArray, weights: FloatArray | None = None) -> FloatArray:
        cells = self.shape[0] * self.shape[1]
        picked = None if weights is None else weights[chosen]
        counted: FloatArray = np.bincount(self.cell[chosen], weights=picked, minlength=cells).astype(np.float64)
        return counted.reshape(self.shape)

    def in_sample(self, slot: int) -> BoolArray:
        return np.asarray(self.visible(slot) & (self.events.mark < self.rates.ravel()[self.cell]))

    def sampled(self, slot: int) -> Sampled:
        chosen, value = self.in_sample(slot), self.events.value
        return Sampled(
            self._by_cell(self.visible(slot)), self._by_cell(chosen), self._by_cell(chosen, value),
            self._by_cell(chosen, value * value), self.lag_sums(slot)[0],
        )  # fmt: skip

    def lag_sums(self, slot: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        chosen = self.in_sample(slot)
        key, value = (self.events.source * self.lag_groups + self.lag_group)[chosen], self.events.value[chosen]
        size, shape = self.shape[0] * self.lag_groups, (self.shape[0], self.lag_groups)

        def summed(weights: FloatArray) -> FloatArray:
            return np.asarray(np.bincount(key, weights=weights, minlength=size).reshape(shape), np.float64)

        return summed(np.ones(len(value))), summed(value), summed(value * value)

    def top_up(self, slot: int, sizes: FloatArray) -> None:
        """Raises each cell's rate until as many of its visible events are in."""
        before = int(self.in_sample(slot).sum())
        visible = np.flatnonzero(self.visible(slot))
        order = visible[np.argsort(self.cell[visible] + self.events.mark[visible])]  # by cell, then by mark
        cells = self.cell[order]
        starts = np.searchsorted(cells, np.arange(sizes.size))
        ends = np.searchsorted(cells, np.arange(sizes.size), side="right")
        wanted = np.minimum(sizes.ravel().astype(np.int64), ends - starts)
        some = wanted > 0
        last = order[np.where(some, starts + wanted - 1, 0)]
        rate = np.where(some, np.nextafter(self.events.mark[last], 2.0), 0.0)
        rate = np.where(wanted == ends - starts, 1.0, rate)
        self.rates = np.maximum(self.rates, rate.reshape(self.shape))
        self.topped_up += int(self.in_sample(slot).sum()) - before


class Engine:
    """Runs one query on a workload."""

    def __init__(
        self, workload: Workload, grid: Grid, target: Target, measure: MeasureKind, event_cost_ms: float,
        *, silence: Silence | None = None, latest_slots: int | None = None, policy: Policy | None = None,
    ) -> None:  # fmt: skip
        self.workload, self.grid, self.target, self.measure = workload, grid, target, measure
        self.event_cost_ms, self.silence = event_cost_ms, silence
        self.latest_slots, self.policy = latest_slots, policy
        self.slots = workload.window_ms // grid.slot_ms
        self._fresh()

    def _fresh(self) -> None:
        self.mark = Watermark(
            self.workload.sources, self.grid, self.slots, self.target, self.measure,
            latest_slots=self.latest_slots, policy=self.policy,
        )  # fmt: skip
        self._ring = np.zeros((self.grid.lags + 2 * self.slots, self.workload.sources, self.grid.lags), np.float32)
        self._open: list[tuple[OpenWindow, int]] = []
        self._silent_rows: list[FloatArray] = []

    def run(self, progress: Progress = lambda done: None) -> list[Outcome]:
        results: list[Outcome] = []
        origin = 0
        for index in range(self.workload.windows):
            if index and self.workload.forgets_before(index):
                results += self._drain()
                self._fresh()
                origin = index * self.slots
            results += self._window(index, origin)
            progress(index + 1)
        return results + self._drain()

    def _window(self, index: int, origin: int) -> list[Outcome]:
        """The slots of one window: its events are born, and open windows are judged."""
        events = self.workload.window(index)
        shifted = Events(
            events.source, events.born_ms - origin * self.grid.slot_ms, events.delay_ms, events.value,
            events.group, events.mark,
        )  # fmt: skip
        start = index * self.slots - origin
        opened = OpenWindow(shifted, start + self.slots, self.grid, self.mark.late.groups, self.mark.plan().rates)
        if self.silence and self.silence.first <= index < self.silence.last:
            back = (self.silence.last - index) * self.slots + start
            opened.heard_slot = np.where(
                shifted.source == self.silence.source, np.maximum(opened.heard_slot, back), opened.heard_slot
            )
        self._open.append((opened, start + self.slots))
        arrival = opened.born_slot + opened.lag
        flat = (arrival % len(self._ring)) * self._ring[0].size + shifted.source * self.grid.lags + opened.lag
        used, places = np.unique(flat, return_counts=True)
        self._ring.reshape(-1)[used] += places
        done: list[Outcome] = []
        for slot in range(start, start + self.slots):
            self._advance(slot, index)
            done += self._judge_all()
        return done

    def _advance(self, slot: int, index: int) -> None:
        place = slot % len(self._ring)
        arrived = self._ring[place].astype(float)
        self._ring[place] = 0
        silence = self.silence
        if silence and silence.first <= index < silence.last:
            reporting = np.arange(self.workload.sources) != silence.source
            self._silent_rows.append(arrived[silence.source])
            self.mark.on_slot(arrived, reporting)
            return
        if silence and self._silent_rows:
            self.mark.on_return(silence.source, np.array(self._silent_rows))
            self._silent_rows = []
        self.mark.on_slot(arrived)

    def _judge_all(self) -> list[Outcome]:
        now, done, kept = self.mark.slot, [], []
        for opened, due in self._open:
            if due > now:
                kept.append((opened, due))
                continue
            verdict = self._judge(opened, now)
            if isinstance(verdict, Wait):
                kept.append((opened, verdict.until))
            else:
                done.append(self._outcome(opened, now, verdict))
        self._open = kept
        return done

    def _judge(self, opened: OpenWindow, now: int) -> Answer | Wait:
        for _ in range(6):
            verdict = self.mark.judge(opened.end_slot, opened.sampled(now))
            if not isinstance(verdict, TopUp):
                return verdict
            opened.top_up(now, verdict.sizes)
        return Wait(now + 1)

    def _outcome(self, opened: OpenWindow, now: int, answer: Answer) -> Outcome:
        sampled = opened.sampled(now)
        self.mark.on_answered(sampled, answer, opened.lag_sums(now))
        events, now_ms = opened.events, float(now * self.grid.slot_ms)
        arrival = np.where(opened.heard_slot > opened.born_slot + opened.lag, np.inf, events.arrival_ms)
        ready = queue_end_ms(arrival[opened.planned], self.event_cost_ms, now_ms)
        finish = max(ready, now_ms) + opened.topped_up * self.event_cost_ms
        return Outcome(
            answer.estimate, truth_of(events, self.measure, self.workload.groups), answer.half_width,
            answer.straggler, finish - opened.end_slot * self.grid.slot_ms, int(sampled.count.sum()),
            int((~opened.visible(now)).sum()), len(events), answer.met,
        )  # fmt: skip

    def _drain(self) -> list[Outcome]:
        """Time goes on without new windows until all are answered."""
        done: list[Outcome] = []
        while self._open:
            self._advance(self.mark.slot, self.workload.windows)
            done += self._judge_all()
        return done
