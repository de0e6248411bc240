"""Predictions of early answers: intervals that replace the data's, and records that are out of a synopsis. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import pyarrow as pa

from center.serving.measures import MeasureQuestions
from center.serving.withheld import record_count
from edgewater.answers import Bounds, Predicted
from edgewater.arrivals.targets import EXTREMES
from edgewater.model.accuracy import group_key, group_values
from edgewater.model.early_synopses import RANKS, SAMPLES, split_confidence
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
    if measure.function.name in EXTREMES:  # reports round the extreme of the same records
        value = np.fmin(np.fmax(estimates.value, columns[1]), columns[2])
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
        missing: by measure, float64 per row, the most records that the data lack; NaN: nothing is predicted of the row;
            infinite: the data have more records than were predicted.
        confidence: probability that they are not more.
        own_confidence: by measure, the confidence of the synopsis' own interval, if a reader asks for none.
    """

    missing: dict[str, FloatArray]
    confidence: float
    own_confidence: dict[str, float]

    @classmethod
    def of(
        cls, spec: QuerySpec, predicted: Predicted | None, groups: Mapping[str, pa.Array], stacks: Mapping[str, Stack]
    ) -> Self | None:
        """Returns None if the answer has no prediction of a number of records.

        Args:
            groups: the rows' key columns.
            stacks: the rows' merged data by measure: measures of the accuracy, and a count() if there is one.
        """
        accuracy = spec.accuracy
        if accuracy is None or predicted is None or not predicted.of_records:
            return None
        count, missing, own = record_count(spec), {}, {}
        counted = None if count is None else stacks[count.name].query()
        upper = _columns(predicted, groups, max(map(len, stacks.values()), default=0))[2]
        for measure in (m for m in spec.measures if m.name in accuracy.measures and m.name in stacks):
            # Without a count of all records, the synopsis has the number of its values. It is not larger.
            merged = stacks[measure.name].query(Count()) if counted is None else counted
            exceeds = merged.value > upper * (1 + _ROUNDING)
            missing[measure.name] = np.where(exceeds, np.inf, np.maximum(upper - merged.value, 0.0))
            own[measure.name] = split_confidence(measure, accuracy.confidence)[1]
        return cls(missing, predicted.confidence or 0.0, own)

    def asked(self, measure: Measure, questions: MeasureQuestions) -> MeasureQuestions:
        """Returns the questions, with the confidence with which the synopsis keeps its part of the accuracy."""
        own = self.own_confidence.get(measure.name, 1.0)
        return questions if questions.confidence is not None or own >= 1.0 else replace(questions, confidence=own)

    def widen(
        self, name: str, stack: Stack, estimates: Estimates, question: Question | None, rows: IntArray | None = None
    ) -> Estimates:
        """Widens the answer to a question. Rows of which it is not known how many records are out have no bounds.

        Args:
            name: the measure.
            rows: the row of each estimate; None: there is one per row.
        """
        missing = self.missing[name] if rows is None else self.missing[name][rows]
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
        functions: the function of each measure of the accuracy.
        records: float64 per row, the merged records, which a sample only estimates; None if no measure is a sample.
        worst: by measure, the largest error of a value; infinite: a value has lost a bound.
    """

    functions: Mapping[str, str]
    records: FloatArray | None = None
    worst: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: QuerySpec, stacks: Mapping[str, Stack]) -> Self | None:
        """Returns None unless the accuracy is about a synopsis.

        Args:
            stacks: the rows' merged data by measure.
        """
        accuracy = spec.accuracy
        if accuracy is None or accuracy.kind != "records":
            return None
        functions = {m.name: m.function.name for m in spec.measures if m.name in accuracy.measures}
        count = record_count(spec) if any(function in SAMPLES for function in functions.values()) else None
        return cls(functions, None if count is None else stacks[count.name].query().value)

    def note(
        self, name: str, stack: Stack, before: Estimates, widened: Estimates, missing: FloatArray, rows: IntArray | None
    ) -> None:
        """Takes account of the values of a measure.

        Args:
            name: the measure.
            missing: the most records that each row lacks; NaN: unknown, so nothing is promised of the row.
            rows: the row of each estimate; None: there is one per row.
        """
        at = np.arange(len(stack)) if rows is None else rows
        promised = ~np.isnan(missing[at]) & np.isfinite(before.value)
        if not promised.any():
            return
        value, lower, upper = (part[promised] for part in (widened.value, widened.lower, widened.upper))
        lost = np.isfinite(before.lower[promised]) & np.isnan(lower)
        lost |= np.isfinite(before.upper[promised]) & np.isnan(upper)
        if self.functions[name] in SAMPLES:  # the accuracy is about the records that the sample lacks
            lost = np.isinf(missing[at][promised])
        if self.functions[name] == "distinct":
            with np.errstate(divide="ignore", invalid="ignore"):
                error = np.fmax((value - lower) / np.maximum(lower, 1.0), (upper - value) / np.maximum(upper, 1.0))
        else:
            records = self.records if self.functions[name] in SAMPLES else None
            count = (stack.query(Count()).value if records is None else records)[at][promised]
            out = missing[at][promised]
            if self.functions[name] in (*RANKS, *SAMPLES):
                own = stack.rank_errors(before.confidence)[at][promised] if isinstance(stack, KllStack) else 0.0
                with np.errstate(invalid="ignore"):
                    error = (own * count + out) / np.maximum(count + out, 1.0)
            else:
                error = np.fmax(upper - value, value - lower) / np.maximum(count + out, 1.0)
        self.worst[name] = max(self.worst.get(name, 0.0), float(np.where(lost, np.inf, error).max()))


def add_expected(aggregate: GroupedAggregate, predicted: Predicted | None) -> None:
    """Adds rows for groups that have a prediction but no records yet, such as those of an unreachable edge."""
    if predicted is None or predicted.groups is None:
        return
    keys = [group_values(key) for key, (_, lower, _) in predicted.groups.items() if lower is not None]
    if keys:
        types = [column.type for column in aggregate.rows()]
        columns = [pa.array(list(c), t) for c, t in zip(zip(*keys, strict=True), types, strict=True)]
        aggregate.encode(columns, len(keys))
