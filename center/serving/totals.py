"""Computes the totals of an answer: each exact measure over all groups, including the values that edges withhold.

Under a budget each group of an answer lacks little, but all groups together may lack much. Edges state the rest exactly
(`edgewater.synopses.rests`). So the total is exact when every edge has closed the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from center.results import AnswerRecord
from center.serving.measures import MeasureQuestions, includes
from center.serving.widening import Lacking
from edgewater.answers import Cause, Facts
from edgewater.answers.cells import intervals
from edgewater.model.json_types import Document, IntervalCell
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates, GroupedAggregate, Stack
from edgewater.synopses.named_questions import merge_groups
from edgewater.synopses.rests import NOTHING, has_exact_rest, with_rest
from edgewater.synopses.shapes import shows_integers
from edgewater.wire import Rest

_UNKNOWN: IntervalCell = {"estimate": None, "lower": None, "upper": None}


@dataclass(frozen=True, slots=True)
class AnswerTotals:
    """The members `total`, `rest` and `notes` of an answer, which are about all its groups."""

    total: Mapping[str, IntervalCell]
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


def answer_totals(
    record: AnswerRecord, spec: QuerySpec, questions: MeasureQuestions, merged: GroupedAggregate | None
) -> AnswerTotals:
    """Returns the totals of an answer, for the exact measures that the questions include.

    They are about all groups, whatever groups the questions select. Both are empty for a session that was merged into
    another session, and for an answer whose data cannot be read.

    If edges withhold values that are in no group, the notes say so.

    Args:
        merged: the merged data of the record; None: nothing has arrived.
    """
    facts = record.facts
    if facts.is_merged_session or facts.by_cause(Cause.UNREADABLE):
        return AnswerTotals({}, {})
    rests, total, rest = Rests(facts.rests), dict[str, IntervalCell](), dict[str, float | None]()
    lacking, numbers = Lacking.of([facts], {}, 1), dict[str, Estimates]()
    for measure in spec.measures:
        groups = rests.stack_without_data(measure) if merged is None else merged.measures[measure.name]
        if not has_exact_rest(groups) or not (questions.computed or includes(questions, measure)):
            continue
        if is_sampled(spec, facts):
            total[measure.name] = _UNKNOWN
            continue
        stack, is_whole = rests.merged(measure, groups), rests.missing(measure, groups) == 0.0
        # A known number of absent records alone does not bound a mean or a variance.
        by_number = measure.function.error is None and measure.name not in lacking.amounts and lacking.records > 0
        unknown = replace(lacking, is_unknown=lacking.is_unknown | (not is_whole) | by_number)
        estimates = unknown.widen(stack.query(), measure, stack)
        numbers[measure.name] = estimates
        total[measure.name] = intervals(estimates, shows_integers(stack))[0]
        if measure.function.error == "sum":
            amount, has_all = rests.get(measure.name), is_whole and not facts.lacks_records
            rest[measure.name] = _amount(measure, amount) if has_all and amount is not None else None
    for value in questions.computed:
        if value.reads() <= set(numbers):
            total[value.name] = intervals(value.estimates(numbers, spec.measures), False)[0]
    hidden = {m.name for m in spec.measures if not includes(questions, m)}
    rest = {name: amount for name, amount in rest.items() if name not in hidden}
    held = ", ".join(f"{name} {amount:,.15g}" for name, amount in rest.items() if amount)
    notes = [f"edges withhold values under the budget: {held} in `total` and in no group of `data`"] if held else []
    return AnswerTotals({name: cell for name, cell in total.items() if name not in hidden}, rest, notes)


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
