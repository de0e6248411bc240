"""Conditions of alert rules: decides whether the intervals of an answer support a condition. No I/O.

``certainly: errors > 100`` holds if every value within the interval of `errors` is over 100. ``possibly: errors > 100``
holds if at least one value within the interval is over 100. If a bound is unknown, a condition on it is not certain,
but possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater.base.errors import InvalidQuery, InvalidRequest
from edgewater.base.number_columns import float_column
from edgewater.model.computed import ComputedValue
from edgewater.model.expressions import bind_condition
from edgewater.model.measure import Measure
from edgewater.model.syntax import column_names, parse_sql
from edgewater.synopses import BoolArray, Estimates

_OPPOSITE: dict[type[exp.Expression], type[exp.Binary]] = {
    exp.GT: exp.LTE, exp.LTE: exp.GT, exp.LT: exp.GTE, exp.GTE: exp.LT, exp.EQ: exp.NEQ, exp.NEQ: exp.EQ,
}  # fmt: skip
_ACCEPTED = "comparisons of measures (=, <>, <, <=, >, >=, BETWEEN, IN), with AND, OR and NOT"


class Verdicts(NamedTuple):
    """The result of a condition for each row of an answer. In a row without a value, `holds` and `fails` are both
    false.

    Attributes:
        holds: the rows for which the condition holds, with the certainty that the rule requires.
        fails: the rows for which the condition certainly does not hold.
        intervals: by column name, the numbers of the rows that have bounds; also the values of `compute`.
    """

    holds: BoolArray
    fails: BoolArray
    intervals: Mapping[str, Estimates]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the rows of an answer.

    Attributes:
        text: SQL over the columns of the answer's table and of `compute`.
        certainty: whether all values within the intervals must satisfy the condition, or at least one value.
        compute: further values: expression by name.
    """

    text: str
    certainty: Literal["certainly", "possibly"]
    compute: Mapping[str, str]

    def parsed(self) -> exp.Expression:
        """Returns the syntax tree of `text`.

        Raises:
            InvalidQuery: `text` is not valid SQL.
        """
        return parse_sql(self.text, self.certainty)

    def verdicts(self, rows: pa.Table, measures: Sequence[Measure]) -> Verdicts:
        """Evaluates the condition for each row.

        Raises:
            InvalidRequest, InvalidQuery: the condition names an unknown column, does not fit the types of the columns,
                or reads a measure outside a comparison.
        """
        intervals = _intervals(rows)
        for name, text in self.compute.items():
            intervals[name] = ComputedValue(name, text).estimates(intervals, measures)
        given = _Rows(rows, intervals, measures, self.certainty)
        tree = self.parsed()
        return Verdicts(
            given.where(tree, True, certainly=self.certainty == "certainly"),
            given.where(tree, False, certainly=True),
            intervals,
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of an answer, for a condition. Errors name the condition by `field`."""

    rows: pa.Table
    intervals: Mapping[str, Estimates]
    measures: Sequence[Measure]
    field: str

    def where(self, tree: exp.Expression, truth: bool, *, certainly: bool) -> BoolArray:
        """Returns the rows in which a condition is `truth`, for all values within the intervals or for at least one
        value.

        NOT is moved into the comparisons. So a row without a value satisfies neither a condition nor its negation, as
        in SQL.
        """
        tree = tree.unnest()
        if isinstance(tree, exp.Not):
            return self.where(tree.this, not truth, certainly=certainly)
        if isinstance(tree, exp.Between) and self._reads_interval(tree):
            low = exp.GTE(this=tree.this, expression=tree.args["low"])
            high = exp.LTE(this=tree.this, expression=tree.args["high"])
            return self._where_each([low, high], truth, truth, certainly)
        if isinstance(tree, exp.In) and self._reads_interval(tree):
            if not tree.expressions:
                raise InvalidQuery(self.field, tree.sql(), "IN with a list of numbers")
            equal = [exp.EQ(this=tree.this, expression=option) for option in tree.expressions]
            return self._where_each(equal, truth, not truth, certainly)
        if isinstance(tree, exp.And | exp.Or):
            return self._where_each(list(tree.flatten()), truth, isinstance(tree, exp.And) == truth, certainly)
        if type(tree) in _OPPOSITE and self._reads_interval(tree):
            return self._where_compared(tree, truth, certainly)
        if not isinstance(tree, exp.Is) and self._reads_interval(tree):
            raise InvalidQuery(self.field, tree.sql(), _ACCEPTED, "its interval would be ignored")
        return self._where_plain(tree if truth else exp.Not(this=exp.Paren(this=tree)))

    def _reads_interval(self, tree: exp.Expression) -> bool:
        return any(name in self.intervals for name in column_names(tree))

    def _where_each(self, parts: Sequence[exp.Expression], truth: bool, all_of: bool, certainly: bool) -> BoolArray:
        found = [self.where(part, truth, certainly=certainly) for part in parts]
        return reduce(np.logical_and if all_of else np.logical_or, found)

    def _where_compared(self, tree: exp.Expression, truth: bool, certainly: bool) -> BoolArray:
        comparison = type(tree) if truth else _OPPOSITE[type(tree)]
        direct = self._minus_number(tree)
        if direct is None:
            try:
                difference = ComputedValue.parse(f"difference: ({tree.left.sql()}) - ({tree.right.sql()})")
                direct = difference.estimates(self.intervals, self.measures)
            except InvalidRequest as exc:
                raise InvalidQuery(self.field, tree.sql(), exc.accepted, exc.reason) from exc
        return _compared(comparison, direct, certainly)

    def _minus_number(self, tree: exp.Expression) -> Estimates | None:
        """Returns the difference of a column and a number, with an exact sign; None if the comparison has other
        operands.
        """
        column, number = tree.left.unnest(), tree.right.unnest()
        literal = number.this if isinstance(number, exp.Neg) else number
        if not (isinstance(column, exp.Column) and isinstance(literal, exp.Literal) and not literal.is_string):
            return None
        estimates = self.intervals[column.name]
        constant = -float(literal.name) if isinstance(number, exp.Neg) else float(literal.name)
        return Estimates(estimates.value - constant, estimates.lower - constant, estimates.upper - constant)

    def _where_plain(self, tree: exp.Expression) -> BoolArray:
        columns = {name: self.rows.column(name).combine_chunks() for name in self.rows.column_names}
        condition = bind_condition(tree, {name: column.type for name, column in columns.items()}, self.field)
        batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        plain: BoolArray = pc.fill_null(condition.array(batch), False).to_numpy(zero_copy_only=False)
        return plain


def _intervals(rows: pa.Table) -> dict[str, Estimates]:
    """Returns the numbers that have bounds, by the name of their column."""
    names = set(rows.column_names)
    result = {}
    for name in rows.column_names:
        if f"{name}_lower" in names and f"{name}_upper" in names:
            value, lower, upper = (rows.column(n) for n in (name, f"{name}_lower", f"{name}_upper"))
            result[name] = Estimates(float_column(value, 0), float_column(lower, -1), float_column(upper, 1))
    return result


def _compared(comparison: type[exp.Expression], difference: Estimates, certainly: bool) -> BoolArray:
    """Compares a difference with 0. A row without a value satisfies no comparison."""
    lower = np.where(np.isnan(difference.lower), -np.inf, difference.lower)
    upper = np.where(np.isnan(difference.upper), np.inf, difference.upper)
    if comparison in (exp.LT, exp.LTE):
        lower, upper = -upper, -lower
    least = lower if certainly else upper
    if comparison in (exp.GT, exp.LT):
        result = least > 0
    elif comparison in (exp.GTE, exp.LTE):
        result = least >= 0
    elif certainly == (comparison is exp.EQ):
        result = (lower == 0) & (upper == 0)
    else:
        result = (lower <= 0) & (upper >= 0)
    if comparison is exp.NEQ:
        result = ~result
    return np.asarray(result & ~np.isnan(difference.value), bool)
