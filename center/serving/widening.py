"""Widens intervals by the records that the data of an answer lack. Answers and questions on synopses share it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from center.serving.predictions import RecordsOut, SynopsisAccuracy, with_prediction
from center.serving.withheld import GroupsWithheld, with_withheld_amounts
from edgewater.answers import NONE, RULES, Cause, Constants, Facts, Predicted, WithheldBound, joint_confidence
from edgewater.answers.work import spend
from edgewater.base.streams import Constant
from edgewater.model.measure import Measure
from edgewater.synopses import BoolArray, Estimates, FloatArray, IntArray, Question, Stack
from edgewater.synopses.late_values import means_with, variances_with

_EXACT_FLOATS = 2.0**53  # format: integers that float64 has exactly


@dataclass(frozen=True, slots=True)
class Lacking:
    """The records that rows of an answer lack, or have too often, by the deviations of its facts.

    Attributes:
        is_unknown: bool per row: an unknown number of records may be absent from its data.
        records: float64 per row, the most records of a known number that may be absent besides.
        amounts: by measure, by how much the `records` of a row together may move its value; an absent one is unknown.
        confidence: probability that `records` and `amounts` are not exceeded.
        may_change: some records may still come.
        may_count_twice: some records may be in the data twice.
        lacks_excluded_records: no prediction stands for some of the records, because no answer will have them.
    """

    is_unknown: BoolArray
    records: FloatArray
    amounts: Mapping[str, WithheldBound] = field(default_factory=dict)
    confidence: float = 1.0
    may_change: bool = False
    may_count_twice: bool = False
    lacks_excluded_records: bool = False

    @classmethod
    def of(cls, facts: Facts, keys: Mapping[str, pa.Array], rows: int) -> Lacking:
        """Returns what some rows lack.

        Args:
            facts: the facts of the answer, or the united ones of several answers.
            keys: the rows' key columns; empty: a row has records of all groups.
            rows: number of rows.
        """
        unknown, records, deviations = np.full(rows, facts.expected == 0), np.zeros(rows), facts.deviations
        for each in deviations:
            if each.lacks == NONE:
                continue
            chosen = _rows_with(each.only, keys, rows)
            if each.lacks.most is None:
                unknown |= chosen
            else:
                records[chosen] += each.lacks.most
        numbered = [d.amounts for d in deviations if d.lacks.most]
        names = frozenset.intersection(*map(frozenset, numbered)) if numbered else ()
        return cls(
            unknown,
            records,
            {name: WithheldBound.union(amounts[name] for amounts in numbered) for name in sorted(names)},
            joint_confidence(d.confidence for d in deviations),
            bool(facts.by_cause(Cause.MAY_CHANGE)),
            facts.may_count_twice,
            any(not RULES[d.cause].predicted for d in deviations),
        )

    def at(self, rows: IntArray | None) -> Lacking:
        """Returns what some of the rows lack; None: all rows."""
        return self if rows is None else replace(self, is_unknown=self.is_unknown[rows], records=self.records[rows])

    def widen(self, estimates: Estimates, measure: Measure | None, stack: Stack) -> Estimates:
        """Removes or moves the bounds that the absent records may exceed.

        Further records can only raise a count or a maximum, and lower a minimum. They may move any other value either
        way, by an unknown amount unless `amounts` states it.

        Args:
            measure: the measure whose values the estimates are; None: they answer another question.
            stack: the synopses of the estimates.
        """
        if self.may_count_twice:
            return estimates.without_bounds()
        function, lacking = None if measure is None else measure.function.name, self.is_unknown
        lower, upper = estimates.lower, estimates.upper
        if function == "count":
            upper = upper + self.records
            upper = np.where((self.records > 0) & (upper >= _EXACT_FLOATS), np.nextafter(upper, np.inf), upper)
        elif measure is not None and (amounts := self.amounts.get(measure.name)) is not None:
            moved = self._with_amounts(measure.function.name, amounts, estimates, stack)
            lower, upper = (np.where(self.records > 0, *both) for both in zip(moved, (lower, upper), strict=True))
        elif measure is not None and measure.function.error is not None:
            lacking = lacking | (self.records > 0)
        if not lacking.any() and upper is estimates.upper:
            return estimates
        unknown = np.where(lacking, np.nan, 0.0)
        lower = lower if function in ("count", "max") else lower + unknown
        return replace(estimates, lower=lower, upper=upper if function == "min" else upper + unknown)

    def _with_amounts(
        self, function: str, amounts: WithheldBound, estimates: Estimates, stack: Stack
    ) -> tuple[FloatArray, FloatArray]:
        lower, upper, whole = estimates.lower, estimates.upper, estimates.integers is not None
        match function:
            case "mean":
                return means_with(estimates, stack, amounts.above, amounts.below, self.records)
            case "var":
                return variances_with(estimates, stack, amounts.above, self.records)
            case "min":  # the negated maximum of the negated values
                least, most = with_withheld_amounts(-upper, -lower, amounts, whole=whole)
                return -most, -least
        return with_withheld_amounts(lower, upper, amounts, whole=whole)


def _rows_with(only: Constants, keys: Mapping[str, pa.Array], rows: int) -> BoolArray:
    """Returns the rows whose groups have these values. A column that is no key or has another type is ignored."""
    result: BoolArray = np.ones(rows, bool)
    for name, value in only.items():
        if name not in keys:
            continue
        if pa.types.is_null(keys[name].type):
            result[:] = False
        elif (wanted := _value(value, keys[name].type)) is not None:
            equal = pc.equal(keys[name], wanted)
            result &= pc.fill_null(equal, False).to_numpy(zero_copy_only=False)
    return result


@dataclass(frozen=True, slots=True)
class Widening:
    """Widens the intervals of some rows of an answer, or of several merged answers.

    Attributes:
        keys: the rows' key columns.
        withheld: the values that edges withhold from the rows.
        lacking: the records that the rows lack.
        predicted: the estimate for records that have not arrived; None: the values contain no estimate.
        out: the records that the data does not contain, if the accuracy is about a synopsis.
        accuracy: takes note of the errors of the synopsis that the accuracy is about.
    """

    keys: Mapping[str, pa.Array]
    withheld: GroupsWithheld
    lacking: Lacking
    predicted: Predicted | None
    out: RecordsOut | None
    accuracy: SynopsisAccuracy | None = None

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
        spend(cells=len(estimates))
        if self.predicted is not None:
            predicted = self.predicted if own else Predicted()
            return self._predicted(measure, stack, estimates, question, rows, predicted)
        if self.lacking.may_count_twice:
            return estimates.without_bounds()
        withheld = self.withheld.missing_records(len(stack))
        missing = withheld + self.lacking.records
        is_moved = own and measure.name in self.lacking.amounts  # `lacking` widens by the late records then
        unknown = withheld if is_moved else missing
        widened = self.withheld.widen(measure, stack, estimates, question, unknown, own=own, groups=rows)
        lacking = self.lacking.at(rows)
        widened = lacking.widen(widened, measure if own else None, stack)
        if lacking.confidence < 1.0 and widened is not estimates:
            widened = widened.depending_on(lacking.confidence)
        if lacking.may_change and own:
            self.withheld.note_late(measure, estimates, widened)
        if lacking.is_unknown.any():
            return widened
        if self.accuracy is not None and measure.name in self.accuracy.functions:
            self.accuracy.note(measure.name, stack, estimates, widened, missing, rows)
        return widened

    def _predicted(
        self,
        measure: Measure,
        stack: Stack,
        estimates: Estimates,
        question: Question | None,
        rows: IntArray | None,
        predicted: Predicted,
    ) -> Estimates:
        """Widens the values of an answer with predictions, which stand for records that edges will still count."""
        has_bounds = not self.lacking.may_count_twice and not self.lacking.lacks_excluded_records
        if self.out is None or measure.name not in self.out.missing or not has_bounds:
            result = with_prediction(estimates, measure, predicted, self.keys)
            return result if has_bounds else result.without_bounds()
        widened = self.out.widen(measure.name, stack, estimates, question, rows)
        if self.accuracy is not None:
            self.accuracy.note(measure.name, stack, estimates, widened, self.out.missing[measure.name], rows)
        return widened


def _value(value: Constant, key: pa.DataType) -> pa.Scalar | None:
    try:
        return pa.scalar(value, key)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None
