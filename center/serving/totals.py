"""Computes the totals of an answer: its measures over all groups, including the values that edges withhold.

Under a budget each group of an answer lacks little, but all groups together may lack much. Edges state the rest of an
exact measure (`edgewater.synopses.rests`). So its total is exact when every edge has closed the window. Of distinct
counts and quantiles the synopses of all groups are merged, and their intervals are widened by the withheld records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import pyarrow as pa

from center.results import AnswerRecord
from center.serving.measures import MeasureEvaluator, MeasureQuestions, computed_values, includes
from center.serving.widening import Lacking, Widening
from center.serving.withheld import GroupsWithheld, of_all_groups
from edgewater.answers import Cause, Facts, WithheldBound
from edgewater.answers.cells import IntervalPart, KeyedPart, RowInterval, intervals, row_intervals
from edgewater.model.json_types import Document, TotalCell
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.synopses import Distinct, Estimates, GroupedAggregate, Quantile, Stack
from edgewater.synopses.named_questions import merge_groups
from edgewater.synopses.rests import NOTHING, has_exact_rest, with_rest
from edgewater.synopses.shapes import shows_integers
from edgewater.wire import Rest

_UNKNOWN: TotalCell = {"estimate": None, "lower": None, "upper": None}


@dataclass(frozen=True, slots=True)
class AnswerTotals:
    """The members `total`, `rest` and `notes` of an answer, which are about all its groups."""

    total: Mapping[str, TotalCell]
    rest: Mapping[str, float | int | None]
    notes: Sequence[str] = ()

    def members(self) -> Document:
        return {"total": self.total, "rest": self.rest, **({"notes": self.notes} if self.notes else {})}


@dataclass(frozen=True, slots=True)
class Rests:
    """The values that all groups of an answer together lack, by measure; None: unknown.

    An absent measure lacks nothing.
    """

    of_measures: Mapping[str, Rest | None]

    def get(self, measure: str) -> Rest | None:
        return self.of_measures.get(measure, NOTHING)

    def stack_without_data(self, measure: Measure) -> Stack:
        """Returns an empty stack of a measure of which nothing was sent. The rest determines the type of its values."""
        stack = measure.stack(None)
        if self.get(measure.name) in (None, NOTHING) or not has_exact_rest(stack):
            return stack
        typed = map(measure.stack, (pa.int64(), pa.float64()))
        return next((stack for stack in typed if self.missing(measure, stack) == 0.0), stack)

    def merged(self, measure: Measure, stack: Stack) -> Stack:
        """Returns the union of all groups of a measure's stack as one group. It includes the rest if `missing` is 0."""
        rest = self.get(measure.name)
        if rest is None or rest == NOTHING or not has_exact_rest(stack):
            return merge_groups(stack)
        return with_rest(stack, rest) or merge_groups(stack)

    def missing(self, measure: Measure, stack: Stack) -> float | None:
        """Returns how many records the result of `merged` lacks at most; None: unknown."""
        rest = self.get(measure.name)
        if rest is None or not has_exact_rest(stack):
            return None if rest is None else float(rest.values)
        is_value = rest == NOTHING or with_rest(stack.take(np.zeros(0, np.int64)), rest) is not None
        return 0.0 if is_value else None

    def withheld(
        self, spec: QuerySpec, measure: Measure, stack: Stack, bounds: Mapping[str, WithheldBound]
    ) -> GroupsWithheld:
        """Returns what the result of `merged` lacks.

        Args:
            bounds: what edges withhold of a group, per measure.
        """
        missing = self.missing(measure, stack)
        if missing is not None:
            return GroupsWithheld.of_records(spec, missing)
        return GroupsWithheld.of(spec, of_all_groups(spec, bounds) if spec.group_by else bounds)


