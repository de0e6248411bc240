"""Estimates from a uniform sample without replacement about the sampled population, per group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.base import (
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Mean,
    Quantile,
    Question,
    Questions,
    Rank,
    Sum,
)
from edgewater.synopses.checks import check_not_nan, check_quantile
from edgewater.synopses.intervals import normal_quantile, thinned_count, wilson
from edgewater.synopses.questions import Proportion, SubsetCount
from edgewater.synopses.sampling.bounds import UpperBounds

QUESTIONS: Questions = (Mean, Sum, Count, Proportion, SubsetCount, Rank, Quantile)
"""Questions that every sample answers. A sample of strings answers only `Count`: strings have no mean and no order."""


@dataclass(frozen=True, slots=True)
class SampleEstimator:
    """The estimates of a sample per group.

    Attributes:
        groups: int64 group per value, ascending.
        values: NumPy numbers or Arrow strings.
        rate: float64 per group, the probability with which each value was sampled; 1: the sample is complete and
            answers are exact; 0: an infinite population. It replaces k/N in the finite population correction.
        basis: the basis of the estimates.
        least, greatest: float64 per group, the range of the whole population; NaN or infinite: unknown. None: unknown
            for all groups.
    """

    groups: IntArray
    values: Any
    rate: FloatArray
    basis: str
    least: FloatArray | None = None
    greatest: FloatArray | None = None

    def query(self, question: Question) -> Estimates:
        """Answers one of `QUESTIONS`. NaN where there are no values. Raises InvalidRequest."""
        match question:
            case Count(confidence):
                return self.count(confidence)
            case Mean(confidence):
                return self.mean(confidence)
            case Sum(confidence):
                return self.sum(confidence)
            case Rank(x, confidence):
                return self.proportion(-np.inf, check_not_nan("x", x), confidence)
            case Proportion(low, high, confidence):
                return self.proportion(check_not_nan("lo", low), check_not_nan("hi", high), confidence)
            case SubsetCount(low, high, confidence):
                return self._subset_count(check_not_nan("lo", low), check_not_nan("hi", high), confidence)
            case Quantile(q, confidence):
                return self._quantile(check_quantile(q), confidence)
        raise TypeError(f"{question} is not one of {QUESTIONS}")

    def count(self, confidence: float) -> Estimates:
        """Estimates the number of values in the population."""
        sampled = self._per_group(None)
        lower, upper = thinned_count(sampled, self.rate, normal_quantile(confidence))
        return Estimates(sampled / self.rate, lower, upper, confidence, self.basis)

    def mean(self, confidence: float) -> Estimates:
        """Estimates the mean by the mean of the sample.

        The bounds are the bounds of `UpperBounds`, within the range. The sampled part of the population may differ from
        the rate, so the bounds use its least possible value.
        """
        if not self.rate.any():
            return self._mean(confidence)
        sampled = self._per_group(None)
        _, most = thinned_count(sampled, self.rate, normal_quantile(confidence))
        part = sampled / np.maximum(most, 1)
        return replace(self, rate=np.where(self.rate < 1, part, self.rate))._mean(confidence)

    def _mean(self, confidence: float) -> Estimates:
        values, least, greatest, exponent = self._scaled()
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self._per_group(values) / self._per_group(None)
        lower, upper = self._bounds(values, least, greatest, confidence, UpperBounds.of_mean)
        return self._scaled_back(mean, np.fmax(lower, least), np.fmin(upper, greatest), exponent, confidence)

    def sum(self, confidence: float) -> Estimates:
        """Estimates the sum by Σx/rate (Horvitz and Thompson). The bounds are the bounds of `UpperBounds`."""
        values, least, greatest, exponent = self._scaled()
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.where(self._per_group(None) > 0, self._per_group(values) / self.rate, np.nan)
        bounds = self._bounds(values, least, greatest, confidence, UpperBounds.of_sum)
        return self._scaled_back(total, *bounds, exponent, confidence)

    def _bounds(
        self,
        values: FloatArray,
        least: FloatArray,
        greatest: FloatArray,
        confidence: float,
        upper: Callable[[UpperBounds], FloatArray],
    ) -> tuple[FloatArray, FloatArray]:
        """Returns lower and upper bounds, float64 per group; infinite without a sample or a range."""
        z = normal_quantile(confidence)
        known = np.isfinite(least) & np.isfinite(greatest)
        chosen = np.flatnonzero(known & (self.rate < 1) & (self._per_group(None) > 0))
        position = np.full(len(self.rate), -1)
        position[chosen] = np.arange(len(chosen))
        inside = position[self.groups] >= 0
        groups, values = position[self.groups[inside]], values[inside]
        with np.errstate(divide="ignore"):
            unseen = -np.log1p(-self.rate[chosen])
            intensity = unseen[groups]
        bounds = []
        for sign, most in ((-1.0, -least), (1.0, greatest)):
            bound = np.full(len(self.rate), np.inf)
            if len(chosen):
                found = upper(UpperBounds(groups, sign * values, intensity, unseen, most[chosen], z))
                bound[chosen] = np.where(np.isnan(found), np.inf, found)
            bounds.append(sign * bound)
        return bounds[0], bounds[1]

    def _scaled_back(
        self, value: FloatArray, lower: FloatArray, upper: FloatArray, exponent: IntArray, confidence: float
    ) -> Estimates:
        exact, none = self.rate >= 1, np.isnan(value)
        with np.errstate(invalid="ignore", over="ignore"):
            # If the value is NaN or outside of float64, nothing bounds it.
            lower = np.where(np.isfinite(value), np.fmin(lower, value), -np.inf)
            upper = np.where(np.isfinite(value), np.fmax(upper, value), np.inf)
            value, lower, upper = (np.ldexp(each, exponent) for each in (value, lower, upper))
        lower, upper = np.where(exact, value, lower), np.where(exact, value, upper)
        lower, upper = np.where(none, np.nan, lower), np.where(none, np.nan, upper)
        return Estimates(value, lower, upper, confidence, self.basis)

    def proportion(self, low: float, high: float, confidence: float) -> Estimates:
        """Estimates the fraction of the values in [low, high]. NaN is a value, as in `count`, and in no range."""
        values = self.numbers()
        sampled = self._per_group(None)
        hits = self._per_group((values >= low) & (values <= high))
        lower, upper = wilson(hits, sampled, self.rate, normal_quantile(confidence))
        with np.errstate(invalid="ignore"):
            value = hits / sampled
        lower, upper = np.where(sampled > 0, lower, np.nan), np.where(sampled > 0, upper, np.nan)
        return Estimates(value, lower, upper, confidence, self.basis)

    def _subset_count(self, low: float, high: float, confidence: float) -> Estimates:
        values = self.numbers()
        hits = self._per_group((values >= low) & (values <= high))
        lower, upper = thinned_count(hits, self.rate, normal_quantile(confidence))
        return Estimates(hits / self.rate, lower, upper, confidence, self.basis)

    def _quantile(self, q: float, confidence: float) -> Estimates:
        """Returns the value with rank ⌊q·(n - 1)⌋. The bounds are two order statistics.

        If the sample has no value that far out, the bound is the end of the population's range, or infinite if that is
        unknown.
        """
        values = self.numbers()
        present = values == values
        order = np.lexsort((values, self.groups))
        ordered = values[order][present[order]]
        sampled = self._per_group(present)
        starts = np.concatenate([[0], np.cumsum(sampled)])[:-1].astype(np.int64)
        low, high = wilson(q * sampled, sampled, self.rate, normal_quantile(confidence))
        exact = self.rate >= 1
        rank = np.floor(q * np.maximum(sampled - 1, 0))
        lowest = np.where(exact, rank, np.floor(low * sampled) - 1)
        highest = np.where(exact, rank, np.ceil(high * sampled))
        least, greatest = (
            unknown if end is None else np.where(np.isnan(end), unknown, end)
            for end, unknown in ((self.least, -np.inf), (self.greatest, np.inf))
        )
        results = [
            np.where(at < 0, least, np.where(at >= sampled, greatest, _at(ordered, starts + at)))
            for at in (rank, lowest, highest)
        ]
        value, lower, upper = (np.where(sampled > 0, r, np.nan) for r in results)
        return Estimates(value, lower, upper, confidence, self.basis)

    def _per_group(self, weights: npt.NDArray[Any] | None) -> FloatArray:
        return np.bincount(self.groups, weights, len(self.rate)).astype(np.float64)

    def _scaled(self) -> tuple[FloatArray, FloatArray, FloatArray, IntArray]:
        """Returns the values and the range divided by powers of two, and per group the exponent, int64.

        The greatest magnitude of each group becomes at most 1, so that squares neither underflow nor overflow. Only
        values that are 2^1000 times smaller than the greatest are rounded.
        """
        values = self.numbers()
        unknown = np.full(len(self.rate), np.nan)
        extremes = [unknown if e is None else e for e in (self.least, self.greatest)]
        magnitude = np.zeros(len(self.rate))
        finite = np.isfinite(values)
        np.maximum.at(magnitude, self.groups[finite], np.abs(values[finite]))
        for extreme in extremes:
            magnitude = np.where(np.isfinite(extreme), np.maximum(magnitude, np.abs(extreme)), magnitude)
        exponent = np.frexp(magnitude)[1].astype(np.int64)
        least, greatest = (np.ldexp(extreme, -exponent) for extreme in extremes)
        return np.ldexp(values, -exponent[self.groups]), least, greatest, exponent

    def numbers(self) -> FloatArray:
        """Returns the values as float64. Raises InvalidRequest for strings."""
        if isinstance(self.values, pa.Array):
            raise InvalidRequest("question", "a sample of strings", "Count", "strings have no mean and no order")
        return np.asarray(self.values, np.float64)


def _at(values: FloatArray, index: npt.NDArray[Any]) -> FloatArray:
    if not len(values):
        return np.full(len(index), np.nan)
    return np.asarray(values[np.clip(index, 0, len(values) - 1).astype(np.int64)])
