"""Widens intervals by the records that the data of an answer lack. Answers and questions on synopses share it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from center.serving.measures import (
    is_incomplete,
    lacking_rows,
    lacks_excluded_records,
    may_count_twice,
    widen_by_missing,
    without_bounds,
)
from center.serving.predictions import RecordsOut, SynopsisAccuracy, with_prediction
from center.serving.withheld import GroupsWithheld
from edgewater.model.measure import Measure
from edgewater.synopses import BoolArray, Estimates, IntArray, Question, Stack


@dataclass(frozen=True, slots=True)
class Widening:
    """Widens the intervals of some rows of an answer, or of several merged answers.

    Attributes:
        keys: the rows' key columns.
        withheld: the values that edges withhold of the rows.
        lacking: bool per row: records of a missing edge may be absent from its data.
        may_count_twice: some records may be in the data twice.
        lacks_excluded_records: some records are in no answer.
        predictions: predictions by measure, of an early answer to a query with an accuracy; None: the values are those
            of the data.
        out: the records that are out of the data, if the accuracy is about a synopsis.
        accuracy: takes note of the errors of the synopsis that the accuracy is about.
    """

    keys: Mapping[str, pa.Array]
    withheld: GroupsWithheld
    lacking: BoolArray
    may_count_twice: bool
    lacks_excluded_records: bool
    predictions: Mapping[str, Any] | None
    out: RecordsOut | None
    accuracy: SynopsisAccuracy | None

    @classmethod
    def of(
        cls,
        completeness: Sequence[Mapping[str, Any]],
        keys: Mapping[str, pa.Array],
        rows: int,
        withheld: GroupsWithheld,
        predictions: Mapping[str, Any] | None,
        out: RecordsOut | None,
        accuracy: SynopsisAccuracy | None = None,
    ) -> Widening:
        """Returns how to widen the intervals of an answer.

        Args:
            completeness: the completeness of each answer whose data were merged.
            keys: the rows' key columns; empty: a row has records of all groups.
            rows: number of rows.
        """
        lacking = np.zeros(rows, bool)
        for each in filter(is_incomplete, completeness):
            lacking |= lacking_rows(each, keys, rows)
        doubtful, excluded = (any(map(is_so, completeness)) for is_so in (may_count_twice, lacks_excluded_records))
        return cls(keys, withheld, lacking, doubtful, excluded, predictions, out, accuracy)

    def widen(
        self,
        measure: Measure,
        stack: Stack,
        estimates: Estimates,
        question: Question | None,
        rows: IntArray | None = None,
        *,
        own: bool = True,
    ) -> Estimates:
        """Returns the widened estimates of a measure.

        Args:
            question: the question that the estimates answer; None: the measure's own.
            rows: int64, the row of each estimate; None: there is one estimate per row.
            own: whether the estimates are values of the measure, to which its budget and its predictions apply.
        """
        if self.predictions is not None:
            return self._predicted(measure, stack, estimates, question, rows, self.predictions if own else {})
        if self.may_count_twice:
            return without_bounds(estimates)
        widened = self.withheld.widen(measure, stack, estimates, question, own=own, groups=rows)
        if self.lacking.any():
            lacking = self.lacking if rows is None else self.lacking[rows]
            return widen_by_missing(widened, measure if own else None, lacking)
        if self.accuracy is not None and self.accuracy.measure == measure.name:
            self.accuracy.note(stack, estimates, widened, self.withheld.missing_records(len(stack)), rows)
        return widened

    def _predicted(
        self,
        measure: Measure,
        stack: Stack,
        estimates: Estimates,
        question: Question | None,
        rows: IntArray | None,
        predictions: Mapping[str, Any],
    ) -> Estimates:
        """Widens the values of an answer with predictions, which stand for records that edges will still count."""
        # Nothing predicts records that are in no answer.
        has_bounds = not self.may_count_twice and not self.lacks_excluded_records
        if self.out is None or self.out.measure != measure.name or not has_bounds:
            predicted = with_prediction(estimates, measure, predictions, self.keys)
            return predicted if has_bounds else without_bounds(predicted)
        widened = self.out.widen(stack, estimates, question, rows)
        if self.accuracy is not None:
            self.accuracy.note(stack, estimates, widened, self.out.missing, rows)
        return widened
