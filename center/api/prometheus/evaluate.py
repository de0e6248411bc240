"""PromQL over answers: selectors, numbers, ``+ - * /``, comparisons, and aggregations of a selector.

An aggregation of bounds is a bound, if each group has one: the sum of the upper bounds is an upper bound of the sum. If
one group has none, the result is absent. Functions such as `rate` are refused, because an answer is already about a
window. The rules are the rules of Prometheus 2: anchored RE2, one-to-one matching, names dropped by arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from center.api.prometheus.series import ABSENT, Axis, Labels, Matchers, Samples, SeriesReader, hold, is_absent
from edgewater.answers.work import spend
from edgewater.base.errors import EdgewaterError
from edgewater.base.float_bounds import LARGEST_EXACT, Side, side_of
from edgewater.model.table_texts import json_text

MAX_LENGTH = 8_192
"""Characters of an expression: a limit of the parser's work."""
MAX_DEPTH = 50
"""A limit of the recursion of parser and evaluation."""
MAX_OPERATORS = 100
"""A limit of the parser's time, which is quadratic in the number of operators."""
_TOO_DEEP = f"the expression is nested more than {MAX_DEPTH} deep, or has more than {MAX_OPERATORS} operators"
_SKIPPED = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`|#[^\n\r]*""")
"""Texts and comments."""
_MATCHERS = re.compile(r"\{[^{}]*\}")
_OPERATOR = re.compile(r"[-+*/^%]|[<>=!]=?|(?<![a-z_:])(?:and|or|unless|atan2)\b", re.IGNORECASE)
REFUSED = (
    "a value is about its whole window already; divide by the length of the window for a rate, and register a query"
    " with a longer window, or ask for a roll-up, for a longer range"
)
AGGREGATIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda rows: rows.sum(axis=0),
    "min": lambda rows: np.fmin.reduce(rows, axis=0),
    "max": lambda rows: np.fmax.reduce(rows, axis=0),
    "avg": lambda rows: rows.mean(axis=0),
    "count": lambda rows: np.full(rows.shape[1], float(len(rows))),
}
ADDING = ("sum", "avg")
ACCEPTED = (
    "accepted are selectors, numbers, + - * /, comparisons, parentheses and"
    f" {', '.join(AGGREGATIONS)}, topk and bottomk of a selector"
)
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": np.greater,
    "<": np.less,
    ">=": np.greater_equal,
    "<=": np.less_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
SIGNS = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}
"""The operators of matchers, by their names in the parser."""
BOUNDS = ("_lower", "_upper")
Scalar = npt.NDArray[np.float64]


class PromqlError(EdgewaterError):
    """An expression that is not evaluated.

    Attributes:
        kind: Prometheus' `errorType`: ``bad_data`` or ``execution``.
    """

    def __init__(self, message: str, kind: str = "bad_data") -> None:
        super().__init__(message)
        self.kind = kind


def parse(text: str) -> Any:
    """Parses an expression. Raises PromqlError."""
    import promql_parser

    if len(text) > MAX_LENGTH:
        raise PromqlError(f"the expression has {len(text)} characters; at most {MAX_LENGTH} are accepted")
    plain = _SKIPPED.sub(" ", text)
    depth = deepest = 0
    for character in plain:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH or len(_OPERATOR.findall(_MATCHERS.sub(" ", plain))) > MAX_OPERATORS:
        raise PromqlError(_TOO_DEEP)
    try:
        return promql_parser.parse(text)
    except ValueError as exc:
        raise PromqlError(f"invalid parameter 'query': {exc}") from None


def matchers(selector: Any) -> Matchers:
    """Returns a selector's matchers. Raises PromqlError for a pattern that RE2 refuses."""
    if selector.matchers.or_matchers:
        raise PromqlError("`or` between matchers is not supported")
    each = [(m.name, SIGNS[str(m.op)], m.value) for m in selector.matchers.matchers]
    if selector.name is not None:
        each.insert(0, ("__name__", "=", selector.name))
    accepts_empty = True
    for _, operator, value in each:
        try:
            accepts_empty &= hold(operator, [""], value)[0]
        except pa.ArrowInvalid as exc:
            raise PromqlError(f"{value[:200]!r} is no regular expression (RE2): {exc}") from None
    if accepts_empty:
        raise PromqlError("vector selector must contain at least one non-empty matcher")
    return Matchers(tuple(each))


def selectors(texts: list[str]) -> list[Matchers]:
    """Returns the matchers of `match[]` parameters. Raises PromqlError."""
    import promql_parser

    found = []
    for text in texts:
        tree = parse(text)
        if not isinstance(tree, promql_parser.VectorSelector):
            raise PromqlError(f"match[]: {text[:200]!r} is not accepted; expected a selector such as flights:n")
        found.append(matchers(tree))
    return found


def evaluate(tree: Any, reader: SeriesReader, axis: Axis, depth: int = 0) -> Samples | Scalar:
    """Returns the series, or the numbers, of an expression on an axis.

    Raises:
        PromqlError: the expression is not supported, or cannot be evaluated.
        Overspent: it needs too many windows or series.
    """
    import promql_parser as ast

    if depth > MAX_DEPTH:
        raise PromqlError(_TOO_DEEP)
    spend()
    match tree:
        case ast.NumberLiteral():
            return np.full(len(axis.times), float(tree.val))
        case ast.ParenExpr():
            return evaluate(tree.expr, reader, axis, depth + 1)
        case ast.UnaryExpr():
            value = evaluate(tree.expr, reader, axis, depth + 1)
            return -value if isinstance(value, np.ndarray) else _mapped(value, np.negative)
        case ast.VectorSelector():
            if tree.at is not None:
                raise PromqlError("the modifier @ is not supported")
            return reader.samples(matchers(tree), _axis_of(tree, axis))
        case ast.BinaryExpr():
            left, right = (evaluate(side, reader, axis, depth + 1) for side in (tree.lhs, tree.rhs))
            return _binary(tree, left, right)
        case ast.Call():
            of_range = ast.ValueType.Matrix in tree.func.arg_types
            raise PromqlError(f"{tree.func.name}() is not supported; {REFUSED if of_range else ACCEPTED}")
        case ast.AggregateExpr():
            with np.errstate(all="ignore"):
                return _aggregated(tree, reader, axis)
        case ast.MatrixSelector() | ast.SubqueryExpr():
            raise PromqlError(f"ranges such as [5m] are not supported; {REFUSED}")
    raise PromqlError(f"this expression is not supported; {ACCEPTED}")


def _axis_of(selector: Any, axis: Axis) -> Axis:
    """Returns the axis on which a selector is read, by its `offset`."""
    offset = selector.offset
    return axis if offset is None else axis.shifted(round(offset.total_seconds() * 1000))


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}


def _binary(tree: Any, left: Samples | Scalar, right: Samples | Scalar) -> Samples | Scalar:
    """Applies an operator. A comparison without `bool` returns the samples for which it holds, with their names."""
    operator, modifier = str(tree.op), tree.modifier
    apply = COMPARISONS.get(operator, OPERATORS.get(operator))
    if apply is None:
        accepted = ", ".join([*OPERATORS, *COMPARISONS])
        raise PromqlError(f"the operator {operator} is not supported; accepted are {accepted}")
    filters = operator in COMPARISONS and not (modifier is not None and modifier.return_bool)
    with np.errstate(all="ignore"):
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
            if filters:
                raise PromqlError("comparisons between scalars must use the modifier bool")
            return np.asarray(apply(left, right), np.float64)
        if isinstance(left, dict) and isinstance(right, dict):
            both = (lambda a, b: np.where(apply(a, b), a, ABSENT)) if filters else apply
            return _matched(left, right, modifier, both)

        def applied(values: Scalar) -> Any:
            return apply(values, right) if isinstance(left, dict) else apply(left, values)

        samples = left if isinstance(left, dict) else right
        assert isinstance(samples, dict)
        if filters:
            return {labels: _marked(values, ~applied(values)) for labels, values in samples.items()}
        return _mapped(samples, applied)


def _aggregated(tree: Any, reader: SeriesReader, axis: Axis) -> Samples:
    """Aggregates the series of a selector over all their groups, or by some labels."""
    import promql_parser as ast

    operator, selector = str(tree.op), tree.expr
    while isinstance(selector, ast.ParenExpr):
        selector = selector.expr
    if not isinstance(selector, ast.VectorSelector):
        raise PromqlError(f"{operator} of an expression is not supported; accepted is {operator} of a selector")
    if operator not in (*AGGREGATIONS, "topk", "bottomk"):
        raise PromqlError(f"{operator} is not supported; accepted are {', '.join(AGGREGATIONS)}, topk and bottomk")
    samples = evaluate(selector, reader, axis)
    assert not isinstance(samples, np.ndarray)
    modifier = tree.modifier
    is_by = modifier is None or modifier.type == ast.AggModifierType.By
    grouping = Grouping(frozenset(() if modifier is None else modifier.labels), is_by)
    groups: dict[Labels, list[tuple[Labels, Scalar]]] = {}
    for labels, values in samples.items():
        groups.setdefault(grouping.of(labels), []).append((labels, values))
    if operator in ("topk", "bottomk"):
        return _ranked(tree, groups, axis)
    lacking = _lacking(selector, grouping, samples, reader, axis) if operator != "count" else {}
    result: Samples = {}
    for group, series in groups.items():
        spend()
        sides = {side_of(name_of(labels)) for labels, _ in series}
        side = sides.pop() if len(sides) == 1 else 0
        rows = np.stack([values for _, values in series])
        there = ~is_absent(rows)
        result[group] = np.full(len(axis.times), ABSENT)
        for columns, at in _same_presence(there):
            if columns.any():
                values = AGGREGATIONS[operator](rows[columns][:, at])
                result[group][at] = _outwards(values, rows[columns][:, at], side) if operator in ADDING else values
        if group in lacking:
            result[group] = _marked(result[group], lacking[group])
    return result


def _outwards(values: Scalar, rows: npt.NDArray[np.float64], side: Side) -> Scalar:
    """Returns sums or means of bounds, widened by their rounding errors. Sums of small integers have none."""
    size = np.abs(rows).sum(axis=0)
    is_exact = (size < LARGEST_EXACT) & (rows == np.rint(rows)).all(axis=0) & (values == np.rint(values))
    return np.where(is_exact | (side == 0), values, values + side * len(rows) * np.finfo(np.float64).eps * size)


def _same_presence(there: npt.NDArray[np.bool_]) -> Iterator[tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]]:
    """Yields a mask of series, and the times at which exactly these series have a sample."""
    patterns, inverse = np.unique(there, axis=1, return_inverse=True)
    for number in range(patterns.shape[1]):
        yield patterns[:, number], np.flatnonzero(inverse.reshape(-1) == number)


def _lacking(
    selector: Any, grouping: Grouping, samples: Samples, reader: SeriesReader, axis: Axis
) -> dict[Labels, npt.NDArray[np.bool_]]:
    """Returns, per group of a selector of bounds, the times at which a series has a value but no bound; bool per
    step.
    """
    result: dict[Labels, npt.NDArray[np.bool_]] = {}
    others = [m for m in matchers(selector).each if m[0] != "__name__"]
    for name in dict.fromkeys(map(name_of, samples)):
        if not name.endswith(BOUNDS):
            continue
        wanted = Matchers((("__name__", "=", name.removesuffix(BOUNDS[0]).removesuffix(BOUNDS[1])), *others))
        for labels, values in reader.samples(wanted, _axis_of(selector, axis)).items():
            labels = tuple((n, name if n == "__name__" else v) for n, v in labels)
            unknown = ~is_absent(values) & (is_absent(samples[labels]) if labels in samples else True)
            group = grouping.of(labels)
            result[group] = result.get(group, False) | unknown
    return result


class Grouping(NamedTuple):
    """The labels by which series are grouped: these ones, or all others except the name."""

    names: frozenset[str]
    includes: bool

    def of(self, labels: Labels) -> Labels:
        """Returns the labels of a series' group."""
        if self.includes:
            return tuple((n, v) for n, v in labels if n in self.names)
        return tuple((n, v) for n, v in labels if n not in self.names and n != "__name__")


def _ranked(tree: Any, groups: Mapping[Labels, list[tuple[Labels, Scalar]]], axis: Axis) -> Samples:
    """Returns the series with the greatest, or least, values at each time."""
    import promql_parser as ast

    if not isinstance(tree.param, ast.NumberLiteral) or not tree.param.val >= 1:
        raise PromqlError(f"{tree.op} needs a number of at least 1, such as {tree.op}(5, flights:n)")
    limit, sign = np.floor(tree.param.val), -1.0 if str(tree.op) == "topk" else 1.0
    result: Samples = {}
    for series in groups.values():
        rows = np.stack([values for _, values in series])
        keys = np.where(is_absent(rows) | np.isnan(rows), np.inf, sign * rows)
        places = np.argsort(np.argsort(keys, axis=0, kind="stable"), axis=0, kind="stable")
        for row, (labels, values) in enumerate(series):
            result[labels] = _marked(values, places[row] >= limit)
    return result


def _mapped(samples: Samples, apply: Callable[[Any], Any]) -> Samples:
    """Applies an operation to each series and drops the name."""
    result: Samples = {}
    for labels, values in samples.items():
        spend()
        _put(result, _without_name(labels), _marked(apply(values), is_absent(values)))
    return result


def _matched(left: Samples, right: Samples, modifier: Any, apply: Callable[[Any, Any], Any]) -> Samples:
    """One-to-one matching: pairs series of both sides with equal labels.

    With `on`, only these labels are compared; with `ignoring`, all other labels.
    """
    import promql_parser as ast

    if modifier is not None and modifier.card != ast.VectorMatchCardinality.OneToOne:
        raise PromqlError("group_left and group_right are not supported")
    matching = None if modifier is None else modifier.matching
    is_on = matching is not None and matching.type == ast.LabelModifierType.Include
    grouping = Grouping(frozenset(() if matching is None else matching.labels), is_on)
    sides: list[dict[Labels, Scalar]] = []
    for name, side in (("left", left), ("right", right)):
        by_group: dict[Labels, Scalar] = {}
        for labels, values in side.items():
            spend()
            group = grouping.of(labels)
            if group in by_group and not (is_absent(values) | is_absent(by_group[group])).all():
                raise PromqlError(
                    f"found duplicate series for the match group {dict(group)} on the {name} hand-side of the"
                    " operation; many-to-many matching not allowed: matching labels must be unique on one side",
                    "execution",
                )
            by_group[group] = (
                values if group not in by_group else np.where(is_absent(by_group[group]), values, by_group[group])
            )
        sides.append(by_group)
    result: Samples = {}
    for group, values in sides[0].items():
        if group in sides[1]:
            other = sides[1][group]
            _put(result, group, _marked(apply(values, other), is_absent(values) | is_absent(other)))
    return result


def _put(found: Samples, labels: Labels, values: Scalar) -> None:
    if labels in found:
        raise PromqlError("vector cannot contain metrics with the same labelset", "execution")
    found[labels] = values


def _marked(values: Scalar, absent: npt.NDArray[np.bool_]) -> Scalar:
    return np.where(absent, ABSENT, values)


def name_of(labels: Labels) -> str:
    """Returns the name of a series."""
    return dict(labels)["__name__"]


def _without_name(labels: Labels) -> Labels:
    return tuple((n, v) for n, v in labels if n != "__name__")


def instant_json(value: Samples | Scalar, axis: Axis) -> Iterator[bytes]:
    """Yields the `data` of an instant query in parts."""
    at = axis.start_ms / 1000
    if isinstance(value, np.ndarray):
        yield _encoded({"resultType": "scalar", "result": [at, number(float(value[0]))]})
        return
    result = (
        {"metric": dict(labels), "value": [at, number(float(values[0]))]}
        for labels, values in sorted(value.items())
        if not is_absent(values)[0]
    )
    yield from _result("vector", result)


def range_json(value: Samples | Scalar, axis: Axis) -> Iterator[bytes]:
    """Yields the `data` of a range query in parts."""
    times = axis.times
    samples: Samples = {(): value} if isinstance(value, np.ndarray) else value
    result = (
        {"metric": dict(labels), "values": list(_points(times, values))}
        for labels, values in sorted(samples.items())
        if not is_absent(values).all()
    )
    yield from _result("matrix", result)


def _result(kind: str, series: Iterable[object]) -> Iterator[bytes]:
    """Yields a list of series in parts: other threads wait while a text is written."""
    yield b'{"resultType":"%b","result":[' % kind.encode()
    for number, each in enumerate(series):
        spend()
        yield (b"," if number else b"") + _encoded(each)
    yield b"]}"


def _encoded(value: object) -> bytes:
    return json_text(value).encode(errors="replace")


def _points(times: npt.NDArray[np.int64], values: Scalar) -> Iterator[list[Any]]:
    there = ~is_absent(values)
    for at, value in zip(times[there].tolist(), values[there].tolist(), strict=True):
        yield [at / 1000, number(value)]


def number(value: float) -> str:
    """Returns a number as Prometheus writes it: shortest digits, no exponent."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    text = format(Decimal(repr(value)), "f")
    return text.removesuffix(".0")
