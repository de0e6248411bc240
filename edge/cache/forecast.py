"""What is still to come for a group before its slice ends, as probabilities.

Records of a group are taken to arrive as a Poisson process; its rate is what this slice has shown, with
half a slice's weight of what earlier slices were like. Values are taken to have the group's own mean
and second moment, of this slice and earlier ones, with half a record's weight of all groups together.
Their sum S over the records to come is then compound Poisson; P(S > x) is taken from a lognormal of the
same moments, given that anything comes at all. The forecast decides what leaves first and no more: a
wrong one costs bytes and time, and no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.history import GroupHistory
from edgewater.synopses import CountStack, ExtremumStack, FloatArray, IntArray, SumStack

HISTORY_SLICES = 0.5
"""What earlier slices weigh, in slices: at half of a slice, as much as the slice itself."""
POPULATION_RECORDS = 0.5
COLD_START = 0.02
"""Without history, the part of a slice that must have passed before a rate means anything."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of some groups, for the rest of their slice.

    Attributes:
        arrivals: records expected, per group.
        first, second: per measure, the expected change and second moment per record.
        records: records so far, this slice and earlier ones.
        extrema: measures that change by records being broken, not by adding up.
    """

    arrivals: FloatArray
    first: Mapping[str, FloatArray]
    second: Mapping[str, FloatArray]
    records: FloatArray
    extrema: frozenset[str]

    def any_arrival(self) -> FloatArray:
        """P(at least one record is still to come)."""
        return np.asarray(-np.expm1(-self.arrivals), np.float64)

    def mean(self, measure: str) -> FloatArray:
        """The expected absolute change until the slice's end."""
        if measure in self.extrema:
            return np.asarray(self.first[measure] * self._broken(), np.float64)
        return np.asarray(self.arrivals * self.first[measure], np.float64)

    def _broken(self) -> FloatArray:
        # Of n values in random order the last is the largest with probability 1/n.
        return np.asarray(-np.expm1(-self.arrivals / (self.records + 1.0)), np.float64)

    def of(self, chosen: IntArray) -> Forecast:
        """Of some of these groups, by position."""
        first = {m: values[chosen] for m, values in self.first.items()}
        second = {m: values[chosen] for m, values in self.second.items()}
        return Forecast(self.arrivals[chosen], first, second, self.records[chosen], self.extrema)

    def exceeds(self, measure: str, *rooms: FloatArray) -> list[FloatArray]:
        """P(the change until the slice's end is larger than a room), per room and group; each room ≥ 0."""
        if measure in self.extrema:
            broken, scale = self._broken(), np.maximum(self.first[measure], 1e-300)
            return [broken * np.exp(-room / scale) for room in rooms]
        some = self.any_arrival()
        with np.errstate(all="ignore"):
            # Of the sum, given that anything comes at all.
            mean = self.arrivals * self.first[measure] / some
            square = (self.arrivals * self.second[measure] + (self.arrivals * self.first[measure]) ** 2) / some
            spread = np.log(np.maximum(square / (mean * mean), 1.0 + 1e-9))
            middle, width = np.log(mean) - spread / 2.0, np.sqrt(spread)
            tails = [_upper_tail((np.log(np.maximum(room, 1e-300)) - middle) / width) for room in rooms]
        return [np.nan_to_num(some * np.where(room > 0.0, t, 1.0)) for room, t in zip(rooms, tails, strict=True)]


def _upper_tail(z: FloatArray) -> FloatArray:
    """P(N(0,1) > z) to within 1e-7 (Abramowitz and Stegun 26.2.17)."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = series * np.exp(-z * z / 2.0) * 0.3989422804014327
    return np.asarray(np.where(z >= 0.0, upper, 1.0 - upper), np.float64)


def forecast(entries: SliceEntries, groups: IntArray, history: GroupHistory, elapsed: float) -> Forecast:
    """The forecast for these groups when `elapsed` (0 to 1) of their slice has passed."""
    past = history.recall(entries, groups)
    so_far = entries.arrivals[groups].astype(np.float64)
    if history.slices:
        rate = (so_far + HISTORY_SLICES * past.arrivals) / (elapsed + HISTORY_SLICES)
    else:
        rate = so_far / (elapsed + COLD_START)
    records = so_far + past.arrivals
    first, second, extrema = {}, {}, set()
    for name in entries.bounded:
        stack = entries.pending.measures[name]
        total = np.abs(entries.total(name))
        if isinstance(stack, ExtremumStack):
            extrema.add(name)
            first[name] = np.maximum(total[groups], past.totals[name]) / np.maximum(records, 1.0)
            second[name] = first[name] ** 2
        elif isinstance(stack, CountStack) or not isinstance(stack, SumStack):
            first[name] = second[name] = np.ones(len(groups))
        else:
            seen = max(float(entries.arrivals.sum()), 1.0)
            squares = entries.squares(name)
            weight = records + POPULATION_RECORDS
            mean, square = total.sum() / seen, squares.sum() / seen
            first[name] = (total[groups] + past.totals[name] + POPULATION_RECORDS * mean) / weight
            second[name] = (squares[groups] + past.squares[name] + POPULATION_RECORDS * square) / weight
    return Forecast(rate * (1.0 - elapsed), first, second, records, frozenset(extrema))
