"""Computes values of an answer from its measures (`compute`), and selects and sorts its rows (`having`, `order`).

Pure.

An expression reads the columns of the answer's table: `m`, `"m_0.5"`, `"m.mean"`. Conditions also read `m_lower`,
`m_upper` and the columns of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater.answers.cells import interval_columns
from edgewater.model.errors import InvalidQuery, InvalidRequest, did_you_mean
from edgewater.model.expressions import bind_condition
from edgewater.model.float_bounds import LARGEST_EXACT
from edgewater.model.measure import NAME, NAME_ACCEPTED, Measure
from edgewater.model.number_columns import outwards
from edgewater.model.query import QuerySpec
from edgewater.model.syntax import column_names, parse_sql
from edgewater.synopses import BoolArray, Estimates, FloatArray, IntArray

MAX_COMPUTED = 20
_ROUNDING = 2.0**-48
"""A bound of the relative rounding of a few float64 operations."""
_OPERATORS = {exp.Add: np.add, exp.Sub: np.subtract, exp.Mul: np.multiply, exp.Div: np.divide}
_ACCEPTED = "+, -, *, / and parentheses over measures and numbers, such as errors / requests"


@dataclass(frozen=True, slots=True)
class ComputedValue:
    """A value that a request computes from measures: ``error_rate: errors / requests``.

    Attributes:
        text: the expression, SQL.
    """

    name: str
    text: str

    @classmethod
    def parse(cls, text: str, spec: QuerySpec | None = None) -> ComputedValue:
        """Parses a parameter `compute`.

        Args:
            spec: the query; None: it is not known, so the name is not compared with its measures and groups.

        Raises:
            InvalidRequest: states the accepted form.
        """
        name, colon, expression = (part.strip() for part in text.partition(":"))
        if not colon or not NAME.fullmatch(name):
            raise InvalidRequest("compute", text, "name: expression, such as error_rate: errors / requests")
        if spec is not None and (name in spec.group_by or any(m.name == name for m in spec.measures)):
            accepted = f"a name that no measure or group has; a name is {NAME_ACCEPTED}"
            raise InvalidRequest("compute", text, accepted)
        tree = _parsed(expression, "compute")
        for node in tree.walk():
            if not isinstance(node, (*_OPERATORS, exp.Paren, exp.Neg, exp.Literal, exp.Column, exp.Identifier)) or (
                isinstance(node, exp.Literal) and node.is_string
            ):
                raise InvalidRequest("compute", text, _ACCEPTED, f"{node.sql()} is not supported")
        if not tree.find(exp.Column):
            raise InvalidRequest("compute", text, _ACCEPTED, "it reads no measure")
        return cls(name, expression)

    def reads(self) -> set[str]:
        """Returns the columns that the expression reads."""
        return set(column_names(_parsed(self.text, "compute")))

    def estimates(self, intervals: Mapping[str, Estimates], measures: Sequence[Measure]) -> Estimates:
        """Returns the values with bounds that contain every value for measures within their intervals.

        A measure that occurs several times has one value. So the bounds of `errors / (errors + others)` are its exact
        range, if it rises or falls with each measure alone. Otherwise each occurrence may have another value, which
        makes the bounds wider. The count of a measure's values is at most the count of records, so their quotient is at
        most 1.

        Args:
            intervals: of the same groups, by name of their column.
            measures: of the query.

        Raises:
            InvalidRequest: the expression reads a column that is not a number of each group.
        """
        tree = _parsed(self.text, "compute")
        names = column_names(tree)
        for name in names:
            if name not in intervals:
                available = ", ".join(intervals) or "none; ask for a question that has one number per group"
                reason = f"unknown number {name}{did_you_mean(name, intervals)}"
                raise InvalidRequest(
                    "compute", f"{self.name}: {self.text}", f"the numbers of a group: {available}", reason
                )
        read = {name: intervals[name] for name in names}
        with np.errstate(all="ignore"):
            value = _evaluated(tree, {name: e.value for name, e in read.items()})
            lower, upper = _bounds(tree, read)
        if _is_share(tree, measures):
            lower, upper = np.fmax(lower, 0.0), np.fmin(upper, 1.0)
        is_known = np.isfinite(value)
        value = np.where(is_known, value, np.nan)
        lower = np.where(is_known, np.fmin(lower, value), np.nan)
        upper = np.where(is_known, np.fmax(upper, value), np.nan)
        confidence = 1.0 - sum(1.0 - e.confidence for e in read.values())
        return Estimates(value, _or_unknown(lower), _or_unknown(upper), max(confidence, 0.0), "computed")


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Which rows of an answer a request reads, and in which order.

    Attributes:
        having: a condition over the columns of the answer's table; empty: all rows.
        order: columns; a minus before a column sorts it in descending order. Empty: by group.
        limit: the largest number of rows; None: all.
    """

    having: str = ""
    order: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self.having or self.order) or self.limit is not None

    def rows(self, groups: Mapping[str, pa.Array], intervals: Mapping[str, Estimates], length: int) -> IntArray:
        """Returns the selected rows in their order.

        Raises:
            InvalidRequest: the condition or the order names a column that the answer does not have, or does not fit
                its type.
        """
        columns = {n: c.cast(pa.float64()) if pa.types.is_null(c.type) else c for n, c in groups.items()}
        for name, estimates in intervals.items():
            for column, values in interval_columns(name, estimates, wide=True).items():
                columns.setdefault(column, values)
        rows = np.arange(length)
        if self.having:
            batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns)) if columns else None
            rows = np.flatnonzero(self._matching(batch, {n: c.type for n, c in columns.items()}, length))
        if self.order and len(rows):
            rows = rows[self._sorted(columns, rows)]
        return rows if self.limit is None else rows[: self.limit]

    def _matching(self, batch: pa.RecordBatch | None, types: Mapping[str, pa.DataType], length: int) -> BoolArray:
        try:
            condition = bind_condition(_parsed(self.having, "having"), types, "having")
        except InvalidQuery as exc:
            raise InvalidRequest("having", self.having, exc.accepted, exc.reason) from exc
        if batch is None:
            return np.ones(length, bool)
        matching: BoolArray = pc.fill_null(condition.array(batch), False).to_numpy(zero_copy_only=False)
        return matching

    def _sorted(self, columns: Mapping[str, pa.Array], rows: IntArray) -> IntArray:
        keys = []
        for key in self.order:
            name = key.removeprefix("-")
            if name not in columns:
                reason = f"unknown column {name}{did_you_mean(name, columns)}"
                raise InvalidRequest("order", key, f"one of {', '.join(columns)}; -column: descending", reason)
            keys.append((name, "descending" if key.startswith("-") else "ascending"))
        table = pa.table({name: columns[name].take(pa.array(rows)) for name, _ in keys})
        positions: IntArray = pc.sort_indices(table, sort_keys=keys).to_numpy()
        return positions


