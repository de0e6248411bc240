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

from edgewater.model import arithmetic, record_functions, text_functions, time_functions
from edgewater.model.arithmetic import Value
from edgewater.model.errors import InvalidQuery, did_you_mean
from edgewater.model.record_functions import CallFailures, values_or_null
from edgewater.model.streams import COLUMN_TYPES, TIME_COLUMN, type_name
from edgewater.model.syntax import SUPPORTED_SYNTAX, check_calls

Evaluate = Callable[[pa.RecordBatch], Value]

NUMERIC = ("int64", "float64")
MAX_DECIMALS = 15
MAX_GROWTH = 64
"""A text that an expression builds may be so many times as long as the columns that it reads."""
MAX_ADDED_BYTES = 4_096
"""Bytes of literals in a text that an expression builds."""


@dataclass(frozen=True, slots=True)
class BoundExpression:
    """An expression bound to a schema.

    Attributes:
        evaluate: returns the values of a batch: an array, or a scalar for all records.
        encode: see `encoded`.
    """

    type: pa.DataType
    evaluate: Evaluate
    encode: Callable[[pa.RecordBatch], pa.DictionaryArray] | None = None

    def encoded(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns the value per record as `array` does; dictionary-encoded where it is computed per distinct text.
        Values may be in the dictionary several times."""
        return self.array(batch) if self.encode is None else self.encode(batch)

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
    return _Binder(columns, field, failures or CallFailures()).condition(tree)


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
_TEXT_TESTS: dict[type[exp.Expression], Callable[[Value, str], Value]] = {
    exp.StartsWith: pc.starts_with,
    exp.EndsWith: pc.ends_with,
    exp.Contains: pc.match_substring,
    exp.RegexpLike: pc.match_substring_regex,
}
_EXTREMES: dict[type[exp.Expression], Callable[..., Value]] = {
    exp.Greatest: pc.max_element_wise,
    exp.Least: pc.min_element_wise,
}
_TIME_PARTS: dict[type[exp.Expression], str] = {
    exp.Year: "year", exp.Quarter: "quarter", exp.Month: "month", exp.Week: "week", exp.Day: "day",
    exp.DayOfWeek: "isodow", exp.DayOfYear: "doy", exp.Hour: "hour", exp.Minute: "minute", exp.Second: "second",
}  # fmt: skip
_BUILDS_TEXT = (exp.DPipe, exp.Concat, exp.Replace, exp.RegexpReplace)
_READS_TEXT = (
    exp.Lower, exp.Upper, exp.Trim, exp.Like, exp.ILike, exp.Substring, exp.Left, exp.Right, exp.SplitPart,
    exp.RegexpExtract, exp.Cast, *_TEXT_TESTS, *_BUILDS_TEXT,
)  # fmt: skip
"""Operations that take longer per text than to find out which texts of a batch are equal."""
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
        self._reads_distinct = False

    def bind(self, node: exp.Expression) -> BoundExpression:
        column = None if self._reads_distinct else self._only_text(node)
        if column is None:
            return self._bind(node)
        self._reads_distinct = True
        bound = self._bind(node)
        self._reads_distinct = False
        return _over_distinct(bound, column)

    def _only_text(self, node: exp.Expression) -> str | None:
        """Returns the text column that an expression reads, if it is the only column and worth reading once per
        distinct text. Failed calls of plugin functions count per record, so these are called for each."""
        names = {column.name for column in node.find_all(exp.Column)}
        if len(names) != 1 or not pa.types.is_string(self._columns.get(name := names.pop(), pa.null())):
            return None
        return name if node.find(*_READS_TEXT) and not node.find(exp.Anonymous) else None

    def _bind(self, node: exp.Expression) -> BoundExpression:
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

    def condition(self, node: exp.Expression) -> BoundExpression:
        """Binds an expression that must be boolean."""
        bound = self.bind(node)
        if not pa.types.is_boolean(bound.type):
            raise self._error(node, "a boolean expression", f"its type is {type_name(bound.type)}")
        return bound

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
        left, right = self.condition(node.left), self.condition(node.right)
        kernel = _LOGIC[type(node)]
        return BoundExpression(pa.bool_(), lambda b: kernel(left.evaluate(b), right.evaluate(b)))

    def _not(self, node: exp.Not) -> BoundExpression:
        return self._inverted(self.condition(node.this))

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

    def _as_text(self, node: exp.Expression) -> BoundExpression:
        """Binds an operand of a function that builds texts; it takes numbers and booleans, too."""
        return _cast(self.bind(node), pa.string())

    def _text_literal(self, node: exp.Expression | None, parent: exp.Expression, accepted: str) -> str:
        if not (isinstance(node, exp.Literal) and node.is_string):
            raise self._error(parent, accepted)
        return str(node.this)

    def _whole(self, node: exp.Expression | None, parent: exp.Expression, accepted: str) -> int:
        """Returns the value of a literal whole number."""
        literal = node.this if isinstance(node, exp.Neg) else node
        if not (isinstance(literal, exp.Literal) and literal.is_int and len(literal.name) < 10):
            raise self._error(parent, accepted)
        return -int(literal.this) if isinstance(node, exp.Neg) else int(literal.this)

    def _concatenation(self, node: exp.DPipe | exp.Concat) -> BoundExpression:
        operands = node.expressions if isinstance(node, exp.Concat) else list(node.flatten(unnest=False))
        texts = [self._as_text(operand) for operand in operands]
        self._check_growth(node)
        # As in PostgreSQL, concat leaves nulls out; with || one makes the result null.
        nulls = {"null_handling": "replace", "null_replacement": ""} if isinstance(node, exp.Concat) else {}
        return BoundExpression(
            pa.string(), lambda b: pc.binary_join_element_wise(*(t.evaluate(b) for t in texts), "", **nulls)
        )

    def _check_growth(self, node: exp.Expression) -> None:
        times, added = _growth(node)
        if times > MAX_GROWTH or added > MAX_ADDED_BYTES:
            accepted = f"a text of at most {MAX_GROWTH} times its columns and {MAX_ADDED_BYTES} bytes of literals"
            raise self._error(node, accepted)

    def _substring(self, node: exp.Substring) -> BoundExpression:
        text, usage = self._text(node.this), "substring(text, start) or substring(text, start, length), in numbers"
        start = self._whole(node.args.get("start"), node, usage)
        length = node.args.get("length")
        count = None if length is None else self._whole(length, node, usage)
        if count is not None and count < 0:
            raise self._error(node, usage, "the length is negative")
        return BoundExpression(pa.string(), lambda b: text_functions.substring(text.evaluate(b), start, count))

    def _end(self, node: exp.Left | exp.Right) -> BoundExpression:
        text, count = self._text(node.this), self._whole(node.expression, node, "a text and a number of characters")
        kernel = text_functions.left if isinstance(node, exp.Left) else text_functions.right
        return BoundExpression(pa.string(), lambda b: kernel(text.evaluate(b), count))

    def _split_part(self, node: exp.SplitPart) -> BoundExpression:
        text, usage = self._text(node.this), "split_part(text, '/', 2), with a literal delimiter and number"
        delimiter = self._text_literal(node.args.get("delimiter"), node, usage)
        number = self._whole(node.args.get("part_index"), node, usage)
        if not delimiter or not number:
            raise self._error(node, usage, "the delimiter is empty or the number 0")
        return BoundExpression(pa.string(), lambda b: text_functions.split_part(text.evaluate(b), delimiter, number))

    def _replace(self, node: exp.Replace | exp.RegexpReplace) -> BoundExpression:
        text, usage = self._text(node.this), "a text, a literal pattern and a literal replacement"
        pattern = self._text_literal(node.expression, node, usage)
        replacement = self._text_literal(node.args.get("replacement"), node, usage)
        self._check_growth(node)
        kernel = pc.replace_substring
        if isinstance(node, exp.RegexpReplace):
            self._check_pattern(lambda: text_functions.check_pattern(pattern, replacement), node)
            kernel = pc.replace_substring_regex
        elif not pattern:
            raise self._error(node, usage, "the pattern is empty")
        return BoundExpression(
            pa.string(), lambda b: kernel(text.evaluate(b), pattern=pattern, replacement=replacement)
        )

    def _text_test(self, node: exp.Expression) -> BoundExpression:
        text, kernel = self._text(node.this), _TEXT_TESTS[type(node)]
        pattern = self._text_literal(node.args.get("expression"), node, "a text and a literal")
        if isinstance(node, exp.RegexpLike):
            self._check_pattern(lambda: text_functions.check_pattern(pattern), node)
        return BoundExpression(pa.bool_(), lambda b: kernel(text.evaluate(b), pattern))

    def _regexp_extract(self, node: exp.RegexpExtract) -> BoundExpression:
        text, usage = self._text(node.this), "regexp_extract(text, 'pattern') or with the number of a group"
        pattern = self._text_literal(node.expression, node, usage)
        given = node.args.get("position")
        group = int(text_functions.has_group(pattern)) if given is None else self._whole(given, node, usage)
        if not 0 <= group <= 8:
            raise self._error(node, "the number of a group from 0 to 8")
        self._check_pattern(lambda: text_functions.check_group(pattern, group), node)
        return BoundExpression(pa.string(), lambda b: text_functions.regexp_extract(text.evaluate(b), pattern, group))

    def _check_pattern(self, check: Callable[[], None], node: exp.Expression) -> None:
        try:
            check()
        except text_functions.InvalidPattern as exc:
            accepted = "a regular expression of RE2, without references such as \\1 and without looking ahead or back"
            raise self._error(node, accepted, str(exc)) from None

    def _extreme(self, node: exp.Greatest | exp.Least) -> BoundExpression:
        parts, common = self._alike([node.this, *node.expressions], node)
        kernel = _EXTREMES[type(node)]
        return BoundExpression(common, lambda b: kernel(*(p.evaluate(b) for p in parts)))

    def _time(self, node: exp.Expression, parent: exp.Expression) -> tuple[BoundExpression, str]:
        """Binds a time in ms, and returns the zone by which its calendar is read."""
        zone = time_functions.UTC
        if isinstance(node, exp.AtTimeZone):
            zone = self._text_literal(node.args.get("zone"), parent, "a time zone such as 'Europe/Berlin'")
            if not time_functions.is_zone(zone):
                raise self._error(parent, "a time zone of the IANA database, such as 'Europe/Berlin'")
            node = node.this
        bound = self.bind(node)
        if not pa.types.is_int64(bound.type):
            accepted = f"a time in ms since 1970, such as {TIME_COLUMN}"
            raise self._error(parent, accepted, f"its type is {type_name(bound.type)}")
        return bound, zone

    def _time_part(self, node: exp.Expression) -> BoundExpression:
        return self._part_of(node, node.this, _TIME_PARTS[type(node)])

    def _extract(self, node: exp.Extract) -> BoundExpression:
        name = node.this.name.lower()
        if name not in time_functions.PARTS:
            raise self._error(node, f"one of the parts {', '.join(time_functions.PARTS)}")
        return self._part_of(node, node.expression, name)

    def _part_of(self, node: exp.Expression, operand: exp.Expression, name: str) -> BoundExpression:
        time, zone = self._time(operand, node)
        return BoundExpression(pa.int64(), lambda b: time_functions.part(time.evaluate(b), name, zone))

    def _date_trunc(self, node: exp.DateTrunc) -> BoundExpression:
        unit = node.args["unit"].name.lower()
        if unit not in time_functions.UNITS:
            raise self._error(node, f"one of the units {', '.join(time_functions.UNITS)}")
        time, zone = self._time(node.this, node)
        return BoundExpression(pa.int64(), lambda b: time_functions.truncated(time.evaluate(b), unit, zone))

    def _strftime(self, node: exp.Anonymous) -> BoundExpression:
        usage = "strftime(time, '%Y-%m-%d')"
        if len(node.expressions) != 2:
            raise self._error(node, usage)
        (time, zone), pattern = self._time(node.expressions[0], node), node.expressions[1]
        layout = self._text_literal(pattern, node, usage)
        if len(layout) > text_functions.MAX_PATTERN:
            raise self._error(node, f"a pattern of at most {text_functions.MAX_PATTERN} characters")
        try:
            time_functions.formatted(pa.array([0]), layout, zone)
        except pa.ArrowInvalid as exc:
            raise self._error(node, usage, str(exc)) from None
        return BoundExpression(pa.string(), lambda b: time_functions.formatted(time.evaluate(b), layout, zone))

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
        branches = node.args["ifs"]
        tests = [exp.EQ(this=node.this, expression=b.this) if node.this is not None else b.this for b in branches]
        conditions = [self.condition(test) for test in tests]
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

    def _if(self, node: exp.If) -> BoundExpression:
        return self._case(exp.Case(ifs=[node], default=node.args.get("false")))

    def _called(self, node: exp.Anonymous) -> BoundExpression:
        if node.name.lower() == "strftime":
            return self._strftime(node)
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
        ((exp.DPipe, exp.Concat), _concatenation, ("this", "expression", "expressions", "safe")),
        (exp.Substring, _substring, ("this", "start", "length")),
        ((exp.Left, exp.Right), _end, ("this", "expression")),
        (exp.SplitPart, _split_part, ("this", "delimiter", "part_index")),
        ((exp.Replace, exp.RegexpReplace), _replace, ("this", "expression", "replacement")),
        (tuple(_TEXT_TESTS), _text_test, ("this", "expression")),
        (exp.RegexpExtract, _regexp_extract, ("this", "expression", "position")),
        (tuple(_EXTREMES), _extreme, ("this", "expressions", "ignore_nulls")),
        (tuple(_TIME_PARTS), _time_part, ("this",)),
        (exp.Extract, _extract, ("this", "expression")),
        (exp.DateTrunc, _date_trunc, ("unit", "this")),
        (exp.If, _if, ("this", "true", "false")),
        (exp.Coalesce, _coalesce, ("this", "expressions")),
        (exp.Nullif, _nullif, ("this", "expression")),
        (exp.Case, _case, ("this", "ifs", "default")),
        (exp.Cast, _cast_to, ("this", "to", "safe")),
        (exp.Anonymous, _called, ("this", "expressions")),
    )


def _over_distinct(bound: BoundExpression, column: str) -> BoundExpression:
    """Returns an expression of one text column that is evaluated once per distinct text of a batch."""

    def encode(batch: pa.RecordBatch) -> pa.DictionaryArray:
        texts = batch.column(column).dictionary_encode(null_encoding="encode")
        values = bound.array(pa.RecordBatch.from_arrays([texts.dictionary], [column]))
        return pa.DictionaryArray.from_arrays(texts.indices, values)

    def evaluate(batch: pa.RecordBatch) -> Value:
        encoded = encode(batch)
        return encoded.dictionary.take(encoded.indices)

    return BoundExpression(bound.type, evaluate, encode)


def _growth(node: exp.Expression) -> tuple[float, int]:
    """Returns how long a text can get: the factor to the bytes of the columns, and the bytes of literals."""
    if isinstance(node, exp.Column):
        return 1.0, 0
    if isinstance(node, exp.Literal):
        return 0.0, len(node.name.encode())
    if isinstance(node, exp.Predicate | exp.Connector | exp.Not):
        return 0.0, 0
    if isinstance(node, exp.Replace | exp.RegexpReplace):
        times, added = _growth(node.this)
        factor = 1 + len(node.args["replacement"].name.encode())
        return times * factor, added * factor
    parts = [_growth(child) for child in node.iter_expressions()]
    return sum(times for times, _ in parts), sum(added for _, added in parts)


def _is_constant(node: exp.Expression) -> bool:
    return isinstance(node.this if isinstance(node, exp.Neg) else node, exp.Literal | exp.Boolean)


def _cast(bound: BoundExpression, target: pa.DataType) -> BoundExpression:
    if bound.type == target:
        return bound
    return BoundExpression(target, lambda b: arithmetic.cast(bound.evaluate(b), target))
