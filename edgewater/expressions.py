"""Typed SQL scalar expressions, evaluated on record batches by Arrow compute.

Null semantics are SQL's: operators return null for null operands, comparisons with null are unknown, and ``where``
keeps a record only if its condition is true. ``/`` is floating-point division. Undefined results (division by zero,
integer overflow, the cast of a text that is not a number) and failed calls of plugin functions (`record_functions`)
are null, so one bad record cannot fail a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater import arithmetic, record_functions
from edgewater.arithmetic import Value
from edgewater.errors import InvalidQuery, did_you_mean
from edgewater.record_functions import CallFailures, values_or_null
from edgewater.streams import COLUMN_TYPES, type_name
from edgewater.syntax import SUPPORTED_SYNTAX, check_calls

Evaluate = Callable[[pa.RecordBatch], Value]

NUMERIC = ("int64", "float64")
MAX_DECIMALS = 15


@dataclass(frozen=True, slots=True)
class BoundExpression:
    """An expression bound to a schema: its type, and a function that evaluates it on a batch."""

    type: pa.DataType
    evaluate: Evaluate

    def array(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns the value per record, one array of length ``batch.num_rows``."""
        value = self.evaluate(batch)
        if isinstance(value, pa.Scalar):
            return pa.repeat(value, batch.num_rows)
        if isinstance(value, pa.ChunkedArray):
            return value.combine_chunks()
        return value


def bind(
    tree: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: CallFailures | None = None
) -> BoundExpression:
    """Type-checks an expression against a stream's columns.

    Args:
        failures: counts failed calls of plugin functions.

    Raises:
        InvalidQuery: an unknown column or function, or an operand of the wrong type.
    """
    return _Binder(columns, field, failures or CallFailures()).bind(tree)


def bind_condition(
    tree: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: CallFailures | None = None
) -> BoundExpression:
    """Binds an expression that must be boolean; raises like `bind`."""
    bound = bind(tree, columns, field, failures)
    if not pa.types.is_boolean(bound.type):
        raise InvalidQuery(field, tree.sql(), "a boolean expression", f"its type is {type_name(bound.type)}")
    return bound


def as_row(columns: Sequence[exp.Expression]) -> exp.Expression:
    """Returns several expressions as one: `(x, y)`.

    A single literal is put in parentheses, so that parsing it again does not take it for a parameter.
    """
    if len(columns) > 1:
        return exp.Tuple(expressions=list(columns))
    (column,) = columns
    is_literal = isinstance(column.this if isinstance(column, exp.Neg) else column, exp.Literal)
    return exp.Paren(this=column) if is_literal else column


def columns_of(row: exp.Expression) -> list[exp.Expression]:
    """Returns the expressions that `as_row` was given."""
    if isinstance(row, exp.Tuple):
        return list(row.expressions)
    return [row.unnest()]


