"""Values that are computed from the measures of an answer, with intervals. Pure.

An expression reads the columns of the answer's table: `m`, `"m_0.5"`, `"m.mean"`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from sqlglot import exp

from edgewater.base.errors import InvalidQuery, InvalidRequest, did_you_mean
from edgewater.base.float_bounds import LARGEST_EXACT
from edgewater.base.number_columns import outwards
from edgewater.model.measure import NAME, NAME_ACCEPTED, Measure
from edgewater.model.syntax import column_names, parse_sql
from edgewater.synopses import Estimates, FloatArray
from edgewater.synopses.intervals import normal_quantile, wilson

MAX_COMPUTED = 20  # limit: CPU of an answer
BINOMIAL = "binomial"
"""The member of a share that has its statistical reading (`ComputedValue.binomial`), and the basis of its interval."""
_UNIT = 2.0**-53  # format: of float64
"""A bound of the relative rounding of one float64 operation."""
_ROUNDING = 2.0**-48  # derived: the rounding of a few operations, outwards
"""A bound of the relative rounding of a few float64 operations without cancellation."""
OPERATORS = {exp.Add: np.add, exp.Sub: np.subtract, exp.Mul: np.multiply, exp.Div: np.divide}
_ARITHMETIC = (*OPERATORS, exp.Paren, exp.Neg)
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
    def parse(cls, text: str, taken: Collection[str] = ()) -> ComputedValue:
        """Parses a parameter `compute`.

        Args:
            taken: names that the value may not have.

        Raises:
            InvalidRequest: states the accepted form.
        """
        name, colon, expression = (part.strip() for part in text.partition(":"))
        if not colon or not NAME.fullmatch(name):
            raise InvalidRequest("compute", text, "name: expression, such as error_rate: errors / requests")
        if name in taken:
            accepted = f"a name that no measure or group has; a name is {NAME_ACCEPTED}"
            raise InvalidRequest("compute", text, accepted)
        tree = parsed(expression, "compute")
        for operand in operands(tree):
            if not isinstance(operand, exp.Column):
                raise InvalidRequest("compute", text, _ACCEPTED, f"{operand.sql()} is not supported")
        if not tree.find(exp.Column):
            raise InvalidRequest("compute", text, _ACCEPTED, "it reads no measure")
        return cls(name, expression)

    def reads(self) -> set[str]:
        """Returns the columns that the expression reads."""
        return set(column_names(parsed(self.text, "compute")))

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
        tree = parsed(self.text, "compute")
        names = column_names(tree)
        for name in names:
            if name not in intervals:
                available = ", ".join(intervals) or "none; ask for a question that has one number per group"
                reason = f"unknown number {name}{did_you_mean(name, intervals)}"
                accepted = f"the numbers of a group: {available}"
                raise InvalidRequest("compute", f"{self.name}: {self.text}", accepted, reason)
        read = {name: intervals[name] for name in names}
        with np.errstate(all="ignore"):
            value = _evaluated(tree, {name: e.value for name, e in read.items()})
            lower, upper = _bounds(tree, read)
        if _share(tree, measures) is not None:
            lower, upper = np.fmax(lower, 0.0), np.fmin(upper, 1.0)
        is_known = np.isfinite(value)
        value = np.where(is_known, value, np.nan)
        lower = np.where(is_known, np.fmin(lower, value), np.nan)
        upper = np.where(is_known, np.fmax(upper, value), np.nan)
        confidence = 1.0 - sum(1.0 - e.confidence for e in read.values())
        return Estimates(value, _or_unknown(lower), _or_unknown(upper), max(confidence, 0.0), "computed")

    def binomial(
        self, intervals: Mapping[str, Estimates], measures: Sequence[Measure], confidence: float
    ) -> Estimates | None:
        """Returns the shares as rates of a binomial distribution: each record of a group is a trial. None: the value is
        no share of the records.

        `estimates` bounds the share of the records that there are. This interval contains, with the confidence, the
        rate with which such records come.

        Args:
            intervals, measures: as of `estimates`.
        """
        names = _share(parsed(self.text, "compute"), measures)
        if names is None:
            return None
        part, whole = (intervals[name] for name in names)
        most = np.where(np.isnan(whole.upper), np.inf, whole.upper)
        least = np.fmax(whole.lower, 0.0)
        z, none = normal_quantile(confidence), np.zeros(len(part))
        with np.errstate(all="ignore"):
            lower, _ = wilson(np.fmax(part.lower, 0.0), most, none, z)
            _, upper = wilson(np.fmin(part.upper, least), least, none, z)
            value = part.value / whole.value
        value = np.where(np.isfinite(value), value, np.nan)
        lower = np.where(np.isnan(value), np.nan, np.where(np.isfinite(most), np.fmin(lower, value), 0.0))
        upper = np.where(np.isnan(value), np.nan, np.fmax(upper, value))
        reached = max(part.confidence + whole.confidence + confidence - 2.0, 0.0)
        return Estimates(value, lower, upper, reached, BINOMIAL)


def operands(tree: exp.Expression) -> Iterator[exp.Expression]:
    """Yields what the arithmetic is about, without numbers: columns, and what is not supported."""
    if isinstance(tree, _ARITHMETIC):
        for child in tree.iter_expressions():
            yield from operands(child)
    elif not isinstance(tree, exp.Literal) or tree.is_string:
        yield tree


@lru_cache(maxsize=256)
def parsed(text: str, field: str) -> exp.Expression:
    """Returns the tree of an expression of a request. Raises InvalidRequest. Each of a page of answers asks again."""
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
    return OPERATORS[type(tree)](_evaluated(tree.this, values), _evaluated(tree.expression, values))


@dataclass(frozen=True, slots=True)
class _Box:
    """Bounds of a term in each row, and bounds of its derivative with respect to each measure. ±inf: unknown.

    Attributes:
        rounding: a bound of the rounding of the term's value, which grows where large terms cancel.
    """

    lower: FloatArray
    upper: FloatArray
    slopes: Mapping[str, tuple[FloatArray, FloatArray]]
    rounding: FloatArray

    @property
    def size(self) -> FloatArray:
        """The largest absolute value."""
        return np.maximum(np.abs(self.lower), np.abs(self.upper))

    def rounded(self, operands: FloatArray) -> _Box:
        """Returns the result of an operation whose operands' rounding moves it by so much."""
        return replace(self, rounding=operands + _UNIT * self.size)

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
    usual = _ROUNDING * np.maximum(np.abs(lower), np.abs(upper))
    is_usual = ~(box.rounding > usual)
    margin = np.where(is_usual, np.where(is_exact & ~is_large, 0.0, usual), box.rounding)
    margin = np.where(np.isfinite(margin), margin, 0.0)
    return lower - margin, upper + margin


