"""Typed SQL scalar expressions, evaluated on record batches by Arrow compute.

Null semantics are SQL's. Operators return null for null operands, comparisons with null are unknown, and ``where``
accepts a record only if its condition is true. ``/`` is floating-point division. Undefined results (division by zero,
integer overflow, the cast of a text that is not a number) and failed calls of plugin functions (`record_functions`) are
null. So one bad record cannot fail a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.model import arithmetic, record_functions, text_functions, time_functions
from edgewater.model.arithmetic import Value
from edgewater.model.binding import NUMERIC, Binder, BoundExpression, Operator, cast, inverted
from edgewater.model.record_functions import CallFailures, values_or_null
from edgewater.model.syntax import check_calls

MAX_DECIMALS = 15  # format: the digits of float64


def bind(
    tree: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: CallFailures | None = None
) -> BoundExpression:
    """Type-checks an expression against a stream's columns.

    Args:
        failures: counts failed calls of plugin functions.

    Raises:
        InvalidQuery: the expression has an unknown column or function, or an operand of the wrong type.
    """
    return _binder(columns, field, failures).bind(tree)


def bind_condition(
    tree: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: CallFailures | None = None
) -> BoundExpression:
    """Binds an expression that must be boolean. Raises the same errors as `bind`."""
    return _binder(columns, field, failures).condition(tree)


def as_row(columns: Sequence[exp.Expression]) -> exp.Expression:
    """Returns several expressions as one expression: `(x, y)`.

    A single literal is put in parentheses, because a parser would otherwise read it as a parameter.
    """
    if len(columns) > 1:
        return exp.Tuple(expressions=list(columns))
    (column,) = columns
    is_literal = isinstance(column.this if isinstance(column, exp.Neg) else column, exp.Literal)
    return exp.Paren(this=column) if is_literal else column


def columns_of(row: exp.Expression) -> list[exp.Expression]:
    """Returns the expressions that `as_row` has joined."""
    if isinstance(row, exp.Tuple):
        return list(row.expressions)
    return [row.unnest()]


def bind_row(
    row: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: CallFailures | None = None
) -> BoundExpression:
    """Binds a row of numbers, the argument of a function of a sample.

    The bound expression returns a fixed-size list of float64 per record. The list is null if a number is null, NaN or
    infinite.

    Raises:
        InvalidQuery: a column is unknown, or an expression is not a number.
    """
    numbers = [bind(column, columns, field, failures) for column in columns_of(row)]
    for number, column in zip(numbers, columns_of(row), strict=True):
        if type_name(number.type) not in NUMERIC:
            raise InvalidQuery(field, column.sql(), "a number", f"its type is {type_name(number.type)}")

    def evaluate(batch: pa.RecordBatch) -> pa.Array:
        arrays = [arithmetic.to_float(number.array(batch)) for number in numbers]
        rows = np.stack([a.to_numpy(zero_copy_only=False) for a in arrays], axis=1)  # a null becomes NaN
        invalid = ~np.isfinite(rows).all(axis=1)
        mask = pa.array(invalid) if invalid.any() else None
        return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), len(numbers), mask=mask)

    return BoundExpression(pa.list_(pa.float64(), len(numbers)), evaluate)


def _binder(columns: Mapping[str, pa.DataType], field: str, failures: CallFailures | None) -> Binder:
    operators = (*OPERATORS, *text_functions.OPERATORS, *time_functions.OPERATORS, _CALL)
    return Binder(columns, field, failures or CallFailures(), operators, (exp.Cast, *text_functions.READ_ONCE_PER_TEXT))


_ARITHMETIC: dict[type[exp.Expression], Callable[[Value, Value], Value]] = {
    exp.Add: arithmetic.add,
    exp.Sub: arithmetic.subtract,
    exp.Mul: arithmetic.multiply,
    exp.Div: arithmetic.divide,
    exp.Mod: arithmetic.modulo,
}
_COMPARISON: dict[type[exp.Expression], Callable[[Value, Value], Value]] = {
    exp.EQ: pc.equal,
    exp.NEQ: pc.not_equal,
    exp.LT: pc.less,
    exp.LTE: pc.less_equal,
    exp.GT: pc.greater,
    exp.GTE: pc.greater_equal,
}
_LOGIC: dict[type[exp.Expression], Callable[[Value, Value], Value]] = {exp.And: pc.and_kleene, exp.Or: pc.or_kleene}
_NUMERIC_FUNCTIONS: dict[type[exp.Expression], Callable[[Value], Value]] = {
    exp.Abs: arithmetic.absolute,
    exp.Ceil: pc.ceil,
    exp.Floor: pc.floor,
    exp.Sqrt: pc.sqrt,
    exp.Ln: pc.ln,
    exp.Neg: arithmetic.negate,
}
_EXTREMES: dict[type[exp.Expression], Callable[..., Value]] = {
    exp.Greatest: arithmetic.greatest,
    exp.Least: pc.min_element_wise,
}
_CASTS: dict[exp.DataType.Type, pa.DataType] = {
    exp.DataType.Type.BIGINT: pa.int64(),
    exp.DataType.Type.INT: pa.int64(),
    exp.DataType.Type.DOUBLE: pa.float64(),
    exp.DataType.Type.FLOAT: pa.float64(),
    exp.DataType.Type.VARCHAR: pa.string(),
    exp.DataType.Type.TEXT: pa.string(),
    exp.DataType.Type.BOOLEAN: pa.bool_(),
}


def _column(binder: Binder, node: exp.Column) -> BoundExpression:
    name = node.name
    if node.table or name not in binder.columns:
        known = ", ".join(binder.columns)
        reason = f"unknown column{did_you_mean(name, binder.columns)}"
        raise InvalidQuery(binder.field, node.sql(), f"one of the columns {known}", reason)
    return BoundExpression(binder.columns[name], lambda batch: batch.column(name))


def _literal(binder: Binder, node: exp.Literal) -> BoundExpression:
    value: object = node.this
    if not node.is_string:
        value = int(node.this) if node.is_int else float(node.this)
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise binder.error(node, "a 64-bit integer; with a decimal point it is a float")
    scalar = pa.scalar(value)
    return BoundExpression(scalar.type, lambda _: scalar)


def _boolean(binder: Binder, node: exp.Boolean) -> BoundExpression:
    scalar = pa.scalar(bool(node.this))
    return BoundExpression(pa.bool_(), lambda _: scalar)


def _null(binder: Binder, _: exp.Null) -> BoundExpression:
    scalar = pa.scalar(None)
    return BoundExpression(pa.null(), lambda _: scalar)


def _unknown() -> BoundExpression:
    """Returns the result of comparing NULL with NULL."""
    scalar = pa.scalar(None, pa.bool_())
    return BoundExpression(pa.bool_(), lambda _: scalar)


def _paren(binder: Binder, node: exp.Expression) -> BoundExpression:
    return binder.bind(node.this)


def _arithmetic(binder: Binder, node: exp.Binary) -> BoundExpression:
    (left, right), common = binder.cast_to_same_type([binder.numeric(node.left), binder.numeric(node.right)], node)
    if pa.types.is_null(common):
        return _null(binder, exp.Null())
    kernel = _ARITHMETIC[type(node)]
    result = pa.float64() if isinstance(node, exp.Div) else common
    return BoundExpression(result, lambda b: kernel(left.evaluate(b), right.evaluate(b)))


def _comparison(binder: Binder, node: exp.Binary) -> BoundExpression:
    (left, right), common = binder.same_type([node.left, node.right], node)
    if pa.types.is_null(common):
        return _unknown()
    kernel = _COMPARISON[type(node)]
    return BoundExpression(pa.bool_(), lambda b: kernel(left.evaluate(b), right.evaluate(b)))


def _logic(binder: Binder, node: exp.Binary) -> BoundExpression:
    left, right = binder.condition(node.left), binder.condition(node.right)
    kernel = _LOGIC[type(node)]
    return BoundExpression(pa.bool_(), lambda b: kernel(left.evaluate(b), right.evaluate(b)))


def _not(binder: Binder, node: exp.Not) -> BoundExpression:
    return inverted(binder.condition(node.this))


def _is(binder: Binder, node: exp.Is) -> BoundExpression:
    inner = binder.bind(node.this)
    if not isinstance(node.expression, exp.Null):
        raise binder.error(node, "IS NULL or IS NOT NULL")
    return BoundExpression(pa.bool_(), lambda b: pc.is_null(inner.evaluate(b)))


def _in(binder: Binder, node: exp.In) -> BoundExpression:
    (needle, *options), common = binder.same_type([node.this, *node.expressions], node)
    if not options or not all(_is_constant(n) for n in node.expressions):
        raise binder.error(node, "IN with a list of literals")
    empty = pa.RecordBatch.from_pylist([])
    values = pa.array([o.evaluate(empty).as_py() for o in options], common)

    def evaluate(batch: pa.RecordBatch) -> Value:
        value = needle.evaluate(batch)
        found = pc.is_in(value, value_set=values)
        return pc.if_else(pc.is_null(value), pa.scalar(None, pa.bool_()), found)

    return BoundExpression(pa.bool_(), evaluate)


def _between(binder: Binder, node: exp.Between) -> BoundExpression:
    (value, low, high), common = binder.same_type([node.this, node.args["low"], node.args["high"]], node)
    if pa.types.is_null(common):
        return _unknown()

    def evaluate(batch: pa.RecordBatch) -> Value:
        found = value.evaluate(batch)
        return pc.and_kleene(pc.greater_equal(found, low.evaluate(batch)), pc.less_equal(found, high.evaluate(batch)))

    return BoundExpression(pa.bool_(), evaluate)


def _numeric_function(binder: Binder, node: exp.Expression) -> BoundExpression:
    inner = binder.numeric(node.this)
    kernel = _NUMERIC_FUNCTIONS[type(node)]
    keeps = isinstance(node, exp.Abs | exp.Neg)
    source = inner if keeps else cast(inner, pa.float64())
    return BoundExpression(inner.type if keeps else pa.float64(), lambda b: kernel(source.evaluate(b)))


def _is_nan(binder: Binder, node: exp.IsNan) -> BoundExpression:
    number = cast(binder.numeric(node.this), pa.float64())
    return BoundExpression(pa.bool_(), lambda b: pc.is_nan(number.evaluate(b)))


def _is_finite(binder: Binder, node: exp.Anonymous) -> BoundExpression:
    if len(node.expressions) != 1:
        raise binder.error(node, "isfinite(x)", f"it is called with {len(node.expressions)} arguments")
    number = cast(binder.numeric(node.expressions[0]), pa.float64())
    return BoundExpression(pa.bool_(), lambda b: pc.is_finite(number.evaluate(b)))


def _round(binder: Binder, node: exp.Round) -> BoundExpression:
    inner = cast(binder.numeric(node.this), pa.float64())
    decimals = node.args.get("decimals")
    if decimals is not None and not (isinstance(decimals, exp.Literal) and decimals.is_int):
        raise binder.error(node, "round(x) or round(x, 2)")
    digits = int(decimals.this) if decimals is not None else 0
    if digits > MAX_DECIMALS:
        raise binder.error(node, f"at most {MAX_DECIMALS} decimals")
    return BoundExpression(pa.float64(), lambda b: arithmetic.rounded(inner.evaluate(b), digits))


def _extreme(binder: Binder, node: exp.Greatest | exp.Least) -> BoundExpression:
    parts, common = binder.same_type([node.this, *node.expressions], node)
    kernel = _EXTREMES[type(node)]
    return BoundExpression(common, lambda b: kernel(*(p.evaluate(b) for p in parts)))


def _coalesce(binder: Binder, node: exp.Coalesce) -> BoundExpression:
    parts, common = binder.same_type([node.this, *node.expressions], node)
    return BoundExpression(common, lambda b: pc.coalesce(*(p.evaluate(b) for p in parts)))


def _nullif(binder: Binder, node: exp.Nullif) -> BoundExpression:
    (value, other), common = binder.same_type([node.this, node.expression], node)
    if pa.types.is_null(common):
        return _null(binder, exp.Null())
    null = pa.scalar(None, common)

    def evaluate(batch: pa.RecordBatch) -> Value:
        left = value.evaluate(batch)
        same = pc.fill_null(pc.equal(left, other.evaluate(batch)), False)
        return pc.if_else(same, null, left)

    return BoundExpression(common, evaluate)


def _case(binder: Binder, node: exp.Case) -> BoundExpression:
    branches = node.args["ifs"]
    tests = [exp.EQ(this=node.this, expression=b.this) if node.this is not None else b.this for b in branches]
    conditions = [binder.condition(test) for test in tests]
    default = node.args.get("default") or exp.Null()
    values, common = binder.same_type([*(branch.args["true"] for branch in branches), default], node)

    def evaluate(batch: pa.RecordBatch) -> Value:
        result = values[-1].array(batch)
        for condition, value in zip(reversed(conditions), reversed(values[:-1]), strict=True):
            taken = pc.fill_null(condition.array(batch), False)
            result = pc.if_else(taken, value.evaluate(batch), result)
        return result

    return BoundExpression(common, evaluate)


def _cast_to(binder: Binder, node: exp.Cast) -> BoundExpression:
    inner = binder.bind(node.this)
    target = _CASTS.get(node.to.this)
    if target is None:
        raise binder.error(node, "a cast to BIGINT, DOUBLE, VARCHAR or BOOLEAN")
    return cast(inner, target)


def _if(binder: Binder, node: exp.If) -> BoundExpression:
    return _case(binder, exp.Case(ifs=[node], default=node.args.get("false")))


def _called(binder: Binder, node: exp.Anonymous) -> BoundExpression:
    if node.name.lower() == "isfinite":
        return _is_finite(binder, node)
    if node.name.lower() == "strftime":
        return time_functions.bind_strftime(binder, node)
    check_calls(node, binder.field)
    function = record_functions.find(node.name)
    assert function is not None
    arguments = [binder.bind(argument) for argument in node.expressions]
    types = [type_name(a.type) for a in arguments]
    signature = f"{function.name}({', '.join(function.arguments)})"
    if len(types) != len(function.arguments):
        raise binder.error(node, signature, f"it is called with {len(types)} arguments")
    for actual, expected in zip(types, function.arguments, strict=True):
        if actual not in (expected, "null") and (actual, expected) != ("int64", "float64"):
            raise binder.error(node, signature, f"it is called with {', '.join(types)}")
    converted = [cast(a, COLUMN_TYPES[t]) for a, t in zip(arguments, function.arguments, strict=True)]
    result, failures = COLUMN_TYPES[function.result], binder.failures
    return BoundExpression(result, lambda b: values_or_null(function, [a.array(b) for a in converted], failures))


def _is_constant(node: exp.Expression) -> bool:
    return isinstance(node.this if isinstance(node, exp.Neg) else node, exp.Literal | exp.Boolean)


OPERATORS: tuple[Operator, ...] = (
    (exp.Column, _column, ("this", "table")),
    (exp.Literal, _literal, ("this", "is_string")),
    (exp.Boolean, _boolean, ("this",)),
    (exp.Null, _null, ()),
    (exp.Paren, _paren, ("this",)),
    (tuple(_ARITHMETIC), _arithmetic, ("this", "expression")),
    (tuple(_COMPARISON), _comparison, ("this", "expression")),
    (tuple(_LOGIC), _logic, ("this", "expression")),
    (exp.Not, _not, ("this",)),
    (exp.Is, _is, ("this", "expression")),
    (exp.In, _in, ("this", "expressions", "query", "unnest", "field")),
    (exp.Between, _between, ("this", "low", "high")),
    (tuple(_NUMERIC_FUNCTIONS), _numeric_function, ("this",)),
    (exp.IsNan, _is_nan, ("this",)),
    (exp.Round, _round, ("this", "decimals")),
    (tuple(_EXTREMES), _extreme, ("this", "expressions", "ignore_nulls")),
    (exp.If, _if, ("this", "true", "false")),
    (exp.Coalesce, _coalesce, ("this", "expressions")),
    (exp.Nullif, _nullif, ("this", "expression")),
    (exp.Case, _case, ("this", "ifs", "default")),
    (exp.Cast, _cast_to, ("this", "to", "safe")),
)
_CALL: Operator = (exp.Anonymous, _called, ("this", "expressions"))
