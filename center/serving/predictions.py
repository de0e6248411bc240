"""Predictions of early answers: intervals that replace the data's, and records that are out of a synopsis. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa

from center.serving.measures import MeasureQuestions
from center.serving.withheld import record_count
from edgewater.answers import Bounds, Predicted
from edgewater.model.accuracy import Accuracy, group_key, group_values
from edgewater.model.early_synopses import RANKS, split_confidence
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.synopses import Count, Estimates, FloatArray, GroupedAggregate, IntArray, KllStack, Question, Stack
from edgewater.synopses.missing_records import with_missing_records

_UNSTATED: Bounds = (None, None, None)
_PREDICTION_ROUNDING = 2.0**-44  # derived: above the rounding of a sum of predictions
_ROUNDING = 1e-9


def with_prediction(
    estimates: Estimates, measure: Measure, predicted: Predicted, groups: Mapping[str, pa.Array]
) -> Estimates:
    """Replaces the data's estimate by the prediction. For measures without one, and groups with too few records, only
    the bounds are replaced: they are unknown.

    Args:
        groups: the rows' key columns.
    """
    if predicted.measure != measure.name or predicted.of_records:
        return estimates.without_bounds()
    columns = _columns(predicted, groups, len(estimates))
    value = np.where(np.isnan(columns[0]), estimates.value, columns[0])
    # Predictions are float64; of integers beyond 2^53 an interval may be narrower than their rounding.
    margin = np.where(np.abs(value) >= 2.0**53, np.abs(value) * _PREDICTION_ROUNDING, 0.0)
    columns = np.array([value, columns[1] - margin, columns[2] + margin])
    # What has arrived decides that the value is NaN or infinite, whatever is still to come.
    odd = estimates.odd
    value, lower, upper = (np.where(odd, estimates.value, each) for each in (value, columns[1], columns[2]))
    confidence = estimates.confidence if predicted.confidence is None else predicted.confidence
    return Estimates(value, lower, upper, confidence, estimates.basis, present=odd | ~np.isnan(value))


def _columns(predicted: Predicted, groups: Mapping[str, pa.Array], rows: int) -> FloatArray:
    """Returns estimate, lower and upper of each row, float64 [3, row]; NaN: unknown."""
    if predicted.groups is None:
        stated = [predicted.interval] * rows
    else:
        keys = (group_key(values) for values in zip(*(c.to_pylist() for c in groups.values()), strict=True))
        stated = [predicted.groups.get(key, _UNSTATED) for key in keys]
    return np.array([[math.nan if x is None else x for x in row] for row in stated], float).reshape(-1, 3).T


@dataclass(frozen=True, slots=True)
class RecordsOut:
    """The records of each row that may be out of an early answer, for an accuracy about a synopsis.

    Attributes:
        measure: name of the synopsis' measure.
        missing: float64 per row, the most records that the data lack; NaN: nothing is predicted of the row; infinite:
            the data have more records than were predicted.
        confidence: probability that they are not more.
        own_confidence: confidence of the synopsis' own interval, if a reader asks for none.
    """

    measure: str
    missing: FloatArray
    confidence: float
    own_confidence: float

    @classmethod
    def of(
        cls, spec: QuerySpec, predicted: Predicted | None, groups: Mapping[str, pa.Array], stacks: Mapping[str, Stack]
    ) -> Self | None:
        """Returns None if the answer has no prediction of a number of records.

        Args:
            groups: the rows' key columns.
            stacks: the rows' merged data by measure: the accuracy's measure, and a count() if there is one.
        """
        accuracy = spec.accuracy
        if accuracy is None or predicted is None or not predicted.of_records:
            return None
        (measure,) = (m for m in spec.measures if m.name == accuracy.measure)
        stack, count = stacks[measure.name], record_count(spec)
        # Without a count of all records, the synopsis has the number of its values. It is not larger.
        merged = stack.query(Count()) if count is None else stacks[count.name].query()
        upper = _columns(predicted, groups, len(stack))[2]
        missing = np.where(merged.value > upper * (1 + _ROUNDING), np.inf, np.maximum(upper - merged.value, 0.0))
        own = split_confidence(measure, accuracy.confidence)[1]
        return cls(measure.name, missing, predicted.confidence or 0.0, own)

    def asked(self, measure: Measure, questions: MeasureQuestions) -> MeasureQuestions:
        """Returns the questions, with the confidence with which the synopsis keeps its part of the accuracy."""
        if measure.name != self.measure or questions.confidence is not None or self.own_confidence >= 1.0:
            return questions
        return replace(questions, confidence=self.own_confidence)

    def widen(
        self, stack: Stack, estimates: Estimates, question: Question | None, rows: IntArray | None = None
    ) -> Estimates:
        """Widens the answer to a question. Rows of which it is not known how many records are out have no bounds.

        Args:
            rows: the row of each estimate; None: there is one per row.
        """
        missing = self.missing if rows is None else self.missing[rows]
        unknown = np.isnan(missing)
        widened = with_missing_records(stack, question, estimates, np.where(unknown, 0.0, missing))
        lower, upper = (np.where(unknown, np.nan, bound) for bound in (widened.lower, widened.upper))
        return replace(widened, lower=lower, upper=upper, confidence=estimates.confidence).depending_on(self.confidence)


@dataclass(slots=True)
class SynopsisAccuracy:
    """Whether the values of a synopsis keep the accuracy of the query.

    The error of a rank, and of a frequency, is a fraction of the group's records; the error of a number of distinct
    values is a fraction of that number.

    Attributes:
        worst: the largest error of a value; infinite: a value has lost a bound.
    """

    accuracy: Accuracy
    function: str
    worst: float = 0.0

    @classmethod
    def of(cls, spec: QuerySpec) -> Self | None:
        """Returns None unless the accuracy is about a synopsis."""
        accuracy = spec.accuracy
        if accuracy is None or accuracy.kind != "records":
            return None
        return cls(accuracy, next(m.function.name for m in spec.measures if m.name == accuracy.measure))

    @property
    def measure(self) -> str:
        return self.accuracy.measure

    def note(
        self, stack: Stack, before: Estimates, widened: Estimates, missing: FloatArray, rows: IntArray | None
    ) -> None:
        """Takes account of the synopsis' values.

        Args:
            missing: the most records that each row lacks; NaN: unknown, so nothing is promised of the row.
            rows: the row of each estimate; None: there is one per row.
        """
        at = np.arange(len(stack)) if rows is None else rows
        promised = ~np.isnan(missing[at]) & np.isfinite(before.value)
        if not promised.any():
            return
        value, lower, upper = (getattr(widened, name)[promised] for name in ("value", "lower", "upper"))
        lost = np.isfinite(before.lower[promised]) & np.isnan(lower)
        lost |= np.isfinite(before.upper[promised]) & np.isnan(upper)
        if self.function == "distinct":
            with np.errstate(divide="ignore", invalid="ignore"):
                error = np.fmax((value - lower) / np.maximum(lower, 1.0), (upper - value) / np.maximum(upper, 1.0))
        else:
            count, out = stack.query(Count()).value[at][promised], missing[at][promised]
            if self.function in RANKS:
                own = stack.rank_errors(before.confidence)[at][promised] if isinstance(stack, KllStack) else 0.0
                with np.errstate(invalid="ignore"):
                    error = (own * count + out) / np.maximum(count + out, 1.0)
            else:
                error = np.fmax(upper - value, value - lower) / np.maximum(count + out, 1.0)
        self.worst = max(self.worst, float(np.where(lost, np.inf, error).max()))


def add_expected(aggregate: GroupedAggregate, predicted: Predicted | None) -> None:
    """Adds rows for groups that have a prediction but no records yet, such as those of an unreachable edge."""
    if predicted is None or predicted.groups is None:
        return
    keys = [group_values(key) for key, (_, lower, _) in predicted.groups.items() if lower is not None]
    if keys:
        types = [column.type for column in aggregate.rows()]
        columns = [pa.array(list(c), t) for c, t in zip(zip(*keys, strict=True), types, strict=True)]
        aggregate.encode(columns, len(keys))