ALL_ROWS = RowSelection()


@lru_cache(maxsize=256)
def _parsed(text: str, field: str) -> exp.Expression:
    try:
        return parse_sql(text, field)
    except InvalidQuery as exc:
        raise InvalidRequest(field, text, exc.accepted, exc.reason) from exc


def _evaluated(tree: exp.Expression, values: Mapping[str, FloatArray]) -> FloatArray:
    if isinstance(tree, exp.Column):
        return values[tree.name]
    if isinstance(tree, exp.Literal):
        return np.full_like(next(iter(values.values())), float(tree.name))
    if isinstance(tree, exp.Paren):
        return _evaluated(tree.this, values)
    if isinstance(tree, exp.Neg):
        return -_evaluated(tree.this, values)
    return _OPERATORS[type(tree)](_evaluated(tree.this, values), _evaluated(tree.expression, values))


@dataclass(frozen=True, slots=True)
class _Box:
    """Bounds of a term in each row, and bounds of its derivative with respect to each measure. ±inf: unknown."""

    lower: FloatArray
    upper: FloatArray
    slopes: Mapping[str, tuple[FloatArray, FloatArray]]

    def slope(self, name: str) -> tuple[FloatArray, FloatArray]:
        return self.slopes.get(name, (np.zeros_like(self.lower), np.zeros_like(self.lower)))


