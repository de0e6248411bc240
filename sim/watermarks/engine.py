"""Our watermark under a virtual clock: slot by slot, the production decision on a workload's arrivals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from center.early_trigger.estimate import Sampled
from center.early_trigger.trigger import Answer, Policy, TopUp, Wait, Watermark
from edgewater.arrivals.grid import Grid
from edgewater.arrivals.target import MeasureKind, Target
from edgewater.synopses.base import BoolArray, FloatArray, IntArray
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


def truth_of(group: IntArray, value: FloatArray, measure: MeasureKind, groups: int) -> FloatArray:
    """The measure of all events, per group."""
    count = np.asarray(np.bincount(group, minlength=groups), np.float64)
    if measure == "count":
        return count
    total = np.asarray(np.bincount(group, weights=value, minlength=groups), np.float64)
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


class Step:
    """The events of a step of time as they become visible, and their sample by thresholds on the marks."""

    def __init__(self, events: Events, grid: Grid, lag_groups: IntArray, rates: FloatArray) -> None:
        self.events, self.rates = events, rates
        self.shape = rates.shape
        born = np.floor_divide(events.born_ms, grid.slot_ms).astype(np.int64)
        self.born_slot = born
        self.lag = np.minimum(np.floor_divide(events.arrival_ms, grid.slot_ms).astype(np.int64) - born, grid.lags - 1)
        self.heard_slot = born + self.lag
        self.lag_group = lag_groups[self.lag]
        self.lag_groups = int(lag_groups[-1]) + 1
        self.cell = events.source * self.shape[1] + events.group
        self.planned = events.mark < rates.ravel()[self.cell]

    @property
    def arrival_ms(self) -> FloatArray:
        """When its events could be heard; not at all in this run: infinite."""
        return np.where(self.heard_slot > self.born_slot + self.lag, np.inf, self.events.arrival_ms)

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


class OpenWindow:
    """A window that is not answered: its steps, which it shares with the windows that overlap it."""

    def __init__(self, steps: Sequence[Step], end_slot: int) -> None:
        self.steps, self.end_slot = steps, end_slot
        self.topped_up = 0

    @property
    def events(self) -> int:
        return sum(len(step.events) for step in self.steps)

    def sampled(self, slot: int) -> Sampled:
        each = [step.sampled(slot) for step in self.steps]
        return Sampled(*(sum_of(getattr(s, f.name) for s in each) for f in fields(Sampled)))

    def lag_sums(self, slot: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        count, total, squares = zip(*(step.lag_sums(slot) for step in self.steps), strict=True)
        return sum_of(count), sum_of(total), sum_of(squares)

    def truth(self, measure: MeasureKind, groups: int) -> FloatArray:
        """The measure of all its events, per group."""
        group, value = (np.concatenate([getattr(s.events, n) for s in self.steps]) for n in ("group", "value"))
        return truth_of(group, value, measure, groups)

    def ready_ms(self, cost_ms: float, until_ms: float) -> float:
        """When those of its events that were to be processed as they come have been."""
        planned = [step.arrival_ms[step.planned] for step in self.steps]
        return queue_end_ms(np.concatenate(planned), cost_ms, until_ms)

    def missed(self, slot: int) -> int:
        return sum(int((~step.visible(slot)).sum()) for step in self.steps)

    def top_up(self, slot: int, sizes: FloatArray) -> None:
        """Raises each cell's rate until as many of its visible events are in."""
        inside = [step.in_sample(slot) for step in self.steps]
        before = sum(int(chosen.sum()) for chosen in inside)
        seen = [np.flatnonzero(step.visible(slot)) for step in self.steps]
        cell = np.concatenate([step.cell[at] for step, at in zip(self.steps, seen, strict=True)])
        mark = np.concatenate([step.events.mark[at] for step, at in zip(self.steps, seen, strict=True)])
        taken = np.concatenate([chosen[at] for chosen, at in zip(inside, seen, strict=True)])
        order = np.lexsort((mark, ~taken, cell))  # by cell; in it those that are in already, then by mark
        cells = cell[order]
        starts = np.searchsorted(cells, np.arange(sizes.size))
        ends = np.searchsorted(cells, np.arange(sizes.size), side="right")
        wanted = np.minimum(sizes.ravel().astype(np.int64), ends - starts)
        some = wanted > 0
        last = order[np.where(some, starts + wanted - 1, 0)]
        rate = np.where(some, np.nextafter(mark[last], 2.0), 0.0)
        rate = np.where(wanted == ends - starts, 1.0, rate)
        for step in self.steps:
            step.rates = np.maximum(step.rates, rate.reshape(step.shape))
        self.topped_up += sum(int(step.in_sample(slot).sum()) for step in self.steps) - before