def bind_row(
    row: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: CallFailures | None = None
) -> BoundExpression:
    """Binds a row of numbers, the argument of a function of a sample.

    Its value per record is a fixed-size list of float64; null where a number is null, NaN or infinite.

    Raises:
        InvalidQuery: an unknown column, or an expression that is not a number.
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
_STRING_FUNCTIONS: dict[type[exp.Expression], tuple[Callable[[Value], Value], pa.DataType]] = {
    exp.Lower: (pc.utf8_lower, pa.string()),
    exp.Upper: (pc.utf8_upper, pa.string()),
    exp.Trim: (pc.utf8_trim_whitespace, pa.string()),
    exp.Length: (lambda text: pc.cast(pc.utf8_length(text), pa.int64()), pa.int64()),
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


class _Binder:
    """Compiles a syntax tree into a closure over Arrow kernels, with type checks."""

    def __init__(self, columns: Mapping[str, pa.DataType], field: str, failures: CallFailures) -> None:
        self._columns = columns
        self._field = field
        self._failures = failures

    def bind(self, node: exp.Expression) -> BoundExpression:
        for base, method, clauses in self._METHODS:
            if isinstance(node, base):
                # Clauses that the parser accepts but the method would ignore, as in TRIM('x' FROM s).
                if any(value for name, value in node.args.items() if name not in clauses):
                    raise self._error(node, "the operator or function with plain arguments only")
                return method(self, node)
        raise self._error(node, SUPPORTED_SYNTAX, "unsupported expression")

    def _error(self, node: exp.Expression, accepted: str, reason: str = "") -> InvalidQuery:
        return InvalidQuery(self._field, node.sql(), accepted, reason)

    def _numeric(self, node: exp.Expression) -> BoundExpression:
        bound = self.bind(node)
        if type_name(bound.type) not in NUMERIC and not pa.types.is_null(bound.type):
            raise self._error(node, "a number", f"its type is {type_name(bound.type)}")
        return bound

    def _condition(self, node: exp.Expression) -> BoundExpression:
        return bind_condition(node, self._columns, self._field, self._failures)

    def _text(self, node: exp.Expression) -> BoundExpression:
        bound = self.bind(node)
        if not pa.types.is_string(bound.type):
            raise self._error(node, "a string", f"its type is {type_name(bound.type)}")
        return bound

    def _alike(self, nodes: list[exp.Expression], parent: exp.Expression) -> tuple[list[BoundExpression], pa.DataType]:
        """Binds operands and casts them to a common type, as `_unified` does."""
        return self._unified([self.bind(node) for node in nodes], parent)

    def _unified(
        self, bounds: list[BoundExpression], parent: exp.Expression
    ) -> tuple[list[BoundExpression], pa.DataType]:
        """Casts operands to a common type: mixed numbers to float64; null has every type."""
        types = {type_name(b.type) for b in bounds if not pa.types.is_null(b.type)}
        if len(types) > 1 and types != set(NUMERIC):
            raise self._error(parent, "operands of the same type", "they are " + " and ".join(sorted(types)))
        common = pa.float64() if len(types) > 1 else COLUMN_TYPES[types.pop()] if types else pa.null()
        return [_cast(b, common) for b in bounds], common

    def _column(self, node: exp.Column) -> BoundExpression:
        name = node.name
        if node.table or name not in self._columns:
            known = ", ".join(self._columns)
            reason = f"unknown column{did_you_mean(name, self._columns)}"
            raise InvalidQuery(self._field, node.sql(), f"one of the columns {known}", reason)
        return BoundExpression(self._columns[name], lambda batch: batch.column(name))

    def _literal(self, node: exp.Literal) -> BoundExpression:
        value: object = node.this
        if not node.is_string:
            value = int(node.this) if node.is_int else float(node.this)
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise self._error(node, "a 64-bit integer; with a decimal point it is a float")
        scalar = pa.scalar(value)
        return BoundExpression(scalar.type, lambda _: scalar)

    def _boolean(self, node: exp.Boolean) -> BoundExpression:
        scalar = pa.scalar(bool(node.this))
        return BoundExpression(pa.bool_(), lambda _: scalar)

    def _null(self, _: exp.Null) -> BoundExpression:
        scalar = pa.scalar(None)
        return BoundExpression(pa.null(), lambda _: scalar)

    @staticmethod
    def _unknown() -> BoundExpression:
        """Returns the result of comparing NULL with NULL."""
        scalar = pa.scalar(None, pa.bool_())
        return BoundExpression(pa.bool_(), lambda _: scalar)

    def _paren(self, node: exp.Expression) -> BoundExpression:
        return self.bind(node.this)

    def _arithmetic(self, node: exp.Binary) -> BoundExpression:
        (left, right), common = self._unified([self._numeric(node.left), self._numeric(node.right)], node)
        if pa.types.is_null(common):
            return self._null(exp.Null())
        kernel = _ARITHMETIC[type(node)]
        result = pa.float64() if isinstance(node, exp.Div) else common
        return BoundExpression(result, lambda b: kernel(left.evaluate(b), right.evaluate(b)))

    def _comparison(self, node: exp.Binary) -> BoundExpression:
        (left, right), common = self._alike([node.left, node.right], node)
        if pa.types.is_null(common):
            return self._unknown()
        kernel = _COMPARISON[type(node)]
        return BoundExpression(pa.bool_(), lambda b: kernel(left.evaluate(b), right.evaluate(b)))

    def _logic(self, node: exp.Binary) -> BoundExpression:
        left, right = self._condition(node.left), self._condition(node.right)
        kernel = _LOGIC[type(node)]
        return BoundExpression(pa.bool_(), lambda b: kernel(left.evaluate(b), right.evaluate(b)))

    def _not(self, node: exp.Not) -> BoundExpression:
        return self._inverted(self._condition(node.this))

    @staticmethod
    def _inverted(condition: BoundExpression) -> BoundExpression:
        return BoundExpression(pa.bool_(), lambda b: pc.invert(condition.evaluate(b)))

    def _is(self, node: exp.Is) -> BoundExpression:
        inner = self.bind(node.this)
        if not isinstance(node.expression, exp.Null):
            raise self._error(node, "IS NULL or IS NOT NULL")
        return BoundExpression(pa.bool_(), lambda b: pc.is_null(inner.evaluate(b)))

    def _in(self, node: exp.In) -> BoundExpression:
        (needle, *options), common = self._alike([node.this, *node.expressions], node)
        if not options or not all(_is_constant(n) for n in node.expressions):
            raise self._error(node, "IN with a list of literals")
        empty = pa.RecordBatch.from_pylist([])
        values = pa.array([o.evaluate(empty).as_py() for o in options], common)

        def evaluate(batch: pa.RecordBatch) -> Value:
            value = needle.evaluate(batch)
            found = pc.is_in(value, value_set=values)
            return pc.if_else(pc.is_null(value), pa.scalar(None, pa.bool_()), found)

        return BoundExpression(pa.bool_(), evaluate)

    def _between(self, node: exp.Between) -> BoundExpression:
        (value, low, high), common = self._alike([node.this, node.args["low"], node.args["high"]], node)
        if pa.types.is_null(common):
            return self._unknown()

        def evaluate(batch: pa.RecordBatch) -> Value:
            found = value.evaluate(batch)
            return pc.and_kleene(
                pc.greater_equal(found, low.evaluate(batch)), pc.less_equal(found, high.evaluate(batch))
            )

        return BoundExpression(pa.bool_(), evaluate)

    def _like(self, node: exp.Binary) -> BoundExpression:
        text = self._text(node.left)
        if not (isinstance(node.right, exp.Literal) and node.right.is_string):
            raise self._error(node, "LIKE with a string literal as its pattern")
        pattern, folded = node.right.this, isinstance(node, exp.ILike)
        matched = BoundExpression(pa.bool_(), lambda b: pc.match_like(text.evaluate(b), pattern, ignore_case=folded))
        # Some sqlglot releases parse NOT LIKE into one node, others into two.
        return self._inverted(matched) if node.args.get("negate") else matched

    def _numeric_function(self, node: exp.Expression) -> BoundExpression:
        inner = self._numeric(node.this)
        kernel = _NUMERIC_FUNCTIONS[type(node)]
        keeps = isinstance(node, exp.Abs | exp.Neg)
        source = inner if keeps else _cast(inner, pa.float64())
        return BoundExpression(inner.type if keeps else pa.float64(), lambda b: kernel(source.evaluate(b)))

    def _round(self, node: exp.Round) -> BoundExpression:
        inner = _cast(self._numeric(node.this), pa.float64())
        decimals = node.args.get("decimals")
        if decimals is not None and not (isinstance(decimals, exp.Literal) and decimals.is_int):
            raise self._error(node, "round(x) or round(x, 2)")
        digits = int(decimals.this) if decimals is not None else 0
        if digits > MAX_DECIMALS:
            raise self._error(node, f"at most {MAX_DECIMALS} decimals")
        # Larger floats have no such decimals, and Arrow's kernel reports an overflow when it scales them.
        whole_from = 2.0**52 / 10.0**digits

        def evaluate(batch: pa.RecordBatch) -> Value:
            value = inner.evaluate(batch)
            has_decimals = pc.less(pc.abs(value), whole_from)
            return pc.if_else(has_decimals, pc.round(pc.if_else(has_decimals, value, 0.0), digits), value)

        return BoundExpression(pa.float64(), evaluate)

    def _string_function(self, node: exp.Expression) -> BoundExpression:
        inner = self._text(node.this)
        kernel, result = _STRING_FUNCTIONS[type(node)]
        return BoundExpression(result, lambda b: kernel(inner.evaluate(b)))

    def _coalesce(self, node: exp.Coalesce) -> BoundExpression:
        parts, common = self._alike([node.this, *node.expressions], node)
        return BoundExpression(common, lambda b: pc.coalesce(*(p.evaluate(b) for p in parts)))

    def _nullif(self, node: exp.Nullif) -> BoundExpression:
        (value, other), common = self._alike([node.this, node.expression], node)
        if pa.types.is_null(common):
            return self._null(exp.Null())
        null = pa.scalar(None, common)

        def evaluate(batch: pa.RecordBatch) -> Value:
            left = value.evaluate(batch)
            same = pc.fill_null(pc.equal(left, other.evaluate(batch)), False)
            return pc.if_else(same, null, left)

        return BoundExpression(common, evaluate)

    def _case(self, node: exp.Case) -> BoundExpression:
        if node.this is not None:
            raise self._error(node, "CASE WHEN condition THEN …, without an operand")
        branches = node.args["ifs"]
        conditions = [self._condition(branch.this) for branch in branches]
        default = node.args.get("default") or exp.Null()
        values, common = self._alike([*(branch.args["true"] for branch in branches), default], node)

        def evaluate(batch: pa.RecordBatch) -> Value:
            result = values[-1].array(batch)
            for condition, value in zip(reversed(conditions), reversed(values[:-1]), strict=True):
                taken = pc.fill_null(condition.array(batch), False)
                result = pc.if_else(taken, value.evaluate(batch), result)
            return result

        return BoundExpression(common, evaluate)

    def _cast_to(self, node: exp.Cast) -> BoundExpression:
        inner = self.bind(node.this)
        target = _CASTS.get(node.to.this)
        if target is None:
            raise self._error(node, "a cast to BIGINT, DOUBLE, VARCHAR or BOOLEAN")
        return _cast(inner, target)

    def _called(self, node: exp.Anonymous) -> BoundExpression:
        check_calls(node, self._field)
        function = record_functions.find(node.name)
        assert function is not None
        arguments = [self.bind(argument) for argument in node.expressions]
        types = [type_name(a.type) for a in arguments]
        signature = f"{function.name}({', '.join(function.arguments)})"
        if len(types) != len(function.arguments):
            raise self._error(node, signature, f"it is called with {len(types)} arguments")
        for actual, expected in zip(types, function.arguments, strict=True):
            if actual not in (expected, "null") and (actual, expected) != ("int64", "float64"):
                raise self._error(node, signature, f"it is called with {', '.join(types)}")
        cast = [_cast(a, COLUMN_TYPES[t]) for a, t in zip(arguments, function.arguments, strict=True)]
        result, failures = COLUMN_TYPES[function.result], self._failures
        return BoundExpression(result, lambda b: values_or_null(function, [a.array(b) for a in cast], failures))

    # Node type, method, and the arguments of the node that the method reads.
    _METHODS: tuple[tuple[Any, Callable[[Any, Any], BoundExpression], tuple[str, ...]], ...] = (
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
        ((exp.Like, exp.ILike), _like, ("this", "expression", "negate")),
        (tuple(_NUMERIC_FUNCTIONS), _numeric_function, ("this",)),
        (exp.Round, _round, ("this", "decimals")),
        (tuple(_STRING_FUNCTIONS), _string_function, ("this",)),
        (exp.Coalesce, _coalesce, ("this", "expressions")),
        (exp.Nullif, _nullif, ("this", "expression")),
        (exp.Case, _case, ("this", "ifs", "default")),
        (exp.Cast, _cast_to, ("this", "to", "safe")),
        (exp.Anonymous, _called, ("this", "expressions")),
    )


def _is_constant(node: exp.Expression) -> bool:
    return isinstance(node.this if isinstance(node, exp.Neg) else node, exp.Literal | exp.Boolean)


def _cast(bound: BoundExpression, target: pa.DataType) -> BoundExpression:
    if bound.type == target:
        return bound
    return BoundExpression(target, lambda b: arithmetic.cast(bound.evaluate(b), target))