def answer_totals(
    record: AnswerRecord, spec: QuerySpec, questions: MeasureQuestions, merged: GroupedAggregate | None
) -> AnswerTotals:
    """Returns the totals of an answer, for the measures that the questions include.

    They are about all groups, whatever groups the questions select. Both are empty for a session that was merged into
    another session, and for an answer whose data cannot be read.

    If edges withhold values that are in no group, the notes say so.

    Args:
        merged: the merged data of the record; None: nothing has arrived.
    """
    facts = record.facts
    if facts.is_merged_session or facts.by_cause(Cause.UNREADABLE):
        return AnswerTotals({}, {})
    rests, total, rest = Rests(facts.rests), dict[str, TotalCell](), dict[str, float | None]()
    lacking, numbers = Lacking.of(facts, {}, 1), dict[str, Estimates]()
    computed = computed_values(questions, spec)
    for measure in spec.measures:
        groups = rests.stack_without_data(measure) if merged is None else merged.measures[measure.name]
        if not (computed or includes(questions, measure)):
            continue
        if not has_exact_rest(groups):
            if spec.group_by and len(groups) and measure.function.sample is None:
                stack, withheld = merge_groups(groups), rests.withheld(spec, measure, groups, facts.withheld)
                widening = Widening({}, withheld, lacking, None, None)
                for each in _synopsis_totals(measure, stack, questions, widening):
                    numbers[each.column] = each.estimates
                    sampled = is_sampled(spec, facts)
                    if includes(questions, measure):
                        total[each.column] = _UNKNOWN if sampled else _cell(each.estimates, each.whole)
            continue
        if is_sampled(spec, facts):
            total[measure.name] = _UNKNOWN
            continue
        stack, is_whole = rests.merged(measure, groups), rests.missing(measure, groups) == 0.0
        # A known number of absent records alone does not bound a mean or a variance.
        by_number = measure.function.error is None and measure.name not in lacking.amounts and lacking.records > 0
        unknown = replace(lacking, is_unknown=lacking.is_unknown | (not is_whole) | by_number)
        estimates = unknown.widen(stack.query(), measure, stack)
        if unknown.records > 0:
            estimates = estimates.depending_on(unknown.confidence)
        numbers[measure.name] = estimates
        total[measure.name] = _cell(estimates, shows_integers(stack))
        if measure.function.error == "sum":
            amount, has_all = rests.get(measure.name), is_whole and not facts.lacks_records
            rest[measure.name] = _amount(measure, amount) if has_all and amount is not None else None
    for value in computed:
        if value.reads() <= set(numbers):
            total[value.name] = _cell(value.estimates(numbers, spec.measures), False)
    hidden = {m.name for m in spec.values if not includes(questions, m)}
    rest = {name: amount for name, amount in rest.items() if name not in hidden}
    held = ", ".join(f"{name} {amount:,.15g}" for name, amount in rest.items() if amount)
    notes = [f"edges withhold values under the budget: {held} in `total` and in no group of `data`"] if held else []
    return AnswerTotals({name: cell for name, cell in total.items() if name not in hidden}, rest, notes)


def _synopsis_totals(
    measure: Measure, stack: Stack, questions: MeasureQuestions, widening: Widening
) -> list[RowInterval]:
    """Returns a distinct count, or quantiles. What other synopses show of all groups is no total."""
    parts, _ = MeasureEvaluator(measure, stack, questions, partial(widening.widen, measure)).parts()
    is_number = Distinct in stack.questions or isinstance(measure.question, Quantile)
    return [
        each
        for part in parts
        if (isinstance(part, KeyedPart) and part.label == "quantile") or (is_number and isinstance(part, IntervalPart))
        for each in row_intervals(part, measure.name)
    ]


def _cell(estimates: Estimates, whole: bool) -> TotalCell:
    (cell,) = intervals(estimates, whole)
    return cast(TotalCell, cell if estimates.confidence >= 1.0 else {**cell, "confidence": estimates.confidence})


def is_sampled(spec: QuerySpec, facts: Facts) -> bool:
    """Returns whether records may have been sampled out. Then merged groups are no total."""
    return spec.accuracy is not None and (spec.accuracy.kind is None or facts.predicted is not None)


def _amount(measure: Measure, rest: Rest) -> float | int | None:
    """Returns the value of a rest of a sum or a count; None: it is not finite."""
    if measure.function.name == "count":
        return rest.values
    if all(map(math.isfinite, rest.parts)) and all(map(float.is_integer, rest.parts)):
        return sum(map(int, rest.parts))
    try:
        amount = math.fsum(rest.parts)
    except (OverflowError, ValueError):  # it exceeds float64, or has infinities of both signs
        return None
    return amount if math.isfinite(amount) else None
