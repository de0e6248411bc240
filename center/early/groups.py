"""The groups of a query with an accuracy. Estimators are added when groups appear, and removed when groups disappear.

A query without `group_by` has a single group of all records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from center.early.evaluation import BATCH_SIZE, BatchEvaluation, GroupBatch, GroupEstimator
from center.early.sampling import SamplingPlan
from center.early.trigger import EarlyTrigger
from center.early.window_prediction import GroupPrediction
from edgewater.arrivals import ReportSchedule, SubstreamStatistics
from edgewater.arrivals.arrival_counts import true_values, window_sample
from edgewater.model.accuracy import MAX_GROUPS, Accuracy, group_key
from edgewater.synopses import BoolArray, IntArray
from edgewater.synopses.encoding.state import State

ALL = ""
"""The key of the single group of a query without groups."""
IDLE_LAGS, OVERFLOW_LAGS = 4, 2
"""Two times, in longest lags.

A group is removed if it has had no arrivals for `IDLE_LAGS`. After there were too many groups, groups are not tracked
for `OVERFLOW_LAGS`."""
_NO_ROWS = np.zeros((0, 4), np.int64)


class Groups:
    """The estimators of all groups, at most `MAX_GROUPS`. If there are more groups, all estimators are removed for some
    time.

    Args:
        new_trigger: makes a trigger of the query with the given number of sources.

    Attributes:
        overflow_until: the slot up to which groups are not tracked; None if they are tracked.
        lost_sample: whether edges sampled while there were too many groups, so that the arrived records are not all
            records.
    """

    def __init__(
        self, new_trigger: Callable[[int], EarlyTrigger], accuracy: Accuracy, schedule: ReportSchedule
    ) -> None:
        self._new_trigger, self._accuracy, self._schedule = new_trigger, accuracy, schedule
        self._groups: dict[str, GroupEstimator] = {}
        self._batched: list[GroupBatch] | None = None
        self._key_cache: dict[tuple[object, ...], str] = {}
        self._next_number = 0
        self.overflow_until: int | None = None
        self.lost_sample = False

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupEstimator]:
        return iter(self._groups.values())

    @property
    def is_sampled(self) -> bool:
        """Whether the edges counted an event without processing the event."""
        return any(group.counts.is_sampled for group in self)

    # Changes

    def begin(self, slot: int, sources: int) -> None:
        """Starts all groups anew at `slot`. The counts of earlier events stay known, but the lags of these events do
        not.
        """
        counts = {key: g.counts for key, g in self._groups.items() if not g.counts.is_empty}
        self.clear()
        for key in counts if self._accuracy.scope is not None else [ALL]:
            group = self._add(key, slot, np.ones(sources, bool))
            group.counts = counts.get(key, group.counts)

    def inherit(self, source: int, sums: NDArray[np.float32], slots: int) -> None:
        """Sets the delays of a source that another query has observed. Only for a query without groups.

        For the arguments see `ArrivalTriangle.inherit`.
        """
        trigger = self._groups[ALL].trigger
        trigger.triangle.inherit(source, sums.reshape(trigger.triangle.sums[:, :, source].shape), slots)

    def undeclare(self) -> None:
        """Withdraws the declared delays. From now on, every lag of the grid can occur."""
        for group in self:
            group.trigger.triangle.horizon = self._schedule.grid.lags
        self._batched = None

    def clear(self) -> None:
        self._groups, self._batched, self.overflow_until, self.lost_sample = {}, None, None, False

    def add_report(
        self, edge: str, statistics: SubstreamStatistics, slot: int, reporting: BoolArray, since: IntArray
    ) -> IntArray:
        """Adds an edge's statistics of a sub-stream to the counts, and adds new groups.

        Args:
            slot: the center's current slot.
            reporting: mask of the sources that have reported up to `slot`.
            since: per source, the slot from which the source has been observed.

        Returns:
            The arrivals as (slot, lag, count, group number).
        """
        rows = statistics.arrivals()
        arrived = np.unique(rows[:, 3])
        if statistics.unattributed or len(arrived) > MAX_GROUPS:
            self._overflow(slot)
        if self.overflow_until is not None:
            return _NO_ROWS
        keys = self._keys(statistics)
        sums, numbers = statistics.arrival_counts(), np.zeros(len(keys), np.int64)
        for i in arrived.tolist():
            numbers[i] = (self._groups.get(keys[i]) or self._add(keys[i], slot, reporting, since)).number
        # When a sample is topped up, values come of records that an earlier report has counted.
        for i in np.flatnonzero(sums[:, : 1 + statistics.lag_groups].any(axis=1)).tolist():
            if (group := self._groups.get(keys[i])) is not None:
                group.counts.add(edge, statistics.index, sums[i])
        if len(self._groups) > MAX_GROUPS:
            self._overflow(slot)
            return _NO_ROWS
        rows[:, 3] = numbers[rows[:, 3]]
        return rows

    def add_counts(self, edge: str, statistics: SubstreamStatistics, new: tuple[int, int] | None = None) -> None:
        """Adds an edge's statistics of a sub-stream to the counts, but not to the arrivals by lag.

        Args:
            new: slot and number of sources for new groups; None if new groups are ignored.
        """
        sums = statistics.arrival_counts()
        for i, key in enumerate(self._keys(statistics)):
            group = self._groups.get(key)
            if group is None and new is not None and key != ALL and sums[i][0] > 0:
                group = self._add(key, new[0], np.ones(new[1], bool))
            if group is not None:
                group.counts.add(edge, statistics.index, sums[i])

    def advance(self, slot: int, target: int, rows: IntArray, reporting: BoolArray) -> None:
        """Advances time from `slot` to `target`.

        Args:
            rows: arrivals in [slot, target), as (slot, source, lag, count, group number).
            reporting: mask of the sources that have reported up to `target`.
        """
        if not self._groups:
            return
        rows, index = self._locate(rows, 4, target)
        batch, rows[:, 4] = np.divmod(index, BATCH_SIZE)
        rows = rows[np.argsort(batch * (target - slot) + rows[:, 0] - slot, kind="stable")]
        ends = np.cumsum(np.bincount(batch, minlength=len(self._batches()))).tolist()
        for each, begin, end in zip(self._batches(), [0, *ends], ends, strict=False):
            each.advance(slot, target, rows[begin:end], reporting)

    def catch_up(self, source: int, rows: IntArray, slot: int) -> None:
        """Adds the arrivals of one source during its silence. Called when the source reports again.

        Args:
            rows: arrivals as (slot, lag, count, group number).
            slot: the center's current slot.
        """
        rows, index = self._locate(rows, 3, slot)
        batch, rows[:, 3] = np.divmod(index, BATCH_SIZE)
        for i, each in enumerate(self._batches()):
            each.catch_up(source, rows[batch == i])

    def remap_sources(self, rows: Sequence[int | None]) -> None:
        """Changes the sources of all groups; see `EarlyTrigger.take`."""
        for group in self:
            group.take(rows)
        self._batched = None

    def learn(self, start_ms: int, edges: Sequence[str], predictions: Sequence[GroupPrediction]) -> None:
        """Updates the triggers from an answered window."""
        by_key = {p.key: p for p in predictions}
        for batch in self._batches():
            batch.learn(start_ms, edges, by_key)

    def forget_before(self, start_ms: int) -> None:
        for group in self:
            group.counts.forget_before(start_ms)

    def idle(self, slot: int) -> list[str]:
        """Returns the keys of the groups without recent arrivals and without records in a window that may
        still change.
        """
        if self._accuracy.scope is None:
            return []
        before = slot - IDLE_LAGS * self._schedule.grid.lags
        return [key for key, g in self._groups.items() if g.last_report_slot < before and g.counts.is_empty]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self._groups[key]
        self._batched = None

    @contextmanager
    def including(self, reports: Iterable[tuple[str, SubstreamStatistics]], slot: int, sources: int) -> Iterator[None]:
        """Adds reports to the counts for the duration of a `with` block. New groups in the reports are added for that
        time, too.
        """
        reports = list(reports)
        if not reports:
            yield
            return
        saved, number = [(group.counts, group.counts.snapshot()) for group in self], self._next_number
        known = set(self._groups)
        try:
            for edge, statistics in reports:
                self.add_counts(edge, statistics, None if self.overflow_until is not None else (slot, sources))
            yield
        finally:
            for counts, snapshot in saved:
                counts.rollback(snapshot)
            self._next_number = number
            if new := [key for key in self._groups if key not in known]:
                self.remove(new)

    # Evaluation

    def evaluate(
        self, start_ms: int, edges: Sequence[str], *, complete: bool = False, widening: float = 1.0
    ) -> list[BatchEvaluation]:
        """Evaluates a window for all groups, in batches; see `GroupBatch.evaluate`."""
        batches = self._batches()
        evaluations = [b.evaluate(start_ms, edges, complete=complete, widening=widening) for b in batches]
        eligible = sum(int(e.eligible.sum()) for e in evaluations)
        if self._accuracy.scope == "all" and eligible:
            for i, batch in enumerate(batches):
                changed = [group.set_simultaneous_confidence(eligible) for group in batch.groups]
                if any(changed):
                    evaluations[i] = batch.evaluate(start_ms, edges, complete=complete, widening=widening)
        return evaluations

    def decide(
        self, start_ms: int, edges: Sequence[str], widening: float = 1.0
    ) -> tuple[list[BatchEvaluation], dict[str, str], int | None]:
        """Decides whether a window can be answered.

        Returns:
            Three values. The first is the evaluations of all groups. The second is, per key of a group with an
            interval, the reason why the group is answered although its accuracy is not met; the reason is empty if the
            accuracy is met. The third is the slot until which the window waits, or None. If the window waits, the
            evaluations and reasons are incomplete.
        """
        reasons: dict[str, str] = {}
        evaluations: list[BatchEvaluation] = []
        for evaluation in self._evaluate_lazily(start_ms, edges, widening):
            batch_reasons, until = evaluation.decide()
            if until is not None:
                return evaluations, reasons, until
            evaluations.append(evaluation)
            reasons |= batch_reasons
        return evaluations, reasons, None

    def true_values(self, start_ms: int, edges: Sequence[str]) -> dict[str, float | None]:
        """Returns the value of the window by group key, from all reports (see `arrival_counts.true_values`)."""
        return dict(zip(self._groups, true_values([g.counts for g in self], start_ms, edges), strict=True))

    def arrived(self, start_ms: int, edges: Sequence[str]) -> dict[str, float]:
        """Returns, by group key, the number of the window's records that have arrived."""
        if not self._groups:
            return {}
        sample = window_sample([g.counts for g in self], start_ms, edges)
        return dict(zip(self._groups, sample.arrived.sum(axis=0).tolist(), strict=True))

    def sampled_edges(self, start_ms: int, edges: Sequence[str]) -> list[str]:
        """Returns the edges that counted some of the window's records without processing them."""
        if not self._groups:
            return []
        sample = window_sample([g.counts for g in self], start_ms, edges)
        return [edges[i] for i in np.flatnonzero((sample.count < sample.arrived).any(axis=1)).tolist()]

    def from_other_edges(self, start_ms: int, edges: Sequence[str]) -> tuple[bool, bool]:
        """Returns whether edges that are not in `edges` have records in the window, and whether these edges sampled."""
        others = {edge for group in self for edge in group.counts.edges(start_ms)}.difference(edges)
        if not others:
            return False, False
        sample = window_sample([g.counts for g in self], start_ms, sorted(others))
        return bool(sample.arrived.any()), bool((sample.count < sample.arrived).any())

    def rates(self, eligible: set[str]) -> list[SamplingPlan] | None:
        """Returns the sampling plan of each source for the next window, or None if all records are needed.

        A source's rate is the largest rate that any group needs, because an edge draws one sample for all groups. All
        records are needed while some group has no interval.

        Args:
            eligible: keys of the groups that had an interval in the last answer.
        """
        if self._accuracy.scope is not None and eligible != self._groups.keys():
            return None
        if self._accuracy.scope == "all":
            for group in self:
                group.set_simultaneous_confidence(len(self))
        rates, records = np.concatenate([b.triggers.rates() for b in self._batches()], axis=2)
        return list(map(SamplingPlan, rates.max(axis=1).tolist(), records.sum(axis=1).tolist()))

    # Snapshots

    def to_state(self) -> State:
        numbers = [self._next_number, self.overflow_until, self.lost_sample]
        return State(numbers, {}, {group.key: group.to_state() for group in self})

    def restore(self, state: State) -> None:
        """Sets the state from the result of `to_state`. A damaged state may raise any exception."""
        arguments = (self._new_trigger, self._accuracy, self._schedule)
        groups = [GroupEstimator.from_state(g, *arguments) for g in state.components.values()]
        self._groups, self._batched = {g.key: g for g in groups}, None
        self._next_number, self.overflow_until, self.lost_sample = state.numbers

    def _add(self, key: str, slot: int, reporting: BoolArray, since: IntArray | None = None) -> GroupEstimator:
        """Adds a group that had no records before the current sub-stream.

        Args:
            since: per source, the slot from which the source has been observed; None if this is not limited.
        """
        slots, lags = self._schedule.grid.substream_slots, self._schedule.grid.lags
        first_slot, sources = slot // slots * slots, len(reporting)
        arguments = (self._new_trigger, self._accuracy, self._schedule)
        group = GroupEstimator(key, self._next_number, first_slot, sources, *arguments)
        self._next_number += 1
        for _ in range(slot - first_slot):
            group.trigger.on_slot(np.zeros((sources, lags)), reporting)
        if since is not None:
            age = group.trigger.triangle.age
            np.minimum(age, np.maximum(slot - since, 0), out=age)
        self._groups[key], self._batched = group, None
        return group

    def _overflow(self, slot: int) -> None:
        self.lost_sample |= self.is_sampled
        self._groups, self._batched = {}, None
        self.overflow_until = slot + OVERFLOW_LAGS * self._schedule.grid.lags + self._schedule.window_slots

    def _batches(self) -> list[GroupBatch]:
        """Returns batches of all groups, in the order in which the groups were added."""
        if self._batched is None:
            groups = list(self)
            parts = [groups[i : i + BATCH_SIZE] for i in range(0, len(groups), BATCH_SIZE)]
            self._batched = [GroupBatch(part, self._accuracy) for part in parts]
        return self._batched

    def _evaluate_lazily(self, start_ms: int, edges: Sequence[str], widening: float) -> Iterator[BatchEvaluation]:
        if self._accuracy.scope == "all":  # the confidence of each group depends on the number of groups
            yield from self.evaluate(start_ms, edges, widening=widening)
        else:
            yield from (b.evaluate(start_ms, edges, widening=widening) for b in self._batches())

    def _keys(self, statistics: SubstreamStatistics) -> list[str]:
        """Returns the keys of the groups in the table. The keys are cached, because reports repeat them and encoding is
        slow.
        """
        if not statistics.keys:
            return [ALL]
        rows = list(zip(*(k.to_pylist() for k in statistics.keys), strict=True))
        # The cache is not used for floats: 0.0 and -0.0 are equal, but they are two groups.
        if any(pa.types.is_floating(k.type) for k in statistics.keys):
            return [group_key(row) for row in rows]
        if len(self._key_cache) > 4 * MAX_GROUPS:
            self._key_cache = {}
        for row in rows:
            if row not in self._key_cache:
                self._key_cache[row] = group_key(row)
        return [self._key_cache[row] for row in rows]

    def _locate(self, rows: IntArray, column: int, slot: int) -> tuple[IntArray, IntArray]:
        """Finds the group of each arrival by the group number, and sets the last report slot of the groups.

        Args:
            column: the column of `rows` that has the group number.

        Returns:
            The rows of known groups, and for each row the index of its group in the order of all groups.
        """
        groups = list(self)
        if not groups:
            return rows[:0], np.zeros(0, np.int64)
        numbers = np.array([g.number for g in groups])  # ascending
        index = np.minimum(np.searchsorted(numbers, rows[:, column]), len(numbers) - 1)
        known = numbers[index] == rows[:, column]
        rows, index = rows[known], index[known]
        for i in np.unique(index).tolist():
            groups[i].last_report_slot = slot
        return rows, index