def sum_of(arrays: Iterable[FloatArray]) -> FloatArray:
    first, *others = arrays
    for other in others:
        first = first + other
    return first


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
        self.step_slots = workload.step_ms // grid.slot_ms
        self._fresh()

    def _fresh(self) -> None:
        self.mark = Watermark(
            self.workload.sources, self.grid, self.slots, self.target, self.measure,
            latest_slots=self.latest_slots, policy=self.policy,
        )  # fmt: skip
        self._ring = np.zeros((self.grid.lags + 2 * self.slots, self.workload.sources, self.grid.lags), np.float32)
        self._steps: deque[Step] = deque(maxlen=self.slots // self.step_slots)
        self._open: list[tuple[OpenWindow, int]] = []
        self._silent_rows: list[FloatArray] = []

    def run(self, progress: Progress = lambda done: None) -> list[Outcome]:
        results: list[Outcome] = []
        origin = 0
        steps = self.slots // self.step_slots
        for index in range(self.workload.windows + steps - 1):
            if index and self.workload.forgets_before(index):
                results += self._drain()
                self._fresh()
                origin = index * self.step_slots
            results += self._step(index, origin)
            if index >= steps - 1:
                progress(index - steps + 2)
        return results + self._drain()

    def _step(self, index: int, origin: int) -> list[Outcome]:
        """The slots of one step: its events are born, and open windows are judged."""
        shifted = self.workload.step(index).after(origin * self.grid.slot_ms)
        start = index * self.step_slots - origin
        step = Step(shifted, self.grid, self.mark.late.groups, self.mark.plan().rates)
        if self.silence and self.silence.first <= index < self.silence.last:
            back = (self.silence.last - index) * self.step_slots + start
            step.heard_slot = np.where(
                shifted.source == self.silence.source, np.maximum(step.heard_slot, back), step.heard_slot
            )
        self._steps.append(step)
        end = start + self.step_slots
        if len(self._steps) == self._steps.maxlen:
            self._open.append((OpenWindow(tuple(self._steps), end), end))
        arrival = step.born_slot + step.lag
        flat = (arrival % len(self._ring)) * self._ring[0].size + shifted.source * self.grid.lags + step.lag
        used, places = np.unique(flat, return_counts=True)
        self._ring.reshape(-1)[used] += places
        done: list[Outcome] = []
        for slot in range(start, end):
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
        now_ms = float(now * self.grid.slot_ms)
        ready = opened.ready_ms(self.event_cost_ms, now_ms)
        finish = max(ready, now_ms) + opened.topped_up * self.event_cost_ms
        return Outcome(
            answer.estimate, opened.truth(self.measure, self.workload.groups), answer.half_width, answer.straggler,
            finish - opened.end_slot * self.grid.slot_ms, int(sampled.count.sum()), opened.missed(now), opened.events,
            answer.met,
        )  # fmt: skip

    def _drain(self) -> list[Outcome]:
        """Time goes on without new windows until all are answered."""
        done: list[Outcome] = []
        while self._open:
            self._advance(self.mark.slot, self.workload.windows)
            done += self._judge_all()
        return done