def _box(tree: exp.Expression, lows: Mapping[str, FloatArray], highs: Mapping[str, FloatArray]) -> _Box:
    if isinstance(tree, exp.Column):
        one = np.ones_like(lows[tree.name])
        return _Box(lows[tree.name], highs[tree.name], {tree.name: (one, one)}, np.zeros_like(one))
    if isinstance(tree, exp.Literal):
        number = np.full_like(next(iter(lows.values())), float(tree.name))
        return _Box(number, number, {}, _UNIT * np.abs(number))
    if isinstance(tree, exp.Paren):
        return _box(tree.this, lows, highs)
    if isinstance(tree, exp.Neg):
        a = _box(tree.this, lows, highs)
        return _Box(-a.upper, -a.lower, {n: (-high, -low) for n, (low, high) in a.slopes.items()}, a.rounding)
    a, b = _box(tree.this, lows, highs), _box(tree.expression, lows, highs)
    names = {*a.slopes, *b.slopes}
    left, right = (a.lower, a.upper), (b.lower, b.upper)
    either = a.rounding + b.rounding
    if isinstance(tree, exp.Add):
        slopes = {n: _sum(a.slope(n), b.slope(n)) for n in names}
        return _Box(*_sum(left, right), slopes, either).rounded(either)
    if isinstance(tree, exp.Sub):
        slopes = {n: _sum(a.slope(n), _negative(b.slope(n))) for n in names}
        return _Box(*_sum(left, _negative(right)), slopes, either).rounded(either)
    if isinstance(tree, exp.Mul):
        slopes = {n: _sum(_product(a.slope(n), right), _product(left, b.slope(n))) for n in names}
        return _Box(*_product(left, right), slopes, either).rounded(a.rounding * b.size + b.rounding * a.size)
    inverse = _inverse(right)
    quotient = _product(left, inverse)
    # (a / b)' = (a' b - a b') / b², with the sign of a' b - a b'.
    slopes = {
        n: _product(
            _sum(_product(a.slope(n), right), _negative(_product(left, b.slope(n)))), _product(inverse, inverse)
        )
        for n in names
    }
    result, largest = _Box(*quotient, slopes, either), np.maximum(np.abs(inverse[0]), np.abs(inverse[1]))
    return result.rounded((a.rounding + result.size * b.rounding) * largest)


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


def _share(tree: exp.Expression, measures: Sequence[Measure]) -> tuple[str, str] | None:
    """Returns the names of both measures if this is the count of an argument's values divided by the count of all
    records.
    """
    by_name = {measure.name: measure for measure in measures}
    tree = tree.unnest()
    if not isinstance(tree, exp.Div):
        return None
    sides = (tree.this.unnest(), tree.expression.unnest())
    part, whole = (by_name.get(side.name) if isinstance(side, exp.Column) else None for side in sides)
    if part is None or whole is None or part.function.name != "count" or not whole.is_record_count:
        return None
    return part.name, whole.name