def _bounds(tree: exp.Expression, read: Mapping[str, Estimates]) -> tuple[FloatArray, FloatArray]:
    lows = {n: np.where(np.isfinite(e.lower), outwards(e.lower, -1), -np.inf) for n, e in read.items()}
    highs = {n: np.where(np.isfinite(e.upper), outwards(e.upper, 1), np.inf) for n, e in read.items()}
    box = _box(tree, lows, highs)
    lower, upper = box.lower, box.upper
    rising = {n: box.slope(n)[0] >= 0 for n in read}
    is_monotone = np.ones_like(lower, dtype=bool)
    for name in read:
        is_monotone &= rising[name] | (box.slope(name)[1] <= 0)
    least = _evaluated(tree, {n: np.where(rising[n], lows[n], highs[n]) for n in read})
    greatest = _evaluated(tree, {n: np.where(rising[n], highs[n], lows[n]) for n in read})
    lower = np.fmax(lower, np.where(is_monotone, least, np.nan))
    upper = np.fmin(upper, np.where(is_monotone, greatest, np.nan))
    # Values of exact measures give exact values here, too, up to the rounding of float64.
    is_exact = np.ones_like(is_monotone)
    is_large = np.zeros_like(is_monotone)
    for name in read:
        is_exact &= lows[name] == highs[name]
        is_large |= np.maximum(np.abs(lows[name]), np.abs(highs[name])) > LARGEST_EXACT
    margin = np.where(is_exact & ~is_large, 0.0, _ROUNDING * np.maximum(np.abs(lower), np.abs(upper)))
    margin = np.where(np.isfinite(margin), margin, 0.0)
    return lower - margin, upper + margin


def _box(tree: exp.Expression, lows: Mapping[str, FloatArray], highs: Mapping[str, FloatArray]) -> _Box:
    if isinstance(tree, exp.Column):
        one = np.ones_like(lows[tree.name])
        return _Box(lows[tree.name], highs[tree.name], {tree.name: (one, one)})
    if isinstance(tree, exp.Literal):
        number = np.full_like(next(iter(lows.values())), float(tree.name))
        return _Box(number, number, {})
    if isinstance(tree, exp.Paren):
        return _box(tree.this, lows, highs)
    if isinstance(tree, exp.Neg):
        a = _box(tree.this, lows, highs)
        return _Box(-a.upper, -a.lower, {n: (-high, -low) for n, (low, high) in a.slopes.items()})
    a, b = _box(tree.this, lows, highs), _box(tree.expression, lows, highs)
    names = {*a.slopes, *b.slopes}
    left, right = (a.lower, a.upper), (b.lower, b.upper)
    if isinstance(tree, exp.Add):
        return _Box(*_sum(left, right), {n: _sum(a.slope(n), b.slope(n)) for n in names})
    if isinstance(tree, exp.Sub):
        return _Box(*_sum(left, _negative(right)), {n: _sum(a.slope(n), _negative(b.slope(n))) for n in names})
    if isinstance(tree, exp.Mul):
        slopes = {n: _sum(_product(a.slope(n), right), _product(left, b.slope(n))) for n in names}
        return _Box(*_product(left, right), slopes)
    inverse = _inverse(right)
    quotient = _product(left, inverse)
    # (a / b)' = (a' b - a b') / b², with the sign of a' b - a b'.
    slopes = {
        n: _product(
            _sum(_product(a.slope(n), right), _negative(_product(left, b.slope(n)))), _product(inverse, inverse)
        )
        for n in names
    }
    return _Box(*quotient, slopes)


_Pair = tuple[FloatArray, FloatArray]


def _negative(a: _Pair) -> _Pair:
    return -a[1], -a[0]


def _sum(a: _Pair, b: _Pair) -> _Pair:
    lower, upper = a[0] + b[0], a[1] + b[1]
    return np.where(np.isnan(lower), -np.inf, lower), np.where(np.isnan(upper), np.inf, upper)


def _product(a: _Pair, b: _Pair) -> _Pair:
    # An unknown bound is finite, so 0 times it is 0.
    corners = [np.where((x == 0) | (y == 0), 0.0, x * y) for x in a for y in b]
    return np.minimum.reduce(corners), np.maximum.reduce(corners)


def _inverse(b: _Pair) -> _Pair:
    has_zero = (b[0] <= 0) & (b[1] >= 0)
    return np.where(has_zero, -np.inf, 1.0 / b[1]), np.where(has_zero, np.inf, 1.0 / b[0])


def _or_unknown(bound: FloatArray) -> FloatArray:
    return np.where(np.isfinite(bound), bound, np.nan)


def _is_share(tree: exp.Expression, measures: Sequence[Measure]) -> bool:
    """Returns whether this is the count of an argument's values divided by the count of all records."""
    by_name = {measure.name: measure for measure in measures}
    tree = tree.unnest()
    if not isinstance(tree, exp.Div):
        return False
    sides = (tree.this.unnest(), tree.expression.unnest())
    part, whole = (by_name.get(side.name) if isinstance(side, exp.Column) else None for side in sides)
    if part is None or whole is None:
        return False
    return part.function.name == whole.function.name == "count" and whole.argument is None
