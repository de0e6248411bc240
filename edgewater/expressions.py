"""SQL scalar expressions over a record's columns: type-checked, and evaluated by Arrow compute.

The semantics are SQL's: null in, null out; comparisons with null are unknown; ``where`` keeps a
record only if its condition is true. ``/`` is floating-point division. What has no answer (division by
zero, integer overflow, a cast of text that is no number) is null, so one bad record cannot fail a batch. What a
function that a user's package brings gets wrong is null too (`record_functions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater import arithmetic, record_functions
from edgewater.arithmetic import Value
from edgewater.errors import InvalidQuery
from edgewater.record_functions import Failures, values_or_null
from edgewater.streams import COLUMN_TYPES, type_name
from edgewater.syntax import KNOWN, check_calls

Evaluate = Callable[[pa.RecordBatch], Value]

NUMERIC = ("int64", "float64")
MAX_DECIMALS = 15


@dataclass(frozen=True, slots=True)
class Bound:
    """An expression bound to a schema: its type, and the function that evaluates it on a batch."""

    type: pa.DataType
    evaluate: Evaluate

    def array(self, batch: pa.RecordBatch) -> pa.Array:
        """The value per record, as one array of ``batch.num_rows``."""
        value = self.evaluate(batch)
        if isinstance(value, pa.Scalar):
            return pa.repeat(value, batch.num_rows)
        if isinstance(value, pa.ChunkedArray):
            return value.combine_chunks()
        return value


def bind(
    tree: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: Failures | None = None
) -> Bound:
    """Type-checks an expression against a stream's columns.

    Args:
        failures: where calls of users' functions that fail are noted.

    Raises:
        InvalidQuery: an unknown column or function, or an operand of the wrong type.
    """
    return _Binder(columns, field, failures or Failures()).bind(tree)


def bind_condition(
    tree: exp.Expression, columns: Mapping[str, pa.DataType], field: str, failures: Failures | None = None
) -> Bound:
    """As `bind`, for an expression that must be boolean."""
    bound = bind(tree, columns, field, failures)
    if not pa.types.is_boolean(bound.type):
        raise InvalidQuery(field, tree.sql(), "a boolean expression", f"its type is {type_name(bound.type)}")
    return bound


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
    """Turns a syntax tree into a closure over Arrow kernels, checking types on the way."""

    def __init__(self, columns: Mapping[str, pa.DataType], field: str, failures: Failures) -> None:
        self._columns = columns
        self._field = field
        self._failures = failures

    def bind(self, node: exp.Expression) -> Bound:
        for base, method, clauses in self._METHODS:
            if isinstance(node, base):
                # What the parser understands and the method would pass over, as in TRIM('x' FROM s).
                if any(value for name, value in node.args.items() if name not in clauses):
                    raise self._error(node, "the operator or function with its plain arguments only")
                return method(self, node)
        raise self._error(node, KNOWN, "not an expression known here")

    def _error(self, node: exp.Expression, accepted: str, reason: str = "") -> InvalidQuery:
        return InvalidQuery(self._field, node.sql(), accepted, reason)

    def _numeric(self, node: exp.Expression) -> Bound:
        bound = self.bind(node)
        if type_name(bound.type) not in NUMERIC and not pa.types.is_null(bound.type):
            raise self._error(node, "a number", f"its type is {type_name(bound.type)}")
        return bound

    def _condition(self, node: exp.Expression) -> Bound:
        return bind_condition(node, self._columns, self._field, self._failures)

    def _text(self, node: exp.Expression) -> Bound:
        bound = self.bind(node)
        if not pa.types.is_string(bound.type):
            raise self._error(node, "a string", f"its type is {type_name(bound.type)}")
        return bound

    def _alike(self, nodes: list[exp.Expression], parent: exp.Expression) -> tuple[list[Bound], pa.DataType]:
        """Operands brought to one type: numbers widen to float64, null fits all."""
        bounds = [self.bind(node) for node in nodes]
        types = {type_name(b.type) for b in bounds if not pa.types.is_null(b.type)}
        if len(types) > 1 and types != set(NUMERIC):
            raise self._error(parent, "operands of one type", "these are " + " and ".join(sorted(types)))
        common = pa.float64() if len(types) > 1 else COLUMN_TYPES[types.pop()] if types else pa.null()
        return [_cast(b, common) for b in bounds], common

    def _column(self, node: exp.Column) -> Bound:
        name = node.name
        if node.table or name not in self._columns:
            known = ", ".join(self._columns)
            raise InvalidQuery(self._field, node.sql(), f"one of the columns {known}", "unknown column")
        return Bound(self._columns[name], lambda batch: batch.column(name))

    def _literal(self, node: exp.Literal) -> Bound:
        value: object = node.this
        if not node.is_string:
            value = int(node.this) if node.is_int else float(node.this)
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise self._error(node, "an integer of 64 bits; write it with a point to mean a float")
        scalar = pa.scalar(value)
        return Bound(scalar.type, lambda _: scalar)

    def _boolean(self, node: exp.Boolean) -> Bound:
        scalar = pa.scalar(bool(node.this))
        return Bound(pa.bool_(), lambda _: scalar)

    def _null(self, _: exp.Null) -> Bound:
        scalar = pa.scalar(None)
        return Bound(pa.null(), lambda _: scalar)

    @staticmethod
    def _unknown() -> Bound:
        """What comparing NULL with NULL gives."""
        scalar = pa.scalar(None, pa.bool_())
        return Bound(pa.bool_(), lambda _: scalar)

    def _paren(self, node: exp.Expression) -> Bound:
        return self.bind(node.this)

    def _arithmetic(self, node: exp.Binary) -> Bound:
        self._numeric(node.left)
        self._numeric(node.right)
        (left, right), common = self._alike([node.left, node.right], node)
        if pa.types.is_null(common):
            return self._null(exp.Null())
        kernel = _ARITHMETIC[type(node)]
        result = pa.float64() if isinstance(node, exp.Div) else common
        return Bound(result, lambda b: kernel(left.evaluate(b), right.evaluate(b)))

    def _comparison(self, node: exp.Binary) -> Bound:
        (left, right), common = self._alike([node.left, node.right], node)
        if pa.types.is_null(common):
            return self._unknown()
        kernel = _COMPARISON[type(node)]
        return Bound(pa.bool_(), lambda b: kernel(left.evaluate(b), right.evaluate(b)))

    def _logic(self, node: exp.Binary) -> Bound:
        left, right = self._condition(node.left), self._condition(node.right)
        kernel = _LOGIC[type(node)]
        return Bound(pa.bool_(), lambda b: kernel(left.evaluate(b), right.evaluate(b)))

    def _not(self, node: exp.Not) -> Bound:
        return self._inverted(self._condition(node.this))

    @staticmethod
    def _inverted(condition: Bound) -> Bound:
        return Bound(pa.bool_(), lambda b: pc.invert(condition.evaluate(b)))

    def _is(self, node: exp.Is) -> Bound:
        inner = self.bind(node.this)
        if not isinstance(node.expression, exp.Null):
            raise self._error(node, "IS NULL or IS NOT NULL")
        return Bound(pa.bool_(), lambda b: pc.is_null(inner.evaluate(b)))

    def _in(self, node: exp.In) -> Bound:
        (needle, *options), common = self._alike([node.this, *node.expressions], node)
        if not options or not all(_is_constant(n) for n in node.expressions):
            raise self._error(node, "IN with a list of literals")
        empty = pa.RecordBatch.from_pylist([])
        values = pa.array([o.evaluate(empty).as_py() for o in options], common)

        def evaluate(batch: pa.RecordBatch) -> Value:
            value = needle.evaluate(batch)
            found = pc.is_in(value, value_set=values)
            return pc.if_else(pc.is_null(value), pa.scalar(None, pa.bool_()), found)

        return Bound(pa.bool_(), evaluate)

    def _between(self, node: exp.Between) -> Bound:
        (value, low, high), common = self._alike([node.this, node.args["low"], node.args["high"]], node)
        if pa.types.is_null(common):
            return self._unknown()
        return Bound(
            pa.bool_(),
            lambda b: pc.and_kleene(
                pc.greater_equal(value.evaluate(b), low.evaluate(b)), pc.less_equal(value.evaluate(b), high.evaluate(b))
            ),
        )

    def _like(self, node: exp.Binary) -> Bound:
        text = self._text(node.left)
        if not (isinstance(node.right, exp.Literal) and node.right.is_string):
            raise self._error(node, "LIKE with a string literal as its pattern")
        pattern, folded = node.right.this, isinstance(node, exp.ILike)
        matched = Bound(pa.bool_(), lambda b: pc.match_like(text.evaluate(b), pattern, ignore_case=folded))
        # The parser of some releases puts NOT LIKE into one node, of others into two.
        return self._inverted(matched) if node.args.get("negate") else matched

    def _numeric_function(self, node: exp.Expression) -> Bound:
        inner = self._numeric(node.this)
        kernel = _NUMERIC_FUNCTIONS[type(node)]
        keeps = isinstance(node, exp.Abs | exp.Neg)
        source = inner if keeps else _cast(inner, pa.float64())
        return Bound(inner.type if keeps else pa.float64(), lambda b: kernel(source.evaluate(b)))

    def _round(self, node: exp.Round) -> Bound:
        inner = _cast(self._numeric(node.this), pa.float64())
        decimals = node.args.get("decimals")
        if decimals is not None and not (isinstance(decimals, exp.Literal) and decimals.is_int):
            raise self._error(node, "round(x) or round(x, 2)")
        digits = int(decimals.this) if decimals is not None else 0
        if digits > MAX_DECIMALS:
            raise self._error(node, f"at most {MAX_DECIMALS} decimals")
        # Beyond it a float has no such decimals, and the kernel takes what it would scale it to for an overflow.
        whole_from = 2.0**52 / 10.0**digits

        def evaluate(batch: pa.RecordBatch) -> Value:
            value = inner.evaluate(batch)
            has_decimals = pc.less(pc.abs(value), whole_from)
            return pc.if_else(has_decimals, pc.round(pc.if_else(has_decimals, value, 0.0), digits), value)

        return Bound(pa.float64(), evaluate)

    def _string_function(self, node: exp.Expression) -> Bound:
        inner = self._text(node.this)
        kernel, result = _STRING_FUNCTIONS[type(node)]
        return Bound(result, lambda b: kernel(inner.evaluate(b)))

    def _coalesce(self, node: exp.Coalesce) -> Bound:
        parts, common = self._alike([node.this, *node.expressions], node)
        return Bound(common, lambda b: pc.coalesce(*(p.evaluate(b) for p in parts)))

    def _nullif(self, node: exp.Nullif) -> Bound:
        (value, other), common = self._alike([node.this, node.expression], node)
        if pa.types.is_null(common):
            return self._null(exp.Null())
        null = pa.scalar(None, common)

        def evaluate(batch: pa.RecordBatch) -> Value:
            given = value.evaluate(batch)
            same = pc.fill_null(pc.equal(given, other.evaluate(batch)), False)
            return pc.if_else(same, null, given)

        return Bound(common, evaluate)

    def _case(self, node: exp.Case) -> Bound:
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

        return Bound(common, evaluate)

    def _cast_to(self, node: exp.Cast) -> Bound:
        inner = self.bind(node.this)
        target = _CASTS.get(node.to.this)
        if target is None:
            raise self._error(node, "a cast to BIGINT, DOUBLE, VARCHAR or BOOLEAN")
        return _cast(inner, target)

    def _called(self, node: exp.Anonymous) -> Bound:
        check_calls(node, self._field)
        function = record_functions.named(node.name)
        assert function is not None
        arguments = [self.bind(argument) for argument in node.expressions]
        given = [type_name(a.type) for a in arguments]
        wanted = ", ".join(function.arguments)
        if len(given) != len(function.arguments):
            raise self._error(node, f"{function.name}({wanted})", f"it is called with {len(given)} arguments")
        for one, expected in zip(given, function.arguments, strict=True):
            if one not in (expected, "null") and (one, expected) != ("int64", "float64"):
                raise self._error(node, f"{function.name}({wanted})", f"it is called with {', '.join(given)}")
        cast = [_cast(a, COLUMN_TYPES[t]) for a, t in zip(arguments, function.arguments, strict=True)]
        result, failures = COLUMN_TYPES[function.result], self._failures
        return Bound(result, lambda b: values_or_null(function, [a.array(b) for a in cast], failures))

    # Syntax, method, and the parts of the syntax that the method reads.
    _METHODS: tuple[tuple[Any, Callable[[Any, Any], Bound], tuple[str, ...]], ...] = (
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


def _cast(bound: Bound, target: pa.DataType) -> Bound:
    if bound.type == target:
        return bound
    return Bound(target, lambda b: arithmetic.cast(bound.evaluate(b), target))
