"""Forecasts how a group changes before its slice ends, as probabilities.

The records of a group are modelled as a Poisson process, whose rate follows the group's records in this slice and in
earlier ones, and the rhythm of earlier slices (`arrival_profile`). The values have the group's own mean and second
moment, estimated from this and earlier slices plus the mean of all groups. The sum S over the
expected records is then compound Poisson; P(S > x) is approximated by a lognormal distribution with the same moments,
given that any record arrives. The forecast only decides which groups are sent first: a wrong forecast costs bytes and
time, and changes no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge.cache.entries import SliceEntries, ratio
from edge.cache.history import GroupHistory
from edgewater.synopses import CountStack, ExtremumStack, FloatArray, IntArray, MaxStack, SumStack

COLD_START = 0.02  # limit: the rate of the first moments of a slice
"""Added to the elapsed fraction of a slice without history, so that its first moments give no extreme rate."""
VALUE_RECORDS = 4.0
"""The mean value of all groups counts in a group's mean value as so many records."""
NEARLY_POISSON = 1e-3  # limit: digits that a difference near 0 loses
"""Below this distance of the dispersion from 1 the number of records counts as that of a Poisson process."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of some groups for the rest of their slice. All arrays are float64 per group.

    Attributes:
        arrivals: expected number of records.
        first, second: per measure, the expected change and second moment per record.
        records: number of records so far, in this slice and the mean of earlier ones.
        extrema: the measures that are minima or maxima, which change only when a new extremum arrives.
        dispersion: the variance of the number of records to come, divided by its mean; None: 1, a Poisson process.
    """

    arrivals: FloatArray
    first: Mapping[str, FloatArray]
    second: Mapping[str, FloatArray]
    records: FloatArray
    extrema: frozenset[str]
    dispersion: FloatArray | None = None

    def any_arrival(self) -> FloatArray:
        """Returns P(at least one more record arrives)."""
        return any_arrival(self.arrivals, self.dispersion)

    def mean(self, measure: str) -> FloatArray:
        """Returns the expected absolute change until the slice's end."""
        if measure in self.extrema:
            return np.asarray(self.first[measure] * self._new_extremum(), np.float64)
        return np.asarray(self.arrivals * self.first[measure], np.float64)

    def _new_extremum(self) -> FloatArray:
        # Of n values in random order the last is the largest with probability 1/n.
        return np.asarray(-np.expm1(-self.arrivals / (self.records + 1.0)), np.float64)

    def take(self, positions: IntArray) -> Forecast:
        """Returns the forecast of the groups at some positions."""
        first = {m: values[positions] for m, values in self.first.items()}
        second = {m: values[positions] for m, values in self.second.items()}
        spread = None if self.dispersion is None else self.dispersion[positions]
        return Forecast(self.arrivals[positions], first, second, self.records[positions], self.extrema, spread)

    def exceeds(self, measure: str, *thresholds: FloatArray) -> list[FloatArray]:
        """Returns P(the change until the slice's end exceeds a threshold), per threshold and group.

        Args:
            thresholds: float64 per group, each at least 0.
        """
        if measure in self.extrema:
            probability, scale = self._new_extremum(), self.first[measure]
            return [probability * np.exp(-ratio(threshold, scale)) for threshold in thresholds]
        any_arrival = self.any_arrival()
        with np.errstate(all="ignore"):
            # Moments of the sum, given that any record arrives.
            mean = self.arrivals * self.first[measure] / any_arrival
            second = self.second[measure]
            if self.dispersion is not None:
                second = np.maximum(second + (self.dispersion - 1.0) * self.first[measure] ** 2, 0.0)
            square = (self.arrivals * second + (self.arrivals * self.first[measure]) ** 2) / any_arrival
            variance = np.log(np.maximum(square / (mean * mean), 1.0 + 1e-9))
            location, width = np.log(mean) - variance / 2.0, np.sqrt(variance)
            tails = [_upper_tail((np.log(np.maximum(t, 1e-300)) - location) / width) for t in thresholds]
        return [
            np.nan_to_num(any_arrival * np.where(threshold > 0.0, tail, 1.0))
            for threshold, tail in zip(thresholds, tails, strict=True)
        ]


def _upper_tail(z: FloatArray) -> FloatArray:
    """Returns P(N(0,1) > z) with an error below 1e-7 (Abramowitz and Stegun 26.2.17)."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = series * np.exp(-z * z / 2.0) * 0.3989422804014327
    return np.asarray(np.where(z >= 0.0, upper, 1.0 - upper), np.float64)


def any_arrival(arrivals: FloatArray, dispersion: FloatArray | None) -> FloatArray:
    """Returns P(at least one more record arrives), from `Forecast.arrivals` and `Forecast.dispersion`."""
    if dispersion is None:
        return np.asarray(-np.expm1(-arrivals), np.float64)
    excess = dispersion - 1.0
    poisson = np.abs(excess) < NEARLY_POISSON
    factor = np.where(poisson, 1.0, np.log(dispersion) / np.where(poisson, 1.0, excess))
    return np.asarray(-np.expm1(-arrivals * factor), np.float64)


def arrivals_to_come(
    entries: SliceEntries, history: GroupHistory, elapsed: float, groups: IntArray | None = None
) -> FloatArray:
    """Returns `Forecast.arrivals` of these groups (None: all) after the fraction `elapsed` (0 to 1) of their slice."""
    if history.slices:
        return history.arrivals_left(entries, elapsed, groups)
    so_far = (entries.arrivals if groups is None else entries.arrivals[groups]).astype(np.float64)
    return np.asarray(so_far / (elapsed + COLD_START) * (1.0 - elapsed))


def dispersion_of(history: GroupHistory, arrivals: FloatArray) -> FloatArray | None:
    """Returns `Forecast.dispersion` of groups with these expected numbers of records."""
    return history.timetable.dispersion(arrivals) if history.timetable.is_used else None


def forecast(entries: SliceEntries, groups: IntArray, history: GroupHistory, elapsed: float) -> Forecast:
    """Forecasts these groups after the fraction `elapsed` (0 to 1) of their slice."""
    past = history.averages_of(entries, groups)
    so_far = entries.arrivals[groups].astype(np.float64)
    arrivals = arrivals_to_come(entries, history, elapsed, groups)
    records = so_far + past.arrivals
    first, second, extrema = {}, {}, set()
    for name in entries.bounded:
        stack = entries.pending.measures[name]
        total = entries.size(name)
        if isinstance(stack, ExtremumStack):
            extrema.add(name)
            value = np.maximum(total[groups], past.totals[name])
            # For exponential values: a new maximum exceeds the maximum of n values by their mean, which is about 1 / (1
            # + ln n) of this maximum. A new minimum is half of the old minimum.
            largest = isinstance(stack, MaxStack)
            first[name] = value / (1.0 + np.log(np.maximum(records, 1.0))) if largest else value / 2.0
            second[name] = first[name] ** 2
        elif isinstance(stack, CountStack) or not isinstance(stack, SumStack):
            first[name] = second[name] = np.ones(len(groups))
        else:
            seen = max(float(entries.arrivals.sum()), 1.0)
            squares = entries.squares(name)
            weight = records + VALUE_RECORDS
            mean, square = total.sum() / seen, squares.sum() / seen
            first[name] = (total[groups] + past.totals[name] + VALUE_RECORDS * mean) / weight
            second[name] = (squares[groups] + past.squares[name] + VALUE_RECORDS * square) / weight
    return Forecast(arrivals, first, second, records, frozenset(extrema), dispersion_of(history, arrivals))
