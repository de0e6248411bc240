"""What a uniform sample without replacement says about the values it was drawn from, per group."""

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
from edgewater.synopses.intervals import around, normal_quantile, student_t, thinned_count, wilson
from edgewater.synopses.questions import Proportion, SubsetCount

QUESTIONS: Questions = (Mean, Sum, Count, Proportion, SubsetCount, Rank, Quantile)
"""What every sample answers. Of strings only `Count`: they have no mean and no order here."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A sample per group.

    Attributes:
        groups: int64 group per value, ascending.
        values: NumPy numbers or Arrow strings.
        share: float64 per group, the probability with which each value was drawn; 1: all are here, and
            answers are exact; 0: an endless population. It takes the place of k/N in the finite population
            correction.
        basis: of the estimates.
    """

    groups: IntArray
    values: Any
    share: FloatArray
    basis: str

    def query(self, question: Question) -> Estimates:
        """One of `QUESTIONS`. NaN where there are no values. Raises InvalidRequest."""
        match question:
            case Count(confidence):
                return self.count(confidence)
            case Mean(confidence):
                return self.mean(confidence)
            case Sum(confidence):
                return self.sum(confidence)
            case Rank(x, confidence):
                return self.proportion(-np.inf, _number("x", x), confidence)
            case Proportion(low, high, confidence):
                return self.proportion(_number("lo", low), _number("hi", high), confidence)
            case SubsetCount(low, high, confidence):
                return self._subset_count(_number("lo", low), _number("hi", high), confidence)
            case Quantile(q, confidence):
                return self._quantile(q, confidence)
        raise TypeError(f"{question} is none of {QUESTIONS}")

    def of_population(self, population: FloatArray, question: Question) -> Estimates:
        """The same where it is known how many values each group was drawn from."""
        drawn = self._per_group(None)
        if population.shape != self.share.shape or (population < drawn).any():
            accepted = f"at least the {drawn.tolist()} values in the sample"
            raise InvalidRequest("population", population.tolist(), accepted)
        known = replace(self, share=np.where(drawn > 0, drawn / np.maximum(population, 1), self.share))
        match question:
            case Count():
                return Estimates.exact(population)
            case Sum(confidence):
                return _times(known.mean(confidence), population)
            case SubsetCount(low, high, confidence):
                return _times(known.proportion(low, high, confidence), population)
        return known.query(question)

    def count(self, confidence: float) -> Estimates:
        """How many values there were to draw from."""
        drawn = self._per_group(None)
        lower, upper = thinned_count(drawn, self.share, normal_quantile(confidence))
        return Estimates(drawn / self.share, lower, upper, confidence, self.basis)

    def mean(self, confidence: float) -> Estimates:
        """s/√n · √(1 - share) by Student's t."""
        values, drawn = self.numbers(), self._per_group(None)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            mean = self._per_group(values) / drawn
            variance = self._per_group((values - mean[self.groups]) ** 2) / np.maximum(drawn - 1, 1)
            return self._around(mean, np.sqrt(variance / drawn * (1 - self.share)), drawn, confidence)

    def sum(self, confidence: float) -> Estimates:
        """Σx/share (Horvitz and Thompson), whose variance is estimated by (1 - share)·Σx²/share²."""
        values, drawn = self.numbers(), self._per_group(None)
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.where(drawn > 0, self._per_group(values) / self.share, np.nan)
            deviation = np.sqrt((1 - self.share) * self._per_group(values * values)) / self.share
            return self._around(total, deviation, drawn, confidence)

    def proportion(self, low: float, high: float, confidence: float) -> Estimates:
        """The part of the values in [low, high]; NaN is no value here."""
        values = self.numbers()
        drawn = self._per_group(values == values)
        hits = self._per_group((values >= low) & (values <= high))
        lower, upper = wilson(hits, drawn, self.share, normal_quantile(confidence))
        with np.errstate(invalid="ignore"):
            value = hits / drawn
        lower, upper = np.where(drawn > 0, lower, np.nan), np.where(drawn > 0, upper, np.nan)
        return Estimates(value, lower, upper, confidence, self.basis)

    def _subset_count(self, low: float, high: float, confidence: float) -> Estimates:
        values = self.numbers()
        hits = self._per_group((values >= low) & (values <= high))
        lower, upper = thinned_count(hits, self.share, normal_quantile(confidence))
        return Estimates(hits / self.share, lower, upper, confidence, self.basis)

    def _quantile(self, q: float, confidence: float) -> Estimates:
        """The value with rank ⌊q·(n - 1)⌋, between two order statistics; infinite where none is far enough out."""
        if not 0 <= q <= 1:
            raise InvalidRequest("q", q, "a number from 0 to 1, such as 0.99")
        values = self.numbers()
        present = values == values
        order = np.lexsort((values, self.groups))
        ordered = values[order][present[order]]
        drawn = self._per_group(present)
        starts = np.concatenate([[0], np.cumsum(drawn)])[:-1].astype(np.int64)
        low, high = wilson(q * drawn, drawn, self.share, normal_quantile(confidence))
        exact = self.share >= 1
        rank = np.floor(q * np.maximum(drawn - 1, 0))
        lowest = np.where(exact, rank, np.floor(low * drawn) - 1)
        highest = np.where(exact, rank, np.ceil(high * drawn))
        results = [
            np.where(at < 0, -np.inf, np.where(at >= drawn, np.inf, _at(ordered, starts + at)))
            for at in (rank, lowest, highest)
        ]
        value, lower, upper = (np.where(drawn > 0, r, np.nan) for r in results)
        return Estimates(value, lower, upper, confidence, self.basis)

    def _around(self, value: FloatArray, deviation: FloatArray, drawn: FloatArray, confidence: float) -> Estimates:
        with np.errstate(invalid="ignore", over="ignore"):
            lower, upper = around(value, student_t(confidence, drawn - 1) * deviation)
        exact = self.share >= 1
        return Estimates(value, np.where(exact, value, lower), np.where(exact, value, upper), confidence, self.basis)

    def _per_group(self, weights: npt.NDArray[Any] | None) -> FloatArray:
        return np.bincount(self.groups, weights, len(self.share)).astype(np.float64)

    def numbers(self) -> FloatArray:
        """The values as float64. Raises InvalidRequest for strings."""
        if isinstance(self.values, pa.Array):
            raise InvalidRequest("question", "a sample of strings", "Count", "strings are not averaged or ordered")
        return np.asarray(self.values, np.float64)


def _at(values: FloatArray, index: npt.NDArray[Any]) -> FloatArray:
    if not len(values):
        return np.full(len(index), np.nan)
    return np.asarray(values[np.clip(index, 0, len(values) - 1).astype(np.int64)])


def _times(estimates: Estimates, factor: FloatArray) -> Estimates:
    value, lower, upper = (e * factor for e in (estimates.value, estimates.lower, estimates.upper))
    return Estimates(value, lower, upper, estimates.confidence, estimates.basis)


def _number(name: str, value: float) -> float:
    if value != value:
        raise InvalidRequest(name, value, "a number")
    return value
