"""Estimates from a uniform sample without replacement about the sampled population, per group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.errors import InvalidRequest
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
from edgewater.synopses.intervals import around, normal_quantile, student_t, thinned_count, wilson
from edgewater.synopses.questions import Proportion, SubsetCount

QUESTIONS: Questions = (Mean, Sum, Count, Proportion, SubsetCount, Rank, Quantile)
"""Questions that every sample answers. A sample of strings answers only `Count`: strings have no mean and no order."""


@dataclass(frozen=True, slots=True)
class SampleEstimator:
    """The estimates of a sample per group.

    Attributes:
        groups: int64 group per value, ascending.
        values: NumPy numbers or Arrow strings.
        rate: float64 per group, the probability with which each value was sampled; 1: the sample is complete and
        answers
            are exact; 0: an infinite population. It replaces k/N in the finite population correction.
        basis: the basis of the estimates.
    """

    groups: IntArray
    values: Any
    rate: FloatArray
    basis: str

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

    def of_population(self, population: FloatArray, question: Question) -> Estimates:
        """Answers a question if the number of values that each group was sampled from is known."""
        sampled = self._per_group(None)
        if population.shape != self.rate.shape or (population < sampled).any():
            accepted = f"at least the {sampled.tolist()} values in the sample"
            raise InvalidRequest("population", population.tolist(), accepted)
        known = replace(self, rate=np.where(sampled > 0, sampled / np.maximum(population, 1), self.rate))
        match question:
            case Count():
                return Estimates.exact(population)
            case Sum(confidence):
                return _times(known.mean(confidence), population)
            case SubsetCount(low, high, confidence):
                return _times(known.proportion(low, high, confidence), population)
        return known.query(question)

    def count(self, confidence: float) -> Estimates:
        """Estimates the number of values in the population."""
        sampled = self._per_group(None)
        lower, upper = thinned_count(sampled, self.rate, normal_quantile(confidence))
        return Estimates(sampled / self.rate, lower, upper, confidence, self.basis)

    def mean(self, confidence: float) -> Estimates:
        """Estimates the mean; the standard error is s/√n · √(1 - rate), the quantile Student's t."""
        values, exponent = self._scaled()
        sampled = self._per_group(None)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = self._per_group(values) / sampled
            variance = self._per_group((values - mean[self.groups]) ** 2) / np.maximum(sampled - 1, 1)
            deviation = np.ldexp(np.sqrt(variance / sampled * (1 - self.rate)), exponent)
            return self._around(np.ldexp(mean, exponent), deviation, sampled, confidence)

    def sum(self, confidence: float) -> Estimates:
        """Estimates the sum by Σx/rate (Horvitz and Thompson), its variance by (1 - rate)·Σx²/rate²."""
        values, exponent = self._scaled()
        sampled = self._per_group(None)
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.where(sampled > 0, self._per_group(values) / self.rate, np.nan)
            deviation = np.sqrt((1 - self.rate) * self._per_group(values * values)) / self.rate
            return self._around(np.ldexp(total, exponent), np.ldexp(deviation, exponent), sampled, confidence)

    def proportion(self, low: float, high: float, confidence: float) -> Estimates:
        """Estimates the fraction of the values in [low, high]; ignores NaN."""
        values = self.numbers()
        sampled = self._per_group(values == values)
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
        """Returns the value with rank ⌊q·(n - 1)⌋, between two order statistics; a bound is infinite if the sample has
        no value that far out."""
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
        results = [
            np.where(at < 0, -np.inf, np.where(at >= sampled, np.inf, _at(ordered, starts + at)))
            for at in (rank, lowest, highest)
        ]
        value, lower, upper = (np.where(sampled > 0, r, np.nan) for r in results)
        return Estimates(value, lower, upper, confidence, self.basis)

    def _around(self, value: FloatArray, deviation: FloatArray, sampled: FloatArray, confidence: float) -> Estimates:
        with np.errstate(invalid="ignore", over="ignore"):
            lower, upper = around(value, student_t(confidence, sampled - 1) * deviation)
        exact = self.rate >= 1
        return Estimates(value, np.where(exact, value, lower), np.where(exact, value, upper), confidence, self.basis)

    def _per_group(self, weights: npt.NDArray[Any] | None) -> FloatArray:
        return np.bincount(self.groups, weights, len(self.rate)).astype(np.float64)

    def _scaled(self) -> tuple[FloatArray, IntArray]:
        """Returns the values divided by powers of two, and per group the exponent, int64.

        The greatest of each group becomes at most 1, so that squares neither underflow nor overflow; nothing is rounded
        but values that are smaller than the greatest by a factor of 2^1000.
        """
        values = self.numbers()
        greatest = np.zeros(len(self.rate))
        finite = np.isfinite(values)
        np.maximum.at(greatest, self.groups[finite], np.abs(values[finite]))
        exponent = np.frexp(greatest)[1].astype(np.int64)
        return np.ldexp(values, -exponent[self.groups]), exponent

    def numbers(self) -> FloatArray:
        """Returns the values as float64. Raises InvalidRequest for strings."""
        if isinstance(self.values, pa.Array):
            raise InvalidRequest("question", "a sample of strings", "Count", "strings have no mean and no order")
        return np.asarray(self.values, np.float64)


def _at(values: FloatArray, index: npt.NDArray[Any]) -> FloatArray:
    if not len(values):
        return np.full(len(index), np.nan)
    return np.asarray(values[np.clip(index, 0, len(values) - 1).astype(np.int64)])


def _times(estimates: Estimates, factor: FloatArray) -> Estimates:
    value, lower, upper = (e * factor for e in (estimates.value, estimates.lower, estimates.upper))
    return Estimates(value, lower, upper, estimates.confidence, estimates.basis)
