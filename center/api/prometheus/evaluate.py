"""PromQL over answers: selectors, numbers, ``+ - * /``, comparisons, and aggregations of a selector.

An aggregation of bounds is a bound, if each group has one: the sum of the upper bounds is an upper bound of the sum. If
one group has none, the result is absent. Functions such as `rate` are refused, because an answer is already about a
window. The rules are the rules of Prometheus 2: anchored RE2, one-to-one matching, names dropped by arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from center.api.prometheus.series import (
    ABSENT,
    Axis,
    Labels,
    Samples,
    SeriesReader,
    SeriesSelection,
    is_absent,
    selection,
)
from edgewater.answers.work import spend
from edgewater.model.errors import EdgewaterError
from edgewater.model.float_bounds import LARGEST_EXACT, Side, side_of
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import json_text

MAX_LENGTH = 8_192
"""Characters of an expression."""
MAX_DEPTH = 50
MAX_RANKED = 10_000
MAX_OPERATORS = 100
"""Maximum number of operators, because the parser takes quadratic time in their number."""
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


@dataclass(frozen=True, slots=True)
class Matchers:
    """The matchers of a selector. A series must fulfil all of them."""

    each: tuple[tuple[str, str, str], ...]
    """Name, operator (``= != =~ !~``) and value."""

    def selects(self, series: Sequence[Labels]) -> list[bool]:
        """Returns whether each series fulfils the matchers. Each pattern is compiled once, which may take 10 ms."""
        held = [dict(labels) for labels in series]
        selected = [True] * len(held)
        for name, operator, wanted in self.each:
            values = [labels.get(name, "") for labels in held]
            fulfilled = _hold(operator, values, wanted)
            selected = [both and one for both, one in zip(selected, fulfilled, strict=True)]
        return selected

    def of(self, query: RegisteredQuery) -> SeriesSelection | None:
        equal = {name: value for name, operator, value in self.each if operator == "="}
        return selection(query, equal.pop("__name__", None), equal)


def _hold(operator: str, values: Sequence[str], wanted: str) -> list[bool]:
    """Returns whether each value fulfils a matcher. An RE2 pattern matches whole values, in linear time.

    Raises:
        pa.ArrowInvalid: RE2 refuses the pattern.
    """
    if operator in ("=", "!="):
        return [(value == wanted) == (operator == "=") for value in values]
    distinct = list(dict.fromkeys(values))
    found = pc.match_substring_regex(pa.array(distinct, pa.string()), f"^(?:{wanted})$").to_pylist()
    matches = dict(zip(distinct, found, strict=True))
    return [matches[value] == (operator == "=~") for value in values]


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
    import promql_parser

    op = promql_parser.MatchOp
    # compared one by one: these operators have no hash
    operators = ((op.Equal, "="), (op.NotEqual, "!="), (op.Re, "=~"), (op.NotRe, "!~"))
    if selector.matchers.or_matchers:
        raise PromqlError("`or` between matchers is not supported")
    each = [
        (m.name, next(sign for kind, sign in operators if kind == m.op), m.value) for m in selector.matchers.matchers
    ]
    if selector.name is not None:
        each.insert(0, ("__name__", "=", selector.name))
    accepts_empty = True
    for _, operator, value in each:
        try:
            accepts_empty &= _hold(operator, [""], value)[0]
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
            offset = tree.offset
            by_ms = 0 if offset is None else round(offset.total_seconds() * 1000)
            return reader.samples(matchers(tree), axis.shifted(by_ms))
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


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
}


def _binary(tree: Any, left: Samples | Scalar, right: Samples | Scalar) -> Samples | Scalar:
    operator, modifier = str(tree.op), tree.modifier
    if operator in COMPARISONS:
        with np.errstate(all="ignore"):
            return _compared(COMPARISONS[operator], left, right, modifier)
    if operator not in OPERATORS:
        accepted = ", ".join([*OPERATORS, *COMPARISONS])
        raise PromqlError(f"the operator {operator} is not supported; accepted are {accepted}")
    apply = OPERATORS[operator]
    with np.errstate(all="ignore"):
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
            result: Scalar = apply(left, right)
            return result
        if isinstance(right, np.ndarray):
            assert not isinstance(left, np.ndarray)
            return _mapped(left, lambda values: apply(values, right))
        if isinstance(left, np.ndarray):
            return _mapped(right, lambda values: apply(left, values))
        return _matched(left, right, modifier, apply)


def _compared(
    holds: Callable[[Any, Any], Any], left: Samples | Scalar, right: Samples | Scalar, modifier: Any
) -> Samples | Scalar:
    """Returns the samples for which a comparison holds; with `bool`, 1 or 0 for each sample."""
    returns_bool = modifier is not None and modifier.return_bool
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        if not returns_bool:
            raise PromqlError("comparisons between scalars must use the modifier bool")
        result: Scalar = holds(left, right).astype(np.float64)
        return result
    if returns_bool:
        return _with_numbers(left, right, modifier, lambda a, b: holds(a, b).astype(np.float64))
    if isinstance(left, np.ndarray):
        assert not isinstance(right, np.ndarray)
        return {labels: _marked(values, ~holds(left, values)) for labels, values in right.items()}
    if isinstance(right, np.ndarray):
        return {labels: _marked(values, ~holds(values, right)) for labels, values in left.items()}
    return _matched(left, right, modifier, lambda a, b: np.where(holds(a, b), a, ABSENT))


def _with_numbers(
    left: Samples | Scalar, right: Samples | Scalar, modifier: Any, apply: Callable[[Any, Any], Any]
) -> Samples:
    if isinstance(right, np.ndarray):
        assert not isinstance(left, np.ndarray)
        return _mapped(left, lambda values: apply(values, right))
    if isinstance(left, np.ndarray):
        return _mapped(right, lambda values: apply(left, values))
    return _matched(left, right, modifier, apply)


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
    groups: dict[Labels, list[tuple[Labels, Scalar]]] = {}
    for labels, values in samples.items():
        groups.setdefault(_group(labels, tree.modifier), []).append((labels, values))
    if operator in ("topk", "bottomk"):
        return _ranked(tree, groups, axis)
    lacking = _lacking(selector, tree.modifier, samples, reader, axis) if operator != "count" else {}
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
    selector: Any, modifier: Any, samples: Samples, reader: SeriesReader, axis: Axis
) -> dict[Labels, npt.NDArray[np.bool_]]:
    """Returns, per group of a selector of bounds, the times at which a series has a value but no bound; bool per
    step.
    """
    result: dict[Labels, npt.NDArray[np.bool_]] = {}
    others = [m for m in matchers(selector).each if m[0] != "__name__"]
    by_ms = 0 if selector.offset is None else round(selector.offset.total_seconds() * 1000)
    for name in dict.fromkeys(map(name_of, samples)):
        if not name.endswith(BOUNDS):
            continue
        wanted = Matchers((("__name__", "=", name.removesuffix(BOUNDS[0]).removesuffix(BOUNDS[1])), *others))
        for labels, values in reader.samples(wanted, axis.shifted(by_ms)).items():
            labels = tuple((n, name if n == "__name__" else v) for n, v in labels)
            unknown = ~is_absent(values) & (is_absent(samples[labels]) if labels in samples else True)
            group = _group(labels, modifier)
            result[group] = result.get(group, False) | unknown
    return result


def _group(labels: Labels, modifier: Any) -> Labels:
    import promql_parser as ast

    if modifier is None:
        return ()
    names = frozenset(modifier.labels)
    if modifier.type == ast.AggModifierType.By:
        return tuple((n, v) for n, v in labels if n in names)
    return tuple((n, v) for n, v in labels if n not in names and n != "__name__")


def _ranked(tree: Any, groups: Mapping[Labels, list[tuple[Labels, Scalar]]], axis: Axis) -> Samples:
    """Returns the series with the greatest, or least, values at each time."""
    import promql_parser as ast

    if not isinstance(tree.param, ast.NumberLiteral) or not tree.param.val >= 1:
        raise PromqlError(f"{tree.op} needs a number of at least 1, such as {tree.op}(5, flights:n)")
    limit, sign = int(min(tree.param.val, MAX_RANKED)), -1.0 if str(tree.op) == "topk" else 1.0
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

    on: frozenset[str] | None = None
    ignoring: frozenset[str] = frozenset()
    if modifier is not None:
        if modifier.card != ast.VectorMatchCardinality.OneToOne:
            raise PromqlError("group_left and group_right are not supported")
        matching = modifier.matching
        if matching is not None:
            names = frozenset(matching.labels)
            if matching.type == ast.LabelModifierType.Include:
                on = names
            else:
                ignoring = names

    def key(labels: Labels) -> Labels:
        if on is not None:
            return tuple((n, v) for n, v in labels if n in on)
        return tuple((n, v) for n, v in labels if n != "__name__" and n not in ignoring)

    sides: list[dict[Labels, Scalar]] = []
    for name, side in (("left", left), ("right", right)):
        by_group: dict[Labels, Scalar] = {}
        for labels, values in side.items():
            spend()
            group = key(labels)
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
